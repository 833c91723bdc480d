"""What a server is asked: a class for each path."""

from talk.llamacpp import ApplyTemplateRequest, InfillRequest, LlamaCppCompletionRequest
from talk.messages import CountRequest, MessagesRequest
from talk.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelRequest,
    TokenizeRequest,
)
from talk.responses import ResponsesRequest

ENDPOINTS: dict[str, type[ModelRequest]] = {
    "/chat/completions": ChatCompletionRequest,
    "/completions": CompletionRequest,
    "/completion": LlamaCppCompletionRequest,
    "/infill": InfillRequest,
    "/responses": ResponsesRequest,
    "/messages": MessagesRequest,
    "/messages/count_tokens": CountRequest,
    "/apply-template": ApplyTemplateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
