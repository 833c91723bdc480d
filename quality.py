"""Fidelity: the perplexity of a text, how far the distributions of two models differ, and how large activations become.

`bench.py --perplexity` and `bench.py --limits` run it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor
from tqdm import tqdm

import kernels
from checkpoint import load
from model import CHUNK, KVCache, Llama
from terminal import note, text_of
from tokenizer import Tokenizer

# ---- perplexity


def windows(count: int, ctx: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """The start and end of each window, and the first token that it counts, so that every token counts once."""
    counted = 0
    for start in range(0, count, stride):
        end = min(start + ctx, count)
        yield start, end, counted
        counted = end
        if end == count:
            return


@dataclasses.dataclass
class Quality:
    """Losses of tokens; with a second model also how far the two distributions differ."""

    losses: list[Tensor] = dataclasses.field(default_factory=list)
    other_losses: list[Tensor] = dataclasses.field(default_factory=list)
    divergences: list[Tensor] = dataclasses.field(default_factory=list)
    same_top: list[Tensor] = dataclasses.field(default_factory=list)

    def add(self, logits: Tensor, other: Tensor | None, targets: Tensor, ops) -> None:
        """Logits [T, V] of the model and of the one it is compared with, and the actual next tokens."""
        self.losses.append(ops.cross_entropy(logits, targets).cpu())
        if other is not None:
            self.other_losses.append(ops.cross_entropy(other, targets).cpu())
            p, q = other.log_softmax(-1), logits.log_softmax(-1)
            self.divergences.append((p.exp() * (p - q)).sum(-1).cpu())
            self.same_top.append((logits.argmax(-1) == other.argmax(-1)).cpu())

    def report(self, text_bytes: int) -> dict:
        """Perplexity with its standard error, bits per byte of text_bytes, and the comparison."""
        losses = torch.cat(self.losses).double()
        mean, error = losses.mean().item(), losses.std().item() / math.sqrt(len(losses))
        result = {"tokens": len(losses), "perplexity": math.exp(mean), "standard_error": math.exp(mean) * error}
        result["bits_per_byte"] = losses.sum().item() / math.log(2) / text_bytes
        if self.divergences:
            kl = torch.cat(self.divergences).double()
            result["perplexity_ratio"] = math.exp(mean - torch.cat(self.other_losses).double().mean().item())
            result["mean_kl"], result["kl_99"] = kl.mean().item(), kl.quantile(0.99).item()
            result["same_top_%"] = 100 * torch.cat(self.same_top).double().mean().item()
        return result


@torch.inference_mode()
def perplexity(
    model: Llama, ids: list[int], bos: int, ctx: int, stride: int, against: Llama | None = None
) -> Iterator[Quality]:
    """Evaluate ids in windows of ctx tokens, every `stride`, each started with bos; yields the result so far after each.

    A window's input is bos and all its tokens but the last; each token counts once, in the first window that contains it.
    """
    quality = Quality()
    models = [m for m in (model, against) if m]
    caches = [KVCache(m, ctx) for m in models]
    for start, end, counted in windows(len(ids), ctx, stride):
        inputs, targets = [bos, *ids[start : end - 1]], ids[start:end]
        for kv in caches:
            kv.truncate(0)
        for first in range(0, len(inputs), CHUNK["cpu"]):  # the logits of a whole window would be large
            part = torch.tensor(inputs[first : first + CHUNK["cpu"]], dtype=torch.int32, device=model.device)
            logits = [m.forward(part, kv) for m, kv in zip(models, caches)]
            skip = min(max(counted - start - first, 0), len(part))
            if skip < len(part):
                goal = torch.tensor(targets[first + skip : first + len(part)], device=model.device)
                quality.add(logits[0][skip:], logits[1][skip:] if against else None, goal, model.ops)
        yield quality


def open_checkpoint(args: argparse.Namespace, dtype: str, ctx_size: int, fp8: str) -> Llama:
    """The checkpoint of bench.py's command line; fp8 "none" keeps the matrices as they are."""
    return load(
        args.model,
        dtype=dtype,
        device=args.device,
        ctx_size=ctx_size,
        backend=args.backend,
        fp8=None if fp8 == "none" else fp8,
        kv_fp8=args.kv_fp8,
        accumulate=args.accumulate,
    )


def open_with_text(args: argparse.Namespace, file: str) -> tuple[Llama, Tokenizer, str, list[int]]:
    """The model and its tokenizer, the file's text and its tokens. Raises OSError, ValueError."""
    with open(file, "rb") as f:
        text = text_of(f, file, 1 << 30)
    if args.model.startswith("random:"):
        raise ValueError("a text needs a checkpoint with a tokenizer, not random weights")
    model = open_checkpoint(args, args.dtype[0], args.ctx_size or 512, args.fp8[0])
    tokenizer = Tokenizer(model.checkpoint.folder, model.config.vocab_size, model.config.bos_id)
    ids = tokenizer.encode(text, bos=False)
    if not ids:
        raise ValueError(f"{file} is empty")
    return model, tokenizer, text, ids


def run_perplexity(args: argparse.Namespace) -> list[dict]:
    """The rows of --perplexity; none when it was interrupted before the first window was done."""
    model, tokenizer, text, ids = open_with_text(args, args.perplexity)
    if args.against and model.checkpoint.format:
        held = model.checkpoint.format.name
        raise ValueError(f"--against needs the original: {model.checkpoint.folder} holds {held} matrices")
    plainly = argparse.Namespace(**vars(args) | {"kv_fp8": False, "accumulate": "fp32"})
    against = open_checkpoint(plainly, args.against, model.ctx_size, "none") if args.against else None
    stride = args.stride or model.ctx_size
    quality, done = Quality(), 0
    bar = tqdm(total=len(ids), unit=" tokens", disable=not sys.stderr.isatty(), leave=False)
    try:
        for quality in perplexity(model, ids, tokenizer.bos, model.ctx_size, stride, against):
            bar.update(sum(map(len, quality.losses)) - done)
            done = sum(map(len, quality.losses))
            bar.set_postfix(perplexity=f"{torch.cat(quality.losses).mean().exp():.4f}")
    except KeyboardInterrupt:
        note(f"interrupted after {done} of {len(ids)} tokens")
    bar.close()
    if not done:
        return []
    counted_bytes = len((text if done == len(ids) else tokenizer.decode(ids[:done])).encode())
    format = model.weights.output.format
    row = {"model": args.model, "dtype": args.dtype[0], "fp8": format.name if format else "none"}
    row |= {"kv fp8": args.kv_fp8, "against": args.against, "ctx": model.ctx_size, "stride": stride}
    return [row | quality.report(counted_bytes)]


# ---- limits


LARGEST_HALF = 65504.0


class Peaks:
    """Wraps an op table to record, layer by layer, the largest magnitudes of what could overflow in half precision."""

    def __init__(self, ops: SimpleNamespace, n_layers: int):
        self.ops, self.peaks, self.calls = ops, [{} for _ in range(n_layers)], 0

    def note(self, name: str, values: Tensor) -> None:
        layer = self.peaks[self.calls % len(self.peaks)]
        layer[name] = max(layer.get(name, 0.0), values.abs().max().item())

    def table(self) -> SimpleNamespace:
        ops = self.ops

        def rmsnorm_qkv_rope(x, norm, wqkv, rope, k_cache, v_cache, pos, eps, *bias_and_norm):
            self.note("x", x)
            q = ops.rmsnorm_qkv_rope(x, norm, wqkv, rope, k_cache, v_cache, pos, eps, *bias_and_norm)
            KH, end = len(k_cache), int(pos) + len(x)
            keys, values = (kernels.cached_ref(kept[:, :end]) for kept in (k_cache, v_cache))
            for name, seen in (("q", q), ("k", keys), ("v", values)):
                self.note(name, seen)
            self.note("q k", q.float().unflatten(1, (KH, -1)).permute(1, 2, 0, 3).flatten(1, 2) @ keys.transpose(1, 2))
            return q

        def rmsnorm_swiglu(x, norm, w13, eps):
            self.note("x", x)
            h = ops.rmsnorm_swiglu(x, norm, w13, eps)
            self.note("h", h)
            self.calls += 1
            return h

        return SimpleNamespace(**vars(ops) | {"rmsnorm_qkv_rope": rmsnorm_qkv_rope, "rmsnorm_swiglu": rmsnorm_swiglu})


@torch.inference_mode()
def run_limits(args: argparse.Namespace) -> list[dict]:
    """Over a text, the largest magnitudes layer by layer: x (the residual), q, k, v, the sums q k, and h between w13 and w2."""
    model, tokenizer, _, ids = open_with_text(args, args.limits)
    seen = Peaks(model.ops, model.config.n_layers)
    model.ops = seen.table()
    for _ in perplexity(model, ids, tokenizer.bos, model.ctx_size, model.ctx_size):
        pass
    return [{"layer": i} | p | {"% of 65504": 100 * max(p.values()) / LARGEST_HALF} for i, p in enumerate(seen.peaks)]
