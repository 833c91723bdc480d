"""Text to ids and back: SentencePiece and tokenizer.json, conversations, and streaming that splits no character."""

import bisect
import codecs
import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from sentencepiece import SentencePieceProcessor

from files import one_line_errors, read_bytes, read_json
from template import Renderer, find_template

TURN_MARKS = ("<|im_start|>", "<|im_end|>")  # in templates: control tokens, even if SentencePiece has them as user-defined
PADDING = 1024  # a model's vocabulary may be padded beyond its tokenizer's, to a multiple that suits the hardware
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

FILE_BYTES = 64_000_000  # of a tokenizer.model or tokenizer.json
CONTROL_LENGTH = 128  # characters of a control token, at most

Span = tuple[int, int]  # of characters: start, end


def any_of(texts: Collection[str]) -> re.Pattern:
    """A pattern that matches these texts, preferring the longest."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True) if text) or "(?!)")


@contextmanager
def stderr_discarded() -> Iterator[None]:
    """Discard what libraries write to file descriptor 2."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def begins_one(names: list[str], part: str) -> bool:
    """Whether one of the sorted names begins with this and is longer."""
    next_name = bisect.bisect_right(names, part)
    return part != "" and next_name < len(names) and names[next_name].startswith(part)


def after(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """The ids of a text that continues other text: as encoded after a character that does not merge with it."""
    for before in (".", "\n", "a"):
        start, ids = encode(before), encode(before + text)
        if ids[: len(start)] == start:
            return ids[len(start) :]
    return encode(text)


# ---- the two kinds of vocabulary, with the same methods


class SentencePiece:
    """A tokenizer.model, with the tokens that fine-tuned models add in files beside it."""

    utf8_errors = "surrogateescape"  # every byte that is not part of a valid character becomes one U+FFFD

    def __init__(self, file: Path, folder: Path, config: dict, vocab_size: int | None):
        raw = read_bytes(file, FILE_BYTES)
        try:
            if not raw:
                raise ValueError  # the library would accept it, but write to stderr later
            self.sp = SentencePieceProcessor(model_proto=raw)
            pieces = [self.sp.id_to_piece(i) for i in range(self.sp.vocab_size())]
            self._byte_values = {i: bytes([int(p[3:5], 16)]) for i, p in enumerate(pieces) if self.sp.is_byte(i)}  # "<0x0A>"
            self.adds_space = self.sp.encode_as_pieces("a")[0].startswith("\u2581")
        except (RuntimeError, ValueError, IndexError):
            raise ValueError(
                f"{file} is not a SentencePiece model (of Llama 3, take the folder in Hugging Face's layout)"
            ) from None
        added = {text: i for text, i in _added_tokens(folder, config).items() if i >= len(pieces)}
        _check_size(file, len(pieces), max([len(pieces) - 1, *added.values()]) + 1, vocab_size)
        embedded = {text: i for text, i in added.items() if vocab_size is None or i < vocab_size}
        self.control = embedded | {p: i for i, p in enumerate(pieces) if self.sp.is_control(i) or p in TURN_MARKS}
        self._in_text = any_of([mark for mark in TURN_MARKS if mark in pieces])
        ids = {"bos_token": self.sp.bos_id(), "eos_token": self.sp.eos_id(), "unk_token": self.sp.unk_id()}
        self.named = {name: pieces[i] for name, i in ids.items() if i >= 0}
        self._space_after_control = bool(config.get("legacy", not config))  # as in Meta's own programs
        self._bytes = [self._bytes_of(i) for i in range(len(pieces))]

    def _bytes_of(self, token: int) -> bytes:
        piece = self.sp.id_to_piece(token)
        if piece in self.control:
            return b""
        if token in self._byte_values:
            return self._byte_values[token]
        return (" \u2047 " if self.sp.is_unknown(token) else piece.replace("\u2581", " ")).encode()

    def bytes_of(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""

    def starts(self, bos: int, config: dict) -> list[int]:
        """The ids that every text begins with."""
        return [bos] if bos >= 0 and config.get("add_bos_token") is not False else []

    def encode(self, text: str) -> list[int]:
        """Text to ids. What SentencePiece would take for a control token is cut in two, so that it is encoded as text."""
        cuts = [0, *(mark.start() + 1 for mark in self._in_text.finditer(text)), len(text)]
        ids = self.sp.encode(text[: cuts[1]])
        for begin, end in zip(cuts[1:], cuts[2:]):
            ids += after(text[begin:end], self.sp.encode)
        return ids

    def encode_after(self, text: str) -> list[int]:
        """Text that continues other text: without the space that SentencePiece puts before a text."""
        return after(text, self.encode)

    def encode_chat(self, text: str, control: list[Span], typed: list[Span], after: bool) -> list[int]:
        """A rendered conversation, or (after) the rest of one. control: its control tokens; all else is text."""
        ids, done, spaced = [], 0, not after
        for begin, end in [*control, (len(text), len(text))]:
            if begin > done:
                ids += self.encode(text[done:begin]) if spaced else self.encode_after(text[done:begin])
            if end > begin:
                ids.append(self.control[text[begin:end]])
            done, spaced = end, self._space_after_control
        return ids


class TokenizerJson:
    """A tokenizer.json, run by the library that defines it (tokenizers)."""

    MARK = re.compile(r"\s*[<\[{].*[>\]}]\s*", re.DOTALL)  # "<think>": a control token, special or not

    def __init__(self, file: Path, folder: Path, config: dict, vocab_size: int | None):
        raw = read_json(file, FILE_BYTES)
        try:
            added = [t for t in raw.get("added_tokens") or [] if vocab_size is None or t["id"] < vocab_size]  # embedded ones
            self._added = {token["id"]: token["content"] for token in added}
            self._special = {token["content"] for token in added if token["special"]}
            self.control = {text: i for i, text in self._added.items() if text in self._special or self.MARK.fullmatch(text)}
            raw["added_tokens"] = [token | {"special": token["content"] in self.control} for token in added]
            kinds = _kinds(raw.get("decoder"))
            with stderr_discarded():  # where a panic in the library reports itself
                self._library = tokenizers.Tokenizer.from_str(json.dumps(raw | {"truncation": None, "padding": None}))
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # the library's PanicException is not an Exception
            raise ValueError(f"{file} is not a valid tokenizer: {error}") from None
        if not kinds & {"ByteLevel", "ByteFallback", "Metaspace", "Replace"}:
            raise ValueError(f"{file}: its decoder is {', '.join(sorted(kinds)) or 'absent'}, which is not supported")
        size = self._library.get_vocab_size(with_added_tokens=False)
        _check_size(file, size, max([size - 1, *self._added]) + 1, vocab_size)
        self._byte_level = "ByteLevel" in kinds
        self.utf8_errors = "replace" if self._byte_level else "surrogateescape"  # U+FFFD per sequence or byte, like the library
        self._control_ids = set(self.control.values()) - {self._library.token_to_id(str(raw["model"].get("unk_token")))}
        self.named: dict[str, str] = {}
        first = self._as_text("a").ids
        self.adds_space = bool(first) and self.bytes_of(first[0]).startswith(b" ")

    def bytes_of(self, token: int) -> bytes:
        if token in self._added:
            text = self._added[token]
            return b"" if text in self._special else text.encode()
        piece = self._library.id_to_token(token) or ""
        if self._byte_level and all(c in BYTE_LEVEL for c in piece):
            return bytes(BYTE_LEVEL[c] for c in piece)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    def starts(self, bos: int, config: dict) -> list[int]:
        """The ids that every text begins with, as the configuration says or, if it says nothing, the file's post-processor."""
        if config.get("add_bos_token") is not None:
            return [bos] if config["add_bos_token"] and bos >= 0 else []
        text, whole = self._as_text("a").ids, self._library.encode("a").ids
        return next(whole[:i] for i in range(len(whole) + 1) if whole[i : i + len(text)] == text)

    def _as_text(self, text: str) -> tokenizers.Encoding:
        self._library.encode_special_tokens = True
        return self._library.encode(text, add_special_tokens=False)

    def _with_control(self, text: str) -> tokenizers.Encoding:
        self._library.encode_special_tokens = False
        return self._library.encode(text, add_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Text to ids. Where the vocabulary itself would turn text into a control token, that text is cut in two."""
        encoding = self._as_text(text)
        if self._control_ids.isdisjoint(encoding.ids):
            return encoding.ids
        found = [span for i, span in zip(encoding.ids, encoding.offsets) if i in self._control_ids and span[1] - span[0] > 1]
        cuts = [0, *(begin + 1 for begin, _ in found), len(text)]
        ids = self._as_text(text[: cuts[1]]).ids
        for begin, end in zip(cuts[1:], cuts[2:]):
            ids += self._after(text[begin:end], lambda text: self._as_text(text).ids)
        return ids

    def encode_after(self, text: str) -> list[int]:
        """Text that continues other text: without the space that some vocabularies put before a text."""
        return self._after(text, self.encode)

    def _after(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        return after(text, encode) if self.adds_space and text else encode(text)

    def encode_chat(self, text: str, control: list[Span], typed: list[Span], after: bool) -> list[int]:
        """A rendered conversation as the library encodes it, except that `typed` spans are text, and so are control tokens that
        only the library finds (it may normalise the text first). With `after`, it is the rest of one."""
        encoding, own = self._with_control(text), {i for begin, end in control for i in range(begin, end)}
        spans = [span for i, span in zip(encoding.ids, encoding.offsets) if i in self._control_ids]
        typed = sorted({*typed, *(span for span in spans if own.isdisjoint(range(*span)))})
        if not typed and not after:
            return encoding.ids
        ids, done = [], 0
        for begin, end in [*typed, (len(text), len(text))]:
            with_control = lambda part: self._with_control(part).ids
            ids += self._after(text[done:begin], with_control) if done or after else with_control(text[:begin])
            ids += self.encode_after(text[max(begin, done) : end])
            done = max(end, done)
        return ids


def _kinds(decoder: dict | None) -> set[str]:
    """The types of a tokenizer.json's decoder and of the decoders it is composed of."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_kinds(part) for part in decoder.get("decoders", [])))


def _byte_level() -> dict[str, int]:
    """GPT-2's alphabet: a character for each byte, the visible ones of Latin-1 for themselves, the others from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LEVEL = _byte_level()


def _check_size(file: Path, size: int, with_added: int, vocab_size: int | None) -> None:
    if vocab_size is not None and not size <= vocab_size <= with_added + PADDING:
        raise ValueError(f"{file} has {size} tokens, but the model has a vocabulary of {vocab_size}")


def tokenizer_file(folder: Path) -> Path:
    """tokenizer.model or tokenizer.json in the folder or, in Meta's layout, tokenizer.model in its parent. Raises
    FileNotFoundError."""
    meta = [] if (folder / "config.json").is_file() else [folder.parent / "tokenizer.model"]
    for file in folder / "tokenizer.model", *meta, folder / "tokenizer.json":
        if file.is_file():
            return file
    raise FileNotFoundError(f"{folder} holds no tokenizer.model and no tokenizer.json")


def _added_tokens(folder: Path, config: dict) -> dict[str, int]:
    """Tokens in addition to SentencePiece's, from added_tokens.json and tokenizer_config.json's added_tokens_decoder."""
    file = folder / "added_tokens.json"
    added = read_json(file) if file.is_file() else {}
    decoder = config.get("added_tokens_decoder")
    for i, token in decoder.items() if isinstance(decoder, dict) else ():
        if i.isdecimal() and len(i) < 10 and isinstance(token, dict) and isinstance(token.get("content"), str):
            added[token["content"]] = int(i)
    return {text: i for text, i in added.items() if type(i) is int}


# ---- the tokenizer


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation, its ids and, once the model has answered, the answer (whose ids are at the end of `ids`)."""

    text: str
    ids: list[int]
    answer: str = ""

    def answered(self, answer: str, ids: list[int]) -> "Prompt":
        return Prompt(self.text, self.ids + ids, answer)


class Tokenizer:
    """A checkpoint's tokenizer.model or tokenizer.json, its control tokens and its chat template."""

    @one_line_errors()
    def __init__(
        self, folder: str | Path, vocab_size: int | None = None, bos_id: int | None = None, chat_template: str | None = None
    ):
        """folder: the checkpoint's; vocab_size and bos_id: the model's; chat_template: a name or a file, instead of its own.

        Raises OSError; ValueError when a file is broken or its size does not fit the model.
        """
        folder = Path(folder)
        file, self.config = tokenizer_file(folder), {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                self.config |= read_json(folder / name)
        kind = SentencePiece if file.suffix == ".model" else TokenizerJson
        self.vocabulary = kind(file, folder, self.config, vocab_size)
        self.control = self.vocabulary.control
        if long := next((name for name in self.control if len(name) > CONTROL_LENGTH), None):
            raise ValueError(f"{folder} has a control token of {len(long):,} characters: {long[:20]}...")
        self._sorted, self._reversed = sorted(self.control), sorted(name[::-1] for name in self.control)
        self._lengths = sorted({len(name) for name in self.control}, reverse=True)
        self._first = any_of({name[:1] for name in self.control})
        self.adds_space = self.vocabulary.adds_space
        tokens = {name: self.config.get(name) for name in NAMES}
        texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
        self.named = self.vocabulary.named | {name: text for name, text in texts.items() if isinstance(text, str)}
        self.bos = self.control.get(self.named.get("bos_token"), -1) if bos_id is None else bos_id
        self.eos = self.control.get(self.named.get("eos_token"), -1)
        self._starts = self.vocabulary.starts(self.bos, self.config)
        self.chat_template, self.template_name = find_template(folder, self.config, chat_template)
        self._renderer = Renderer()

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Text to ids, after bos unless the checkpoint says otherwise. What looks like a control token is encoded as text.
        Raises ValueError for a lone surrogate, which UTF-8 cannot encode."""
        return (self._starts if bos else []) + self.vocabulary.encode(_checked(text))

    def encode_after(self, text: str) -> list[int]:
        """Text that continues other text: without the space that some tokenizers put before a text."""
        return self.vocabulary.encode_after(_checked(text))

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for: none for a control token or one beyond the tokenizer's."""
        return self.vocabulary.bytes_of(token) if 0 <= token < 1 << 31 else b""

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, without the space that some tokenizers put before a text."""
        text = _replaced(b"".join(map(self.bytes_of, ids)).decode(errors=self.vocabulary.utf8_errors))
        return text.removeprefix(" ") if self.adds_space else text

    def apply_chat_template(self, messages: list[dict], add_generation_prompt: bool = True) -> list[int]:
        """A conversation ("role" and "content" of each message) to ids, up to where the model answers. Only the template itself
        writes control tokens: what looks like one in a message is text. Raises ValueError where the template fails."""
        return self.chat_prompt(messages, add_generation_prompt).ids

    @one_line_errors()
    def chat_prompt(self, messages: list[dict], add_generation_prompt: bool = True, past: Prompt | None = None) -> Prompt:
        """The same, with its text. If it continues `past`, an answered prompt, so do the ids: the tokens of an answer need not
        be those that its text would be encoded to, and what was evaluated can stay in the cache."""
        text, control, typed = self._render(messages, add_generation_prompt)
        start = self._end_of(past, text)
        spans = [[(b - start, e - start) for b, e in where if b >= start] for where in (control, typed)]
        ids = self.vocabulary.encode_chat(text[start:], *spans, after=start > 0)
        if start:
            ids = past.ids + ids
        if not ids:
            raise ValueError("the chat template writes nothing for this conversation")
        return Prompt(text, ids)

    def _end_of(self, past: Prompt | None, text: str) -> int:
        """Where past and its answer end in the text of a conversation that continues them; 0 if this one does not."""
        if past is None or not text.startswith(past.text):
            return 0
        answer, begin = past.answer.strip(), len(past.text)
        at = text.find(answer, begin)
        return at + len(answer) if at >= 0 and not text[begin:at].strip() else 0

    def turn_ends(self) -> tuple[set[int], list[str]]:
        """What ends an answer, because the template writes it between an answer and the next question: ids of control tokens
        and, if the template has none for the roles, text."""
        first, answer, second = (secrets.token_hex(8) for _ in range(3))
        roles = {first: "user", answer: "assistant", second: "user"}
        text, control, _ = self._render([{"role": role, "content": word} for word, role in roles.items()], False)
        begin, end = text.find(answer) + len(answer), text.find(second)
        if not len(answer) <= begin <= end:  # it does not write one of them
            return set(), []
        tokens = [text[b:e] for b, e in control if begin <= b < end]
        gap = text[begin:end].strip()
        ids = {self.control[token] for token in tokens[:1] if gap.startswith(token)}
        if any(self.control[token] not in (self.bos, self.eos) for token in tokens):
            return ids, []
        lines = any_of(tokens).sub("", gap).strip().splitlines()
        return ids, [line[:CONTROL_LENGTH] for line in lines[:1]]

    def _render(self, messages: list[dict], add_generation_prompt: bool) -> tuple[str, list[Span], list[Span]]:
        """The text of a conversation, where in it the template wrote control tokens, and where text only looks like one.

        Two characters that occur nowhere else are put into the messages as marks: `opening` before what looks like a control
        token, and before the start of a message that could complete one begun by the template; `closing` after the end of a
        message that could begin one. There is no mark after a token, since templates strip what follows "</think>".
        """
        everything = self.chat_template + _checked("".join(message["content"] for message in messages))
        unused = (chr(c) for c in range(0x10FFFD, 0xFFFFF, -1) if chr(c) not in everything)  # of plane 16, for private use
        opening, closing = next(unused, None), next(unused, None)
        if closing is None:
            raise ValueError(
                "the messages hold all private-use characters of Unicode's plane 16; two must be left to serve as marks"
            )
        marked = [{"role": m["role"], "content": self._marked(m["content"], opening, closing)} for m in messages]
        variables = dict(messages=marked, add_generation_prompt=add_generation_prompt, tools=None, documents=None)
        rendered = self._renderer.render(self.chat_template, **variables, **self.named)
        marks, parts, length = {opening: set(), closing: set()}, [], 0
        for part in re.split(f"([{opening}{closing}])", rendered):
            if part in marks:
                marks[part].add(length)
            else:
                parts.append(part)
                length += len(part)
        text, control, typed = "".join(parts), [], []
        for begin, end in self._control_in(text):
            cut = any(i in marks[opening] or i in marks[closing] for i in range(begin + 1, end))
            (typed if cut or begin in marks[opening] else control).append((begin, end))
        return text, control, typed

    def _marked(self, content: str, opening: str, closing: str) -> str:
        cuts = [0, *(begin for begin, _ in self._control_in(content)), len(content)]
        content = opening.join(content[begin:end] for begin, end in zip(cuts, cuts[1:]))
        end = content.lstrip()
        if any(begins_one(self._reversed, end[:n][::-1]) for n in range(1, CONTROL_LENGTH)):
            content = content[: len(content) - len(end)] + opening + end
        begin = content.rstrip()
        if any(begins_one(self._sorted, begin[-n:]) for n in range(1, CONTROL_LENGTH)):
            content = begin + closing + content[len(begin) :]
        return content

    def _control_in(self, text: str) -> list[Span]:
        """Where control tokens are in a text; of several that begin at one place, the longest."""
        spans, at = [], 0
        while found := self._first.search(text, at):
            begin = found.start()
            length = next((n for n in self._lengths if text[begin : begin + n] in self.control), 0)
            if length:
                spans.append((begin, begin + length))
            at = begin + (length or 1)
        return spans


def _checked(text: str) -> str:
    if bad := re.search("[\ud800-\udfff]", text):
        raise ValueError(f"the text holds U+{ord(bad[0]):04X} at {bad.start()}: a lone surrogate is not a character")
    return text


def _replaced(text: str) -> str:
    """U+FFFD for each byte that was decoded by surrogateescape."""
    return re.sub("[\udc80-\udcff]", "\ufffd", text)


class TextStream:
    """Turns tokens, one at a time, into text that can be printed at once.

    A character of several tokens is held back until it is complete, and whatever may be the start of a stop string until
    that is decided. The pieces returned, joined, equal all tokens decoded together, up to the first stop string.
    """

    def __init__(self, tokenizer: Tokenizer, at_start: bool = False, stops: Sequence[str] = ()):
        """at_start: the text begins here, so that the leading space of the first token is not part of it."""
        self.tokenizer = tokenizer
        self.stops = [stop for stop in stops if stop]
        self.strip_space = at_start and tokenizer.adds_space
        self.stopped = False  # a stop string was found
        self._utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer.vocabulary.utf8_errors)
        self._held = ""

    def push(self, token: int) -> str:
        return self._release(_replaced(self._utf8.decode(self.tokenizer.bytes_of(token))))

    def finish(self) -> str:
        """What is still held back, once there are no more tokens."""
        text = self._release(_replaced(self._utf8.decode(b"", True)))
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
        sizes = [n for stop in self.stops for n in range(min(len(stop), len(self._held) + 1)) if self._held.endswith(stop[:n])]
        keep = max(sizes, default=0)
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(ready) :]
        return ready
