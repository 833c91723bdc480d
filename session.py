"""A session: a loaded model with its tokenizer, cache, settings and timings so far, and the prompt cache on disk."""

import argparse
import dataclasses
import hashlib
import itertools
import os
import resource
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from checkpoint import DTYPES, find_checkpoint, load, read_config, read_sampling
from files import Part, folder_beside, left_behind, read_part, safetensors_header
from model import KVCache, Llama, Timings, generate
from parallel import described, group
from sampling import Sampling
from speculation import Draft, Lookup
from terminal import ending_cleanly, note
from tokenizer import TextStream, Tokenizer

LARGEST_TOKEN = 256  # bytes: a text with more than this for each token of the context cannot fit


@dataclasses.dataclass
class Answer:
    """What was generated after a prompt; filled in as it arrives."""

    prompt_tokens: int
    ids: list[int] = dataclasses.field(default_factory=list)  # without an eos
    text: str = ""
    ended_by: str = "interrupt"  # "eos", "stop" (a stop string), "length" (-n) or "context" (it is full)
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
    """A model with its tokenizer, cache and settings, and its timings so far."""

    def __init__(self, args: argparse.Namespace):
        start = time.perf_counter()
        self.args = args
        folder = find_checkpoint(args.model)
        config = read_config(folder)
        # before the weights, which may take minutes, so that its errors come at once
        self.tokenizer = Tokenizer(folder, config.vocab_size, config.bos_id, args.chat_template)
        if args.threads:
            torch.set_num_threads(args.threads)
        if (args.lookup or args.draft) and group().size > 1:  # ranks would disagree on when proposals pay off
            raise ValueError(f"--lookup and --draft run in one process, not in {group().size}")
        if args.draft:
            check_draft(args.draft, self.tokenizer, config.vocab_size)
        self.model = load_model(args.model, args)
        if not args.threads and self.model.device.type == "cpu" and self.model.suits_one_thread:
            torch.set_num_threads(1)
        self.eos = {*config.eos_ids, self.tokenizer.eos} - {-1}
        self.cache = KVCache(self.model)
        given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Sampling)}
        given = {name: value for name, value in given.items() if value is not None}
        self.own_sampling = {name: value for name, value in read_sampling(folder).items() if name not in given}
        self.sampling = Sampling(**self.own_sampling | given)
        self.speculation = Lookup(args.lookup) if args.lookup else None
        if args.draft:
            self.speculation = Draft(args.draft_max, load_model(args.draft, args))
        self.timings = Timings()
        self.prompt_cache = PromptCache(Path(args.prompt_cache), self.model) if args.prompt_cache else None
        if self.prompt_cache:
            for text in left_behind(self.prompt_cache.file):
                self.note(text)
            self.prompt_cache.restore(self.cache)
        self.load_seconds = time.perf_counter() - start

    def note(self, text: str) -> None:
        """Tell the user something, unless --quiet was given."""
        if not self.args.quiet:
            note(text)

    def check_length(self, length: int, name: str, unit: str = "characters") -> None:
        """Raise ValueError for a text that is too long for the context whatever its tokens are, before it is encoded."""
        if length > LARGEST_TOKEN * self.cache.size:
            raise ValueError(f"{name} has {length:,} {unit}, too many for {self.cache.size} tokens (see -c)")

    def summary(self) -> str:
        m, c = self.model, self.model.checkpoint.config
        heads = f"{c.n_heads} heads" + (f" ({c.n_kv_heads} of keys and values)" if c.n_kv_heads != c.n_heads else "")
        size = f"{m.checkpoint.elements / 1e6:.1f}M parameters, {c.n_layers} layers, dim {c.dim}, {heads}"
        beyond = f" (beyond the model's {c.max_seq_len}: expect nonsense there)" if self.cache.size > c.max_seq_len else ""
        backend = {"torch": "torch ops", "triton": "Triton kernels"}[m.backend]
        if m.backend == "triton" and m.device.type == "cpu":
            backend += " in the interpreter, which is slow"
        where = f"{m.device}{described(m.exchange, m.device)}"
        own = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in self.own_sampling.items())
        sampling = f"\nsampling  {own} (the checkpoint's own; flags override them)" if own else ""
        return (
            f"model     {m.checkpoint.folder}: {size}\n"
            f"running   {types(m)} on {where}, {backend}, context {self.cache.size}{beyond}, seed {self.args.seed}{sampling}"
        )

    def closing(self) -> str:
        t = self.timings
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        gpu = self.model.device.type == "cuda"
        on_gpu = f", {torch.cuda.max_memory_reserved() / 1e9:.2f} GB on the GPU" if gpu else ""
        seconds = t.prompt_seconds
        prompt = f" in {1e3 * seconds:.1f} ms, {t.prompt_tokens / seconds:.1f} tokens/s" if t.new_tokens else ""
        rate = (
            f", {1e3 * t.step_seconds / t.steps:.2f} ms per token, {t.steps / t.step_seconds:.1f} tokens/s" if t.steps else ""
        )
        return (
            f"load      {self.load_seconds:.2f} s\n"
            f"prompt    {t.prompt_tokens} tokens{prompt}\n"
            f"generated {t.new_tokens} tokens{rate}\n"
            f"{self.speculation.summary() if self.speculation else ''}"
            f"memory    peak {peak / 1e9:.2f} GB{on_gpu}"
        )

    def stream(
        self, ids: list[int], answer: Answer, eos: Collection[int], stops: Sequence[str] = (), at_start: bool = False
    ) -> Iterator[str]:
        """Generate after ids: yield printable text as it arrives, and fill in answer. at_start: the output begins a text."""
        text, token = TextStream(self.tokenizer, at_start, stops), None
        n = max(self.args.n_predict, -1)  # -2, "fill the context", is the same as -1: both end at an eos or a full context
        try:
            for token in self._generate(ids, n, eos, answer.timings):
                if token not in eos:
                    answer.ids.append(token)
                answer.text += (piece := text.push(token))
                yield piece
                if text.stopped:
                    break
            answer.text += (piece := text.finish())
            yield piece
            if text.stopped:
                answer.ended_by = "stop"
            elif token in eos:
                answer.ended_by = "eos"
            else:
                answer.ended_by = "length" if answer.timings.new_tokens == n else "context"
        finally:
            self.timings += answer.timings

    def _generate(self, ids: list[int], n: int, eos: Collection[int], timings: Timings) -> Iterator[int]:
        """model.generate, with a progress bar for a long prompt; the first prompt goes into the prompt cache."""
        hidden = self.args.quiet or not sys.stderr.isatty()
        bar = tqdm(desc="prompt", unit=" tokens", delay=2, leave=False, disable=hidden)

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done == total:
                bar.close()
                if self.prompt_cache:
                    self.prompt_cache.keep(ids, self.cache)

        settings = (n, self.sampling, eos, self.args.ignore_eos, timings, progress)
        with bar:
            yield from generate(
                self.model, ids, self.cache, *settings, decode=self.speculation.decode if self.speculation else None
            )

    def note_end(self, answer: Answer) -> None:
        """Once the text is printed, tell the user if a full context cut it short."""
        if answer.ended_by == "context":
            self.note(f"note: the context of {self.cache.size} tokens is full (see -c)")


def load_model(name: str, args: argparse.Namespace) -> Llama:
    """Load the model, or its draft, as the flags say."""
    return load(
        name,
        dtype=args.dtype,
        device=args.device,
        ctx_size=args.ctx_size,
        backend=args.backend,
        fp8=args.fp8,
        kv_fp8=args.kv_fp8,
        accumulate=args.accumulate,
        quiet=args.quiet,
    )


def check_draft(name: str, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError if a draft has a different vocabulary."""
    folder = find_checkpoint(name)
    config = read_config(folder)
    other = Tokenizer(folder, config.vocab_size, config.bos_id)
    same = config.vocab_size == vocab_size and other.control == tokenizer.control
    if not same or any(other.bytes_of(i) != tokenizer.bytes_of(i) for i in range(vocab_size)):
        raise ValueError(f"--draft {name} has a different vocabulary from the model's: it cannot propose tokens for it")


def types(model: Llama) -> str:
    """What a model computes in: its dtype, and what differs from it."""
    text = next(name for name, value in DTYPES.items() if value == model.dtype)
    if format := model.weights.output.format:
        text += f" with {format.name} matrices"
    if model.kv_fp8:
        text += ", e4m3 keys and values"
    if model.fp16_sums:
        text += ", fp16 sums for prompts"
    if format and not model.fast_sums:
        text += ", fp32 sums for prompts"
    return text


# ---- the prompt cache: keys and values of a prompt in a safetensors file


class PromptCache:
    """A file with the keys and values of a prompt, so that a long one is evaluated only once.

    As in llama.cpp, it is read at the start, used for the prefix that the prompt shares with it, and written if less than
    three quarters of the prompt came from it. With several processes, each has a file of its own, for its heads.
    """

    KIND = "prompt cache, layout 1"

    def __init__(self, file: Path, model: Llama):
        self.model = model
        own = f".{group().rank + 1}-of-{group().size}" if group().size > 1 else ""
        self.file = Path(os.path.realpath(f"{os.path.expanduser(file)}{own}"))
        self.tokens: list[int] = []  # what the file holds
        self.first = True  # no prompt has been evaluated in this run yet
        self.metadata = {"fused-llama": self.KIND, "model": fingerprint(model), "types": types(model)}
        if not self.file.parent.is_dir():
            raise FileNotFoundError(f"{self.file.parent} does not exist: create that folder first")

    def restore(self, cache: KVCache) -> None:
        """Fill an empty cache from the file, if there is one. Raises ValueError for one that was not made for this model."""
        if not group().all(self.file.exists()):
            return
        if not self.file.is_file():
            raise ValueError(f"{self.file} is not a file")
        parts = self._checked_parts()
        count = min(cache.size, *parts["tokens"].shape)
        self.tokens = read_part(parts["tokens"], index=[range(count)]).tolist()
        k, v = (self._read_heads(parts[name], count) for name in ("k", "v"))
        if not all(torch.isfinite(t).all() if t.is_floating_point() else (t & 0x7F != 0x7F).all() for t in (k, v)):
            raise ValueError(f"{self.file} holds keys or values that are not finite: delete it")
        if not group().all(self.tokens == group().from_first(lambda: self.tokens)):  # one rank's was written, another's not
            self.tokens = []
            return
        cache.append(torch.tensor(self.tokens, dtype=torch.int32))
        for kept, read in ((cache.k, k), (cache.v, v)):
            for layer, values in zip(kept, read):
                layer[:, :count] = values
        cache.advance(count)

    @staticmethod
    def _read_heads(part: Part, count: int) -> Tensor:
        """Keys or values [L, KH, count, D] of the first tokens."""
        L, KH, n, D = part.shape
        rows = dataclasses.replace(part, shape=(L * KH, n * D))
        return read_part(rows, index=[range(L * KH), range(count * D)]).view(L, KH, count, D)

    def _checked_parts(self) -> dict[str, Part]:
        """The file's tensors. Raises ValueError unless this is a prompt cache of this model and they have the right shapes."""
        metadata, tensors = safetensors_header(self.file)
        if metadata.get("fused-llama") != self.KIND:
            raise ValueError(f"{self.file} is not a prompt cache of this program; it was left unchanged")
        if metadata.get("model") != self.metadata["model"]:
            raise ValueError(
                f"{self.file} was made with another model or other types ({metadata.get('types')}): delete it or name another"
            )
        c, parts = self.model.config, {part.name: part for part in tensors}
        n = parts["tokens"].shape[:1] if "tokens" in parts else ()
        kv = (self.model.kv_dtype, (c.n_layers, c.n_kv_heads, *n, c.head_dim))
        found = {name: (part.dtype, part.shape) for name, part in parts.items()}
        if found != {"tokens": (torch.int32, n), "k": kv, "v": kv}:
            raise ValueError(f"{self.file} does not hold the keys and values that it should: delete it")
        return parts

    def keep(self, ids: list[int], cache: KVCache) -> None:
        """On the first call, write the keys and values of ids, the first in the cache, unless the file has most of them."""
        same, n = len(os.path.commonprefix([self.tokens, ids])), len(ids)
        first, self.first = self.first, False
        if not first or 4 * same >= 3 * n:
            return
        tensors = {name: torch.stack([t[:, :n] for t in kept]).cpu() for name, kept in (("k", cache.k), ("v", cache.v))}
        tensors["tokens"] = cache.tokens[:n].cpu()
        try:
            with ending_cleanly(), folder_beside(self.file) as made:
                save_file(tensors, made / "cache", self.metadata)
                (made / "cache").replace(self.file)
        except Exception as error:
            raise OSError(f"the prompt cache {self.file} cannot be written: {error}") from None


def fingerprint(model: Llama) -> str:
    """A hash of what keys and values depend on: the configuration, the types, and up to 64 numbers of each tensor."""
    w = model.weights
    fields = [w.embedding, w.norm, *(field for layer in w.layers for field in vars(layer).values())]
    tensors = [field for field in fields if isinstance(field, Tensor)]
    tensors += [matrix.scale for matrix in w.matrices if matrix.scale is not None]
    stored = (matrix.data.to_dense() if matrix.data.is_mkldnn else matrix.data for matrix in w.matrices)
    numbers = [t.flatten()[:: max(1, t.numel() // 64)][:64].float() for t in itertools.chain(tensors, stored)]
    return hashlib.sha256(f"{model.config} {types(model)} {torch.cat(numbers).tolist()}".encode()).hexdigest()
