"""Tests of kernels compiled for every architecture, with no GPU present."""

import itertools
import multiprocessing
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch

import attention
import experts
import fp8
import kernels
import launch
import products
import sampling
from bits import int4, others
from bits.int4 import INT4
from cards import hopper
from cards import sizes as launch_sizes
from formats import Matrix
from fp8 import E4M3, E5M2
from loading.place import FORMATS
from ranks import exchange as exchange_module
from sampling import Sampler, Sampling
from tests.helpers import (
    ARCHITECTURES,
    DEVICE,
    FILE_FORMATS,
    HERE,
    OPS,
    OWN,
    a_pass,
    changed,
    encoded,
    expert_arguments,
    op_arguments,
    pass_of_experts,
)
from training import ops as training


def as_if_on(arch: int) -> None:
    """In a process where Triton compiles, compile as if for a GPU of this architecture."""
    from triton.runtime import driver

    target = launch.triton.backends.compiler.GPUTarget("cuda", arch, 32)
    current = dict(device=0, stream=0, target=target)
    functions = {f"get_current_{k}": lambda *_, value=v: value for k, v in current.items()}
    driver.set_active(SimpleNamespace(**functions))
    ours = (
        launch,
        launch_sizes,
        kernels,
        products,
        attention,
        hopper,
        sampling,
        fp8,
        int4,
        experts,
    )
    for module in (*ours, training, exchange_module):
        module.capability, module.processors = lambda device: arch, lambda device: 16
    one_tile = launch_sizes.FewSizes(16, 8, 4, 8, 1)  # which compiles fast
    products.few_sizes = lambda *key: one_tile if launch_sizes.few_sizes(*key) else None
    products.vector_sizes = lambda *_: launch_sizes.VectorSizes(2, 512, 2)
    products.stream_sizes = lambda *_: launch_sizes.StreamSizes(1, 2048, 3, 3)
    # CPUs with AMX have none with a scale for each row
    torch._scaled_mm = lambda *_, out, **options: out


def launch_ops(names, dtype, T: int, heads=(8, 8, 128), format=None, ops=kernels.fused, **extra):
    for op in names:
        arguments = op_arguments(op, dtype, heads, T, 300, 500, **extra)[0]
        getattr(ops, op)(*encoded(arguments, format))


def launch_attention(dtype: torch.dtype) -> None:
    """With one token, a few and a prompt; also of a cache in 8 bits, and of several segments."""
    attend = partial(launch_ops, ["attention"], dtype)
    for T, heads in ((1, (8, 8, 128)), (1, (8, 2, 128)), (3, (16, 2, 128)), (512, (8, 8, 128))):
        attend(T, heads)
    attend(1, (16, 2, 128), segments=[(16, 300), (1, 0)])
    attend(1, (8, 8, 128), segments=[(1, 300)] * 16)
    if dtype == torch.float16:
        for T, heads in ((96, (8, 8, 128)), (1, (4, 2, 256)), (96, (4, 2, 256))):
            attend(T, heads)
        attend(96, ops=kernels.ops("triton", "fp16"))
    k, v = (torch.zeros(8, 500, 64, dtype=torch.int8) for _ in range(2))
    for T in (1, 96):
        x, layer, pass_ = op_arguments("rmsnorm_qkv_rope", dtype, (8, 8, 64), T, 300, 500)[0]
        pass_ = changed(pass_, k=(None, k), v=(None, v))
        q = kernels.fused.rmsnorm_qkv_rope(x, layer, pass_)
        kernels.fused.attention(q, layer, pass_)
    attention.decode_caches(k, v, pass_.segments, 96, dtype)
    if launch.capability(DEVICE) == 90:  # the prompts of others read the codes
        q, layer, pass_ = op_arguments("attention", dtype, (8, 8, 128), 512, 300)[0]
        k, v = (pass_.k[1].to(torch.int8) for _ in range(2))
        kernels.fused.attention(q, layer, changed(pass_, k=(None, k), v=(None, v)))


def blank(N: int, K: int, format, dtype: torch.dtype) -> Matrix:
    if format is None:
        return Matrix(torch.zeros(N, K, dtype=dtype))
    return Matrix(format.empty(N, K, DEVICE), format)


def launch_linear_add(dtype: torch.dtype, T: int, format, bias=None) -> None:
    w = replace(blank(48, 1024, format, dtype), bias=bias)
    x, residual = torch.zeros(T, 1024, dtype=dtype), torch.zeros(T, 48, dtype=dtype)
    kernels.fused.linear_add(x, w, residual)


def launch_many(dtype: torch.dtype, format) -> None:
    """Every epilogue of a product of many tokens, in matrices that Hopper's kernel takes."""
    T, C, H, D = 30, 256, 2, 64
    x, norm = torch.zeros(T, C, dtype=dtype), torch.zeros(C, dtype=dtype)
    _, layer, state = op_arguments("rmsnorm_qkv_rope", dtype, (H, H, D), T, 300, 500)[0]
    wqkv, w13 = (blank(N, C, format, dtype) for N in (3 * H * D, 96))
    layer = changed(layer, attention_norm=norm, ffn_norm=norm, wqkv=wqkv, w13=w13)
    cached = [torch.zeros(H, 500, D, dtype=torch.int8) for _ in range(2)]
    for k, v in ((state.k[1], state.v[1]), cached):
        in_types = changed(state, k=(None, k), v=(None, v))
        kernels.fused.rmsnorm_qkv_rope(x, layer, in_types)
    kernels.fused.rmsnorm_swiglu(x, layer, state)
    kernels.fused.rmsnorm_linear(x, norm, w13, state, torch.zeros(T, 96))


def launch_exchange(dtype: torch.dtype, format) -> None:
    """What several ranks do with their parts of a product."""
    new = partial(torch.zeros, dtype=dtype)
    w, output = blank(512, 1024, format, dtype), blank(600, 512, format, dtype)
    entries = exchange_module.Shared(torch.zeros(3, 2, 16 * 512, dtype=torch.int64), [0, 0])
    terms = exchange_module.Shared(new(2, 8 * 512), [0, 0])
    flags = exchange_module.Shared(torch.zeros(8, 2, dtype=torch.int32), [0, 0])
    exchange = exchange_module.Exchange([w, output], 0, entries, terms, flags)
    for x in (new(1, 1024), new(3, 1024), new(12, 1024)):
        if exchange.sends(x, w, None):
            exchange.linear_add(x, w, new(len(x), 512))
    exchange.add_terms(w, new(8, 512), False)
    exchange.rmsnorm_linear(new(1, 512), new(512), output, 1e-5, torch.zeros(1, 2 * 600 - 1))


def launch_experts(dtype: torch.dtype, T: int, format) -> None:
    x, layer, pass_ = expert_arguments(T, 6, 2, 512, 256, dtype)
    layer.w13, layer.w2 = blank(6 * 512, 512, format, dtype), blank(6 * 512, 256, format, dtype)
    routes = kernels.fused.route(x, layer, pass_)
    h = kernels.fused.rmsnorm_swiglu(x, layer, pass_, routes)
    kernels.fused.linear_add(h, layer.w2, x, routes)


def launch_routers(dtype: torch.dtype) -> None:
    """Of Qwen3-30B-A3B, with as many tokens as each kernel of the router takes."""
    router = Matrix(torch.zeros(128, 2048, dtype=dtype))
    norm = torch.zeros(2048, dtype=dtype)
    layer = SimpleNamespace(ffn_norm=norm, router=router)
    for T in (3, 16, 20, 200):
        kernels.fused.route(torch.zeros(T, 2048, dtype=dtype), layer, pass_of_experts(8))


def launch_products(dtype: torch.dtype) -> None:
    """With one token, a few, many and a prompt; with norms of heads, other ranks and experts."""
    for T in (1, 3, 96):
        launch_ops([op for op in OPS if op != "attention"], dtype, T)
    for T, format in itertools.product((1, 3, 60, 96), (INT4, E4M3)):
        launch_linear_add(dtype, T, format)
    launch_many(dtype, INT4)
    launch_linear_add(dtype, 12, INT4)  # where x is put into its order
    launch_linear_add(dtype, 30, others.Q8_K)  # whose steps take the most shared memory
    qk_norm = torch.zeros(2, 128, dtype=dtype)
    for T in (1, 96):
        launch_ops(["rmsnorm_qkv_rope"], dtype, T, (8, 2, 128), qk_norm=qk_norm)
    launch_exchange(dtype, None)
    for T, format in ((1, None), (1, INT4), (3, E4M3), (40, None)):
        launch_experts(dtype, T, format)
    launch_routers(dtype)
    for norm in (None, torch.zeros(512, dtype=dtype)):
        products.encode_rows(torch.zeros(3, 512, dtype=dtype), norm, 1e-5)


def launch_8_bit_floats() -> None:
    """What else depends on how their matrices are decoded and multiplied."""
    dtype = torch.float16
    for T, format in itertools.product((1, 3, 60, 96), (E4M3, E5M2, others.E4M3_128)):
        launch_linear_add(dtype, T, format)
    launch_linear_add(dtype, 13, E4M3)
    launch_ops(["rmsnorm_qkv_rope", "rmsnorm_linear"], dtype, 1, format=E4M3)
    launch_exchange(dtype, E4M3)
    for T in (1, 40):
        launch_experts(dtype, T, E4M3)


def launch_formats() -> None:
    """Matrices in all formats."""
    dtype = torch.float16
    for T, format in itertools.product((1, 3, 60, 96), (OWN, *FORMATS.values(), *FILE_FORMATS)):
        launch_linear_add(dtype, T, format)
    for T, format in ((1, None), (1, INT4), (3, INT4)):  # a kernel each
        launch_linear_add(dtype, T, format, bias=torch.zeros(48, dtype=dtype))
    x, norm = torch.zeros(1, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    layer = SimpleNamespace(ffn_norm=norm, w13=blank(48, 4096, INT4, dtype))  # two blocks of a row
    kernels.fused.rmsnorm_swiglu(x, layer, SimpleNamespace(norm_eps=1e-5))
    products.recode(layer.w13, *E4M3.empty(48, 4096, DEVICE))
    launch_experts(dtype, 40, INT4)


def launch_sampling() -> None:
    penalised = dict(temp=0, repeat_penalty=1.1)
    # rows and logits of each: parts of 4096 have fewer logits than a program has threads
    cases = [(1, 32000, more) for more in (dict(), penalised, dict(top_k=1000), dict(top_p=1))]
    cases += [(1, 4096, dict()), (5, 32000, dict(top_k=0, top_p=1))]
    for rows, V, settings in cases:
        pass_ = a_pass((1, 1, 8), [(1, 300)] * rows, torch.float16, 512)
        pass_.sampler = Sampler(DEVICE, rows)
        pass_.feeds = rows == 1
        every = torch.full((rows, V // 32), -1, dtype=torch.int32)
        pass_.sampler.set([Sampling(**settings)] * rows)
        pass_.sampler.restrict(every if settings == penalised else None)
        kernels.fused.sample(torch.zeros(rows, V), pass_)
        pass_.rows = torch.arange(rows)
        kernels.fused.sample(torch.zeros(rows, V), pass_)


def launch_training(dtype: torch.dtype, every_shape: bool) -> None:
    """Launch the training ops and their gradients. every_shape: also with odd shapes, and with and
    without optional arguments."""
    new = lambda *shape, dtype=dtype: torch.zeros(
        shape, dtype=dtype, requires_grad=dtype.is_floating_point
    )
    ops = training.fused
    fp32 = torch.float32
    targets = new(2, dtype=torch.int64)

    def rmsnorm(C: int, residual: torch.dtype, p: float) -> tuple:
        x, norm = new(40, C, dtype=residual), new(C, dtype=fp32)
        return ops.rmsnorm(x, new(40, C), norm, 1e-5, dtype, p)

    def rope(D: int) -> tuple:
        return ops.rope(new(2, 8, 8 * D), *[torch.zeros(8, D // 2)] * 2, 4, 2)

    outputs = [
        ops.linear(new(300, 16), new(2304, 16), new(2304)),
        ops.swiglu(new(16, 2 * 2112)),
        ops.cross_entropy(new(2, 32000), targets),
        *rmsnorm(4096, dtype, 0.0),
        *rope(128),
    ]
    if every_shape:
        outputs += [
            ops.swiglu(new(16, 2 * 53)),
            ops.cross_entropy(new(2, 128256, dtype=fp32), targets),
            ops.cross_entropy(new(2, 201), targets),
            *rmsnorm(768, fp32, 0.1),
            *ops.rmsnorm(new(40, 72), None, new(72), 1e-5, dtype)[1:],
            *rope(24),
        ]
    torch.autograd.backward(outputs, [torch.zeros_like(o) for o in outputs])
    with torch.no_grad():
        ops.cross_entropy(new(2, 32000), targets)


def compile_kernels(arch: int) -> None:
    """Compile every kernel for an architecture, to machine code that fits into shared memory."""
    compiled, waits_first, with_fp16_sums = set(), set(), set()

    def start(kernel, grid, device, *arguments, **constants) -> None:
        if arch == 89 and not re.search("native|e5m2", str(constants)):
            return
        binary, name = kernel.warmup(*arguments, grid=grid, **constants), kernel.__name__
        ptx, shared, what = binary.asm["ptx"], binary.metadata.shared, (name, constants)
        compiled.add(name)
        assert binary.asm["cubin"] and shared <= ARCHITECTURES[arch] * 1024, (what, shared)
        if name == "_hopper_attention_kernel":
            assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
        else:
            assert ("griddepcontrol.wait" in ptx) == (arch >= 90), what
        # The product with w13: launch.py says why it waits before it lets the next kernel start, and
        # what programs without rows do instead
        if arch >= 90 and constants.get("CHOICE"):
            order = re.findall(r"griddepcontrol\.(\w+)", ptx)
            assert order == ["wait", "launch_dependents", "wait"], (order, what)
            before, after = ptx.split("fence.acq_rel.gpu")
            assert re.findall(r"st\.global|griddepcontrol", before)[-1] == "st.global", what
            assert re.search("griddepcontrol|ret;", after)[0] == "ret;", what
            waits_first.add(name)
        if constants.get("FP16_SUMS"):
            with_fp16_sums.add(name)
            fp16_sums = "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"
            assert arch >= 90 or fp16_sums in ptx, "sums in half precision are none"
        if constants.get("PENALISE"):  # through memory, from thread to thread
            accesses = re.findall(r"\b(ld\.global|st\.global|bar\.sync)", ptx)
            unordered = re.findall("st.global ld.global", " ".join(accesses))
            assert not unordered, "logits are read after they are written, without a barrier"

    # Triton's cache on disk tells kernels apart by the functions that they call
    others = replace(E4M3, values=fp8.native_values), products.STORE_ROWS._replace(prepare=None)
    for one, other in zip((E4M3, products.STORE_ROWS), others):
        assert one.cache_key != other.cache_key
    as_if_on(arch)
    launch.run_or_compile = hopper.run_or_compile = start
    launch_attention(torch.float16)
    launch_8_bit_floats()
    if arch == 89:
        assert "_vector_kernel" in compiled
        return
    launch_products(torch.float16)
    launch_sampling()
    launch_training(torch.float16, every_shape=arch == 80)
    if arch == 80:
        launch_formats()
        launch_routers(torch.float32)
        launch_experts(torch.float32, 40, INT4)
        for T, heads in ((16, (8, 2, 128)), (40, (8, 2, 128)), (16, (8, 2, 256))):
            launch_ops(["attention"], torch.float32, T, heads)
        launch_products(torch.bfloat16)
        launch_training(torch.bfloat16, every_shape=True)
    if arch in (80, 90):
        launch_attention(torch.bfloat16)
    modules = (kernels, products, attention, experts, sampling, exchange_module, training)
    modules += (hopper,) if arch == 90 else ()
    every = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert compiled == every, "one of the functions launch_... has to launch these as well"
    assert with_fp16_sums == {"_attention_kernel"}
    assert arch < 90 or waits_first == {"_vector_kernel", "stream_kernel"}


def compile_in_processes() -> None:
    """One for each architecture, which have in common what takes long to import."""
    process_of = multiprocessing.get_context("fork").Process
    processes = [process_of(target=compile_kernels, args=(arch,)) for arch in ARCHITECTURES]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


def test_kernels_compile():
    """Each kernel that launch.json lets a card run, with its sizes where they decide how much shared
    memory there has to be.

    For sm_80: all kernels in fp16 and in bf16, and in fp16 all formats of weights. Elsewhere only
    what the architecture may refuse: for 90 and 120 all kernels, since they wait for the kernel
    before and pass through other stages of the compiler, and all that touches 8-bit floats, for
    which they have instructions; for 90 also attention in bf16, since Hopper has other instructions
    for products; for 89, which is like 80 otherwise, 8-bit floats. The formats of files decode by
    instructions that all have. 86 runs the machine code of 80, which gets by with the shared memory
    that 86 has."""
    flags = {"COMPILES": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    command = [
        sys.executable,
        "-c",
        "from tests import test_compiled; test_compiled.compile_in_processes()",
    ]
    done = subprocess.run(command, cwd=HERE, env=os.environ | flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
