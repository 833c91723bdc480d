"""Llama 2 and its relatives from the command line: complete a prompt, or chat. Text goes to stdout,
all else to stderr."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from chat import (
    DEFAULT_MODEL,
    DTYPE_NAMES,
    FORMATS_8,
    Chat,
    Parser,
    Printer,
    device_name_of,
    ending_cleanly,
    exit_code,
    import_torch,
    note,
    read_input,
    show,
    use_safe_streams,
    within,
)
from tokenizer import TEMPLATES

# ---- the command line: before torch is imported, which takes seconds

MODES = {"text": "a prompt", "bare": "no prompt", "chat": "--chat", "save": "--save"}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, MODES)
    writes = "text bare chat"
    # fmt: off
    add = parser.group("model")
    add("-m", "--model", "-hf", "--hf-repo", metavar="MODEL",
        help="folder of a checkpoint, a GGUF file, or owner/name of one on the hub [models/tales, beside this program]")
    add("-c", "--ctx-size", type=within(int, 0, 1 << 24), metavar="N",
        help="context in tokens; 0: as much as the model was trained for [that, at most 4096]")
    add("--dtype", choices=["auto", *DTYPE_NAMES], default="auto", help="auto: the checkpoint's; on a CPU bf16 or fp32")
    add("--fp8", nargs="?", const="e4m3", choices=FORMATS_8,
        help="keep matrices as 8-bit floats; without a value: e4m3")
    add("--int4", action="store_true",
        help="keep matrices as 4-bit integers with a scale and a zero point for each 32 columns: 4.5 bits a weight")
    add("--kv-fp8", action="store_true", only=writes,
        help="keep keys and values as 8-bit floats: half the context's memory")
    add("--save", metavar="DIR",
        help="write the model with its matrices as --fp8 or --int4 says to DIR instead of generating; -m DIR runs it")

    add = parser.group("where it runs")
    add("-dev", "--device", type=device_name_of, default="auto", help="cpu, cuda or cuda:N")
    add("-t", "--threads", type=within(int, 1, 4096), metavar="N",
        help="CPU threads [one for a model of at most 32 MB, otherwise one per core]")
    add("--backend", choices=["auto", "torch", "triton"], default="auto", only=writes,
        help="auto: triton on a GPU, torch on a CPU")
    add("--accumulate", choices=["auto", "fp32", "fp16"], default="auto", only=writes,
        help="how a prompt's products are summed; auto: fast for 8 bits; fp16: needs a GPU and --dtype fp16")

    add = parser.group("text", writes)
    add("-p", "--prompt", metavar="TEXT", only="text chat",
        help="text to continue; - reads standard input; with --chat, the message")
    add("-f", "--file", metavar="FILE", only="text chat", help="read the prompt from a file, without escapes")
    add("-e", "--escape", action="store_true", default=True,
        help="\\n, \\t, \\\\, \\\" and \\xHH in --prompt, --system and --stop mean what they do in C: the default")
    add("--no-escape", action="store_false", dest="escape", default=True, help="take them literally")
    add("-n", "--n-predict", "--predict", type=within(int, -2), default=-1, metavar="N",
        help="tokens to generate; -1 and -2: until the end or a full context")
    add("-r", "--reverse-prompt", "--stop", action="append", dest="stop", default=[], metavar="TEXT",
        help="stop before this text; may be repeated")
    add("--lookup", type=within(int, 1, 15), metavar="N",
        help="propose up to N tokens, those that followed the last ones earlier, and evaluate them in one pass")
    add("--draft", "-md", "--model-draft", metavar="MODEL",
        help="the same with proposals from a smaller model of the same vocabulary")
    add("--draft-max", type=within(int, 1, 15), default=4, metavar="N", help="how many tokens it proposes")
    add("--ignore-eos", action="store_true", help="never choose the end-of-sequence token")
    add("--prompt-cache", metavar="FILE",
        help="save the prompt's keys and values to FILE, and reuse those it already holds")

    add = parser.group("sampling", writes)
    add("--temp", "--temperature", type=within(float, 0), metavar="X",
        help="temperature; 0 is greedy [the checkpoint's, or 0.8]")
    add("--top-k", type=within(int, 0), metavar="N", help="keep the N best tokens; 0 is off [the checkpoint's, or 40]")
    add("--top-p", type=within(float, 0, 1), metavar="X",
        help="keep the best tokens that together have this probability; 1 is off [the checkpoint's, or 0.95]")
    add("--min-p", type=within(float, 0, 1), default=0.05, metavar="X",
        help="drop tokens less probable than X times the best; 0 is off")
    add("--repeat-penalty", type=within(float, 0.01, 100), metavar="X",
        help="divide the logits of recent tokens; 1 is off [the checkpoint's, or 1]")
    add("--repeat-last-n", type=within(int, -1), default=64, metavar="N",
        help="how many tokens are recent; -1: the whole context")
    add("-s", "--seed", type=within(int, -1, (1 << 63) - 1), default=-1, metavar="N", help="-1: random, and printed")

    add = parser.group("chat", "chat bare")
    add("-cnv", "--conversation", "--chat", action="store_true", dest="chat", only="chat",
        help="chat; the default at a terminal if there is no prompt and the model has a chat template")
    add("-no-cnv", "--no-conversation", action="store_true", only="text bare", help="do not chat")
    add("-st", "--single-turn", action="store_true", only="chat",
        help="one turn, then exit; implied by --chat with --prompt or --file")
    add("-sys", "--system-prompt", "--system", dest="system", default="", metavar="TEXT", help="system prompt")
    add("-sysf", "--system-prompt-file", dest="system_file", metavar="FILE", help="read the system prompt from a file")
    add("--chat-template", metavar="NAME or FILE",
        help=f"instead of the checkpoint's own: a file of Jinja, or one of {', '.join(TEMPLATES)}")

    add = parser.group("output")
    add("-o", "--output", choices=["text", "jsonl"], default="text", only=writes,
        help="jsonl: a JSON object for the text or for each turn, with why it ended, counts and seconds")
    add("--no-display-prompt", action="store_true", only="text bare", help="print only what is generated")
    add("--quiet", action="store_true", help="print only text and errors")
    add("--debug", action="store_true", help="print errors with their traceback")
    add("--version", action="store_true", help="print the versions that results depend on")
    # fmt: on

    args = parser.parse(argv, mode_of)
    if args.version:
        print(version(), flush=True)
        parser.exit()
    args.format = "int4" if args.int4 else args.fp8
    wrong = {  # each error, and when it is one
        "-m or --save is empty": "" in (args.model, args.save),
        "--prompt and --file both give a prompt; use one": args.prompt is not None
        and args.file is not None,
        "--fp8 and --int4 both say how matrices are kept; use one": args.fp8 and args.int4,
        "--save writes matrices in 8 or 4 bits: add --fp8 or --int4": args.save is not None
        and not args.format,
        "--lookup and --draft both propose tokens; use one": args.lookup and args.draft,
        "--draft-max is for --draft": args.draft is None and "draft_max" in args.given,
        "--system and --system-prompt-file both give a system prompt; use one": args.system
        and args.system_file,
    }
    for error, is_wrong in wrong.items():
        if is_wrong:
            parser.error(error)
    args.model = str(DEFAULT_MODEL) if args.model is None else args.model
    if args.escape:
        args.prompt = args.prompt and unescaped(args.prompt)
        args.system, args.stop = unescaped(args.system), [unescaped(stop) for stop in args.stop]
    folder = args.prompt_cache and os.path.dirname(real_path(args.prompt_cache))
    parser.find([args.model, args.draft], [args.file, args.system_file, folder])
    if args.seed < 0:
        args.seed = random.SystemRandom().randrange(1 << 32)
    return args


def mode_of(args: argparse.Namespace) -> str:
    """What to do; "bare": chat if the checkpoint has a template, otherwise write text."""
    if args.save is not None:
        return "save"
    if args.chat or args.single_turn:
        return "chat"
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    bare = at_terminal and args.prompt is None and args.file is None and not args.no_conversation
    return "bare" if bare else "text"


def real_path(file: str) -> str:
    return os.path.realpath(os.path.expanduser(file))


def version() -> str:
    found = [f"Python {sys.version.split()[0]}"]
    for package in ("torch", "triton"):
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return f"fused-llama with {', '.join(found)}"


ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


def unescaped(text: str) -> str:
    """llama.cpp's escapes (common.cpp, string_process_escapes) as what they stand for; other
    backslashes stay."""
    replaced = lambda match: ESCAPES.get(match[1]) or bytes.fromhex(match[1][1:].decode())
    return os.fsdecode(re.sub(rb"\\([nrt'\"\\]|x[0-9a-fA-F]{2})", replaced, os.fsencode(text)))


if __name__ == "__main__":
    use_safe_streams()
    args = parse_args(None)
    import_torch()
    import torch

    on_cpu = args.device == "cpu" or args.device == "auto" and not torch.cuda.is_available()
    if args.backend == "triton" and on_cpu:
        # read when kernels.py is imported: a CPU interprets the kernels
        os.environ["TRITON_INTERPRET"] = "1"

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from checkpoint import DTYPES, Checkpoint, find_checkpoint, load, pick_device, read_config
from extra.parallel import Ranks
from extra.save import save as save_model
from extra.speculation import Draft, Lookup
from model import Llama, State, Timings, generate
from sampling import Sampling
from tokenizer import TextStream, Tokenizer

# ---- a session


@dataclasses.dataclass
class Answer:
    """What was generated after a prompt; filled in as it arrives."""

    prompt_tokens: int
    ids: list[int] = dataclasses.field(default_factory=list)  # without an eos
    text: str = ""
    # "eos", "stop" (a stop string), "length" (-n) or "context" (it is full)
    ended_by: str = "interrupt"
    timings: Timings = dataclasses.field(default_factory=Timings)

    def record(self) -> dict:
        """For -o jsonl."""
        t = self.timings
        return {
            "text": self.text,
            "ended_by": self.ended_by,
            "prompt_tokens": self.prompt_tokens,
            "evaluated_tokens": t.prompt_tokens,  # of the prompt; the rest were cached
            "new_tokens": t.new_tokens,
            "prompt_seconds": t.prompt_seconds if t.new_tokens else None,
            "generation_seconds": t.step_seconds,
            "tokens_per_s": t.steps / t.step_seconds if t.steps else None,
        }


class Session:
    """A loaded model with its tokenizer, cache and settings, and its timings so far."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks, prompt: str | None):
        start = time.perf_counter()
        self.args, self.ranks = args, ranks
        checkpoint = Checkpoint(find_checkpoint(args.model))
        folder, config = checkpoint.folder, checkpoint.config
        # before the weights, which may take minutes, so that its errors come at once
        self.tokenizer = Tokenizer(folder, config.vocab_size, config.bos_id, args.chat_template)
        if args.threads:
            torch.set_num_threads(args.threads)
        # ranks would disagree on when proposals pay off
        if (args.lookup or args.draft) and ranks.size > 1:
            raise ValueError(f"--lookup and --draft run in one process, not in {ranks.size}")
        if args.draft:
            check_draft(args.draft, self.tokenizer, config.vocab_size)
        flags = {field.name: getattr(args, field.name) for field in dataclasses.fields(Sampling)}
        given = {name: value for name, value in flags.items() if value is not None}
        self.own_sampling = {
            name: value for name, value in checkpoint.sampling.items() if name not in given
        }
        self.sampling = Sampling(**self.own_sampling | given)
        self.model = self._load(checkpoint)
        if not args.threads and self.model.device.type == "cpu" and self.model.suits_one_thread:
            torch.set_num_threads(1)
        self.eos = {*config.eos_ids, self.tokenizer.eos} - {-1}
        self.cache = State(self.model)
        self.speculation = Lookup(args.lookup) if args.lookup else None
        if args.draft:
            self.speculation = Draft(args.draft_max, self._load(args.draft))
        self.timings = Timings()
        self.prompt_cache = (
            PromptCache(args.prompt_cache, self.model, ranks) if args.prompt_cache else None
        )
        if self.prompt_cache:
            self.prompt_cache.restore(self.cache)
        self.load_seconds = time.perf_counter() - start

    def _load(self, name: str | Checkpoint) -> Llama:
        options = (
            "dtype",
            "device",
            "ctx_size",
            "backend",
            "format",
            "kv_fp8",
            "accumulate",
            "quiet",
        )
        return load(
            name,
            **{option: getattr(self.args, option) for option in options},
            ranks=self.ranks,
        )

    def note(self, text: str) -> None:
        if not self.args.quiet:
            note(text)

    def summary(self) -> str:
        m, c, size = self.model, self.model.checkpoint.config, self.cache.size
        heads = f"{c.n_heads} heads" + (
            f" ({c.n_kv_heads} of keys and values)" if c.n_kv_heads != c.n_heads else ""
        )
        beyond = (
            f" (beyond the model's {c.max_seq_len}: expect nonsense there)"
            if size > c.max_seq_len
            else ""
        )
        backend = {"torch": "torch ops", "triton": "Triton kernels"}[m.backend]
        if m.backend == "triton" and m.device.type == "cpu":
            backend += " in the interpreter, which is slow"
        where = f"{m.device}{self.ranks.described(m.exchange, m.device)}"
        seed = f", seed {self.args.seed}" if self.sampling.temp else ""
        own = ", ".join(
            f"{name.replace('_', '-')} {value:g}" for name, value in self.own_sampling.items()
        )
        sampling = f"\nsampling  {own} (the checkpoint's own; flags override them)" if own else ""
        return (
            f"model     {m.checkpoint.folder}: {m.checkpoint.elements / 1e6:.1f}M parameters, {c.n_layers} layers, "
            f"dim {c.dim}, {heads}\n"
            f"running   {types(m)} on {where}, {backend}, context {size}{beyond}{seed}{sampling}"
        )

    def closing(self) -> str:
        t = self.timings
        prompt = rate = on_gpu = ""
        if t.new_tokens:
            prompt = f" in {1e3 * t.prompt_seconds:.1f} ms, {t.prompt_tokens / t.prompt_seconds:.1f} tokens/s"
        if t.steps:
            rate = f", {1e3 * t.step_seconds / t.steps:.2f} ms per token, {t.steps / t.step_seconds:.1f} tokens/s"
        counts = (
            f"prompt    {t.prompt_tokens} tokens{prompt}\ngenerated {t.new_tokens} tokens{rate}\n"
        )
        if self.model.device.type == "cuda":
            on_gpu = f", {torch.cuda.max_memory_reserved() / 1e9:.2f} GB on the GPU"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return (
            f"load      {self.load_seconds:.2f} s\n"
            f"{counts if t.prompt_tokens else ''}"  # of a prompt that was evaluated
            f"{self.speculation.summary() if self.speculation else ''}"
            f"memory    peak {peak / 1e9:.2f} GB{on_gpu}; {types(self.model)}"
        )

    def answer(
        self,
        message: str,
        ids: list[int],
        printer: Printer,
        eos: Collection[int],
        stops: list[str],
        at_start: bool,
    ) -> Answer:
        """Generate after the prompt `ids` and print the text as it arrives; with -o jsonl an
        object, in which `message` is the prompt. Ctrl-C ends it early, and it says so. at_start:
        the output begins a text."""
        answer, text, token = Answer(len(ids)), TextStream(self.tokenizer, at_start, stops), None
        jsonl = self.args.output == "jsonl"

        def add(piece: str) -> None:
            answer.text += piece
            if not jsonl:
                printer.write(piece)

        try:
            for token in self._generate(ids, eos, answer.timings):
                # generate ends by itself; some files do not flag it special, so that it has a text
                if token in eos:
                    continue
                answer.ids.append(token)
                add(text.push(token))
                if text.stopped:
                    break
            add(text.finish())
            if text.stopped:
                answer.ended_by = "stop"
            elif token in eos:
                answer.ended_by = "eos"
            else:
                answer.ended_by = (
                    "length" if answer.timings.new_tokens == self.args.n_predict else "context"
                )
        except KeyboardInterrupt:
            pass
        finally:
            self.timings += answer.timings
        if jsonl:
            show(json.dumps({"prompt": message} | answer.record()) + "\n")
        else:
            printer.end()
        if answer.ended_by == "context":
            self.note(f"note: the context of {self.cache.size} tokens is full (see -c)")
        return answer

    def _generate(self, ids: list[int], eos: Collection[int], timings: Timings) -> Iterator[int]:
        """model.generate, with a progress bar for a long prompt; the first prompt goes into the
        prompt cache."""
        hidden = self.args.quiet or None  # None: if stderr is no terminal
        bar = tqdm(desc="prompt", unit=" tokens", delay=2, leave=False, disable=hidden)

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done == total:
                bar.close()
                first, self.prompt_cache = self.prompt_cache, None
                if first:
                    if total < len(ids):
                        self.note(
                            f"note: {first.file} holds {len(ids) - total} of the prompt's {len(ids)} tokens"
                        )
                    first.keep(ids, self.cache)

        settings = (
            self.args.n_predict,
            self.sampling,
            eos,
            self.args.ignore_eos,
            timings,
            progress,
        )
        decode = self.speculation.decode if self.speculation else None
        with bar:
            yield from generate(self.model, ids, self.cache, *settings, decode=decode)


def check_draft(name: str, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError if a draft has other tokens. How many unused ones pad its vocabulary does
    not matter."""
    folder = find_checkpoint(name)
    config = read_config(folder)
    other, ids = (
        Tokenizer(folder, config.vocab_size, config.bos_id),
        range(max(config.vocab_size, vocab_size)),
    )
    if other.control != tokenizer.control or any(
        other.bytes_of(i) != tokenizer.bytes_of(i) for i in ids
    ):
        raise ValueError(
            f"--draft {name} has a different vocabulary from the model's: it cannot propose tokens for it"
        )


def types(model: Llama) -> str:
    """What a model computes in: its dtype, and what differs from it."""
    text = next(name for name, value in DTYPES.items() if value == model.dtype)
    held, quantised = model.weights.held, model.checkpoint.quantised
    if held:
        text += f" with {held} matrices"
    if quantised:
        others = "; others as floats" if not all(m.format for m in model.weights.matrices) else ""
        text += f" ({quantised} in the file{others})" if held else f" (decoded from {quantised})"
    if model.kv_fp8:
        text += ", e4m3 keys and values"
    if model.accumulate == "fp16" or model.accumulate == "fp32" and held:
        text += f", {model.accumulate} sums for prompts"
    return text


# ---- the prompt cache: keys and values of a prompt in a safetensors file


class PromptCache:
    """A file with the keys and values of a prompt, so that a long one is evaluated only once.

    As in llama.cpp, it is read at the start, used for the prefix that the prompt shares with it,
    and written if less than three quarters of the prompt came from it. Of several ranks, each has a
    file of its own, for its heads."""

    KIND = "prompt cache, layout 1"

    def __init__(self, file: str, model: Llama, ranks: Ranks):
        self.model, self.ranks = model, ranks
        own = f".{ranks.rank + 1}-of-{ranks.size}" if ranks.size > 1 else ""
        self.file = Path(real_path(f"{file}{own}"))
        self.tokens: list[int] = []  # what the file holds
        self.metadata = {
            "fused-llama": self.KIND,
            "model": fingerprint(model),
            "types": types(model),
        }

    def restore(self, cache: State) -> None:
        """Fill an empty cache from the file, if there is one. Raises ValueError for one of another
        model."""
        held = self._read() if self.file.exists() else {"tokens": torch.empty(0, dtype=torch.int32)}
        tokens = held["tokens"][: cache.size]
        # One rank's file may be newer than another's, or missing
        first, *others = self.ranks.gather(tokens.tolist)
        if not first or any(other != first for other in others):
            return
        self.tokens = first
        cache.append(tokens)
        for layer, values in zip([*cache.k, *cache.v], [*held["k"], *held["v"]]):
            layer[:, : len(tokens)] = values[:, : len(tokens)]
        cache.advance(len(tokens))

    def _read(self) -> dict[str, Tensor]:
        """The tokens [n] and their keys "k" and values "v" [L, KH, n, D]. Raises ValueError."""
        if not self.file.is_file():
            raise ValueError(f"{self.file} is not a file")
        try:
            with safe_open(self.file, "pt") as f:
                metadata = f.metadata() or {}
                if metadata.get("fused-llama") != self.KIND:
                    raise ValueError(
                        f"{self.file} is not a prompt cache of this program; it was left unchanged"
                    )
                if metadata.get("model") != self.metadata["model"]:
                    made = f"{self.file} was made with another model or other types ({metadata.get('types')})"
                    raise ValueError(f"{made}: delete it or name another")
                return {name: f.get_tensor(name) for name in f.keys()}
        except SafetensorError as error:
            raise ValueError(f"{self.file} is not a valid safetensors file: {error}") from None

    def keep(self, ids: list[int], cache: State) -> None:
        """Write the keys and values of ids, the first in the cache, unless the file has most of
        them. If a rank cannot, all raise its OSError."""
        same, n = len(os.path.commonprefix([self.tokens, ids])), len(ids)
        if 4 * same < 3 * n:
            self.ranks.gather(lambda: self._write(n, cache))

    def _write(self, n: int, cache: State) -> None:
        tensors = {
            name: torch.stack([t[:, :n] for t in kept]).cpu()
            for name, kept in (("k", cache.k), ("v", cache.v))
        }
        tensors["tokens"] = cache.tokens[:n].cpu()
        try:
            with (
                ending_cleanly(),
                TemporaryDirectory(prefix=f"{self.file.name}.", dir=self.file.parent) as beside,
            ):
                file = Path(beside, "cache")  # renamed when it is whole
                save_file(tensors, file, self.metadata)
                file.replace(self.file)
        except Exception as error:
            raise OSError(f"the prompt cache {self.file} cannot be written: {error}") from None


def fingerprint(model: Llama) -> str:
    """A hash of what keys and values depend on: the configuration, the types, and up to 64 numbers
    of each matrix."""
    numbers = []
    for t in [
        model.weights.embedding,
        *(t for matrix in model.weights.matrices for t in matrix.tensors),
    ]:
        t = t.to_dense() if t.is_mkldnn else t
        numbers += t.flatten()[:: max(1, t.numel() // 64)][:64].tolist()
    return hashlib.sha256(f"{model.config} {types(model)} {numbers}".encode()).hexdigest()


# ---- what the program does


def read_prompt(args: argparse.Namespace) -> str | None:
    """The text of --prompt, of --file, or of standard input (for "--prompt -", or if it is not a
    terminal). None if there is no prompt."""
    if args.prompt not in (None, "-"):
        return args.prompt
    if args.file is None and args.prompt is None and sys.stdin.isatty():
        return None
    return read_input(args.file)


def complete(session: Session, prompt: str) -> None:
    """Print the prompt, once it is evaluated, and its continuation."""
    args, tokenizer = session.args, session.tokenizer
    ids = tokenizer.encode(prompt) or [i for i in (tokenizer.bos, tokenizer.eos) if i >= 0][:1]
    printer = Printer("" if args.no_display_prompt else prompt)
    if (
        session.answer(prompt, ids, printer, session.eos, args.stop, at_start=not prompt).ended_by
        == "interrupt"
    ):
        raise KeyboardInterrupt


def save(args: argparse.Namespace) -> int:
    options = dict(format=args.format, dtype=args.dtype, device=args.device, quiet=args.quiet)
    with ending_cleanly():
        file = save_model(args.model, args.save, **options)
    if not args.quiet:
        note(
            f"saved     {file.parent}: {args.format} matrices, {file.name} of {file.stat().st_size:,} bytes"
        )
    return 0


def work(args: argparse.Namespace, ranks: Ranks) -> int:
    if args.quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read when huggingface_hub is imported
    if args.mode == "save":
        return save(args) if ranks.rank == 0 else 0  # one process does it
    ranks.join(pick_device(args.device, ranks))
    # only rank 0 sees the terminal, and its random seed counts
    args = ranks.broadcast(lambda: args)
    single = args.single_turn or args.prompt is not None or args.file is not None
    prompt = (
        None if args.mode == "chat" and not single else ranks.broadcast(lambda: read_prompt(args))
    )
    if args.system_file is not None:
        args.system = ranks.broadcast(lambda: read_input(args.system_file))
    session = Session(args, ranks, prompt)
    session.note(session.summary())
    made_for_chat = (
        args.chat_template is not None or session.tokenizer.chat_template != TEMPLATES["plain"]
    )
    code = 0
    try:
        if args.mode == "chat" or args.mode == "bare" and made_for_chat:
            code = Chat(session).run(prompt, single)
        else:
            complete(session, prompt or "")
    except KeyboardInterrupt:
        code = 130
    session.note("\n" + session.closing())
    return code


def main(argv: list[str] | None = None) -> int:
    return exit_code(work, parse_args(argv))


if __name__ == "__main__":
    code = main()
    # nothing is left to interrupt, but Python takes a moment to exit
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)
