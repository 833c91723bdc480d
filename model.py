"""Llama 2: configuration, weights, forward. engine.py says which tokens are evaluated next. Shape
letters as in kernels.py."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import experts
import kernels
from cards.cpu import storage_dtype
from formats import Matrix
from products import copy_bytes
from ranks.processes import Ranks
from sampling import Sampling

if TYPE_CHECKING:
    from loading.checkpoint import Checkpoint
    from passes import Pass
    from ranks.exchange import Exchange

CPU_CACHE_BYTES = 32 << 20  # of weights, which the caches of a CPU hold


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
    # (beta, length): q is multiplied by 1 + beta log(1 + position // length) after RoPE
    q_scaling: tuple[float, int] | None = None
    nope_layers: tuple[int, ...] = ()  # those without RoPE, neither divisors nor gain
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
    # What loading multiplies tensors by: pairs of a field of Weights or LayerWeights and a factor
    factors: tuple[tuple[str, float], ...] = ()
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
    def widest(self) -> int:
        """Elements of a prompt's activations for each token, where they are widest."""
        F = self.hidden_dim
        feed_forward = 3 * F
        if self.n_experts:  # w2 may need a second copy of the hidden values, in its column order
            feed_forward = self.experts_per_token * max(3 * F, 2 * F + self.dim)
        return 2 * self.dim + max(feed_forward, 2 * self.q_dim + 2 * self.kv_dim)

    @property
    def output_rows(self) -> int:
        return -(-self.vocab_size // self.ranks)


# ---- weights


@dataclass
class LayerWeights:
    """The tensors of a layer. A matrix brings its bias, if its products have one."""

    attention_norm: Tensor | None  # [C]; None in a head, see speculation/heads.py
    wqkv: Matrix  # [(H + 2 KH) D, C]: wq, wk, wv stacked
    wo: Matrix  # [C, H D]
    ffn_norm: Tensor  # [C]
    w13: Matrix  # [2 F, C]: the rows of w1 and w3 interleaved; experts one after the other
    w2: Matrix  # [C, F]; experts one after the other
    qk_norm: Tensor | None = None  # [2, D]: the weights of q's norm, then of k's
    router: Matrix | None = None  # [E, C], never in a format; None in a layer without experts
    index: int = 0  # of the layer, from 0 on: its keys and values are Pass.k[index], v[index]

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
    def format_names(self) -> str:
        """The formats of its matrices, in words; empty if there are none."""
        return enumerated({m.format.name for m in self.matrices if m.format})


def enumerated(names: Collection[str]) -> str:
    """The names in order, as in "a, b and c"."""
    *others, last = sorted(names) or [""]
    return f"{', '.join(others)} and {last}" if others else last


# ---- the model


@dataclass
class Llama:
    """A loaded model: what forward needs."""

    config: Config
    weights: Weights = field(repr=False)
    backend: str  # whose ops run it: "torch" or "triton"
    device: torch.device
    dtype: torch.dtype
    ctx_size: int  # positions of a sequence, unless another size is given
    # With the config of the whole model, however many ranks share it. None if the weights are random
    checkpoint: Checkpoint | None = None
    kv_fp8: bool = False  # keys and values in 8 bits
    accumulate: str = "auto"  # how a prompt's products are summed, see kernels.ops
    ranks: Ranks = Ranks()  # the processes that share it
    sampling: Sampling = Sampling()  # the checkpoint's own
    exchange: Exchange | None = field(default=None, repr=False)  # if ranks have one
    ops: SimpleNamespace = field(init=False, repr=False)
    whole_ops: SimpleNamespace = field(init=False, repr=False)  # for what each rank has whole

    def __post_init__(self) -> None:
        self.ops = self.whole_ops = kernels.ops(self.backend, self.accumulate)
        if self.ranks.size > 1:
            from ranks.exchange import cut_ops

            fp16_sums = self.accumulate == "fp16"
            self.ops = cut_ops(self.ranks, self.ops, self.exchange, fp16_sums)

    def forward(self, pass_: Pass, logits: Tensor) -> Tensor:
        """Evaluate a pass: T tokens of one or several sequences. Fills the logits of its rows, float32
        [R, V], and returns them."""
        ops, w = self.ops, self.weights
        x = ops.embedding(w.embedding, pass_)
        q_scale = pass_.q_scale
        if q_scale is not None:
            q_scale = q_scale.index_select(0, pass_.position)
        for layer in w.layers:
            for index, kept in pass_.kept:
                if index == layer.index:
                    kept.copy_(x)
            q = ops.rmsnorm_qkv_rope(x, layer, pass_)
            if q_scale is not None:
                q.mul_(q_scale)
            x = ops.linear_add(ops.attention(q, layer, pass_), layer.wo, x)
            routes = ops.route(x, layer, pass_)
            h = ops.rmsnorm_swiglu(x, layer, pass_, routes)
            x = ops.linear_add(h, layer.w2, x, routes)
        if pass_.rows is not None:
            x = x.index_select(0, pass_.rows)
        return ops.rmsnorm_linear(x, w.norm, w.output, pass_, logits)

    def prompt_memory(self, T: int) -> int:
        """Bytes that a prompt of T tokens needs at once: its activations where they are widest, and
        the largest copy of a matrix that a product makes. Keys and values in 8 bits, which
        attention decodes, come on top."""
        c = self.config
        copies = [0]
        for layer in self.weights.layers:
            of_experts = (layer.w13, layer.w2) if layer.router else ()
            for m in layer.matrices:
                if m in of_experts:
                    each = T * c.experts_per_token // c.n_experts
                    copies.append(experts.copy_bytes(m, self.accumulate, each))
                else:
                    copies.append(copy_bytes(m, self.dtype, self.accumulate))
        return T * c.widest * self.dtype.itemsize + max(copies)

    @property
    def uses_graphs(self) -> bool:
        """Whether decode steps and prompts are captured as CUDA graphs."""
        return self.device.type == "cuda" and self.backend == "triton"

    @property
    def suits_one_thread(self) -> bool:
        """Whether one thread is best on a CPU: for matrices in its caches, threads mostly wait for
        each other."""
        return sum(m.nbytes for m in self.weights.matrices) <= CPU_CACHE_BYTES

    @property
    def kv_dtype(self) -> torch.dtype:
        return torch.int8 if self.kv_fp8 else self.dtype


def rope_tables(config: Config, length: int, device: torch.device) -> tuple[Tensor, ...]:
    """For each layer [length, D/2, 2] float32: cosine and sine of position * theta^(-2i/D), divided and
    scaled as the config says; 1 and 0 in layers without RoPE. Layers share two tables at most."""
    freqs = config.rope_theta ** -(
        torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    )
    if config.rope_factors:
        freqs = freqs / torch.tensor(config.rope_factors, dtype=torch.float64)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), freqs)
    rotate = config.rope_gain * torch.stack((angles.cos(), angles.sin()), -1).float().to(device)
    if not config.nope_layers:
        return (rotate,) * config.n_layers
    keep = torch.zeros_like(rotate)
    keep[..., 0] = 1
    layers = range(config.n_layers)
    return tuple(keep if layer in config.nope_layers else rotate for layer in layers)


def q_scales(config: Config, length: int, device: torch.device) -> Tensor | None:
    """What q is multiplied by at each position, float32 [length, 1, 1]. Returns None if that is 1."""
    if config.q_scaling is None or length <= config.q_scaling[1]:
        return None
    beta, every = config.q_scaling
    times = torch.arange(length, dtype=torch.float64) // every
    return (1 + beta * times.log1p()).float().view(-1, 1, 1).to(device)


def not_finite(model: Llama) -> str:
    """What to tell the user about logits that are not finite: which tensor is to blame, if any."""
    if model.checkpoint:
        dtype = storage_dtype(model.backend, model.dtype, model.device)
        if bad := model.checkpoint.first_bad_tensor(dtype):
            return f"the logits are not finite: {bad}"
    overflow = "the activations overflow; try dtype bf16 or fp32"
    return f"the logits are not finite, although every weight is: {overflow}"
