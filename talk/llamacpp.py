"""llama.cpp's own requests, which editors send: the text that follows a prompt, the text between
two others, and a chat as the model would read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field
from pydantic_core import to_json

from talk.openai import (
    Account,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    Strict,
    TopLogprobs,
    answers_to,
    event,
    timings,
    token_scores,
)
from talk.tools import Answer, Part
from tokenizer import FIM_ENDS

if TYPE_CHECKING:
    from prompts import Writer
    from texts import Generation, Logprob

# Of fill-in-the-middle: what begins the text before, the text after, and the text between, by the
# names that these have in vocabularies
FIM_MARKS = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
]
ENDS = (*FIM_ENDS, "▁<EOT>", "<EOT>")  # of the text between, whatever a checkpoint says
STOP_TYPES = {"eos": "eos", "stop": "word", "length": "limit", "context": "limit"}


class Contents(Account):
    """What llama.cpp tells of texts."""

    def add(self, index: int, parts: list[Part], logprobs: Sequence[Logprob]) -> bytes:
        if not parts and not logprobs:
            return b""
        said = {"index": index, "stop": False, "content": "".join(part.text for part in parts)}
        return event(said | self._probabilities(logprobs))

    def end(self, index: int) -> bytes:
        return event(self._last(self.answers[index].text) | {"index": index})

    def whole(self) -> dict | list[dict]:
        whole = []
        for each in self.answers:
            said = {"content": each.said["text"]} | self._probabilities(each.text.logprobs)
            whole.append(self._last(each.text) | said)
        return whole if len(whole) > 1 else whole[0]

    def _probabilities(self, logprobs: Sequence[Logprob]) -> dict:
        if not logprobs:
            return {}
        return {"completion_probabilities": token_scores(logprobs, self.session)}

    def _last(self, text: Generation) -> dict:
        return {
            "content": "",
            "stop": True,
            "model": self.model,
            "tokens_predicted": len(text.ids),
            "tokens_evaluated": text.prompt_tokens,
            "tokens_cached": text.prompt_tokens + len(text.ids),
            "truncated": False,
            "stop_type": STOP_TYPES.get(text.ended_by, "none"),
            "stopping_word": text.stop,
            "generation_settings": {"n_ctx": self.session.ctx_size},
            "timings": timings([text]),
        }


# How many of the likeliest tokens are told beside each token; 0: no log-probabilities at all
Probabilities = Annotated[TopLogprobs, AfterValidator(lambda count: count or False)]


class LlamaCppCompletionRequest(CompletionRequest):
    """A request for the text that follows a prompt."""

    account = Contents

    logprobs: Probabilities = Field(False, validation_alias="n_probs")


class ApplyTemplateRequest(ChatCompletionRequest):
    """A request for a chat as the model would read it."""

    def answer(self, session: Writer, *_) -> Iterator[bytes]:
        return iter([to_json({"prompt": self.prompt(session).text})])


class Extra(Strict):
    filename: str = ""
    text: str


class InfillRequest(GenerationRequest):
    """A request for the text between two others."""

    account = Contents

    input_prefix: str
    input_suffix: str
    input_extra: list[Extra] = []  # other files, which come first
    prompt: str = ""  # comes after the prefix
    n_probs: TopLogprobs = 0

    def choices(self, session: Writer) -> list[Answer]:
        tokenizer = session.tokenizer
        known = [marks for marks in FIM_MARKS if {*marks} <= tokenizer.control.keys()]
        if not known:
            raise ValueError("this model has no marks for the text between two others (FIM)")
        encode = lambda text: tokenizer.vocabulary.encode_chat(text, [], after=True)
        before, after, between = map(tokenizer.control.get, known[0])
        begin = tokenizer.encode("")
        others = "".join(f"{file.filename}\n{file.text}\n\n" for file in self.input_extra)
        size = session.ctx_size
        new = self.max_tokens if self.max_tokens >= 0 else size // 8
        room = size - min(new, size // 2) - len(begin) - len(known[0])
        texts = map(encode, (others, self.input_prefix + self.prompt, self.input_suffix))
        others, prefix, suffix = fitted(*texts, room)
        ids = [*begin, before, *others, *prefix, after, *suffix, between]
        ends = [tokenizer.control[name] for name in ENDS if name in tokenizer.control]
        self.stop_token_ids = [*self.stop_token_ids, *ends]
        options = dict(logprobs=self.n_probs or None, grammar=self.text_grammar())
        return answers_to(ids, self, session, **options)


def fitted(
    others: list[int], prefix: list[int], suffix: list[int], room: int
) -> tuple[list[int], list[int], list[int]]:
    """The parts of these texts that fit into `room` tokens: the beginning of the suffix, in a quarter of
    the room or in what the prefix leaves; the end of the prefix; and the end of the other files, in
    what is left."""
    after = min(len(suffix), max(room // 4, room - len(prefix)))
    before = min(len(prefix), room - after)
    rest = min(len(others), room - after - before)
    return others[len(others) - rest :], prefix[len(prefix) - before :], suffix[:after]
