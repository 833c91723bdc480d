"""Llama 2: configuration, weights, key/value cache, forward, generate. Shape letters as in
kernels.py."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, nullcontext
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import kernels
from fp8 import Matrix, fit_norm
from launch import Scratch, compile_kernels
from sampling import Sampler, Sampling

CACHES = 32 << 20  # bytes of weights that the caches of a CPU hold
# prompt tokens evaluated at once: enough to be compute-bound, yet little workspace
CHUNK = {"cpu": 512, "cuda": 2048}
# Prompt lengths that are captured as CUDA graphs. A prompt is padded to the next one as long as
# tokens times weights of a layer stay below PADDED_WORK: up to there, launching the kernels takes
# the host longer than the GPU runs them
PADDED, PADDED_WORK = (8, 16, 32, *range(64, 513, 64), *range(640, 2049, 128)), 2e11


# ---- configuration


@dataclass(frozen=True)
class Config:
    """What a checkpoint's config.json or params.json says, under Meta's names."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float = 10000.0
    # by which the D/2 frequencies are divided for a longer context; empty: by 1
    rope_factors: tuple[float, ...] = ()
    rope_gain: float = 1.0  # q and k are multiplied by it
    max_seq_len: int = 4096
    # how far back a token sees; not implemented, so the context must not be longer
    sliding_window: int | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False  # q, k and v have a bias
    qk_norm: bool = False  # q and k are normalised head by head before RoPE
    dtype: torch.dtype | None = None  # None: as the tensors are stored
    bos_id: int | None = None  # for a tokenizer that names none
    eos_ids: tuple[int, ...] = ()  # empty: as the tokenizer says
    # processes that share the model; if several, n_heads, n_kv_heads and hidden_dim are per process
    ranks: int = 1

    @property
    def q_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    def cut(self, ranks: int) -> Config:
        """The config of one of several ranks (parallel.py). Raises ValueError if so many cannot
        share the model."""
        if ranks == 1:
            return self
        evenly = f"evenly among {ranks} processes"
        if self.n_heads % ranks:
            raise ValueError(f"{self.n_heads} query heads cannot be divided {evenly}")
        if self.hidden_dim % ranks:
            raise ValueError(f"hidden_dim {self.hidden_dim} cannot be divided {evenly}")
        if self.n_kv_heads % ranks and ranks % self.n_kv_heads:
            raise ValueError(
                f"{self.n_kv_heads} key/value heads can be neither divided nor repeated {evenly}"
            )
        heads, kv_heads = self.n_heads // ranks, max(1, self.n_kv_heads // ranks)
        return replace(
            self,
            ranks=ranks,
            n_heads=heads,
            n_kv_heads=kv_heads,
            hidden_dim=self.hidden_dim // ranks,
        )

    @property
    def output_rows(self) -> int:
        return -(-self.vocab_size // self.ranks)


# ---- weights


@dataclass
class LayerWeights:
    attention_norm: Tensor  # [C]
    wqkv: Matrix  # [(H + 2 KH) D, C]: wq, wk, wv stacked
    wo: Matrix  # [C, H D]
    ffn_norm: Tensor  # [C]
    w13: Matrix  # [2 F, C]: the rows of w1 and w3 interleaved
    w2: Matrix  # [C, F]
    qkv_bias: Tensor | None = None  # [(H + 2 KH) D]
    qk_norm: Tensor | None = None  # [2, D]: the weights of q's norm, then of k's


@dataclass
class Weights:
    embedding: Tensor  # [V, C]
    layers: list[LayerWeights]
    norm: Tensor  # [C]
    output: Matrix  # [V, C], or one rank's rows of it; the embedding itself when tied

    @property
    def matrices(self) -> list[Matrix]:
        of_layers = (value for layer in self.layers for value in vars(layer).values())
        return [*(value for value in of_layers if isinstance(value, Matrix)), self.output]

    @property
    def held(self) -> str:
        """The formats of its matrices, in words; empty if there are none."""
        names = sorted({m.format.name for m in self.matrices if m.format})
        return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


# ---- the model


@dataclass
class Llama:
    """A loaded model: what forward and generate need."""

    config: Config
    weights: Weights = field(repr=False)
    backend: str  # the ops that run it: a key of kernels.BACKENDS
    device: torch.device
    dtype: torch.dtype
    ctx_size: int  # default size of its cache, in positions
    checkpoint: Any = None  # the checkpoint.Checkpoint that the weights came from, if any
    kv_fp8: bool = False  # keys and values in 8 bits
    accumulate: str = "auto"  # how a prompt's products are summed, see kernels.py
    ranks: Any = None  # the parallel.Ranks that share it, if several
    sampling: Sampling = Sampling()  # the checkpoint's own
    ops: SimpleNamespace = field(init=False, repr=False)
    # parallel.Exchange, for one token's sums over ranks
    exchange: Any = field(init=False, default=None, repr=False)
    # the last captured decode step: its key, its graph
    _graph: tuple = field(default=(None, None), repr=False)

    @torch.inference_mode()
    def __post_init__(self) -> None:
        self.ops, w = kernels.BACKENDS[self.backend], self.weights
        if self.ranks and self.ranks.size > 1:
            matrices = [m for layer in w.layers for m in (layer.wo, layer.w2)] + [w.output]
            self.ops, self.exchange = self.ranks.cut_ops(
                self.ops, matrices, self.backend, self.device
            )
        if self.backend == "triton":
            for layer in w.layers:
                fit_norm(layer.attention_norm, layer.wqkv)
                fit_norm(layer.ffn_norm, layer.w13)
            fit_norm(w.norm, w.output)

    def check(self, prompt: list[int]) -> None:
        """Raise TypeError for a prompt that is no list of ids, ValueError if it is empty or has an
        id that the model does not."""
        if not isinstance(prompt, list) or not all(isinstance(i, int) for i in prompt):
            raise TypeError(
                "a prompt is a list of ids: tokenizer.encode(text), or ids.tolist() of a tensor"
            )
        if not prompt:
            raise ValueError("the prompt is empty: it needs a token to start from, such as bos")
        V = self.config.vocab_size
        if wrong := [i for i in prompt if not 0 <= i < V]:
            raise ValueError(f"the prompt contains the id {wrong[0]}; the model's are 0 .. {V - 1}")

    @torch.inference_mode()
    def forward(self, tokens: Tensor | list[int], cache: State) -> Tensor:
        """Evaluate T tokens at cache.pos. tokens int [T] -> logits float32 [T, V] of all of them. A
        tensor's ids are not checked."""
        if not isinstance(tokens, Tensor):
            self.check(tokens)
        tokens = torch.as_tensor(tokens)
        assert tokens.ndim == 1, (tokens.shape, "one sequence at a time")
        cache.append(tokens)
        return self.evaluate(len(tokens), cache)

    def evaluate(self, T: int, cache: State) -> Tensor:
        """Evaluate the T tokens already at cache.pos -> logits float32 [T, V] of all of them."""
        return self._forward(T, cache, torch.empty(T, self.config.vocab_size, device=self.device))

    def _forward(self, T: int, cache: State, logits: Tensor, row: Tensor | None = None) -> Tensor:
        """Evaluate the T tokens already at cache.pos; logits [n, V] are filled for the last n of
        them, or for `row`."""
        ops, w, eps, accumulate = self.ops, self.weights, self.config.norm_eps, self.accumulate
        pos, rope, scratch = cache.device_pos, cache.rope, cache.scratch
        x = ops.embedding(cache.tokens, pos, T, w.embedding)
        for layer, k, v in zip(w.layers, cache.k, cache.v):
            extra = layer.qkv_bias, layer.qk_norm, accumulate
            q = ops.rmsnorm_qkv_rope(
                x, layer.attention_norm, layer.wqkv, rope, k, v, pos, eps, *extra
            )
            x = ops.linear_add(
                ops.attention(q, k, v, pos, scratch, accumulate), layer.wo, x, accumulate
            )
            h = ops.rmsnorm_swiglu(x, layer.ffn_norm, layer.w13, eps, accumulate)
            x = ops.linear_add(h, layer.w2, x, accumulate)
        x = x[T - len(logits) :] if row is None else x.index_select(0, row)
        ops.rmsnorm_linear(x, w.norm, w.output, eps, logits, accumulate)
        cache.advance(T)
        return logits

    def step(self, T: int, cache: State) -> None:
        """Evaluate the T tokens already at cache.pos; the last one's logits go to cache.logits."""
        self._forward(T, cache, cache.logits.view(1, -1))

    def prefill(
        self, tokens: list[int], cache: State, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Evaluate a prompt in chunks; the last token's logits go to cache.logits. progress is
        called with the number of tokens done and the total."""
        cache.check_room(len(tokens))
        start = cache.pos
        for chunk in torch.tensor(tokens, dtype=torch.int32, device=self.device).split(
            CHUNK[self.device.type]
        ):
            cache.append(chunk)
            T = len(chunk)
            if length := self._padded(T, cache.size - cache.pos):
                self._padded_step(T, length, cache)
            else:
                self.step(T, cache)
            if progress:
                progress(cache.pos - start, len(tokens))

    def _padded(self, T: int, room: int) -> int | None:
        """The length to which a prompt of T tokens is padded; None if it is not captured as a CUDA
        graph."""
        c = self.config
        layer = vars(self.weights.layers[0]).values()
        layer_weights = sum(m.rows * m.columns for m in layer if isinstance(m, Matrix))
        fits = (
            n for n in PADDED if T <= n <= room and (n == T or n * layer_weights <= PADDED_WORK)
        )
        return next(fits, None) if self.uses_graphs and c.ranks == 1 and T > 1 else None

    def _padded_step(self, T: int, length: int, cache: State) -> None:
        """`step` for T tokens, padded to `length` with copies of the last one. What is cached for
        the padding lies beyond cache.pos, so its weight is 0; but 0 * NaN is NaN, so the padding
        may not be whatever an earlier prompt left there. Captured as a CUDA graph the first time,
        replayed from then on."""
        start, end, graphs = cache.pos, cache.pos, cache.prompt_graphs
        cache.tokens[start + T : start + length] = cache.tokens[start + T - 1]
        cache.row.fill_(T - 1)
        step = lambda: self._forward(length, cache, cache.logits.view(1, -1), cache.row)
        # shared by all: nothing outlives a replay
        pool = next((graph.pool() for graph in graphs.values()), None)
        try:
            if length in graphs:
                graphs[length].replay()
            else:
                graphs[length] = captured(step, self.device, lambda: cache.seek(start), pool)
            end = start + T
        finally:
            cache.seek(end)

    @torch.inference_mode()
    def warm_up(self, T: int, sampling: Sampling) -> None:
        """Launch the kernels that `generate` launches for a prompt of T tokens: for
        launch.compile_kernels."""
        cache = State(self)
        T = min(T, cache.size, CHUNK[self.device.type])
        cache.sampler.set(sampling)
        self.step(self._padded(T, cache.size) or T, cache)
        choose_next(self, cache, cache.logits)
        self.step(1, cache)

    @property
    def uses_graphs(self) -> bool:
        """Whether decode steps, and prompts of the lengths in PADDED, are captured as CUDA
        graphs."""
        return self.device.type == "cuda" and self.backend == "triton"

    def graph(self, cache: State) -> torch.cuda.CUDAGraph:
        """One decode step as a CUDA graph: sample a token from cache.logits, evaluate it. Captured
        again only for another cache, other switches of the sampler, or another number of banned
        ids; the cache is not kept alive."""
        key = (weakref.ref(cache), *cache.captured_with(self))
        if self._graph[0] != key:
            pos, logits = cache.pos, cache.logits.clone()

            def run() -> None:
                choose_next(self, cache, cache.logits)
                self.step(1, cache)

            def reset() -> None:
                cache.seek(pos)
                cache.logits.copy_(logits)

            self._graph = (key, captured(run, self.device, reset))
        return self._graph[1]

    @property
    def suits_one_thread(self) -> bool:
        """Whether one thread is best on a CPU: for matrices in its caches, threads mostly wait for
        each other."""
        return sum(m.nbytes for m in self.weights.matrices) <= CACHES

    @property
    def kv_dtype(self) -> torch.dtype:
        return torch.int8 if self.kv_fp8 else self.dtype


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs of a GPU, so that they can share memory. torch's own default is one of the
    first GPU used."""
    return torch.cuda.Stream(device)


def captured(
    run: Callable[[], object],
    device: torch.device,
    reset: Callable[[], object] = lambda: None,
    pool: tuple[int, int] | None = None,
) -> torch.cuda.CUDAGraph:
    """Capture `run` as a CUDA graph, in the given memory pool of another graph if there is one.
    `run` is called twice before, first only to compile what is not compiled yet. `reset` restores
    what it has changed."""
    collects = gc.isenabled()
    with torch.cuda.device(device):
        try:
            compile_kernels(run, device)
            reset()
            run()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            gc.disable()  # freeing an old graph would end the capture
            with torch.cuda.graph(graph, pool, _capture_stream(device)):
                run()
        finally:
            if collects:
                gc.enable()
            reset()
    return graph


# ---- key/value cache


def rope_table(config: Config, length: int) -> Tensor:
    """[length, D/2, 2] float32: cosine and sine of position * theta^(-2i/D), divided and scaled as
    the config says."""
    freqs = config.rope_theta ** -(
        torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    )
    if config.rope_factors:
        freqs = freqs / torch.tensor(config.rope_factors, dtype=torch.float64)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), freqs)
    return config.rope_gain * torch.stack((angles.cos(), angles.sin()), -1).float()


class State:
    """Keys and values of the tokens seen so far, and the tokens themselves."""

    def __init__(self, model: Llama, size: int | None = None):
        c, size = model.config, size or model.ctx_size
        shape = (c.n_layers, c.n_kv_heads, size, c.head_dim)
        self.size = size
        self.pos = 0  # positions in use, on the host
        # the same, on the device
        self.device_pos = torch.zeros(1, dtype=torch.int32, device=model.device)
        # index of a padded prompt's last token
        self.row = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.prompt_graphs: dict[int, torch.cuda.CUDAGraph] = {}  # of prompts, by length
        self.tokens = torch.zeros(size, dtype=torch.int32, device=model.device)
        pinned = model.device.type == "cuda"
        # sampled ones, for the host
        self.host_tokens = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        # of the last token evaluated
        self.logits = torch.zeros(c.vocab_size, dtype=torch.float32, device=model.device)
        self.sampler = Sampler(model.device)  # how the next one is chosen
        self.never: tuple[int, ...] = ()  # ids that are not sampled
        # BANNED at these ids, 0 elsewhere: added to logits
        self.bans = torch.zeros_like(self.logits)
        self.scratch = Scratch(model.device)
        # L x [KH, S, D]
        self.k = torch.zeros(shape, dtype=model.kv_dtype, device=model.device).unbind()
        self.v = torch.zeros(shape, dtype=model.kv_dtype, device=model.device).unbind()
        self.rope = rope_table(c, size).to(model.device)  # [S, D/2, 2]

    def check_room(self, count: int) -> None:
        """Raise ValueError if `count` more tokens do not fit: the one place that checks this."""
        count += self.pos
        if count > self.size:
            raise ValueError(
                f"the prompt has {count} tokens; the context holds {self.size} (-c, or State's size)"
            )

    def append(self, tokens: Tensor) -> None:
        """Place tokens at pos, where forward will evaluate them."""
        self.check_room(len(tokens))
        self.tokens[self.pos : self.pos + len(tokens)] = tokens

    def ban(self, ids: list[int]) -> None:
        """Never sample these tokens from now on; earlier bans are lifted."""
        self.never = tuple(ids)
        self.bans.zero_()[ids] = BANNED

    def captured_with(self, model: Llama) -> tuple:
        """What a graph that samples depends on besides the cache."""
        return self.sampler.switches(model.config.vocab_size), len(self.never)

    def truncate(self, pos: int) -> None:
        """Forget everything from pos on."""
        assert 0 <= pos <= self.pos, (pos, self.pos)
        self.seek(pos)

    def advance(self, count: int) -> None:
        self.pos += count
        self.device_pos += count

    def seek(self, pos: int) -> None:
        self.pos = pos
        self.device_pos.fill_(pos)

    def reuse(self, tokens: list[int]) -> int:
        """Keep the longest prefix that the cache and tokens share, but not the last of tokens.
        Returns its length."""
        cached = self.tokens[: min(self.pos, len(tokens) - 1)].tolist()
        same = next((i for i, (a, b) in enumerate(zip(cached, tokens)) if a != b), len(cached))
        self.truncate(same)
        return same


# ---- generation


@dataclass
class Timings:
    """Filled in by generate, added up over calls."""

    prompt_tokens: int = 0  # evaluated, not those that were still in the cache
    prompt_seconds: float = 0.0
    new_tokens: int = 0
    steps: int = 0  # new tokens except the first of each call, whose time counts as the prompt's
    step_seconds: float = 0.0

    def __add__(self, other: Timings) -> Timings:
        return Timings(*(a + b for a, b in zip(astuple(self), astuple(other))))

    def add(self, seconds: float, first: bool) -> None:
        """Count one new token."""
        self.new_tokens += 1
        if first:
            self.prompt_seconds += seconds
        else:
            self.steps += 1
            self.step_seconds += seconds


@torch.inference_mode()
def generate(
    model: Llama,
    prompt: list[int],
    cache: State | None = None,
    n: int = -1,
    sampling: Sampling | None = None,
    eos: Collection[int] | None = None,
    ignore_eos: bool = False,
    timings: Timings | None = None,
    progress: Callable[[int, int], None] | None = None,
    decode: Callable[..., Iterator[int]] | None = None,
) -> Iterator[int]:
    """Evaluate the prompt, then yield new tokens: at most n (below 0: no limit), until an eos
    (yielded too) or a full context.

    The beginning of the prompt that the cache already holds is not evaluated again. sampling: by
    default the model's. eos: by default the config's. progress: as in prefill. decode: a
    replacement for decoding token by token, such as Speculation.decode. There is one sequence at a
    time. Raises what Llama.check does, ValueError when the prompt is longer than the cache,
    RuntimeError when the logits are not finite."""
    model.check(prompt)
    cache, V = cache or State(model), model.config.vocab_size
    # a tokenizer without one says -1
    eos = [i for i in (model.config.eos_ids if eos is None else eos) if 0 <= i < V]
    cache.sampler.set(sampling or model.sampling)
    cache.ban(eos if ignore_eos else [])
    timings = timings or Timings()
    start = time.perf_counter()
    reused = cache.reuse(prompt)
    model.prefill(prompt[reused:], cache, progress)
    n = min(n, cache.size - cache.pos) if n >= 0 else cache.size - cache.pos
    timings.prompt_tokens += len(prompt) - reused
    decode = decode or (_decode_on_gpu if model.uses_graphs else _decode)
    stopping = model.ranks.stopping_together() if model.ranks else nullcontext()
    with stopping, closing(decode(model, cache, n)) as tokens:
        for i, token in enumerate(tokens):
            timings.add(time.perf_counter() - start, first=i == 0)
            start = time.perf_counter()
            if token < 0:
                raise RuntimeError(not_finite(model))
            yield token
            if token in eos and not ignore_eos:
                return


BANNED = -1e36  # a logit that no temperature draws; finite, since others are an error


def choose_next(model: Llama, cache: State, logits: Tensor, drawn: Tensor | None = None) -> None:
    """Sample the token at cache.pos from logits [V], or the T tokens that end there from [T, V],
    into `drawn` (by default cache.host_tokens); a single one goes into cache.tokens, too. logits
    may be overwritten."""
    if cache.never:
        logits.add_(cache.bans)
    drawn = cache.host_tokens if drawn is None else drawn
    model.ops.sample(
        logits.view(-1, model.config.vocab_size),
        cache.tokens,
        drawn,
        cache.device_pos,
        cache.sampler,
    )


def sample_next(model: Llama, cache: State, logits: Tensor) -> int:
    """The same, but wait for the token and return it: -1 where the logits are not finite."""
    choose_next(model, cache, logits)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return int(cache.host_tokens[cache.pos])


def _decode(model: Llama, cache: State, n: int) -> Iterator[int]:
    """Up to n tokens, one after the other; each is evaluated only when the next is asked for."""
    for i in range(n):
        yield sample_next(model, cache, cache.logits)
        if i + 1 < n:
            model.step(1, cache)


def _decode_on_gpu(model: Llama, cache: State, n: int) -> Iterator[int]:
    """The same, as replays of one CUDA graph (sample, then evaluate what was sampled), with the
    host one step ahead: while it reads a token, the GPU computes the next. Token and position stay
    on the device."""
    if n == 0:
        return
    graph = model.graph(cache)
    first, read = cache.pos, 0
    stream, done = torch.cuda.current_stream(model.device), [torch.cuda.Event(), torch.cuda.Event()]
    try:
        for launched in range(n + 1):
            if launched < n:
                graph.replay()
                done[launched % 2].record(stream)
            if launched > 0:
                read = launched - 1
                done[read % 2].synchronize()
                cache.pos = first + read
                yield int(cache.host_tokens[cache.pos])
    finally:
        cache.seek(first + read)


def not_finite(model: Llama) -> str:
    stored = kernels.storage_dtype(model.backend, model.dtype, model.device)
    if bad := model.checkpoint and model.checkpoint.first_bad_tensor(stored):
        return f"the logits are not finite: {bad}"
    return "the logits are not finite, although every weight is: the activations overflow; try --dtype bf16 or fp32"
