"""Text to ids and back: SentencePiece and tokenizer.json, conversations, and streaming that splits no
character.

A Vocabulary encodes text and knows the bytes of each token. A Tokenizer reads one from a checkpoint,
and makes Prompts of conversations. A TextStream makes text of ids as they come.

Tokenizers and templates come with a checkpoint, so they are not trusted: only regular files of a
sane size are read, a template runs in Jinja's sandbox (see loading/templates.py), errors are one
line. Control tokens are written by the template itself and by whoever writes a whole prompt, never
by a message. None of this needs torch."""

import codecs
import functools
import json
import os
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from pathlib import Path
from threading import Lock

from loading.files import one_line, one_line_errors
from loading.templates import render

# Chat templates use these as control tokens, even if a vocabulary has them as text
TURN_MARKS = ("<|im_start|>", "<|im_end|>")
# a model's vocabulary may be padded beyond its tokenizer's, to a multiple that suits the hardware
PADDING = 4096
LARGE = 1 << 20  # characters; longer texts are encoded one at a time, since 8 million take 2 GB
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

# What ends the text of models that fill in the middle
FIM_ENDS = (
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<fim-repo>", "<|repo_name|>", "<REPO>", "<reponame>", "<|file_sep|>",
)  # fmt: skip
THINK, THOUGHT = "<think>", "</think>"  # around what is thought, at the beginning of an answer

Span = tuple[int, int]  # of characters: start, end


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What the files of a checkpoint say about its tokenizer."""

    file: Path  # of the vocabulary
    vocabulary: bytes | dict  # a tokenizer.model, or the object in a tokenizer.json
    config: dict  # of tokenizer_config.json
    added: dict = field(default_factory=dict)  # of added_tokens.json
    # The added_tokens of a tokenizer.json beside a tokenizer.model
    beside: list = field(default_factory=list)
    template: str  # of chats, in Jinja
    template_name: str  # where that comes from; empty for plain text, if there is none
    tool_template: str  # of chats with tools, for which some checkpoints have one of their own


# ---- vocabularies


def any_of(texts: Collection[str], words: Collection[str] = ()) -> re.Pattern:
    """A pattern that matches these texts, preferring the longest; those that are among the words,
    where no letter is beside them."""
    patterns = []
    for text in sorted(filter(None, texts), key=len, reverse=True):
        escaped = re.escape(text)
        patterns.append(rf"(?<!\w){escaped}(?!\w)" if text in words else escaped)
    return re.compile("|".join(patterns) or "(?!)")


def encode_continuation(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """The ids of a text that continues other text: as encoded after a character that cannot merge
    with it."""
    for before in (".", "\n", "a"):
        start = encode(before)
        ids = encode(before + text)
        if ids[: len(start)] == start:
            return ids[len(start) :]
    return encode(text)


class Vocabulary:
    """The two kinds of vocabulary, which share these attributes and methods."""

    size: int  # tokens of the vocabulary itself
    size_with_added: int  # and those that were added to it
    control: dict[str, int]  # ids of the control tokens
    named: dict[str, str] = {}  # some of these by name ("bos_token"), where the file says it
    adds_space: bool  # a text is encoded with a space before it
    utf8_errors: str  # how bytes that are not UTF-8 are decoded
    # whether text after a control token is encoded with a space before it
    space_after: Callable[[str], bool]

    # "<think>": a control token, special or not
    MARK = re.compile(r"\s*[<\[{].*[>\]}]\s*", re.DOTALL)

    def _describe(self, added: dict[int, dict]) -> None:
        """Take what is known of the added tokens, by id, which both kinds of vocabulary treat
        alike, even where they replace a piece of the vocabulary."""
        self._added = added
        self.lstrip = {token["content"] for token in added.values() if token["lstrip"]}
        self.rstrip = {token["content"] for token in added.values() if token["rstrip"]}
        self.single = {token["content"] for token in added.values() if token["single_word"]}
        self.control = {t["content"]: i for i, t in added.items() if self._is_control(t)}

    def _is_control(self, token: dict) -> bool:
        marked = self.MARK.fullmatch(token["content"]) is not None
        return token.get("control", token["special"] or marked)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for, none for a control token or one beyond the
        vocabulary."""
        if token not in self._added:
            return self._bytes_of(token)
        if self._added[token]["special"]:
            return b""
        return self._added[token]["content"].encode()

    def encode(self, text: str) -> list[int]:
        """Text to ids. What the vocabulary would turn into a control token is cut in two, so that
        it stays text."""
        ids, found = self._encode(text)
        if found:
            cuts = [begin + 1 for begin in found]
            ids = self._encode(text[: cuts[0]])[0]
            for begin, end in zip(cuts, [*cuts[1:], len(text)]):
                ids += encode_continuation(text[begin:end], lambda part: self._encode(part)[0])
        return ids

    def encode_chat(self, text: str, control: list[Span], after: bool) -> list[int]:
        """A rendered conversation, or (after) the rest of one. control: spans of control tokens;
        what else looks like one is text."""
        return self._joined(text, control, self.control, self.encode, spaced=not after)

    def _joined(
        self,
        text: str,
        spans: list[Span],
        tokens: dict[str, int],
        encode: Callable[[str], list[int]],
        spaced: bool = True,
    ) -> list[int]:
        """The ids of a text that has tokens at these spans. encode: of the text between them.
        spaced: whether the first may begin with the space that some vocabularies add."""
        ids: list[int] = []
        done = 0
        before = ""
        for begin, end in [*spans, (len(text), len(text))]:
            part = text[done:begin]
            token = text[begin:end]
            if before in self.rstrip:
                part = part.lstrip()
            if token in self.lstrip:
                part = part.rstrip()
            if spaced or not self.adds_space or not part:
                ids += encode(part)
            else:
                ids += encode_continuation(part, encode)
            if token:
                ids.append(tokens[token])
            done = end
            before = token
            spaced = bool(token) and self.space_after(token)
        return ids


class SentencePiece(Vocabulary):
    """A tokenizer.model, with the tokens that fine-tuned models add in files beside it."""

    # Every byte that is not part of a valid character becomes one U+FFFD
    utf8_errors = "surrogateescape"

    def __init__(self, file: Path, raw: bytes, added: dict[int, dict], config: dict):
        from sentencepiece import SentencePieceProcessor

        adds_space = config.get("add_prefix_space")
        if isinstance(adds_space, bool):  # what follows in a protocol buffer replaces what it says
            raw += b"\x1a\x02\x18" + bytes([adds_space])  # normalizer_spec: add_dummy_prefix
        try:
            self.sp = SentencePieceProcessor(model_proto=raw)
            self.adds_space = self.sp.encode_as_pieces("a")[0].startswith("\u2581")
            self.size = self.sp.vocab_size()
            pieces = [self.sp.id_to_piece(i) for i in range(self.size)]
        except (RuntimeError, ValueError, IndexError):
            instead = "of Llama 3, take the folder in Hugging Face's layout"
            raise ValueError(f"{file} is not a SentencePiece model ({instead})") from None
        add_named(added, config, {piece: i for i, piece in enumerate(pieces)})
        self._describe(added)
        self.size_with_added = max([self.size - 1, *added]) + 1
        for i, piece in enumerate(pieces):
            # of the turn marks only user-defined symbols are always found
            turn_mark = piece in TURN_MARKS and i in self.sp.encode(piece)
            if i not in added and (turn_mark or self.sp.is_control(i)):
                self.control[piece] = i
        found = [piece for i, piece in enumerate(pieces) if not self.sp.is_control(i)]
        self._in_text = any_of(self.control.keys() & found)
        self._words = {}  # added tokens that are found in a text
        self._instead = {}  # of pieces that added tokens replace: their bytes
        for i, token in added.items():
            if token["content"] not in self.control:
                self._words[token["content"]] = i
            if i < self.size and pieces[i] != token["content"]:
                text = pieces[i].replace("\u2581", " ").encode()
                self._instead[i] = [self.sp.piece_to_id(f"<0x{byte:02X}>") for byte in text]
        self._word = any_of(self._words, self.single)
        ids = {
            "bos_token": self.sp.bos_id(),
            "eos_token": self.sp.eos_id(),
            "unk_token": self.sp.unk_id(),
        }
        self.named = {name: pieces[i] for name, i in ids.items() if i >= 0}
        # Without a configuration, as in Meta's own programs
        self._legacy = bool(config.get("legacy", not config))

    def space_after(self, token: str) -> bool:
        return self._legacy

    def _bytes_of(self, token: int) -> bytes:
        if token >= self.size:
            return b""
        piece = self.sp.id_to_piece(token)
        if piece in self.control:
            return b""
        if self.sp.is_byte(token):  # "<0x0A>"
            return bytes([int(piece[3:5], 16)])
        if self.sp.is_unknown(token):
            return " \u2047 ".encode()
        return piece.replace("\u2581", " ").encode()

    def starts(self, bos: int, config: dict) -> list[int]:
        """The ids that every text begins with."""
        if bos < 0 or config.get("add_bos_token") is False:
            return []
        return [bos]

    def _encode(self, text: str) -> tuple[list[int], list[int]]:
        """The ids of a text, and where the control tokens begin that the vocabulary itself finds in
        it."""
        words = [word.span() for word in self._word.finditer(text)]
        ids = self._joined(text, words, self._words, self._encode_pieces)
        return ids, [found.start() for found in self._in_text.finditer(text)]

    def _encode_pieces(self, text: str) -> list[int]:
        ids = self.sp.encode(text)
        if self._instead:
            ids = [i for piece in ids for i in self._instead.get(piece, [piece])]
        return ids


# the flags of an added token of which no more is known
ADDED = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}


def added_tokens(files: TokenizerFiles, vocab_size: int | None) -> dict[int, dict]:
    """All that the files say of added tokens for which the model has an embedding, by id: "content"
    and the flags of tokenizer.json. As in transformers, they are those of tokenizer_config.json's
    added_tokens_decoder or else of added_tokens.json; a tokenizer.json that is the vocabulary has
    more, and another stands in for added_tokens_decoder."""
    listed = []
    decoder = files.config.get("added_tokens_decoder")
    if not isinstance(decoder, dict):
        decoder = {}
        for text, i in files.added.items():
            special = bool(Vocabulary.MARK.fullmatch(text))
            listed.append({"id": i, "content": text, "special": special})
    if isinstance(files.vocabulary, dict):
        own = files.vocabulary.get("added_tokens") or []
        if not isinstance(own, list) or not all(isinstance(token, dict) for token in own):
            raise ValueError(
                f"{files.file} is not a valid tokenizer: added_tokens is not a list of objects"
            )
        listed += own
    elif not decoder:
        listed += files.beside
    for i, token in decoder.items():
        if i.isdecimal() and len(i) < 10 and type(token) is dict:
            listed.append(token | {"id": int(i)})
    most = 1 << 31 if vocab_size is None else vocab_size
    added = {}
    for token in listed:
        i = token.get("id") if type(token) is dict else None
        if type(i) is int and 0 <= i < most and (content_of(token) or "") != "":
            added[i] = ADDED | token
    return added


def add_named(added: dict[int, dict], config: dict, pieces: dict[str, int]) -> None:
    """Add the pieces of the vocabulary that the configuration names: as in transformers, they are
    added tokens as well."""
    named = [config.get(name) for name in NAMES]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(name)
        if isinstance(more, dict):
            more = [*more.values()]
        if isinstance(more, list):
            named += more
    texts = {token["content"] for token in added.values()}
    for text in map(content_of, named):
        i = pieces.get(text, -1)
        if text not in texts and i >= 0 and i not in added:
            added[i] = ADDED | {"id": i, "content": text}


def content_of(token: object) -> str | None:
    """The text of a token that a configuration describes, None if it describes none."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


@contextmanager
def panics_are_errors(what: str) -> Iterator[None]:
    """Make a ValueError of whatever the library raises inside: what it cannot do is often a
    PanicException, which is no Exception, and of which Rust writes lines to stderr before."""
    try:
        with native_stderr_to_nowhere():
            yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(one_line(f"{what}: {error}")) from None


@contextmanager
def native_stderr_to_nowhere() -> Iterator[None]:
    """Let what libraries write to file descriptor 2 go nowhere. It takes a microsecond or two."""
    try:
        saved = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    try:
        os.dup2(nowhere(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


@functools.cache
def nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY)


class TokenizerJson(Vocabulary):
    """A tokenizer.json, run by the library that defines it (tokenizers)."""

    def __init__(self, file: Path, raw: dict, added: dict[int, dict], config: dict):
        import tokenizers

        with panics_are_errors(f"{file} is not a valid tokenizer"):
            vocab = raw["model"]["vocab"]
            if isinstance(vocab, list):  # of Unigram: pieces and their scores
                vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
            add_named(added, config, vocab)
            if "dropout" in raw["model"]:
                raw["model"]["dropout"] = None  # merges left out at random are for training
            as_text = [token | {"special": self._is_control(token)} for token in added.values()]
            # A decoder may be composed of several
            kinds = set(re.findall('"type": "(.*?)"', json.dumps(raw.get("decoder"))))
            whole = raw | {"truncation": None, "padding": None, "added_tokens": as_text}
            self._library = tokenizers.Tokenizer.from_str(json.dumps(whole))
            self._replaced = replacements(raw.get("decoder"))
        self._large = Lock()
        # The library counts on from the vocabulary, whatever ids the files say
        ids = [self._library.token_to_id(token["content"]) for token in added.values()]
        added = dict(zip(ids, added.values()))
        self._describe(added)
        if not kinds & {"ByteLevel", "ByteFallback", "Metaspace", "Replace"}:
            said = ", ".join(sorted(kinds)) or "absent"
            raise ValueError(f"{file}: its decoder is {said}, which is not supported")
        self.size = self._library.get_vocab_size(with_added_tokens=False)
        self.size_with_added = max([self.size - 1, *added]) + 1
        self._byte_level = "ByteLevel" in kinds
        # U+FFFD per sequence or byte
        self.utf8_errors = "replace" if self._byte_level else "surrogateescape"
        unknown = self._library.token_to_id(str(raw["model"].get("unk_token")))
        self._control_ids = set(self.control.values())
        self._unknown = raw["model"].get("unk_id", unknown)
        first, _ = self._encode("a")
        self.adds_space = bool(first) and self.bytes_of(first[0]).startswith(b" ")
        self._spaced = {}  # whether text after a token begins with the space, by "normalized"
        for token, i in self.control.items():
            normalized = added[i]["normalized"]
            if normalized not in self._spaced:
                ids, _ = self._encode(f"{token}a")
                self._spaced[normalized] = ids[1:] == first
        self._library.encode_special_tokens = True  # as text

    def space_after(self, token: str) -> bool:
        return self._spaced[self._added[self.control[token]]["normalized"]]

    def _bytes_of(self, token: int) -> bytes:
        piece = self._library.id_to_token(token) or ""
        if self._byte_level and all(c in BYTE_LEVEL for c in piece):
            return bytes(BYTE_LEVEL[c] for c in piece)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        for text, instead in self._replaced:
            piece = piece.replace(text, instead)
        return piece.encode()

    def starts(self, bos: int, config: dict) -> list[int]:
        """What the file's post-processor adds. As in transformers, the configuration does not
        matter."""
        text, _ = self._encode("a")
        with panics_are_errors("the tokenizer fails at the text 'a'"):
            whole = self._library.encode("a").ids
        for i in range(len(whole)):
            if whole[i : i + len(text)] == text:
                return whole[:i]
        return []

    def _encode(self, text: str) -> tuple[list[int], list[int]]:
        large = self._large if len(text) > LARGE else nullcontext()
        with large, panics_are_errors("the tokenizer fails at this text"):
            # alone, unlike in a batch, nothing else in this process would run meanwhile
            [encoding] = self._library.encode_batch([text], add_special_tokens=False)
        ids = encoding.ids
        begins = []
        if not self._control_ids.isdisjoint(ids):
            for i, (begin, end) in zip(ids, encoding.offsets):
                if i in self._control_ids and i != self._unknown and end - begin > 1:
                    begins.append(begin)
        return ids, begins


def replacements(decoder: dict | None) -> list[tuple[str, str]]:
    """What a valid decoder of a tokenizer.json replaces in a token, and with what. Raises
    ValueError for a regular expression, and for what would make a token longer and longer."""
    if decoder is None:
        return []
    if decoder["type"] == "Metaspace":
        return [(decoder["replacement"], " ")]
    if decoder["type"] == "Replace":
        text, instead = decoder["pattern"].get("String", ""), decoder["content"]
        if not len(text) >= max(1, len(instead)):
            said = f"its decoder replaces {decoder['pattern']} by {instead!r}"
            raise ValueError(f"{said}, which is not supported")
        return [(text, instead)]
    return [pair for inner in decoder.get("decoders", []) for pair in replacements(inner)]


# GPT-2's alphabet has a character for each byte. Visible bytes of Latin-1 stand for themselves, the
# others are numbered from 256 on
VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in VISIBLE]
BYTE_LEVEL = {chr(byte): byte for byte in VISIBLE} | {
    chr(256 + i): byte for i, byte in enumerate(OTHERS)
}


# ---- the tokenizer


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation and its ids; once answered, the ids include the answer's."""

    text: str
    ids: list[int]
    answer: str = ""
    continues: bool = False  # it ends within an answer, which is to be continued
    # the answer's last space is left out, since it belongs to the token that comes next
    leaves_space: bool = False
    # where the earlier answers whose ids it kept end: characters of the text, and ids
    ends: tuple[tuple[int, int], ...] = ()

    @property
    def thinks(self) -> bool:
        """Whether the template has opened what is thought before the answer."""
        return self.text.rstrip().endswith(THINK)


class Tokenizer:
    """A checkpoint's tokenizer.model or tokenizer.json, or GGUF's, its control tokens and its chat
    template."""

    @one_line_errors()
    def __init__(
        self,
        files: TokenizerFiles,
        vocab_size: int | None = None,
        bos_id: int | None = None,
    ):
        """vocab_size and bos_id: the model's. Raises ValueError when a file is broken or its size does
        not fit the model."""
        file = files.file
        self.config = files.config
        kind = SentencePiece if isinstance(files.vocabulary, bytes) else TokenizerJson
        added = added_tokens(files, vocab_size)
        self.vocabulary = kind(file, files.vocabulary, added, self.config)
        size = self.vocabulary.size
        most = self.vocabulary.size_with_added + PADDING
        if vocab_size is not None and not size <= vocab_size <= most:
            raise ValueError(
                f"{file} has {size} tokens, but the model has a vocabulary of {vocab_size}"
            )
        # After each token its bytes are asked for. A model's step leaves little of Python in the
        # CPU's caches, so working them out again would take 1% of a small model's time
        self._bytes_of = functools.lru_cache(1 << 17)(self.vocabulary.bytes_of)
        self.control = self.vocabulary.control
        as_text = self.config.get("split_special_tokens") is True
        self.control_pattern = any_of(() if as_text else self.control, self.vocabulary.single)
        self.control_names = {id: name for name, id in self.control.items()}
        self._longest = max(map(len, self.control), default=0)
        self._names = Beginnings(self.control)
        self._backwards = Beginnings(name[::-1] for name in self.control)
        self.named = dict(self.vocabulary.named)
        for name in NAMES:
            if text := content_of(self.config.get(name)):
                self.named[name] = text
        if bos_id is None:
            bos_id = -1
        self.bos = self.control.get(self.named.get("bos_token"), bos_id)
        self.eos = self.control.get(self.named.get("eos_token"), -1)
        self._starts = self.vocabulary.starts(self.bos, self.config)
        self.chat_template = files.template
        self.template_name = files.template_name
        self.tool_template = files.tool_template

    def encode(self, text: str, bos: bool = True, parse_special: bool = False) -> list[int]:
        """Text to ids, after bos unless the checkpoint says otherwise. What looks like a control
        token is encoded as text or, with parse_special, as that token. Raises ValueError for a lone
        surrogate, which UTF-8 cannot encode."""
        control = self._control_in(_checked(text)) if parse_special else []
        ids = self.vocabulary.encode_chat(text, control, after=False)
        if bos:
            return self._starts + ids
        return ids

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for, none for a control token or one beyond the
        tokenizer's."""
        if not 0 <= token < 1 << 31:
            return b""
        return self._bytes_of(token)

    def decode(self, ids: Sequence[int], marks: bool = False) -> str:
        """Ids to text, without the space that some tokenizers put before a text. marks: control
        tokens are written by their names; otherwise they are left out."""
        names = self.control_names if marks else {}
        raw = b"".join(names[i].encode() if i in names else self.bytes_of(i) for i in ids)
        text = _replaced(raw.decode(errors=self.vocabulary.utf8_errors))
        if self.vocabulary.adds_space:
            text = text.removeprefix(" ")
        return text

    def apply_chat_template(
        self,
        messages: list[dict],
        add_generation_prompt: bool = True,
        tools: list[dict] | None = None,
        **variables,
    ) -> list[int]:
        """The ids of chat_prompt, under transformers' name. Raises TypeError for what is no
        conversation ("role" and "content" of each message), ValueError as chat_prompt."""
        is_turn = lambda message: isinstance(message, dict) and {"role", "content"} <= {*message}
        if not messages or not all(map(is_turn, messages)):
            raise TypeError('a conversation is a list of dicts with "role" and "content"')
        return self.chat_prompt(
            messages, add_generation_prompt, tools=tools, variables=variables
        ).ids

    def chat_prompt(
        self,
        messages: list[dict],
        add_generation_prompt: bool = True,
        pasts: Sequence[Prompt] = (),
        continues: bool = False,
        tools: list[dict] | None = None,
        variables: dict | None = None,
    ) -> Prompt:
        """What the template makes of a conversation, up to where the model answers: its text and
        its ids. Only the template itself writes control tokens: what looks like one in a message is
        text. As far as it has the answers of one of `pasts`, answered prompts, it has their ids: the
        tokens of an answer need not be those that its text would be encoded to, and what was
        evaluated can stay in the cache. continues: the last message is an answer, which is to be
        continued. tools and variables: what else the template is given. Raises ValueError where the
        template fails."""
        asks = add_generation_prompt and not continues
        text, control, end = self._render(messages, asks, tools, variables, continues)
        leaves_space = False
        if continues:
            said = messages[-1]["content"]
            if not text[:end].endswith(said.strip()):
                raise ValueError(
                    "the chat template changes the last answer: it cannot be continued"
                )
            control = [span for span in control if span[1] <= end]
            # Templates may leave out white space at the end, which the model has to know of
            space = said[len(said.rstrip()) :]
            leaves_space = space.endswith(" ")
            text = text[:end] + space.removesuffix(" ")
        ends, past = (), None
        for each in pasts:
            found = self._common_ends(each, text)
            if found[-1:] > ends[-1:]:
                ends, past = found, each
        start, known = ends[-1] if ends else (0, 0)
        control = [(begin - start, end - start) for begin, end in control if begin >= start]
        ids = self.vocabulary.encode_chat(text[start:], control, after=start > 0)
        if known:
            ids = past.ids[:known] + ids
        if not ids:
            raise ValueError("the chat template writes nothing for this conversation")
        return Prompt(text, ids, continues=continues, leaves_space=leaves_space, ends=ends)

    @staticmethod
    def _common_ends(past: Prompt, text: str) -> tuple[tuple[int, int], ...]:
        """Where the answers in `past`, its own among them, end in the text of a conversation that
        begins with them: characters of the text, and ids of `past`."""
        ends = tuple(end for end in past.ends if text.startswith(past.text[: end[0]]))
        # If the texts are equal, the same question is asked again
        if not text.startswith(past.text) or text == past.text:
            return ends
        answer = past.answer.strip()
        begin = len(past.text)
        at = text.find(answer, begin)
        if at < 0 or text[begin:at].strip():
            return ends
        return (*ends, (at + len(answer), len(past.ids)))

    def turn_ends(self) -> tuple[set[int], list[str]]:
        """What ends an answer, because the template writes it between an answer and the next
        question: ids of control tokens and, if the template has none for the roles, text."""
        first, answer, second = (random_digits() for _ in range(3))
        roles = {first: "user", answer: "assistant", second: "user"}
        text, control, _ = self._render(
            [{"role": role, "content": word} for word, role in roles.items()], False
        )
        begin = text.find(answer) + len(answer)
        end = text.find(second)
        if not len(answer) <= begin <= end:  # it does not write one of them
            return set(), []
        tokens = [text[b:e] for b, e in control if begin <= b < end]
        gap = text[begin:end].strip()
        ids = {self.control[token] for token in tokens[:1] if gap.startswith(token)}
        if any(self.control[token] not in (self.bos, self.eos) for token in tokens):
            return ids, []
        lines = any_of(tokens).sub("", gap).strip().splitlines()
        return ids, lines[:1]

    def check_systems(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        variables: dict | None = None,
    ) -> None:
        """Raise ValueError if the template leaves out a system message, which it may also rewrite: if
        it leaves out another one in its place."""
        key = random_digits()
        others = [*messages]
        count = 0
        for i, message in enumerate(messages):
            if message["role"] == "system" and message["content"].strip():
                others[i] = message | {"content": f"{key}{count:08}"}
                count += 1
        if not count:
            return
        given = {**(variables or {}), "messages": others, "tools": tools or None}
        if len({*re.findall(rf"{key}\d{{8}}", self._written(given, True))}) < count:
            raise ValueError("the chat template has no place for this system message")

    def _written(self, given: dict, add_generation_prompt: bool) -> str:
        """What the template makes of the variables that it is given. Raises ValueError where it fails
        or writes what is not UTF-8."""
        template = self.tool_template if given["tools"] else self.chat_template
        known = dict(add_generation_prompt=add_generation_prompt, documents=None, **self.named)
        text = render(template, **given | known)
        return _checked(text, "the conversation as the chat template writes it")

    def _render(
        self,
        messages: list[dict],
        add_generation_prompt: bool,
        tools: list[dict] | None = None,
        variables: dict | None = None,
        continues: bool = False,
    ) -> tuple[str, list[Span], int]:
        """The text of a conversation, where the template wrote control tokens, and where the last
        answer ends if it is to be continued. Raises ValueError if that is not in the text.

        A sentinel, which is a character that occurs nowhere else, marks what is typed: in messages
        it is put before what looks like a control token, or could become one together with what the
        template writes around the message. None stands in a token or after it, since templates look
        for "</think>" and strip what follows."""
        given = {**(variables or {}), "messages": messages, "tools": tools or None}
        used = {*self.chat_template, *self.tool_template, *"".join(strings_in(given))}
        private = map(chr, range(0x10FFFD, 0xFFFFF, -1))  # plane 16, for private use
        unused = [*islice((c for c in private if c not in used), 2)]
        if len(unused) < 2:
            raise ValueError("the messages use every character for private use of Unicode")
        sentinel, end_mark = unused
        marked = {name: self._all_marked(value, sentinel) for name, value in given.items()}
        for message, original in zip(marked["messages"], messages):
            message["role"] = original["role"]
        if continues:
            said = marked["messages"][-1]["content"]
            end = len(said.rstrip())
            marked["messages"][-1]["content"] = said[:end] + end_mark + said[end:]
        before, *after = self._written(marked, add_generation_prompt).split(end_mark)
        if len(after) != int(continues):
            raise ValueError("the chat template leaves out the last answer: it cannot be continued")
        parts = "".join([before, *after]).split(sentinel)
        typed_at = {*accumulate(map(len, parts[:-1]))}
        text = "".join(parts)
        control = [s for s in self._control_in(text) if typed_at.isdisjoint(range(*s))]
        return text, control, len(before.replace(sentinel, ""))

    def _all_marked(self, value: object, sentinel: str) -> object:
        """A value of JSON in which each string is marked."""
        match value:
            case str():
                return self._marked(value, sentinel)
            case list():
                return [self._all_marked(item, sentinel) for item in value]
            case dict():
                return {
                    self._marked(name, sentinel): self._all_marked(item, sentinel)
                    for name, item in value.items()
                }
        return value

    def _marked(self, content: str, sentinel: str) -> str:
        start = len(content) - len(content.lstrip())
        end = len(content.rstrip())
        places = {begin for begin, _ in self._control_in(content)}
        for i in range(max(start, end - self._longest), end):
            if content[i] in self._names.first and self._names.has(content[i:end]):
                places.add(i)
        head = content[start : min(end, start + self._longest)][::-1]
        lasts = self._backwards
        if any(head[i] in lasts.first and lasts.has(head[i:]) for i in range(len(head))):
            places.add(start)
        cuts = [0, *sorted(places), len(content)]
        return sentinel.join(content[begin:end] for begin, end in pairwise(cuts))

    def _control_in(self, text: str) -> list[Span]:
        """Where control tokens are in a text; of several that begin at one place, the longest."""
        return [found.span() for found in self.control_pattern.finditer(text)]


def strings_in(value: object) -> Iterator[str]:
    """The strings in a value of JSON, names of fields among them."""
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from strings_in(item)
        case dict():
            for name, item in value.items():
                yield name
                yield from strings_in(item)


class Beginnings:
    """What names begin with, which takes no more memory than they do."""

    def __init__(self, names: Iterable[str]):
        self._sorted = sorted(names)
        self.first = {name[0] for name in self._sorted}

    def has(self, text: str) -> bool:
        """Whether a name begins with the text, and goes on."""
        i = bisect_right(self._sorted, text)
        return i < len(self._sorted) and self._sorted[i].startswith(text)


def random_digits() -> str:
    """A word that occurs nowhere else, and that a template which rewrites text leaves as it is."""
    return f"{secrets.randbelow(10**16):016}"


def _checked(text: str, what: str = "the text") -> str:
    """The text, if it can be encoded in UTF-8. Raises ValueError, which says `what` cannot."""
    if bad := re.search("[\ud800-\udfff]", text):
        holds = f"it holds U+{ord(bad[0]):04X} at {bad.start()}, a lone surrogate"
        raise ValueError(f"{what} is not UTF-8: {holds}")
    return text


# ---- ids to text, as they come

SURROGATES = dict.fromkeys(range(0xDC80, 0xDD00), "\ufffd")


def _replaced(text: str) -> str:
    """U+FFFD for each byte that was decoded by surrogateescape."""
    return text.translate(SURROGATES)


class TextStream:
    """Turns tokens, one at a time, into text that can be printed at once.

    A character of several tokens is held back until it is complete, and whatever may be the start
    of a stop string until that is decided. The pieces returned, joined, equal all tokens decoded
    together, up to the first stop string, which may contain control tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        strip_space: bool = False,
        stops: Sequence[str] = (),
        shown: Collection[str] = (),
    ):
        """strip_space: a space at the beginning is not part of the text. shown: control tokens that
        the text does not leave out."""
        self.tokenizer = tokenizer
        ids = {tokenizer.control[name]: name for name in shown if name in tokenizer.control}
        self._shown = {id: name for id, name in ids.items() if not tokenizer.bytes_of(id)}
        # by id, what stands for a control token of a stop string while text is compared: a lone
        # surrogate, which no text contains
        self._signs: dict[int, str] = {}
        whole = [stop for stop in stops if stop]
        self.stops = Stops([*whole, *(self._with_signs(stop) for stop in whole)])
        self.strip_space = strip_space
        self.stop = ""  # the stop string that was found
        self._utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer.vocabulary.utf8_errors)
        self._pending = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop != ""

    @property
    def lacks_text(self) -> bool:
        """Whether the text so far lacks something of the tokens: what is held back, or a stop
        string and what follows it."""
        incomplete, _ = self._utf8.getstate()
        return bool(incomplete or self._pending)

    @property
    def held_back(self) -> int:
        """How many characters are complete, but held back."""
        return len(self._pending)

    def push(self, token: int) -> str:
        text = _replaced(self._utf8.decode(self.tokenizer.bytes_of(token)))
        return self._release(text + self._shown.get(token, self._signs.get(token, "")))

    def finish(self) -> str:
        """What is still held back, once there are no more tokens."""
        text = self._release(_replaced(self._utf8.decode(b"", True)))
        if not self.stopped:
            text += self._without_signs(self._pending)
            self._pending = ""
        return text

    def _with_signs(self, stop: str) -> str:
        """A stop string with a sign in place of each control token."""

        def sign(token: re.Match) -> str:
            id = self.tokenizer.control[token[0]]
            return self._signs.setdefault(id, chr(0xD800 + len(self._signs) % 0x400))

        return self.tokenizer.control_pattern.sub(sign, stop)

    @staticmethod
    def _without_signs(text: str) -> str:
        return re.sub("[\ud800-\udbff]", "", text)

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        if self.strip_space and text:
            text = text.removeprefix(" ")
            self.strip_space = False
        end = len(self._pending)
        self._pending += text
        for char in text:
            end += 1
            stop = self.stops.push(char)
            if stop:
                self.stop = self._pending[end - stop : end]
                end -= stop
                break
        else:
            end -= self.stops.begun
        ready = self._pending[:end]
        self._pending = self._pending[end:]
        return self._without_signs(ready)


class _Begun:
    """What the text ends with: the longest beginning of stop strings. Sorted, those that begin with
    it lie together."""

    def __init__(self, begin: int = 0, end: int = 0, length: int = 0):
        self.begin = begin  # of the strings that begin with it
        self.end = end
        self.length = length
        self.shorter: _Begun | None = None  # the next longest, None if there is none
        self.whole = 0  # the length of the longest stop string that ends here, 0 if none does
        self.after: dict[str, _Begun] = {}  # by the next character


class Stops:
    """Looks for several strings at once, at a cost for each character that does not depend on how
    many there are: Aho and Corasick's automaton, of which only those states are made that the text
    reaches."""

    def __init__(self, strings: Sequence[str]):
        self.strings = sorted(strings)
        self._start = self._state = _Begun(0, len(self.strings))

    @property
    def begun(self) -> int:
        """How many characters at the end of the text may be the beginning of a string."""
        return self._state.length

    def push(self, char: str) -> int:
        """Go on by a character. Returns the length of the string that ends with it, of several the
        longest, or 0."""
        unknown = []
        state = self._state
        while state and char not in state.after:
            unknown.append(state)
            state = state.shorter
        reached = state.after[char] if state else self._start
        for state in reversed(unknown):
            reached = state.after[char] = self._longer(state, char, reached) or reached
        self._state = reached
        return reached.whole

    def _longer(self, state: _Begun, char: str, shorter: _Begun) -> _Begun | None:
        """The state of what is longer by a character; None if no string begins so."""
        n = state.length
        after = dict(lo=state.begin, hi=state.end, key=lambda string: string[n : n + 1])
        begin = bisect_left(self.strings, char, **after)
        end = bisect_right(self.strings, char, **after)
        if begin == end:
            return None
        longer = _Begun(begin, end, n + 1)
        longer.shorter = shorter
        is_whole = len(self.strings[begin]) == n + 1
        longer.whole = n + 1 if is_whole else shorter.whole
        return longer
