"""Each op of the model beside its ceiling and beside plain PyTorch.

python dev/kernels.py -m random:7b:8 --dtype fp16 -p 2048     # one token, and a prompt of 2048
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench
from cards.cpu import cpu_product_dtype
from dev.passes import device_time
from formats import Matrix
from model import Llama
from passes import Pass, Passes
from talk import bench_flags
from talk.cli import Parser, note, use_safe_streams

LEGEND = """\
bound by: what takes longer at its ceiling, moving the op's bytes or its arithmetic
% of ceiling: the time at that ceiling, of the time taken
x PyTorch: how many times as long the same takes in plain PyTorch"""

LAYER_PRODUCTS = ("rmsnorm_qkv_rope", "wo", "rmsnorm_swiglu", "w2")
PRODUCTS = (*LAYER_PRODUCTS, "rmsnorm_linear")  # in the order of a forward pass


def cost(op: str, model: Llama, T: int, start_pos: int = 0) -> tuple[float, float]:
    """Bytes that one launch of an op must move and operations that it must do, for T tokens after
    start_pos others: every input is read once, every output written once, and a multiply-add counts
    as two operations. Where layers have matrices in different formats, the mean of their bytes
    counts. Of experts those are read that some token chooses, if each chooses at random."""
    c = model.config
    w = model.weights
    C, F, V, q, kv = c.dim, c.hidden_dim, c.output_rows, c.q_dim, c.kv_dim
    size = model.dtype.itemsize
    slots = 1
    chosen = 1.0  # the part of the experts that a token goes through
    if c.n_experts:
        slots = c.experts_per_token
        chosen = slots / c.n_experts

    def product(matrices: list[Matrix], others: float, part: float = 1.0) -> tuple[float, float]:
        """others: values that are read and written, apart from the matrix and its input. part: of
        the matrix, by which a token is multiplied."""
        N, K = matrices[0].shape
        read = 1 - (1 - part) ** T
        nbytes = fmean(m.nbytes for m in matrices)
        return read * nbytes + size * (T * K + others), 2.0 * T * part * N * K

    def of_layers(name: str) -> list[Matrix]:
        return [getattr(layer, name) for layer in w.layers]

    match op:
        case "embedding":
            return size * 2.0 * T * C, 0.0
        case "rmsnorm":
            return size * (2.0 * T * C + C), 4.0 * T * C
        case "rmsnorm_qkv_rope":
            return product(of_layers("wqkv"), C + T * (q + 2 * kv))
        case "attention":
            seen = T * start_pos + T * (T + 1) / 2  # keys seen by all tokens together
            cached = model.kv_dtype.itemsize * 2.0 * (start_pos + T) * kv
            return size * 2.0 * T * q + cached, 4.0 * q * seen
        case "route":
            return product(of_layers("router"), C + T * c.n_experts * 4 / size)  # logits
        case "rmsnorm_swiglu":
            return product(of_layers("w13"), C + T * slots * F, chosen)
        case "wo":
            return product(of_layers("wo"), 2 * T * C)
        case "w2":
            return product(of_layers("w2"), 2 * T * C + T * (slots - 1) * F, chosen)
        case "rmsnorm_linear":
            return product([w.output], C + T * V * 4 / size)  # logits are in fp32
        case "sample":
            return 4.0 * c.vocab_size, 2.0 * c.vocab_size
    raise AssertionError(op)


def arithmetic_dtype(model: Llama, op: str, T: int) -> torch.dtype:
    """The type in which an op multiplies T tokens."""
    if model.device.type == "cpu":
        return cpu_product_dtype(model.dtype)
    return bench.product_dtype(model) if T > 1 and op in PRODUCTS else model.dtype


def open_model(args: argparse.Namespace, ctx_size: int) -> Llama:
    model = bench.open_model(args, args.dtype[0], ctx_size, args.format[0])
    if model.backend == "torch":
        on = bench.device_name(model.device, args.ranks)
        note(f"note: this measures torch's ops on {on}; the Triton kernels need a GPU")
    return model


# ---- the ops of the model, and the same in plain PyTorch. Each is a function of a layer's number


class Inputs(NamedTuple):
    """Random inputs of the ops."""

    x: Tensor  # [T, C]
    copies: list[Tensor]  # of the size of x, so many that they do not fit into the L2
    residual: Tensor  # [T, C]
    y: Tensor  # [T, H D]: queries, or what attention gives
    h: Tensor  # [T, F]; with experts [T, k, F]
    logits: Tensor  # fp32 [1, V]


def random_inputs(model: Llama, T: int) -> Inputs:
    c = model.config

    def normal(columns: int) -> Tensor:
        return torch.randn(T, columns, device=model.device, dtype=model.dtype)

    x = normal(c.dim)
    copies = [normal(c.dim) for _ in range(max(1, min(64, (256 << 20) // x.nbytes)))]
    h = normal(c.hidden_dim)
    if c.n_experts:
        h = normal(c.experts_per_token * c.hidden_dim).view(T, -1, c.hidden_dim)
    logits = torch.zeros(1, c.vocab_size, device=model.device)
    return Inputs(x, copies, normal(c.dim), normal(c.q_dim), h, logits)


def ops_of(model: Llama, pass_: Pass, inputs: Inputs) -> dict[str, Callable[[int], object]]:
    """The only place here that knows the arguments of the model's ops."""
    x, copies, residual, y, h, logits = inputs
    c = model.config
    ops = model.ops
    layers = model.weights.layers
    eps = c.norm_eps
    queries = y.view(len(y), c.n_heads, c.head_dim)
    routes = [ops.route(x, layer, pass_) for layer in layers]  # None without experts
    for layer, of_layer in zip(layers, routes):
        if of_layer:
            ops.rmsnorm_swiglu(x, layer, pass_, of_layer)  # chooses the experts for w2

    def rmsnorm(i: int) -> object:
        return ops.rmsnorm(copies[i], layers[0].ffn_norm, eps)

    def qkv(i: int) -> object:
        return ops.rmsnorm_qkv_rope(x, layers[i], pass_)

    def attention(i: int) -> object:
        return ops.attention(queries, layers[i], pass_)

    def wo(i: int) -> object:
        return ops.linear_add(y, layers[i].wo, residual)

    def route(i: int) -> object:
        return ops.route(x, layers[i], pass_)

    def w2(i: int) -> object:
        return ops.linear_add(h, layers[i].w2, residual, routes[i])

    def swiglu(i: int) -> object:
        return ops.rmsnorm_swiglu(x, layers[i], pass_, routes[i])

    def output(i: int) -> object:
        return ops.rmsnorm_linear(x, model.weights.norm, model.weights.output, pass_, logits)

    def sample(i: int) -> object:
        return ops.sample(logits, pass_)

    return {
        "rmsnorm": rmsnorm,
        "rmsnorm_qkv_rope": qkv,
        "attention": attention,
        "wo": wo,
        "route": route,
        "w2": w2,
        "rmsnorm_swiglu": swiglu,
        "rmsnorm_linear": output,
        "sample": sample,
    }


def plain_rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def plain_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, N, D], neighbouring pairs; cos and sin [T, 1, D / 2]."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def plain_ops(
    model: Llama, pass_: Pass, inputs: Inputs, start_pos: int
) -> dict[str, Callable[[int], object]]:
    """One token goes through experts as in gpt-fast, which gathers their matrices. There is nothing
    here for several tokens and experts."""
    x, copies, residual, y, h, logits = inputs
    c = model.config
    H, KH, D = c.n_heads, c.n_kv_heads, c.head_dim
    layers = model.weights.layers
    eps = c.norm_eps
    linear = functional.linear
    T = len(x)
    end = start_pos + T
    queries = y.view(T, H, D)
    cos, sin = (t.to(x.dtype)[:, None] for t in pass_.rope[0][start_pos:end].unbind(-1))
    keys, values = pass_.k, pass_.v
    if model.kv_fp8:  # PyTorch has no keys and values in 8 bits
        keys, values = x.new_zeros(2, c.n_layers, KH, pass_.size, D)

    @cache
    def dense(m: Matrix) -> Tensor:  # in the model's dtype, whatever its format
        return m.dense().to(x.dtype)

    def qkv(i: int) -> Tensor:
        own = layers[i]
        normed = plain_rmsnorm(x, own.attention_norm, eps)
        heads = linear(normed, dense(own.wqkv), own.wqkv.bias).view(T, -1, D)
        q, k, v = heads.split([H, KH, KH], 1)
        if own.qk_norm is not None:
            q = plain_rmsnorm(q, own.qk_norm[0], eps)
            k = plain_rmsnorm(k, own.qk_norm[1], eps)
        keys[i][:, start_pos:end] = plain_rope(k, cos, sin).transpose(0, 1)
        values[i][:, start_pos:end] = v.transpose(0, 1)
        return plain_rope(q, cos, sin)

    def attention(i: int) -> Tensor:
        mask = None
        if T > 1 and start_pos:
            mask = torch.ones(T, end, dtype=torch.bool, device=x.device).tril(start_pos)
        heads = (queries.transpose(0, 1)[None], keys[i][None, :, :end], values[i][None, :, :end])
        return functional.scaled_dot_product_attention(
            *heads, mask, is_causal=T > 1 and not start_pos, enable_gqa=True
        )

    def swiglu(i: int) -> Tensor:
        normed = plain_rmsnorm(x, layers[i].ffn_norm, eps)
        w1, w3 = dense(layers[i].w13).view(2, -1, c.dim)  # two matrices of the right size
        return functional.silu(linear(normed, w1)) * linear(normed, w3)

    def route(i: int) -> tuple[Tensor, Tensor]:
        normed = plain_rmsnorm(x, layers[i].ffn_norm, eps)
        weights = linear(normed, dense(layers[i].router)).softmax(-1)
        return weights.topk(c.experts_per_token)

    def swiglu_of_experts(i: int) -> Tensor:
        normed = plain_rmsnorm(x, layers[i].ffn_norm, eps)
        w1, w3 = dense(layers[i].w13).view(c.n_experts, 2, -1, c.dim)[ids[i]].unbind(1)
        return functional.silu(normed @ w1.mT) * (normed @ w3.mT)

    def w2_of_experts(i: int) -> Tensor:
        w2 = dense(layers[i].w2).view(c.n_experts, c.dim, -1)[ids[i]]
        return residual + (w2 @ h[0, :, :, None]).sum(0).T

    def output(i: int) -> Tensor:
        return linear(
            plain_rmsnorm(x, model.weights.norm, eps), dense(model.weights.output)
        ).float()

    def sample(i: int) -> Tensor:
        return torch.multinomial(logits[0].topk(40).values.softmax(0), 1)

    plain = {
        "rmsnorm": lambda i: plain_rmsnorm(copies[i], layers[0].ffn_norm, eps),
        "rmsnorm_qkv_rope": qkv,
        "attention": attention,
        "wo": lambda i: residual + linear(y, dense(layers[i].wo)),
        "w2": lambda i: residual + linear(h, dense(layers[i].w2)),
        "rmsnorm_swiglu": swiglu,
        "rmsnorm_linear": output,
        "sample": sample,
    }
    if c.n_experts:
        plain["route"] = route
        del plain["w2"], plain["rmsnorm_swiglu"]
        if T == 1:
            ids = [route(i).indices[0] for i in range(c.n_layers)]
            plain |= {"w2": w2_of_experts, "rmsnorm_swiglu": swiglu_of_experts}
    return plain


# ---- the table


def kernel_rows(model: Llama, T: int, start_pos: int) -> Iterator[dict]:
    """The ops at T tokens after start_pos others, on the data of each layer in turn, which are
    several times the size of the L2: memory is measured, not the cache."""
    pass_ = Passes(model).pass_at(start_pos, T)
    inputs = random_inputs(model, T)
    ours = ops_of(model, pass_, inputs)
    plain = plain_ops(model, pass_, inputs, start_pos)
    counts = {"rmsnorm": len(inputs.copies), "rmsnorm_linear": 4, "sample": 4}
    for op in ours:
        if op == "route" and not model.config.n_experts:
            continue
        if T == 1 or op not in ("rmsnorm_linear", "sample"):
            count = counts.get(op, model.config.n_layers)
            yield row_of(model, T, start_pos, op, ours[op], plain.get(op), count)


def row_of(
    model: Llama,
    T: int,
    start_pos: int,
    op: str,
    ours: Callable,
    plain: Callable | None,
    count: int,
) -> dict:
    """Microseconds of an op on `count` sets of data in turn, and in plain PyTorch, if there is such
    a function, and its share of the ceiling that binds."""

    def seconds_of(run: Callable[[int], object]) -> float:
        return device_time(lambda: [run(i) for i in range(count)], model) / count

    seconds = seconds_of(ours)
    plain_us = times = None
    if plain:
        plain_us = 1e6 * seconds_of(plain)
        times = plain_us / (1e6 * seconds)
    moved, operations = cost(op, model, T, start_pos)
    # The norm writes as much as it reads
    bandwidth = bench.copy_ceiling if op == "rmsnorm" else bench.read_ceiling
    memory = moved / bandwidth(model.device)
    rate = bench.product_ceiling(model.device, arithmetic_dtype(model, op, T))
    compute = operations / rate
    return {
        "op": op,
        "tokens": T,
        "depth": start_pos,
        "us": 1e6 * seconds,
        "MB": moved / 1e6,
        "GFLOP": operations / 1e9,
        "bound by": "memory" if memory > compute else "arithmetic",
        "% of ceiling": bench.percent(max(memory, compute), seconds),
        "PyTorch us": plain_us,
        "x PyTorch": times,
    }


@torch.inference_mode()
def show_kernels(args: argparse.Namespace) -> None:
    shapes = [(1, depth) for depth in sorted({max(depth, 100) for depth in args.depth})]
    shapes += [(T, depth) for depth in args.depth for T in args.n_prompt if T]
    model = open_model(args, max(map(sum, shapes)))
    rows = (row for shape in shapes for row in kernel_rows(model, *shape))
    bench.show(rows, args.output, later={"op": [*PRODUCTS], "bound by": ["arithmetic"]})
    note(LEGEND)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__.splitlines()[0], {"kernels": "dev/kernels.py"})
    bench_flags.add_model_flags(parser)
    add = parser.group("tests")
    help = "tokens of a prompt; 0 leaves the test out [512]"
    bench_flags.add_counts(add, "-p", "--n-prompt", default=512, help=help)
    bench_flags.add_counts(add, "-d", "--depth", default=0, help="tokens already in the cache [0]")
    bench_flags.add_output_flags(parser)
    args = parser.parse(argv, lambda args: "kernels")
    bench_flags.take_one(parser, args, "-m", "--dtype", "--format")
    bench_flags.find_models(parser, args)
    return args


def main(argv: list[str] | None = None) -> int:
    return bench.exit_code_of(show_kernels, parse_args(argv))


if __name__ == "__main__":
    use_safe_streams()
    sys.exit(main())
