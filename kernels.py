"""Every op of the model. One op is one block: the formula and its shapes, then a reference in plain torch.

Shape letters, used everywhere: T new tokens, S cached positions, H query heads, KH key/value heads, D head_dim,
C dim, F hidden_dim, V vocabulary, L layers. One sequence at a time, so there is no batch axis.

The file ends with the op table. `reference` runs on any torch device: it is the CPU path.
`pos`, wherever it appears, is an int32 tensor of one element: how many positions are already in the cache.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Matrix:
    """A weight matrix W of N rows and K columns, applied as y = x W^T."""

    data: Tensor  # [N, K] row-major, or the same in oneDNN's blocked layout (see `pack`)

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    def pack(self) -> "Matrix":
        """For a CPU in bf16: oneDNN's blocked layout, which streams 1.4 to 1.7 times faster than row-major at T = 1."""
        if self.data.device.type == "cpu" and self.data.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():
            self.data = torch.ops.mkldnn._reorder_linear_weight(self.data, 1)
        return self

    def dense(self) -> Tensor:
        """[N, K] row-major, whatever the layout."""
        return self.data.to_dense() if self.data.is_mkldnn else self.data


def linear_ref(x: Tensor, w: Matrix) -> Tensor:
    """y = x W^T. x [T, K] -> [T, N]."""
    if w.data.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, w.data, None, "none", [], "")
    return F.linear(x, w.data)


# ---- embedding: x = table[tokens]. tokens int32 [S], of which T from pos on; table [V, C] -> [T, C]


def embedding_ref(tokens: Tensor, pos: Tensor, T: int, table: Tensor) -> Tensor:
    first = int(pos)
    return F.embedding(tokens[first : first + T], table)


# ---- rmsnorm: y = x / sqrt(mean(x^2) + eps) * weight. x [T, C], weight [C] -> [T, C]  (Zhang and Sennrich, 2019)


def rmsnorm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


# ---- rope: neighbouring pairs (x[2i], x[2i+1]) turned by the angle table[position, i]. x [T, N, D] -> [T, N, D]
#      table [max_seq_len, D/2, 2] float32 holds the cosine and the sine  (Su et al., 2021)


def rope_ref(x: Tensor, table: Tensor, pos: Tensor) -> Tensor:
    first, T = int(pos), x.shape[0]
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turn = torch.view_as_complex(table[first : first + T]).unsqueeze(1)
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


# ---- rmsnorm_qkv_rope: q, k, v = split(rmsnorm(x) Wqkv^T); q and k turned by rope; k, v written into the cache at pos.
#      x [T, C], wqkv [(H + 2 KH) D, C], caches of one layer [KH, S, D] -> q [T, H, D]


def rmsnorm_qkv_rope_ref(
    x: Tensor, norm: Tensor, wqkv: Matrix, table: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor, eps: float
) -> Tensor:
    first, T = int(pos), x.shape[0]
    KH, _, D = k_cache.shape
    qkv = linear_ref(rmsnorm_ref(x, norm, eps), wqkv).view(T, -1, D)
    H = qkv.shape[1] - 2 * KH
    qk = rope_ref(qkv[:, : H + KH], table, pos)
    k_cache[:, first : first + T] = qk[:, H:].transpose(0, 1)
    v_cache[:, first : first + T] = qkv[:, H + KH :].transpose(0, 1)
    return qk[:, :H]


# ---- attention: softmax(q k^T / sqrt(D)) v. Token t sees positions 0 .. pos + t; H / KH query heads share one k, v head.
#      q [T, H, D], caches of one layer [KH, S, D] -> [T, H D]


def attention_ref(q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor) -> Tensor:
    T, H, D = q.shape
    KH, length = k_cache.shape[0], int(pos) + T
    q32 = q.float().view(T, KH, H // KH, D).permute(1, 2, 0, 3)  # [KH, H / KH, T, D]
    k = k_cache[:, None, :length].float()
    v = v_cache[:, None, :length].float()
    if T == 1:  # the heads of a group stand as rows of one product, so that k and v are read once
        y = F.scaled_dot_product_attention(q32.transpose(1, 2), k, v).transpose(1, 2)
    else:
        mask = torch.ones(T, length, dtype=torch.bool, device=q.device).tril(length - T)
        k, v = k.expand(KH, H // KH, length, D), v.expand(KH, H // KH, length, D)
        y = F.scaled_dot_product_attention(q32, k, v, attn_mask=mask)
    return y.permute(2, 0, 1, 3).reshape(T, H * D).to(q.dtype)


# ---- linear_add: residual += x W^T, in place. x [T, K], W [C, K], residual [T, C] -> residual


def linear_add_ref(x: Tensor, w: Matrix, residual: Tensor) -> Tensor:
    return residual.add_(linear_ref(x, w))


# ---- rmsnorm_swiglu: silu(a) * b with a, b = rmsnorm(x) W1^T, rmsnorm(x) W3^T. x [T, C] -> [T, F]  (Shazeer, 2020)
#      w13 [2 F, C] holds the rows of w1 and w3 in turn, so that a and b of one output are neighbours


def rmsnorm_swiglu_ref(x: Tensor, norm: Tensor, w13: Matrix, eps: float) -> Tensor:
    a, b = linear_ref(rmsnorm_ref(x, norm, eps), w13).unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(a) * b


# ---- rmsnorm_linear: logits = rmsnorm(x) W^T in float32. x [T, C], W [V, C] -> [T, V]


def rmsnorm_linear_ref(x: Tensor, norm: Tensor, w: Matrix, eps: float) -> Tensor:
    return linear_ref(rmsnorm_ref(x, norm, eps), w).float()


# ---- sample: the next token from logits float32 [V]; -1 when they are not finite. tokens int32 [S] -> tensor of one id.
#      In llama.cpp's order: repetition penalty over the last tokens, top-k, top-p, min-p, temperature, draw. The draw is
#      the inverse of the cumulative distribution at uniform(seed, pos), so a seed gives the same text on every device.
#      Each filter keeps the tokens at or above one threshold, so equals at the edge stay together.


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temp 0 is greedy; top_k 0, top_p 1, min_p 0 and repeat_penalty 1 are off."""

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # tokens that the penalty looks back on; -1 is all of them
    seed: int = 0


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 24 random bits, from a seed and a position: SplitMix64's output function (Vigna, 2015)."""
    mask = (1 << 64) - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return ((z ^ (z >> 31)) >> 40) / (1 << 24)


def sample_ref(logits: Tensor, tokens: Tensor, pos: Tensor, s: Sampling) -> Tensor:
    position = int(pos)
    if not torch.isfinite(logits.sum()):
        return torch.tensor([-1], device=logits.device)
    if s.repeat_penalty != 1:
        first = 0 if s.repeat_last_n < 0 else max(0, position - s.repeat_last_n)
        recent = tokens[first:position].long().unique()
        seen = logits[recent]
        logits = logits.index_copy(0, recent, torch.where(seen > 0, seen / s.repeat_penalty, seen * s.repeat_penalty))
    if s.temp == 0:
        return logits.argmax(keepdim=True)
    ranked = logits.topk(s.top_k if 0 < s.top_k < len(logits) else len(logits)).values  # what top-k keeps, best first
    if s.top_p < 1:
        p = ranked.softmax(0)
        ranked = ranked[: int((p.cumsum(0) - p < s.top_p).sum().clamp(min=1))]
    floor = ranked[-1]
    if s.min_p > 0:
        floor = torch.maximum(floor, ranked[0] + torch.tensor(s.min_p).log())
    p = torch.where(logits >= floor, (logits - ranked[0]) / s.temp, -torch.inf).exp()
    cdf = p.double().cumsum(0)
    drawn = torch.searchsorted(cdf, uniform(s.seed, position) * cdf[-1], right=True)
    return drawn.clamp(max=int(p.nonzero()[-1])).view(1)


reference = SimpleNamespace(
    embedding=embedding_ref,
    rmsnorm=rmsnorm_ref,
    rope=rope_ref,
    rmsnorm_qkv_rope=rmsnorm_qkv_rope_ref,
    attention=attention_ref,
    linear_add=linear_add_ref,
    rmsnorm_swiglu=rmsnorm_swiglu_ref,
    rmsnorm_linear=rmsnorm_linear_ref,
    sample=sample_ref,
)
