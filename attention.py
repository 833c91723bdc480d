"""Attention: softmax(q k^T / sqrt(D)) v. Row t of a segment sees positions 0 .. start + t of its
sequence; G = H / KH query heads share one k, v head.

q [T, H, D], keys and values of one layer [KH, P, D] -> [T, H D]

Three kernels: for one query row per key/value head, for a few rows, also of several segments, and
for a prompt, which is a single segment. For Hopper, cards/hopper.py has one for up to 64 tokens and
128 rows, and one for long prompts.
All keep a running softmax in base 2, with the factor log2(e) folded into qk_scale (online softmax:
Milakov and Gimelshein, 2018)."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from cards import hopper
from cards.cpu import without_onednn
from cards.sizes import SplitSizes, few_rows_sizes, single_row_sizes, split_sizes
from formats import plain_values
from fp8 import E4M3, e4m3_encode
from launch import (
    EMULATED,
    begin_split,
    capability,
    gdc_launch_dependents,
    gdc_wait,
    is_last,
    jit,
    launch,
    processors,
    rows_of_program,
    saturated,
    segment_of,
    split_of,
    tl,
    triton,
)

if TYPE_CHECKING:
    from model import LayerWeights
    from passes import Pass

# ---- keys and values as the cache stores them


def to_cache_ref(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values in the type in which the cache stores them. In E4M3, what is not finite becomes
    NaN, so that it is noticed."""
    if dtype != torch.int8:
        return x
    return E4M3.round(torch.where(torch.isfinite(x), x, torch.nan))


@jit
def to_cache(x, cache, IN_8_BITS: tl.constexpr):
    """to_cache_ref in a kernel."""
    return e4m3_encode(x) if IN_8_BITS else x.to(cache.dtype.element_ty)


def cached_ref(cache: Tensor) -> Tensor:
    """Stored keys or values in fp32."""
    return E4M3.floats(cache) if cache.dtype == torch.int8 else cache.float()


# ---- the reference

# The reference takes some tokens of a prompt at a time: as many as keep the mask below MASK_BYTES,
# and at most MOST_TOKENS, so that little is computed for keys that a token does not see. On a CPU,
# torch's function is a fifth slower with fewer than 768 rows (tokens times G), which MASK_BYTES
# causes beyond 34,000 positions.
MASK_BYTES = 128 << 20
MOST_TOKENS = 256
MASK_ELEMENT = 5  # bytes: a bool, and the float32 that torch makes of it


def attention_ref(q: Tensor, layer: LayerWeights, pass_: Pass) -> Tensor:
    k, v = pass_.k[layer.index], pass_.v[layer.index]
    parts = []
    for first, start, begin, count in pass_.segments.tolist():
        sees = slice(first, first + start + count)
        parts.append(_attend_segment_ref(q[begin : begin + count], k[:, sees], v[:, sees]))
    y = parts[0] if len(parts) == 1 else torch.cat(parts)
    padding = len(q) - len(y)
    return functional.pad(y, (0, 0, 0, padding)) if padding else y


def _attend_segment_ref(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A segment's attention. q [T, H, D], k and v [KH, S, D] as they are stored, of all positions
    up to its last one -> [T, H D]"""
    T, H, D = q.shape
    length = k.shape[1]
    if T == 1 and q.is_cpu and q.dtype == k.dtype == torch.bfloat16:
        return _attend_one_bf16(q, k, v)
    k = cached_ref(k)
    v = cached_ref(v)
    if T == 1:
        return _attend_one_ref(q, k, v).to(q.dtype)
    at_once = MASK_BYTES // (MASK_ELEMENT * (H // len(k)) * length)
    at_once = max(1, min(at_once, MOST_TOKENS))
    parts, end = [], length - T
    for part in q.split(at_once):
        end += len(part)
        parts.append(_attend_ref(part, k[:, :end], v[:, :end]))
    return torch.cat(parts).to(q.dtype)


def _attend_one_bf16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One token's attention on a CPU, in bf16 with fp32 sums: keys and values are read as they are
    stored. q [1, H, D], k and v [KH, S, D] -> [1, H D]"""
    _, H, D = q.shape
    rows = q.view(1, len(k), -1, D)  # the heads of a group are rows of one product
    return without_onednn(_attend_rows, rows, k[None], v[None]).view(1, H * D)


def _attend_one_ref(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One token's attention in fp32. q [1, H, D], k and v float32 [KH, S, D] -> float32 [1, H D].
    For so few rows in fp32 torch's own function is no faster on a CPU, and slower on some."""
    _, H, D = q.shape
    rows = q.float().view(len(k), -1, D)  # the heads of a group are rows of one product
    scores = torch.bmm(rows, k.mT).div_(math.sqrt(D))
    return torch.bmm(scores.softmax(-1), v).view(1, H * D)


def _attend_ref(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last tokens' attention. q [T, H, D], k and v float32 [KH, S, D] -> float32 [T, H D]"""
    T, H, D = q.shape
    KH, S, _ = k.shape
    G = H // KH
    # The heads of a group are rows of one product, so k and v are read once and are not expanded:
    # with expanded keys and a mask, torch's result is wrong for some lengths on a GPU (compare
    # pytorch issue 191937)
    rows = q.float().view(T, KH, G, D).transpose(0, 1).reshape(KH, 1, T * G, D)
    sees = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    mask = sees.repeat_interleave(G, 0)
    k, v = k[:, None], v[:, None]
    y = _attend_rows(rows, k, v, mask)
    return y.view(KH, T, G * D).transpose(0, 1).reshape(T, H * D)


def _attend_rows(rows: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """torch's attention, which mistakes a row whose scores are all NaN for a masked one and returns
    0. The scores are all NaN if q is not finite, or if all keys are NaN; then q or the first key,
    times 0, makes the row NaN again."""
    y = functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
    return y.addcmul_(rows, k[:, :, :1], value=0)


# ---- in kernels: a block of keys and values


@jit
def _load_cached(cache, offs_n, offs_d, mask_n, D: tl.constexpr):
    """Keys or values [BLOCK_N, BLOCK_D] of a head, as they are stored; zero where mask_n is off.
    Without a mask all are loaded."""
    offs = offs_n[:, None] * D + offs_d[None, :]
    if mask_n is None and offs_d.shape[0] == D:
        return tl.load(cache + offs)
    mask = offs_d[None, :] < D if mask_n is None else mask_n[:, None] & (offs_d[None, :] < D)
    return tl.load(cache + offs, mask=mask, other=0)


@jit
def _dot(a, b, FP16_SUMS: tl.constexpr):
    """a b in fp32; fp32 operands are not rounded to TF32."""
    if EMULATED:  # the interpreter's own bf16 products are wrong
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    if FP16_SUMS:
        return saturated(tl.dot(a, b, out_dtype=tl.float16).to(tl.float32), True)
    return tl.dot(a, b, input_precision="ieee")


@jit
def _attend(
    q, k, v, row_max, row_sum, acc, mask, qk_scale, DECODE: tl.constexpr, FP16_SUMS: tl.constexpr
):
    """Add a block of keys and values, as they are stored, to the running softmax of the rows of q.
    row_max is the maximum of q k^T before scaling, so that scaling a score and subtracting the
    maximum are one instruction. mask is None if every row sees the whole block."""
    k = DECODE(k).to(q.dtype)
    v = DECODE(v).to(q.dtype)
    scores = _dot(q, tl.trans(k), FP16_SUMS)
    if mask is not None:
        scores = tl.where(mask, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # 0 for a row that has seen nothing yet
    base = tl.where(new_max == float("-inf"), 0.0, new_max) * qk_scale
    p = tl.exp2(scores * qk_scale - base[:, None])
    rescale = tl.exp2(row_max * qk_scale - base)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    acc = acc * rescale[:, None] + _dot(p.to(v.dtype), v, FP16_SUMS)
    return new_max, row_sum, acc


# ---- a prompt

# How many bytes of keys and values the programs that run at the same time share: well within an L2
SHARED_KEYS = 16 << 20


@jit
def _attention_kernel(
    q, k_cache, v_cache, out, segments, P, T, qk_scale, v_scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    POSITIONS_AT_ONCE: tl.constexpr,
    DECODE: tl.constexpr, FP16_SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A prompt: BLOCK_M tokens of one head, over the keys they see."""
    gdc_launch_dependents(PDL)
    first, start_pos, _, count, _ = segment_of(segments, 0, True, T)
    heads_at_once = tl.maximum(POSITIONS_AT_ONCE // (start_pos + count), 1) * G
    pid_m, head = rows_of_program(tl.program_id(0), tl.cdiv(T, BLOCK_M), heads_at_once, H)
    row = pid_m * BLOCK_M
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    offs_head = ((head // G).to(tl.int64) * P + first) * D
    k_head = k_cache + offs_head
    v_head = v_cache + offs_head
    gdc_wait(PDL)
    mask_q = (offs_m[:, None] < T) & (offs_d[None, :] < D)
    offs_q = (offs_m[:, None] * H + head) * D + offs_d[None, :]
    q_tile = tl.load(q + offs_q, mask=mask_q, other=0.0)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Whole blocks of keys that every row sees. A program that has only padding reads none
    end = tl.where(row < count, start_pos + tl.minimum(count, row + BLOCK_M), 0)
    diagonal = tl.minimum((start_pos + row + 1) // BLOCK_N * BLOCK_N, end)
    for n in range(0, diagonal, BLOCK_N):
        k = _load_cached(k_head, n + offs_n, offs_d, None, D)
        v = _load_cached(v_head, n + offs_n, offs_d, None, D)
        row_max, row_sum, acc = _attend(
            q_tile, k, v, row_max, row_sum, acc, None, qk_scale, DECODE, FP16_SUMS
        )
    # Those on the diagonal
    for n in range(diagonal, end, BLOCK_N):
        k = _load_cached(k_head, n + offs_n, offs_d, n + offs_n < end, D)
        v = _load_cached(v_head, n + offs_n, offs_d, n + offs_n < end, D)
        mask = (n + offs_n)[None, :] <= start_pos + offs_m[:, None]
        row_max, row_sum, acc = _attend(
            q_tile, k, v, row_max, row_sum, acc, mask, qk_scale, DECODE, FP16_SUMS
        )
    pointers = out + offs_q
    y = tl.where(offs_m[:, None] < count, acc * (v_scale / row_sum)[:, None], 0.0)
    tl.store(pointers, y.to(out.dtype.element_ty), mask=mask_q)


# ---- one token, or a few
#
#      Each segment has programs of its own. Few rows make for few programs, too few to read keys and
#      values at full speed, so the positions are split among programs, each of which ends with a
#      softmax over its own part: maximum, sum and unnormalised result of each row. The last program
#      to finish merges them (launch.is_last). In a short context some programs get no positions.
#      They exit without waiting, since the next kernel, which starts early, needs their registers.


@jit
def _merge_splits(
    out, partial, ends, group, used, begin, head, top, count, written,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, MERGE: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge the softmaxes of the splits into one, MERGE of them at a time, for the rows of a segment
    from `top` on, at most ROWS. It has `count` rows; those behind, up to `written`, become 0."""
    count -= top
    rows = tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    splits = tl.arange(0, SPLITS)
    indices = (group * SPLITS + splits[:, None]) * BLOCK_M + rows[None, :]
    mask = (splits[:, None] < used) & (rows[None, :] < count)
    row_max = tl.max(tl.load(ends + indices * 2, mask=mask, other=-1e30, cache_modifier=".cg"), 0)
    row_sum = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in tl.static_range(0, SPLITS, MERGE):
        split = first + tl.arange(0, MERGE)
        index = (group * SPLITS + split[:, None]) * BLOCK_M + rows[None, :]
        mask = (split[:, None] < used) & (rows[None, :] < count)
        peak = tl.load(ends + index * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
        weight = tl.exp2(peak - row_max[None, :])
        total = tl.load(ends + index * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        row_sum += tl.sum(weight * total, 0)
        mask_part = mask[:, :, None] & (offs_d < D)[None, None, :]
        offs_part = index[:, :, None] * D + offs_d[None, None, :]
        part = tl.load(partial + offs_part, mask=mask_part, other=0.0, cache_modifier=".cg")
        y += tl.sum(weight[:, :, None] * part, 0)
    y = tl.where(rows[:, None] < count, y / row_sum[:, None], 0.0).to(out.dtype.element_ty)
    rows += top
    offs = ((begin + rows // G)[:, None] * H + head * G + (rows % G)[:, None]) * D + offs_d[None, :]
    tl.store(out + offs, y, mask=(rows[:, None] < written) & (offs_d[None, :] < D))


@jit
def _split_attention_kernel(
    q, k_cache, v_cache, out, partial, ends, arrived, segments, P, T, qk_scale, v_scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCKS: tl.constexpr, SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DECODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A few tokens of a segment: the G query heads of one key/value head are rows, G for each token,
    BLOCK_M of them in each of BLOCKS programs, and the positions are split."""
    gdc_launch_dependents(PDL)
    segment, heads, positions = begin_split(
        segments, k_cache, v_cache, P, T, D, BLOCKS, BLOCK_M, SPLITS, BLOCK_N, LEAST
    )
    group, begin, count, written = segment
    head, top, k_head, v_head = heads
    start_pos, used, split, start, end = positions
    rows = top + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    t, g = rows // G, rows % G
    # Before the wait: the part of the first block that earlier passes have stored
    if (split < used) & (top < written * G):
        offs_s = start + offs_n
        mask_old = offs_s < tl.minimum(end, start_pos)
        mask_new = (offs_s >= start_pos) & (offs_s < end)
        k = _load_cached(k_head, offs_s, offs_d, mask_old, D)
        v = _load_cached(v_head, offs_s, offs_d, mask_old, D)
        gdc_wait(PDL)
        mask_row = rows[:, None] < count * G
        mask_q = mask_row & (offs_d[None, :] < D)
        offs_q = ((begin + t[:, None]) * H + head * G + g[:, None]) * D + offs_d[None, :]
        q_tile = tl.load(q + offs_q, mask=mask_q, other=0.0)
        k += _load_cached(k_head, offs_s, offs_d, mask_new, D)
        v += _load_cached(v_head, offs_s, offs_d, mask_new, D)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        mask = (offs_s[None, :] <= start_pos + t[:, None]) & (offs_s[None, :] < end)
        row_max, row_sum, acc = _attend(
            q_tile, k, v, row_max, row_sum, acc, mask, qk_scale, DECODE, False
        )
        # The other blocks of this split
        for n in range(start + BLOCK_N, end, BLOCK_N):
            offs_s = n + offs_n
            k = _load_cached(k_head, offs_s, offs_d, offs_s < end, D)
            v = _load_cached(v_head, offs_s, offs_d, offs_s < end, D)
            mask = (offs_s[None, :] <= start_pos + t[:, None]) & (offs_s[None, :] < end)
            row_max, row_sum, acc = _attend(
                q_tile, k, v, row_max, row_sum, acc, mask, qk_scale, DECODE, False
            )
        acc *= v_scale
        if used == 1:
            y = tl.where(mask_row, acc / row_sum[:, None], 0.0).to(out.dtype.element_ty)
            mask_out = (rows[:, None] < written * G) & (offs_d[None, :] < D)
            tl.store(out + offs_q, y, mask=mask_out)
        else:
            index = (group * SPLITS + split) * BLOCK_M + rows - top
            tl.store(ends + index * 2, row_max * qk_scale)
            tl.store(ends + index * 2 + 1, row_sum)
            tl.store(partial + index[:, None] * D + offs_d[None, :], acc, mask=mask_q)
            if is_last(arrived + group, used):
                _merge_splits(
                    out, partial, ends, group, used, begin, head, top, count * G, written * G,
                    H, G, D, SPLITS, MERGE, BLOCK_M, ROWS, BLOCK_D,
                )  # fmt: skip


@jit
def _single_attention_kernel(
    q, k_cache, v_cache, out, partial, ends, arrived, segments, P, T, qk_scale, v_scale,
    H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, MERGE: tl.constexpr,
    BLOCK_N: tl.constexpr, LEAST: tl.constexpr, BLOCK_D: tl.constexpr, DECODE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token of each segment with as many key/value heads as query heads, without tl.dot, which
    needs 16 rows: each of the BLOCK_N positions read at a time has a running softmax of its own,
    and these are merged at the end."""
    gdc_launch_dependents(PDL)
    head, split, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = segment * H + head
    first, start_pos, begin, _, _ = segment_of(segments, segment, False, T)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    offs_head = (head.to(tl.int64) * P + first) * D
    k_head = k_cache + offs_head
    v_head = v_cache + offs_head
    offs_q = (begin * H + head) * D + offs_d
    # Before the wait: the part of the first block that earlier passes have stored
    used, start, end = split_of(start_pos + 1, split, SPLITS, BLOCK_N, LEAST)
    if split < used:
        mask_old = start + offs_n < tl.minimum(end, start_pos)
        mask_new = start + offs_n == start_pos
        k = _load_cached(k_head + start * D, offs_n, offs_d, mask_old, D)
        v = _load_cached(v_head + start * D, offs_n, offs_d, mask_old, D)
        gdc_wait(PDL)
        q_row = tl.load(q + offs_q, mask=offs_d < D, other=0.0).to(tl.float32) * qk_scale
        k += _load_cached(k_head + start * D, offs_n, offs_d, mask_new, D)
        v += _load_cached(v_head + start * D, offs_n, offs_d, mask_new, D)
        row_max = tl.full([BLOCK_N], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_N], tl.float32)
        acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for n in range(start, end, BLOCK_N):
            # The next block is in flight while this one is used
            k_now, v_now = k, v
            n_next = n + BLOCK_N
            k = _load_cached(k_head + n_next * D, offs_n, offs_d, n_next + offs_n < end, D)
            v = _load_cached(v_head + n_next * D, offs_n, offs_d, n_next + offs_n < end, D)
            scores = tl.sum(DECODE(k_now).to(tl.float32) * q_row[None, :], 1)
            scores = tl.where(n + offs_n < end, scores, float("-inf"))
            # Finite, so that an absent position adds nothing
            new_max = tl.maximum(tl.maximum(row_max, scores), -1e30)
            p = tl.exp2(scores - new_max)
            rescale = tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + p
            acc = acc * rescale[:, None] + p[:, None] * DECODE(v_now).to(tl.float32)
            row_max = new_max
        # Merge the BLOCK_N softmaxes
        peak = tl.max(row_max, 0)
        weight = tl.exp2(row_max - peak)
        total = tl.sum(row_sum * weight, 0)
        y = tl.sum(acc * weight[:, None], 0) * v_scale
        if used == 1:
            tl.store(out + offs_q, (y / total).to(out.dtype.element_ty), mask=offs_d < D)
        else:
            index = group * SPLITS + split
            tl.store(ends + index * 2, peak)
            tl.store(ends + index * 2 + 1, total)
            tl.store(partial + index * D + offs_d, y, mask=offs_d < D)
            if is_last(arrived + group, used):
                _merge_splits(
                    out, partial, ends, group, used, begin, head, 0, 1, 1,
                    H, 1, D, SPLITS, MERGE, 1, 1, BLOCK_D,
                )  # fmt: skip


# ---- launching

# Up to this many query rows per key/value head, attention is bound by reading keys and values, and
# the positions are split
SPLIT_ROWS = 64


def attention(q: Tensor, layer: LayerWeights, pass_: Pass, *, accumulate: str = "auto") -> Tensor:
    T, H, D = q.shape
    k, v = pass_.k[layer.index], pass_.v[layer.index]
    assert all(t.is_contiguous() for t in (q, k, v)) and D % 8 == 0, (q.shape, k.shape, v.shape)
    out = q.new_empty(T, H * D)
    rows = pass_.longest * H // len(k)  # of a segment, at most
    few_rows = None
    if rows > 1 and hopper.attends_few(q, pass_.longest, rows):
        few_rows = few_rows_sizes(q.device)
    if few_rows:
        _launch_few_rows(q, k, v, out, pass_, few_rows)
    elif rows <= SPLIT_ROWS or len(pass_.segments) > 1:
        _launch_split(q, k, v, out, pass_)
    else:
        _launch_prompt(q, k, v, out, pass_, accumulate == "fp16")
    return out


def _constants(q: Tensor, k: Tensor) -> tuple[tuple[float, float], dict]:
    """The scales and the constants that every attention kernel takes."""
    _, H, D = q.shape
    # How keys and values are decoded, and what the decoded ones are multiplied by
    decode, gain = plain_values, 1.0
    if k.dtype == torch.int8:
        format = E4M3.on(q.device)
        decode, gain = format.values_nan, format.gain
    block_d = max(16, triton.next_power_of_2(D))
    constants = dict(H=H, D=D, BLOCK_D=block_d, DECODE=decode)
    return (gain * math.log2(math.e) / math.sqrt(D), gain), constants


def _divided(
    pass_: Pass, KH: int, blocks: int, rows: int, D: int, sizes: SplitSizes
) -> tuple[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]]:
    """The grid: blocks of `rows` rows for each key/value head, splits of the positions, segments. And
    what the splits leave for the last program: results [..., D], maxima and sums, counters."""
    scratch, segments = pass_.scratch, len(pass_.segments)
    groups = KH * blocks * segments
    programs = sizes.programs * processors(scratch.device)
    splits = min(32, triton.next_power_of_2(triton.cdiv(programs, groups)))
    partial = scratch.zeros("partial", groups, splits, rows, D)
    ends = scratch.zeros("ends", groups, splits, rows, 2)
    arrived = scratch.zeros("splits done", groups, dtype=torch.int32)
    return (KH * blocks, splits, segments), (partial, ends, arrived)


def _launch_split(q: Tensor, k: Tensor, v: Tensor, out: Tensor, pass_: Pass) -> None:
    T, H, D = q.shape
    KH, P, _ = k.shape
    rows = pass_.longest * H // KH
    scales, constants = _constants(q, k)
    if rows == 1:
        sizes = single_row_sizes(q.device, len(pass_.segments))
    else:
        sizes = split_sizes(q.device, rows)
    least = 1 if rows == 1 else 16  # rows, and positions: tl.dot needs 16 of each
    padded = min(triton.next_power_of_2(rows), SPLIT_ROWS)
    block_m = max(padded, least)
    block_n = sizes.block if D <= 128 else max(sizes.block // 2, least)
    stages = sizes.stages
    if rows > 1 and q.element_size() == 4:  # which takes twice the shared memory
        block_n = min(block_n, max(least, 4096 // constants["BLOCK_D"]))
        stages = 1
    blocks = triton.cdiv(rows, block_m)
    grid, scratch = _divided(pass_, KH, blocks, block_m, D, sizes)
    _, splits, _ = grid
    constants |= dict(
        SPLITS=splits,
        MERGE=min(splits, max(1, 4096 // (padded * constants["BLOCK_D"]))),
        BLOCK_N=block_n,
        LEAST=max(block_n, sizes.least),
        warps=sizes.warps,
    )
    args = (q, k, v, out, *scratch, pass_.segments, P, T, *scales)
    if rows == 1:
        launch(_single_attention_kernel, grid, q.device, *args, **constants)
    else:
        constants |= dict(G=H // KH, BLOCKS=blocks, BLOCK_M=block_m, ROWS=padded)
        launch(_split_attention_kernel, grid, q.device, *args, **constants, stages=stages)


def _launch_few_rows(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, pass_: Pass, sizes: SplitSizes
) -> None:
    T, H, _ = q.shape
    KH, P, _ = k.shape
    scales, constants = _constants(q, k)
    rows = pass_.longest * H // KH
    blocks = triton.cdiv(rows, hopper.FEW_M)
    block_d = max(64, constants["BLOCK_D"])
    grid, scratch = _divided(pass_, KH, blocks, hopper.FEW_M, block_d, sizes)
    constants |= dict(G=H // KH, BLOCKS=blocks, BLOCK_D=block_d, WARPS=sizes.warps, SPLITS=grid[1])
    constants |= dict(KEPT=8 if rows <= 8 else hopper.FEW_M)
    constants |= dict(LEAST=max(16 * sizes.warps, sizes.least), warps=sizes.warps)
    args = (q, k, v, out, *scratch, pass_.segments, P, T, *scales)
    launch(hopper.few_attention_kernel, grid, q.device, *args, **constants)


def _launch_prompt(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, pass_: Pass, fp16_sums: bool
) -> None:
    T, H, D = q.shape
    P, segments = k.shape[1], pass_.segments
    positions_at_once = SHARED_KEYS // (2 * D * k.element_size())
    scales, constants = _constants(q, k)
    if capability(q.device) == 90 and hopper.attends_prompt(q) and not fp16_sums:
        in_pool = k.dtype != torch.int8
        if not in_pool:
            k, v = decode_caches(k, v, segments, pass_.size, q.dtype)
        hopper.prompt_attention(q, k, v, out, segments, scales[0], positions_at_once, in_pool)
        return
    # These fit into the 99 kB of shared memory that the smallest cards have
    if q.element_size() == 4:
        block_m, block_n, stages = (32, 16, 2) if D > 128 else (64, 32, 2)
    elif D > 128:
        block_m, block_n, stages = 64, 32, 2
    elif T > 64:
        block_m, block_n, stages = 128, 64, 3
    else:
        block_m, block_n, stages = 64, 64, 3
    constants |= dict(
        G=H // len(k),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        POSITIONS_AT_ONCE=positions_at_once,
        FP16_SUMS=fp16_sums,
        warps=max(4, block_m // 16),
        stages=stages,
    )
    grid = (triton.cdiv(T, block_m) * H,)
    args = (q, k, v, out, segments, P, T, *scales)
    launch(_attention_kernel, grid, q.device, *args, **constants)


# ---- keys and values in 8 bits, decoded for Hopper's kernel for prompts


@jit
def _decode_caches_kernel(
    k_cache, v_cache, k, v, segments, P, SIZE, D,
    BLOCK: tl.constexpr, DECODE: tl.constexpr, GAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Decode one head's keys and values of the positions that the first segment sees."""
    gdc_launch_dependents(PDL)
    first, start_pos, _, count, _ = segment_of(segments, 0, True, 0)
    head = tl.program_id(0).to(tl.int64)
    k_cache += (head * P + first) * D
    v_cache += (head * P + first) * D
    k += head * SIZE * D
    v += head * SIZE * D
    gdc_wait(PDL)
    end = (start_pos + count) * D
    for start in range(tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        # Eight elements per thread, in the loads as in the stores
        offs = tl.max_contiguous(start + tl.arange(0, BLOCK), 8)
        keys = DECODE(tl.load(k_cache + offs, mask=offs < end, other=0))
        keys = keys.to(tl.float32) * GAIN
        values = DECODE(tl.load(v_cache + offs, mask=offs < end, other=0))
        values = values.to(tl.float32) * GAIN
        tl.store(k + offs, keys.to(k.dtype.element_ty), mask=offs < end)
        tl.store(v + offs, values.to(v.dtype.element_ty), mask=offs < end)


def decode_caches(
    k_cache: Tensor, v_cache: Tensor, segments: Tensor, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values [KH, P, D] in E4M3 of the sequence that the first segment belongs to, of at
    most `size` positions, decoded to a 16-bit type as far as the segment sees them: [KH, size, D].
    The rest is not written."""
    KH, P, D = k_cache.shape
    device = k_cache.device
    format = E4M3.on(device)
    k, v = torch.empty(2, KH, size, D, dtype=dtype, device=device)
    grid = (KH, triton.cdiv(16 * processors(device), KH))
    args = (k_cache, v_cache, k, v, segments, P, size, D)
    sizes = dict(BLOCK=4096, DECODE=format.values_nan, GAIN=format.gain)
    launch(_decode_caches_kernel, grid, device, *args, **sizes)
    return k, v
