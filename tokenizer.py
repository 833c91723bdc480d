"""SentencePiece tokens, chat templates, and text that streams without breaking a character or printing a stop string."""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sentencepiece import SentencePieceProcessor

TURN_MARKS = ("<|im_start|>", "<|im_end|>")  # of templates: control tokens, even if SentencePiece has them as user's symbols
PADDING = 1024  # a model's vocabulary may be padded beyond its tokenizer's, to a multiple that suits the hardware


class Tokenizer:
    """A checkpoint's tokenizer.model, with the control tokens that fine-tuned relatives add beside it."""

    def __init__(self, folder: str | Path, vocab_size: int | None = None, bos_id: int | None = None):
        """folder holds tokenizer.model (or, with Meta's own, its parent does); vocab_size and bos_id are the model's.

        Raises FileNotFoundError; ValueError when the file is broken or its size does not fit the model.
        """
        folder = Path(folder)
        file = tokenizer_file(folder)
        if file is None:
            raise FileNotFoundError(f"{folder} holds no tokenizer.model (other kinds of tokenizer are not supported)")
        self.config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
        try:
            self.sp = SentencePieceProcessor(model_proto=file.read_bytes())
            pieces = [self.sp.id_to_piece(i) for i in range(self.sp.vocab_size())]
        except (RuntimeError, ValueError):
            raise ValueError(f"{file} is not a SentencePiece model") from None
        size = len(pieces)
        added = {text: i for text, i in _added_tokens(folder, self.config).items() if i >= size}
        if vocab_size is not None:
            if not size <= vocab_size <= max([size, *added.values()]) + PADDING:
                raise ValueError(f"{file} has {size} tokens, but the model has a vocabulary of {vocab_size}")
            added = {text: i for text, i in added.items() if i < vocab_size}  # the model has no embedding for the others
        self.control = added | {piece: i for i, piece in enumerate(pieces) if self.sp.is_control(i) or piece in TURN_MARKS}
        self._in_text = [text for text in TURN_MARKS if text in pieces]  # which SentencePiece would take for control tokens
        self.bos = self.sp.bos_id() if bos_id is None else bos_id
        self.eos = self.sp.eos_id()
        self.adds_bos = self.bos >= 0 and self.config.get("add_bos_token") is not False
        self.adds_space = self.sp.encode_as_pieces("a")[0].startswith("\u2581")
        self._bytes = [self._token_bytes(i) for i in range(size)]

    def _token_bytes(self, token: int) -> bytes:
        piece = self.sp.id_to_piece(token)
        if piece in self.control:
            return b""
        if self.sp.is_byte(token):
            return bytes([int(piece[3:5], 16)])  # "<0x0A>"
        return (" \u2047 " if self.sp.is_unknown(token) else piece.replace("\u2581", " ")).encode()

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Text to ids, after bos unless the checkpoint says otherwise. What looks like a control token in the text is text."""
        ids = [self.bos] * (bos and self.adds_bos)
        for name in self._in_text:
            if name in text:  # cut it, so that it is not seen as one
                head, tail = text.split(name, 1)
                return ids + self.encode(head + name[0], bos=False) + self.encode_after(name[1:] + tail)
        return ids + self.sp.encode(text)

    def encode_after(self, text: str) -> list[int]:
        """Text that goes on after other text: without the space that SentencePiece puts before a text."""
        return self.encode("." + text, bos=False)[len(self.sp.encode(".")) :]

    def encode_segments(self, segments: "Segments", after_text: bool = False) -> list[int]:
        """A rendered template to ids: control tokens only where it places them. One that the model does not have is text."""
        named = {"bos": self.bos, "eos": self.eos} | self.control
        ids: list[int] = []
        for segment in segments:
            if isinstance(segment, Control):
                ids += [named[segment.name]] if segment.name in named else self.sp.encode(segment.name)
            else:
                ids += self.encode_after(segment) if after_text else self.encode(segment, bos=False)
            after_text = False
        return ids

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for: none for a control token or one beyond the tokenizer's."""
        return self._bytes[token] if token < len(self._bytes) else b""

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text; the space that SentencePiece puts before a text is taken away."""
        stream = TextStream(self, at_start=True)
        return "".join(stream.push(i) for i in ids) + stream.finish()


def tokenizer_file(folder: Path) -> Path | None:
    """tokenizer.model in the folder or, with Meta's own, in its parent."""
    return next((f / "tokenizer.model" for f in (folder, folder.parent) if (f / "tokenizer.model").is_file()), None)


def read_json(file: Path) -> dict:
    """The object that a JSON file holds. Raises ValueError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds no JSON object")
    return value


def _added_tokens(folder: Path, config: dict) -> dict[str, int]:
    """Tokens beside SentencePiece's, from added_tokens.json and tokenizer_config.json's added_tokens_decoder."""
    file = folder / "added_tokens.json"
    added = read_json(file) if file.is_file() else {}
    decoder = config.get("added_tokens_decoder")
    for i, token in decoder.items() if isinstance(decoder, dict) else ():
        if i.isdecimal() and len(i) < 10 and isinstance(token, dict) and isinstance(token.get("content"), str):
            added[token["content"]] = int(i)
    return {text: i for text, i in added.items() if type(i) is int}


class TextStream:
    """Token by token to text that can be printed at once.

    A character of several tokens is held back until it is whole, and whatever may become a stop string until it is
    decided. What was returned, joined, equals the decoded whole up to the first stop string.
    """

    def __init__(self, tokenizer: Tokenizer, at_start: bool = False, stops: Sequence[str] = ()):
        """at_start: the text begins here, so that the leading space of the first token is not part of it."""
        self.tokenizer = tokenizer
        self.stops = [stop for stop in stops if stop]
        self.strip_space = at_start and tokenizer.adds_space
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


def _mistral(system: str, user: str, first: bool) -> Segments:
    head = f"{system}\n\n" if first and system else ""
    return ([BOS] if first else []) + [f"[INST] {head}{user.strip()} [/INST]"]


TEMPLATES = {
    "llama2": Template(_llama2, [" ", EOS]),
    "zephyr": Template(_zephyr, [EOS]),
    "vicuna": Template(_vicuna, [EOS], ("USER:",)),
    "chatml": Template(_chatml, [Control("<|im_end|>"), "\n"], ("<|im_end|>",)),
    "mistral": Template(_mistral, [EOS]),
    "plain": Template(_plain, ["\n"]),
}


SIGNS = {"<<SYS>>": "llama2", "<|im_start|>": "chatml", "<|user|>": "zephyr", "USER:": "vicuna", "[INST]": "mistral"}


def recognise_template(folder: str | Path, config: dict) -> str:
    """Name of the template that a checkpoint was tuned on: from its own (chat_template.jinja, or in tokenizer_config.json), or
    from the folder's path, since Meta's checkpoints and Vicuna's come without one."""
    file = Path(folder) / "chat_template.jinja"
    jinja = json.dumps(config.get("chat_template") or "") + (file.read_text(errors="replace") if file.is_file() else "")
    for sign, name in SIGNS.items():
        if sign in jinja:
            return name
    path = str(Path(folder).absolute()).lower()
    return "llama2" if re.search("llama-2[^/]*chat", path) else "vicuna" if "vicuna" in path else "plain"
