"""Llama 2: configuration, weights, forward, the state of a sequence, generate. Shape letters as in
kernels.py."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import astuple, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import torch
from torch import Tensor

import experts
import kernels
from cards.cpu import storage_dtype
from formats import Format, Matrix
from launch import Scratch, compile_kernels
from products import copy_bytes, fit_norm
from ranks.exchange import Exchange, cut_ops, make_exchange
from ranks.processes import Ranks
from sampling import BANNED, Adjustment, Sampler, Sampling

CACHES = 32 << 20  # bytes of weights that the caches of a CPU hold
# How many tokens of a prompt are evaluated at once: enough to be compute-bound, with little
# workspace
PROMPT_CHUNK = {"cpu": 512, "cuda": 2048}
# Numbers of tokens that are captured as CUDA graphs; a prompt is padded to the next one. Up to
# about 190 tokens, a prompt takes as long as reading the weights; beyond, as long as its
# arithmetic, so that a step is at most a twelfth of the length. The longest is two chunks, since a
# small remainder would have to read and decode all the weights again
LENGTHS = (1, 8, 16, 32, 48, 64, 96, 128, 160)
LENGTHS += (*range(192, 384, 16), *range(384, 768, 32), *range(768, 2048, 64))
LENGTHS += tuple(range(2048, 4097, 128))


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
    # What the D/2 frequencies of RoPE are divided by for a longer context. Empty if they stay as
    # they are
    rope_factors: tuple[float, ...] = ()
    rope_gain: float = 1.0  # what q and k are multiplied by, for a longer context
    max_seq_len: int = 4096
    # How many positions back a token sees. Not implemented, so the context must not be longer
    sliding_window: int | None = None
    tie_embeddings: bool = False
    # Which products have a bias: those with wqkv, wo, w13 and w2
    qkv_bias: bool = False
    wo_bias: bool = False
    w13_bias: bool = False
    w2_bias: bool = False
    qk_norm: bool = False  # q and k are normalised head by head before RoPE
    # E and k of experts.py; 0 in a dense model. With experts, hidden_dim is that of one
    n_experts: int = 0
    experts_per_token: int = 0
    norm_topk: bool = True  # the weights of a token's experts are divided by their sum
    dtype: torch.dtype | None = None  # of the tensors; None if the file does not say
    bos_id: int | None = None  # for a tokenizer that names none
    eos_ids: tuple[int, ...] = ()  # empty if only the tokenizer knows
    # How many processes share the model. With several, n_heads, n_kv_heads and hidden_dim are those
    # of one of them
    ranks: int = 1

    @property
    def q_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    def cut(self, ranks: int) -> Config:
        """The config of one of several ranks (ranks/processes.py). Raises ValueError if the model
        cannot be divided among that many."""
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
        return replace(
            self,
            ranks=ranks,
            n_heads=self.n_heads // ranks,
            n_kv_heads=max(1, self.n_kv_heads // ranks),
            hidden_dim=self.hidden_dim // ranks,
        )

    @property
    def output_rows(self) -> int:
        return -(-self.vocab_size // self.ranks)


# ---- weights


@dataclass
class LayerWeights:
    """The tensors of a layer. A matrix brings its bias, if its products have one."""

    attention_norm: Tensor  # [C]
    wqkv: Matrix  # [(H + 2 KH) D, C]: wq, wk, wv stacked
    wo: Matrix  # [C, H D]
    ffn_norm: Tensor  # [C]
    w13: Matrix  # [2 F, C]: the rows of w1 and w3 interleaved; experts one after the other
    w2: Matrix  # [C, F]; experts one after the other
    qk_norm: Tensor | None = None  # [2, D]: the weights of q's norm, then of k's
    router: Matrix | None = None  # [E, C], never in a format; None in a layer without experts
    router_gain: float = 1.0  # a power of two that fit_norm took out of ffn_norm
    index: int = 0  # of the layer, from 0 on: its keys and values are State.k[index], v[index]

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All for which a format can be chosen."""
        return self.wqkv, self.wo, self.w13, self.w2


@dataclass
class Weights:
    embedding: Tensor  # [V, C]
    layers: list[LayerWeights]
    norm: Tensor  # [C]
    output: Matrix  # [V, C], or one rank's rows of it; the embedding itself when tied

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.layers):
            layer.index = index

    @property
    def matrices(self) -> list[Matrix]:
        """All for which a format can be chosen; routers stay as they are."""
        return [*(m for layer in self.layers for m in layer.matrices), self.output]

    @property
    def held(self) -> str:
        """The formats of its matrices, in words; empty if there are none."""
        return enumerated({m.format.name for m in self.matrices if m.format})


def enumerated(names: Collection[str]) -> str:
    """The names in order, as in "a, b and c"."""
    *others, last = sorted(names) or [""]
    return f"{', '.join(others)} and {last}" if others else last


# ---- the model


class Constraint(Protocol):
    """What says which token may come next: constraints.Constraint."""

    ended: bool  # no more tokens can come

    def mask(self) -> Tensor:
        """A bit for each token, which is 1 if that may come next: int32 [ceil(V/32)]."""

    def accept(self, token: int) -> None:
        """Go on to what follows this token."""


class Origin(Protocol):
    """What a model knows of the checkpoint that its weights came from: checkpoint.Checkpoint."""

    folder: Path
    config: Config  # of the whole model, however many ranks share it
    elements: int
    format: Format | None  # of its matrices, where --save encoded them
    quantised: str  # how others have quantised them, in words

    def first_bad_tensor(self, dtype: torch.dtype) -> str | None: ...


@dataclass
class Llama:
    """A loaded model: what forward and generate need."""

    config: Config
    weights: Weights = field(repr=False)
    backend: str  # whose ops run it: "torch" or "triton"
    device: torch.device
    dtype: torch.dtype
    ctx_size: int  # positions of a state, unless another size is given
    checkpoint: Origin | None = None  # None if the weights are random
    kv_fp8: bool = False  # keys and values in 8 bits
    accumulate: str = "auto"  # how a prompt's products are summed, see kernels.ops
    ranks: Ranks = Ranks()  # the processes that share it
    sampling: Sampling = Sampling()  # the checkpoint's own
    ops: SimpleNamespace = field(init=False, repr=False)
    exchange: Exchange | None = field(init=False, default=None, repr=False)  # if ranks have one

    @torch.inference_mode()
    def __post_init__(self) -> None:
        w = self.weights
        self.ops = kernels.ops(self.backend, self.accumulate)
        if self.ranks.size > 1:
            summed = [m for layer in w.layers for m in (layer.wo, layer.w2)]
            if self.ranks.rank > 0:  # rank 0 adds their biases, as it does the residual
                for m in summed:
                    m.bias = None
            exchanged = [*summed, w.output]
            where = (self.backend, self.device, self.dtype)
            self.exchange = make_exchange(self.ranks, exchanged, self.config.dim, *where)
            fp16_sums = self.accumulate == "fp16"
            self.ops = cut_ops(self.ranks, self.ops, self.exchange, fp16_sums)
        if self.backend == "triton":
            for layer in w.layers:
                fit_norm(layer.attention_norm, layer.wqkv)
                layer.router_gain *= fit_norm(layer.ffn_norm, layer.w13)
            fit_norm(w.norm, w.output)

    def check(self, prompt: list[int]) -> None:
        """Raise TypeError for a prompt that is not a list of ids, ValueError if it is empty or
        contains an id that the model does not have."""
        if not isinstance(prompt, list) or not all(isinstance(i, int) for i in prompt):
            how = "tokenizer.encode(text), or ids.tolist() of a tensor"
            raise TypeError(f"a prompt is a list of ids: {how}")
        if not prompt:
            raise ValueError("the prompt is empty: it needs a token to start from, such as bos")
        V = self.config.vocab_size
        if wrong := [i for i in prompt if not 0 <= i < V]:
            raise ValueError(f"the prompt contains the id {wrong[0]}; the model's are 0 .. {V - 1}")

    @torch.inference_mode()
    def forward(self, tokens: Tensor | list[int], state: State) -> Tensor:
        """Evaluate T tokens at state.pos. tokens int [T] -> logits float32 [T, V] of all of them.
        The ids in a tensor are not checked."""
        if not isinstance(tokens, Tensor):
            self.check(tokens)
        tokens = torch.as_tensor(tokens)
        assert tokens.ndim == 1, (tokens.shape, "one sequence at a time")
        state.append(tokens)
        return self.evaluate(len(tokens), state)

    def evaluate(self, T: int, state: State) -> Tensor:
        """Evaluate the T tokens already at state.pos. Returns the logits of all of them, float32
        [T, V]."""
        return self._forward(T, state, torch.empty(T, self.config.vocab_size, device=self.device))

    def _forward(self, T: int, state: State, logits: Tensor, row: Tensor | None = None) -> Tensor:
        """Evaluate the T tokens already at state.pos; logits [n, V] are filled for the last n of
        them, or for `row`."""
        ops, w = self.ops, self.weights
        x = ops.embedding(T, w.embedding, state)
        for layer in w.layers:
            q = ops.rmsnorm_qkv_rope(x, layer, state)
            x = ops.linear_add(ops.attention(q, layer, state), layer.wo, x)
            routes = ops.route(x, layer, state)
            h = ops.rmsnorm_swiglu(x, layer, state, routes)
            x = ops.linear_add(h, layer.w2, x, routes)
        x = x[T - len(logits) :] if row is None else x.index_select(0, row)
        ops.rmsnorm_linear(x, w.norm, w.output, state, logits)
        state.advance(T)
        return logits

    def step(self, T: int, state: State) -> None:
        """Evaluate the T tokens already at state.pos; the last one's logits go to state.logits."""
        self._forward(T, state, state.logits.view(1, -1))

    def prefill(
        self, tokens: list[int], state: State, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Evaluate a prompt in chunks; the last token's logits go to state.logits. progress is
        called with the number of tokens done and the total."""
        state.check_room(len(tokens))
        ids = torch.tensor(tokens, dtype=torch.int32, device=self.device)
        chunk = longest = PROMPT_CHUNK[self.device.type]
        step = self.step
        if self.uses_graphs:
            longest = max(LENGTHS)
            step = self._padded_step
        done = 0
        while done < len(ids):
            part = ids[done:]
            if len(part) > longest:
                part = part[:chunk]
            state.append(part)
            step(len(part), state)
            done += len(part)
            if progress:
                progress(done, len(ids))

    def _padded_step(self, T: int, state: State) -> None:
        """`step` for T tokens of a prompt, as a replay of the CUDA graph for the next length in
        LENGTHS, which is captured when it is first needed. Behind the T tokens stand copies of the
        last one. Keys and values of this padding lie beyond state.pos, so their weight is 0; but
        0 * NaN is NaN, so it may not be whatever an earlier prompt left there. Where the context
        ends before the padding does, the tokens before state.pos are evaluated once more
        instead."""
        begin = state.pos
        end = begin + T
        length = min(next(n for n in LENGTHS if n >= T), state.size)
        start = min(begin, state.size - length)
        state.tokens[end : start + length] = state.tokens[end - 1]
        state.row.fill_(end - 1 - start)

        def run() -> None:
            # Freed at once. Graphs of all lengths find their memory within this block; otherwise
            # each new longest one would add blocks of its own
            most = self._prompt_memory(min(max(LENGTHS), state.size))
            torch.empty(most, dtype=torch.uint8, device=self.device)
            self._forward(length, state, state.logits.view(1, -1), state.row)

        key = ("prompt", length)
        state.seek(start)
        try:
            if key not in state.graphs:
                reset = lambda: state.seek(start)
                state.graphs[key] = captured(run, self.device, reset, state.prompt_pool)
            state.graphs[key].replay()
        except BaseException:
            state.seek(begin)
            raise
        state.seek(end)

    def _prompt_memory(self, T: int) -> int:
        """Bytes that a prompt of T tokens needs at once: its activations where they are widest, and
        the largest copy of a matrix that a product makes. Keys and values in 8 bits, which
        attention decodes, come on top."""
        c = self.config
        widest = 2 * c.dim + max(3 * c.hidden_dim, 2 * c.q_dim + 2 * c.kv_dim)
        widest += c.experts_per_token * (c.hidden_dim + c.dim)
        copies = [0]
        for layer in self.weights.layers:
            of_experts = (layer.w13, layer.w2) if layer.router else ()
            for m in layer.matrices:
                if m in of_experts:
                    each = T * c.experts_per_token // c.n_experts
                    copies.append(experts.copy_bytes(m, self.accumulate, each))
                else:
                    copies.append(copy_bytes(m, self.dtype, self.accumulate))
        return T * widest * self.dtype.itemsize + max(copies)

    @property
    def uses_graphs(self) -> bool:
        """Whether decode steps and prompts are captured as CUDA graphs."""
        return self.device.type == "cuda" and self.backend == "triton"

    def graph(self, state: State) -> torch.cuda.CUDAGraph:
        """One decode step as a CUDA graph: sample a token from state.logits, evaluate it. The state
        keeps the last such graph until other settings need another one."""
        key = ("decode", *state.captured_with(self))
        if key not in state.graphs:
            pos = state.pos
            logits = state.logits.clone()

            def run() -> None:
                choose_next(self, state, state.logits)
                self.step(1, state)

            def reset() -> None:
                state.seek(pos)
                state.logits.copy_(logits)

            graph = captured(run, self.device, reset)
            state.drop_graphs("decode")
            state.graphs[key] = graph
        return state.graphs[key]

    def step_graph(self, state: State) -> torch.cuda.CUDAGraph:
        """The evaluation of the token at the state's position as a CUDA graph."""
        key = ("step",)
        if key not in state.graphs:
            pos = state.pos
            state.graphs[key] = captured(
                lambda: self.step(1, state), self.device, lambda: state.seek(pos)
            )
        return state.graphs[key]

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
    """The stream of all captures on a GPU, so that graphs can share memory. torch's own default
    belongs to the first GPU used."""
    return torch.cuda.Stream(device)


def captured(
    run: Callable[[], object],
    device: torch.device,
    reset: Callable[[], object] = lambda: None,
    pool: tuple[int, int] | None = None,
) -> torch.cuda.CUDAGraph:
    """Capture `run` as a CUDA graph, in the given memory pool of another graph if there is one.
    `reset` restores what `run` has changed.

    `run` is called once before, on the same stream: its kernels are only compiled and loaded, and
    all else runs, so that libraries allocate what they keep and ranks connect. All ranks capture
    together. Their communication library has threads of its own, whose calls must not end the
    capture."""
    collects = gc.isenabled()
    stream = _capture_stream(device)
    with torch.cuda.device(device):
        try:
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                compile_kernels(run, device)
                reset()
            graph = torch.cuda.CUDAGraph()
            gc.disable()  # freeing an old graph would end the capture
            # waits until all ranks have done what was called before
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                run()
        finally:
            if collects:
                gc.enable()
            reset()
    return graph


# ---- the state of a sequence


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


class ContextFull(ValueError):
    """There are more tokens than the context holds."""


class State:
    """Everything that belongs to one sequence: the tokens seen so far with their keys and values,
    how the next one is chosen, and what kernels and graphs need meanwhile. llama2.c calls it
    RunState.

    Keys and values of a layer are a tensor [KH, S, D] each, in the model's kv_dtype: the positions
    of a head are contiguous, and nothing from pos on is used. device_pos is the number
    of positions in use on the device, where a captured graph can move it."""

    def __init__(self, model: Llama, size: int | None = None):
        """size: the number of positions, by default the model's ctx_size."""
        c = model.config
        device = model.device
        self.size = size or model.ctx_size
        self.pos = 0  # positions in use
        self.device_pos = torch.zeros(1, dtype=torch.int32, device=device)  # the same
        self.busy = 0.0  # seconds that a GPU has spent decoding

        # The tokens; those that were sampled are there once more for the host
        self.tokens = torch.zeros(self.size, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self.host_tokens = torch.zeros(self.size, dtype=torch.int32, pin_memory=pinned)

        shape = (c.n_layers, c.n_kv_heads, self.size, c.head_dim)
        self.k = torch.zeros(shape, dtype=model.kv_dtype, device=device).unbind()  # L x [KH, S, D]
        self.v = torch.zeros(shape, dtype=model.kv_dtype, device=device).unbind()  # L x [KH, S, D]
        self.rope = rope_table(c, self.size).to(device)  # [S, D/2, 2]
        self.norm_eps = c.norm_eps
        self.experts_per_token = c.experts_per_token
        self.norm_topk = c.norm_topk

        # How the next token is chosen
        self.logits = torch.zeros(c.vocab_size, device=device)  # of the last token evaluated
        self.prompt: list[int] = []  # the latest one
        self.prompt_logits = torch.zeros_like(self.logits)  # of its last token
        self.sampler = Sampler(device)
        self.never: tuple[int, ...] = ()  # ids that are not sampled
        self.bias: Mapping[int, float] = {}  # added to the logits of these ids
        self.constraint: Constraint | None = None  # what else says which ids are sampled
        self.adjustment = Adjustment(c.vocab_size, device)  # all this, as the op takes it

        # What kernels keep between launches, and what has been captured. The key of a graph is its
        # kind, followed by what it depends on besides the state: ("prompt", length), or ("decode",
        # ...) with captured_with. Programs that capture other kinds of steps keep them here as
        # well.
        self.scratch = Scratch(device)
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.row = torch.zeros(1, dtype=torch.int64, device=device)  # a padded prompt's last token

    def check_room(self, count: int) -> None:
        """Raise ContextFull if `count` more tokens do not fit. Nothing else checks this."""
        count += self.pos  # of the text up to their end
        if count > self.size:
            holds = f"the context holds {self.size} (ctx_size)"
            raise ContextFull(f"the text has {count} tokens; {holds}")

    def append(self, tokens: Tensor) -> None:
        """Place tokens at pos, where forward will evaluate them."""
        self.check_room(len(tokens))
        self.tokens[self.pos : self.pos + len(tokens)] = tokens

    def ask(self, bias: Mapping[int, float] | None, constraint: Constraint | None) -> None:
        """From now on add a bias to the logits of some ids, and sample as a constraint says."""
        self.bias = bias or {}
        self.constraint = constraint
        self.ban(())

    def ban(self, ids: Collection[int]) -> None:
        """Never sample these tokens from now on; earlier bans are lifted."""
        self.never = tuple(ids)
        bias = {**self.bias, **dict.fromkeys(ids, BANNED)}
        self.adjustment.begin(bias, self.sampler.s, self.constraint is not None)

    def captured_with(self, model: Llama) -> tuple:
        """The end of the key of a graph that samples: what it depends on besides the state."""
        return self.sampler.switches(model.config.vocab_size), self.adjustment.parts

    def drop_graphs(self, kind: str) -> None:
        """Free all graphs of a kind."""
        self.graphs = {key: graph for key, graph in self.graphs.items() if key[0] != kind}

    @property
    def prompt_pool(self) -> tuple[int, int] | None:
        """The memory pool that all graphs of prompts share, since nothing outlives a replay. None
        if there is no such graph yet."""
        pools = (graph.pool() for key, graph in self.graphs.items() if key[0] == "prompt")
        return next(pools, None)

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
        """Truncate the state to the positions that agree with the beginning of these tokens, and
        return how many there are. The last token's logits are needed, so it counts only if these
        tokens are the latest prompt, whose logits are kept."""
        seen = self.tokens[: min(self.pos, len(tokens))].tolist()
        same = 0
        while same < len(seen) and seen[same] == tokens[same]:
            same += 1
        if tokens == self.prompt:
            self.logits.copy_(self.prompt_logits)
        else:
            same = min(same, len(tokens) - 1)
        self.truncate(same)
        return same

    def remember(self, prompt: list[int]) -> None:
        """Keep a prompt and the logits of its last token, so that the same prompt gives the same
        text when it comes again. Evaluated on its own, that token would be rounded differently."""
        self.prompt = [*prompt]
        self.prompt_logits.copy_(self.logits)


# ---- generation


@dataclass
class Timings:
    """Filled in by generate, added up over calls.

    What the caller does between tokens does not count: the seconds are those between asking for a
    token and getting it. On a GPU, which works on while the caller does, they are the seconds that
    it took by its own clock, if that is more."""

    prompt_tokens: int = 0  # those evaluated, without what the state already had
    prompt_seconds: float = 0.0
    new_tokens: int = 0
    steps: int = 0  # new tokens except the first of each call, whose time counts as the prompt's
    step_seconds: float = 0.0

    def __add__(self, other: Timings) -> Timings:
        return Timings(*(a + b for a, b in zip(astuple(self), astuple(other))))


@torch.inference_mode()
def generate(
    model: Llama,
    prompt: list[int],
    state: State | None = None,
    n: int = -1,
    sampling: Sampling | None = None,
    eos: Collection[int] | None = None,
    ignore_eos: bool = False,
    timings: Timings | None = None,
    progress: Callable[[int, int], None] | None = None,
    decode: Callable[..., Iterator[int]] | None = None,
    bias: Mapping[int, float] | None = None,
    constraint: Constraint | None = None,
) -> Iterator[int]:
    """Evaluate the prompt, then yield new tokens: at most n (no limit if n is negative), until an
    eos (which is yielded) or a full context.

    state: the sequence to go on with, by default a new one. What the prompt has in common with it,
    from the first token on, is not evaluated again. sampling: by default the model's. eos: by
    default the config's. progress: see prefill. decode: a replacement for decoding token by token,
    such as Speculation.decode; when it ends, state.pos is at the last token that it yielded, which
    is not evaluated, and need not be in state.tokens. bias: added to the logits of some ids.
    constraint: says which tokens may come next, and ends the text. Raises what Llama.check does,
    ValueError if the prompt is longer than the context, RuntimeError if the logits are not
    finite."""
    model.check(prompt)
    state = state or State(model)
    if eos is None:
        eos = model.config.eos_ids
    # A tokenizer without an eos says -1
    eos = {i for i in eos if 0 <= i < model.config.vocab_size}
    state.sampler.set(sampling or model.sampling)
    state.ask(bias, constraint)
    state.ban(sorted(eos) if ignore_eos else [])
    timings = timings or Timings()
    earlier = timings.step_seconds
    asked = time.perf_counter()
    reused = state.reuse(prompt)
    model.prefill(prompt[reused:], state, progress)
    state.remember(prompt)
    timings.prompt_tokens += len(prompt) - reused
    room = state.size - state.pos
    n = min(n, room) if n >= 0 else room
    if decode is None:
        decode = _decode
        if model.uses_graphs:
            decode = _decode_constrained if constraint else _decode_on_gpu
    with model.ranks.stopping_together(), closing(decode(model, state, n)) as tokens:
        waited = 0.0
        for i, token in enumerate(tokens):
            seconds = time.perf_counter() - asked
            timings.new_tokens += 1
            if i == 0:
                timings.prompt_seconds += seconds
                busy_before = state.busy
            else:
                waited += seconds
                timings.steps += 1
                timings.step_seconds = earlier + max(waited, state.busy - busy_before)
            if token < 0:
                raise RuntimeError(not_finite(model))
            yield token
            asked = time.perf_counter()
            if token in eos and not ignore_eos or constraint and constraint.ended:
                return


def choose_next(model: Llama, state: State, logits: Tensor) -> None:
    """Sample the token at state.pos from logits [V], or the T tokens that end there from [T, V],
    into state.host_tokens. A single one is also written to state.tokens. logits may be
    overwritten."""
    rows = logits.view(-1, model.config.vocab_size)
    asked = state.adjustment
    if any(asked.parts):
        model.ops.adjust(rows, asked, state.sampler)
    model.ops.sample(rows, state.tokens, state.host_tokens, state.device_pos, state.sampler)
    if asked.counted:
        assert len(rows) == 1, "penalties depend on the token before"
        asked.count(state.tokens.index_select(0, state.device_pos))


def sample_next(model: Llama, state: State, logits: Tensor) -> int:
    """Sample the token at state.pos, wait for it and return it: -1 if the logits are not finite."""
    if state.constraint:
        state.adjustment.mask.copy_(state.constraint.mask())
    choose_next(model, state, logits)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    token = int(state.host_tokens[state.pos])
    if state.constraint and token >= 0:
        state.constraint.accept(token)
    return token


def _decode(model: Llama, state: State, n: int) -> Iterator[int]:
    """Up to n tokens, one after the other; each is evaluated only when the next is asked for."""
    for i in range(n):
        yield sample_next(model, state, state.logits)
        if i + 1 < n:
            model.step(1, state)


def _decode_on_gpu(model: Llama, state: State, n: int) -> Iterator[int]:
    """The same, as replays of one CUDA graph (sample, then evaluate what was sampled), with the
    host one step ahead: while it reads a token, the GPU computes the next. Token and position stay
    on the device."""
    if n == 0:
        return
    graph = model.graph(state)
    stream = torch.cuda.current_stream(model.device)
    event = partial(torch.cuda.Event, enable_timing=True)
    begun = [event(), event()]
    done = [event(), event()]
    first = state.pos
    read = 0
    try:
        for launched in range(n + 1):
            if launched < n:
                begun[launched % 2].record(stream)
                graph.replay()
                done[launched % 2].record(stream)
            if launched > 0:
                read = launched - 1
                done[read % 2].synchronize()
                state.busy += begun[read % 2].elapsed_time(done[read % 2]) / 1e3
                state.pos = first + read
                yield int(state.host_tokens[state.pos])
    finally:
        state.seek(first + read)


def _decode_constrained(model: Llama, state: State, n: int) -> Iterator[int]:
    """The same where a constraint has to know each token before the next is sampled. It computes
    its mask while the GPU evaluates the token, as a replay of another graph."""
    begin = state.pos
    read = 0
    try:
        for read in range(n):
            token = sample_next(model, state, state.logits)
            if read + 1 < n and not state.constraint.ended:
                model.step_graph(state).replay()
                state.pos += 1
            yield token
    finally:
        state.seek(begin + read)


def not_finite(model: Llama) -> str:
    """What to tell the user about logits that are not finite: which tensor is to blame, if any."""
    if model.checkpoint:
        dtype = storage_dtype(model.backend, model.dtype, model.device)
        if bad := model.checkpoint.first_bad_tensor(dtype):
            return f"the logits are not finite: {bad}"
    overflow = "the activations overflow; try dtype bf16 or fp32"
    return f"the logits are not finite, although every weight is: {overflow}"
