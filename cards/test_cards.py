"""Tests of cards/."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import attention
import kernels
import launch
import products
from bits.int4 import INT4
from cards import cpu
from cards import sizes as launch_sizes
from formats import Matrix
from fp8 import E4M3
from kernels import PRODUCTS
from passes import PROMPT_CHUNK
from tests.helpers import ARCHITECTURES, DEVICE, HERE, ONE_UNIT, encoded, nmse, op_arguments

# ---- cpu.py


@pytest.mark.parametrize("dtype, format, small", [
    (torch.float32, None, False), (torch.bfloat16, None, False), (torch.bfloat16, None, True),
    (torch.bfloat16, INT4, False),
])  # fmt: skip
def test_matrices_in_a_cpu_layout_are_the_same_matrices(dtype, format, small, monkeypatch):
    """As products on a CPU read them: fp32 column by column, bf16 in oneDNN's layout, a small
    matrix in both, one in 4 bits in torch's own."""
    monkeypatch.setattr(cpu, "SMALL", 2 * 320 * 256 if small else 0)
    w = Matrix(torch.randn(320, 256).to(dtype), bias=torch.randn(320).to(dtype))
    (w,) = encoded([w], format)
    laid_out = cpu.in_cpu_layout(w, "torch", dtype)
    assert torch.equal(laid_out.dense(), w.dense())
    assert laid_out.shape == w.shape == (320, 256) and laid_out.nbytes == w.nbytes
    assert cpu.in_cpu_layout(w, "triton", dtype) is w
    if dtype == torch.float32:
        assert laid_out.data.stride() == (1, 320)
    else:
        assert cpu.in_cpu_layout(w, "torch", torch.float32) is w
    if dtype == torch.bfloat16:
        assert bool(laid_out.cpu_product) == bool(format or cpu.multiplies_bf16())
        assert laid_out.data.is_mkldnn == (not format and not small and cpu.multiplies_bf16())
    for T in (9, 1):
        x = torch.randn(T, 256).to(dtype)
        exact = x.double() @ w.dense().double().t() + w.bias
        assert nmse(kernels.linear_ref(x, laid_out), exact) < (2 if format else 1) * ONE_UNIT[dtype]
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize("format", [None, E4M3, INT4])
def test_prompts_need_few_onednn_kernels(format, monkeypatch):
    """oneDNN keeps what it compiles for each number of rows, so a chat's memory would grow with
    each new length, whether a matrix is in its layout or decoded for each prompt."""
    sizes = set()
    (w,) = encoded([Matrix(torch.randn(8, 32, dtype=torch.bfloat16))], format)
    exact = w.dense().float().t()
    w = w if format else Matrix(w.data.to_mkldnn(), cpu_product=cpu._blocked_linear)

    def product(x, weights, *rest):
        sizes.add(len(x))
        weights = weights.to_dense() if weights.is_mkldnn else weights
        return (x.float() @ weights.float().t()).to(x.dtype)

    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", product)
    monkeypatch.setattr(torch.nn.functional, "linear", product)
    for T in range(1, PROMPT_CHUNK["cpu"] + 1):
        x = torch.randn(T, 32, dtype=torch.bfloat16)
        assert nmse(kernels.linear_ref(x, w), x.float() @ exact) < 2 * ONE_UNIT[torch.bfloat16]
    powers, eighths = {1, 2, 4, 8, 16, 32}, {48, 64, 80, 96, 112, 128}
    assert sizes - {1} == (powers | eighths | {*range(160, 257, 32), *range(320, 513, 64)}) - {1}


# ---- launch.py and cards/sizes.py


def test_kernel_that_does_not_compile(monkeypatch):
    """Each is loaded, too; its error is the user's."""
    from triton.runtime._async_compile import active_mode

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def start(name: str, compiled) -> None:
        submit = lambda grid: active_mode.get().submit(name, compiled, lambda kernel: None)
        launch.run_or_compile(SimpleNamespace(warmup=submit), (1,), torch.device("cpu"))

    class Kernel:
        run = property(lambda self: loaded.append(self))

    loaded: list[Kernel] = []
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            launch.compile_kernels(lambda: start("a", lambda: 1 / 0), DEVICE)
        launch.compile_kernels(lambda: [start(name, Kernel) for name in "abb"], DEVICE)
    assert len(loaded) == 4 and active_mode.get() is None and not launch._only_compile.get()


def test_launchers_refuse_strides():
    """Strides are derived from shapes. All are launched here, but Hopper's for prompts, which
    attention guards."""
    apart = torch.zeros(4, 8, 2, device=DEVICE)[..., 0]
    for bad in (apart, (torch.zeros(4, device=DEVICE), apart)):
        with pytest.raises(AssertionError, match="a tensor is not contiguous"):
            launch.launch(kernels._swiglu_kernel, (1,), DEVICE, bad)
    q, *rest = op_arguments("attention", torch.float16, (4, 2, 16), 3, 5)[0]
    with pytest.raises(AssertionError):
        attention.attention(torch.stack((q, q), -1)[..., 0], *rest)


def test_launch_sizes_of_the_nearest_card(monkeypatch, tmp_path):
    """Those of the nearest card below. launch.json is as the tuner writes it; otherwise what was
    not tuned would change with the next tuning."""
    found = [launch_sizes.nearest({0: "a", 80: "b", 90: "c"}, key) for key in (0, 79, 80, 89, 120)]
    assert found == ["a", "a", "b", "b", "c"]
    launch_sizes.tables()  # which keeps what is in the file
    monkeypatch.setattr(launch_sizes, "TABLES_FILE", tmp_path / "launch.json")
    launch_sizes.save_tables()
    assert (tmp_path / "launch.json").read_text() == (HERE / "cards/launch.json").read_text()


@pytest.mark.parametrize("arch", [0, *ARCHITECTURES])
def test_launch_sizes_fit_the_kernels_and_the_card(monkeypatch, arch):
    """Its tiles have to fit into the shared memory. Scales take up to a fifth as much as codes."""
    monkeypatch.setattr(launch_sizes, "capability", lambda device: arch)
    ops = (*PRODUCTS, "an op of one's own")
    for bits, op, columns in itertools.product((4, 6, 8, 16, 32), ops, (64, 4096, 11008)):
        asked = DEVICE, bits, op, columns
        assert launch_sizes.vector_sizes(*asked).rows % 2 == 0
        in_pairs = launch_sizes.stream_sizes(*asked).rows % 2 == 0
        assert op == "linear_add" or in_pairs
        for tokens in (8, 16):
            few = launch_sizes.few_sizes(DEVICE, bits, op, (4096, columns), tokens)
            assert few is None or few.lanes <= 4 * few.steps and few.rows % 8 == 0 and few.ahead > 0
    for bits, op, columns in itertools.product((4, 6, 8), PRODUCTS, range(64, 30_000, 192)):
        sizes = launch_sizes.stream_sizes(DEVICE, bits, op, columns)
        block = products.stream_block(sizes.block, columns)
        held = (sizes.stages - 1) * sizes.rows * -(-columns // block) * block * 1.2 * bits / 8
        assert arch == 0 or held < ARCHITECTURES[arch] * 1024, (bits, op, columns)
