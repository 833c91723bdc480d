"""SentencePiece tokens, chat templates, and text that streams without breaking a character or printing a stop string."""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sentencepiece import SentencePieceProcessor

PADDING = 1024  # a model's vocabulary may be padded beyond its tokenizer's, to a multiple that suits the hardware


class Tokenizer:
    """A checkpoint's tokenizer.model, with the control tokens that fine-tuned relatives add beside it."""

    def __init__(self, folder: str | Path, vocab_size: int | None = None, bos_id: int | None = None):
        """folder holds tokenizer.model (or, with Meta's own, its parent does); vocab_size and bos_id are the model's.

        Raises FileNotFoundError; ValueError when the file is broken or its size does not fit the model.
        """
        folder = Path(folder)
        file = next((f / "tokenizer.model" for f in (folder, folder.parent) if (f / "tokenizer.model").is_file()), None)
        if file is None:
            raise FileNotFoundError(f"{folder} holds no tokenizer.model (other kinds of tokenizer are not supported)")
        try:
            self.sp = SentencePieceProcessor(model_proto=file.read_bytes())
        except RuntimeError:
            raise ValueError(f"{file} is not a SentencePiece model") from None
        self.config = _json_object(folder / "tokenizer_config.json")
        self.control = _added_tokens(folder, self.config, self.sp.vocab_size())  # text of a control token -> id
        for i in range(self.sp.vocab_size()):
            if self.sp.is_control(i):
                self.control[self.sp.id_to_piece(i)] = i
        self.size = max(self.sp.vocab_size(), *(i + 1 for i in self.control.values()))
        if vocab_size is not None and not self.size <= vocab_size <= self.size + PADDING:
            raise ValueError(f"{file} has {self.size} tokens, but the model has a vocabulary of {vocab_size}")
        self.bos = self.sp.bos_id() if bos_id is None else bos_id
        self.eos = self.sp.eos_id()
        self._bytes = [self._token_bytes(i) for i in range(self.sp.vocab_size())]

    def _token_bytes(self, token: int) -> bytes:
        if self.sp.is_control(token):
            return b""
        piece = self.sp.id_to_piece(token)
        if self.sp.is_byte(token):
            return bytes([int(piece[3:5], 16)])  # "<0x0A>"
        return (" \u2047 " if self.sp.is_unknown(token) else piece.replace("\u2581", " ")).encode()

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Text to ids. What looks like a control token in the text, "</s>" say, is text."""
        return [self.bos] * (bos and self.bos >= 0) + self.sp.encode(text)

    def encode_after(self, text: str) -> list[int]:
        """Text that goes on after other text: without the space that SentencePiece puts before a text."""
        return self.sp.encode("." + text)[len(self.sp.encode(".")) :]

    def encode_segments(self, segments: "Segments", after_text: bool = False) -> list[int]:
        """A rendered template to ids: control tokens only where it places them. One that the model does not have is text."""
        named = {"bos": self.bos, "eos": self.eos} | self.control
        ids: list[int] = []
        for segment in segments:
            if isinstance(segment, Control):
                ids += [named[segment.name]] if segment.name in named else self.sp.encode(segment.name)
            else:
                ids += self.encode_after(segment) if after_text else self.sp.encode(segment)
            after_text = False
        return ids

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for: none for a control token or one beyond the tokenizer's."""
        return self._bytes[token] if token < len(self._bytes) else b""

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text; the space that SentencePiece puts before a text is taken away."""
        stream = TextStream(self, at_start=True)
        return "".join(stream.push(i) for i in ids) + stream.finish()


def _json_object(file: Path) -> dict:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds no JSON object")
    return value


def _added_tokens(folder: Path, config: dict, first: int) -> dict[str, int]:
    """Tokens beyond SentencePiece's, from added_tokens.json and tokenizer_config.json's added_tokens_decoder."""
    added = dict(_json_object(folder / "added_tokens.json"))
    decoder = config.get("added_tokens_decoder", {})
    if isinstance(decoder, dict):
        added |= {t["content"]: int(i) for i, t in decoder.items() if i.isdecimal() and isinstance(t, dict) and "content" in t}
    return {text: i for text, i in added.items() if type(i) is int and i >= first}


class TextStream:
    """Token by token to text that can be printed at once.

    A character of several tokens is held back until it is whole, and whatever may become a stop string until it is
    decided. What was returned, joined, equals the decoded whole up to the first stop string.
    """

    def __init__(self, tokenizer: Tokenizer, at_start: bool = False, stops: Sequence[str] = ()):
        """at_start: the text begins here, so that the leading space of the first token is not part of it."""
        self.tokenizer = tokenizer
        self.stops = [stop for stop in stops if stop]
        self.strip_space = at_start
        self.stopped = False  # a stop string has come
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, token: int) -> str:
        return self._release(self._utf8.decode(self.tokenizer.bytes_of(token)))

    def finish(self) -> str:
        """What is still held back, when no more tokens come."""
        text = self._release(self._utf8.decode(b"", True))
        rest, self._held = self._held, ""
        return text if self.stopped else text + rest

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        if self.strip_space and text:
            text, self.strip_space = text.removeprefix(" "), False
        self._held += text
        found = [i for i in (self._held.find(stop) for stop in self.stops) if i >= 0]
        if found:
            self.stopped = True
            ready, self._held = self._held[: min(found)], ""
            return ready
        keep = max((n for stop in self.stops for n in range(len(stop)) if self._held.endswith(stop[:n])), default=0)
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(ready) :]
        return ready


# ---- chat templates


@dataclass(frozen=True)
class Control:
    """A control token in a rendered template, by name ("bos", "eos") or by its text."""

    name: str


BOS, EOS = Control("bos"), Control("eos")
Segments = list[str | Control]


@dataclass(frozen=True)
class Template:
    """How a conversation is laid out. A turn is `ask`, the model's answer, `close`."""

    ask: Callable[[str, str, bool], Segments]  # system prompt (may be empty), user's text, is it the first turn
    close: Segments  # after an answer
    stops: tuple[str, ...] = ()  # strings that end an answer, besides eos


def _llama2(system: str, user: str, first: bool) -> Segments:
    """Meta's llama/generation.py: every turn is [bos] [INST] user [/INST] answer [eos]."""
    if first and system:
        user = f"<<SYS>>\n{system}\n<</SYS>>\n\n{user}"
    return [BOS, f"[INST] {user.strip()} [/INST]"]


def _zephyr(system: str, user: str, first: bool) -> Segments:
    start: Segments = [BOS] if first else []
    if first and system:
        start += [f"<|system|>\n{system}", EOS, f"\n<|user|>\n{user}"]
    else:
        start += [f"<|user|>\n{user}" if first else f"\n<|user|>\n{user}"]
    return [*start, EOS, "\n<|assistant|>\n"]


def _vicuna(system: str, user: str, first: bool) -> Segments:
    head = f"{system} " if first and system else ""
    return ([BOS] if first else []) + [f"{head}USER: {user} ASSISTANT:"]


def _chatml(system: str, user: str, first: bool) -> Segments:
    start, end = Control("<|im_start|>"), Control("<|im_end|>")
    head: Segments = [BOS] if first else []
    if first and system:
        head += [start, f"system\n{system}", end, "\n"]
    return [*head, start, f"user\n{user}", end, "\n", start, "assistant\n"]


def _plain(system: str, user: str, first: bool) -> Segments:
    return [BOS, f"{system}\n{user}" if system else user] if first else [user]


TEMPLATES = {
    "llama2": Template(_llama2, [" ", EOS]),
    "zephyr": Template(_zephyr, [EOS]),
    "vicuna": Template(_vicuna, [EOS], ("USER:",)),
    "chatml": Template(_chatml, [Control("<|im_end|>"), "\n"], ("<|im_end|>",)),
    "plain": Template(_plain, ["\n"]),
}


def recognise_template(folder: str | Path, config: dict) -> str:
    """Name of the template that a checkpoint was tuned on, from tokenizer_config.json; Meta's own have none, but a name."""
    jinja = json.dumps(config.get("chat_template") or "")
    signs = {"<<SYS>>": "llama2", "<|im_start|>": "chatml", "<|user|>": "zephyr", "USER:": "vicuna"}
    for sign, name in signs.items():
        if sign in jinja:
            return name
    return "llama2" if re.search("llama-2.*chat", Path(folder).resolve().name.lower()) else "plain"
