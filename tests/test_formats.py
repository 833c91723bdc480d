"""Tests of formats.py and fp8.py: a format of one's own, the 8-bit floats, products in half precision, 8-bit caches."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import attention
import experts
import fp8
import kernels
import launch
import products
from bits import int4, others
from bits.int4 import INT4
from cards import cpu
from formats import Matrix
from fp8 import E4M3, E5M2
from launch import tl
from loading.checkpoint import load, save
from loading.place import FORMATS, pick_dtype
from tests.helpers import (
    DEVICE,
    FILE_FORMATS,
    INF,
    NAN,
    ON_GPU,
    ONE_UNIT,
    OWN,
    as_fp32,
    assert_close,
    changed,
    check_attention,
    cloned,
    dense,
    encoded,
    int4_matrix,
    logits_of_prompts,
    needs_gpu,
    nmse,
    op_arguments,
    randn,
    random_matrix,
    with_dense_weights,
)


@pytest.mark.parametrize("format, dtype, backend", [
    ("own", "fp32", "torch"), ("own", "fp16", "torch"), ("own", "bf16", "torch"),
    ("int4", "fp32", "torch"), ("int4", "bf16", "torch"), ("own", "fp32", "triton"),
    ("int4", "bf16", "triton"),
])  # fmt: skip
def test_model_in_a_format(grouped_folder, tmp_path, format, dtype, backend, monkeypatch):
    """In a prompt, with one token and with eight; and again when it is saved and loaded."""
    monkeypatch.setitem(FORMATS, "own", OWN)
    loaded = partial(load, grouped_folder, format=format, device=DEVICE.type)
    # "fp32": otherwise a GPU decodes a prompt's weights in 4 bits to E4M3
    ours = loaded(dtype=dtype, backend=backend, accumulate="fp32")
    exact, plain = (loaded(dtype=d, backend="torch") for d in ("fp32", dtype))
    assert ours.weights.layers[0].w2.format is FORMATS[format]
    decoded = backend == "torch" and not ON_GPU  # as a CPU reads it faster
    assert ours.weights.output.format is (OWN if format == "own" else None if decoded else E4M3)
    with_dense_weights(exact)
    with_dense_weights(plain)
    # the interpreter is slow to decode a matrix, as for a prompt, and for several tokens in fp32
    parts = (20, 1, 8) if backend == "torch" else (20, 1) if dtype == "fp32" else (8, 1)
    prompts = torch.randint(3, 300, (1 if dtype == "fp32" else 8, sum(parts)))
    models = (exact, plain, ours)
    right, by_torch, by_ours = (logits_of_prompts(model, prompts, *parts) for model in models)
    # on a CPU, a single token's activations are rounded to fp16
    rounding = 1e-7 if format == "int4" else 1e-9
    limit = 2 * nmse(by_torch, right) + rounding
    assert nmse(by_ours, right) < limit, "less exact than torch with the same weights"
    save(grouped_folder, tmp_path / "saved", format=format, device=DEVICE.type, quiet=True)
    again = load(tmp_path / "saved", dtype=dtype, device=DEVICE.type, backend=backend)
    assert again.checkpoint.format is FORMATS[format]
    for one, other in zip(ours.weights.matrices, again.weights.matrices):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors))


def test_cpu_without_bf16_products(grouped_folder, monkeypatch):
    """bf16 is then stored as fp16, and prompts are multiplied in fp32; matrices in 4 bits have
    torch's own product. A model that fits into its caches runs in fp32."""
    types, product = set(), torch.nn.functional.linear
    on = torch.device("cpu")
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: False)
    fp16, bf16 = torch.float16, torch.bfloat16
    assert pick_dtype("auto", bf16, on, 8e6) == torch.float32
    assert pick_dtype("auto", fp16, on, 9e6) == pick_dtype("auto", bf16, on) == bf16
    typed = lambda x, w: types.add(x.dtype) or product(x, w)
    monkeypatch.setattr(torch.nn.functional, "linear", typed)
    options = dict(dtype="fp32"), dict(dtype="bf16"), dict(dtype="bf16", format="int4")
    models = [load(grouped_folder, device="cpu", **given) for given in options]
    assert {m.data.dtype for m in models[1].weights.matrices} == {fp16}
    assert all(bool(m.cpu_product) == (m.format is INT4) for m in models[2].weights.matrices)
    prompts = torch.randint(3, 300, (8, 59))
    right, ours, _ = (logits_of_prompts(model, prompts, 57, 1, 1) for model in models)
    assert_close(ours, right, 0.05)
    assert types == {torch.float32}


FLOATS_8 = {"e4m3": E4M3, "e5m2": E5M2}
EVERY_CODE = torch.arange(256).to(torch.uint8).view(torch.int8)
EVERY_HALF = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)


@pytest.mark.parametrize("form", FLOATS_8)
def test_8_bit_codes_decode_and_encode(form):
    """As torch converts them; what is beyond the largest is the largest, and NaN is refused."""
    format, values = FORMATS[form], EVERY_CODE.view(FORMATS[form].dtype).float()
    finite = torch.isfinite(values)
    assert format.floats(EVERY_CODE)[finite].equal(values[finite])
    assert format.floats(EVERY_CODE)[~finite].isnan().all()
    assert format.round(values[finite]).equal(EVERY_CODE[finite])
    largest = format.floats(format.round(torch.tensor([1e30, -INF])))
    assert largest.abs().tolist() == [{"e4m3": 448, "e5m2": 57344}[form]] * 2
    for code in EVERY_CODE[~finite]:
        with pytest.raises(ValueError, match="codes of NaN"):
            format.check((torch.tensor([[0, code]], dtype=torch.int8), torch.ones(1, 1)))
    format.check((EVERY_CODE[None, finite], torch.ones(1, 1)))
    weights = torch.randn(50, 40) * 2.0 ** torch.randint(-126, 100, (50, 1))
    weights[7:9] = torch.tensor([[0], [1e-44]])
    format.check(format.encode(weights))


@pytest.mark.parametrize("form, bound", [("e4m3", 2.0**-4), ("e5m2", 2.0**-3)])
def test_encoded_rows_lose_least(form, bound):
    format, weights = FORMATS[form], torch.randn(70, 300) * torch.logspace(-6, 6, 70)[:, None]
    weights[3] = 0
    near = format.decoded(format.encode(weights))
    peak = weights.abs().amax(1, keepdim=True)
    assert ((near - weights).abs() <= bound * torch.maximum(weights.abs(), peak * 2.0**-6)).all()
    for step in (0.0, 0.25, 0.5, 0.75):
        tried = peak.clamp(min=1e-30) / format.top * 2**step
        other = format.decoded((format.round(weights / tried), tried))
        assert ((near - weights).square().sum(1) <= (other - weights).square().sum(1)).all()


@pytest.mark.parametrize("form", FORMATS)
def test_encode_and_check_refuse_what_is_not_finite(form):
    """And scales that are not positive."""
    format, weights, third = FORMATS[form], torch.randn(4, 64), torch.tensor(2)
    for bad in (NAN, INF):
        with pytest.raises(ValueError, match="NaN or inf"):
            format.encode(weights.index_fill(1, third, bad))
    largest = int4.MOST if format is INT4 else 1e38
    *codes, scales = format.encode(weights.sign() * largest)
    assert scales.isfinite().all()
    if format is INT4:
        with pytest.raises(ValueError, match="a weight beyond 5e[+]36 cannot be stored"):
            format.encode(weights * 1e37)
    *codes, scales = format.encode(weights)
    for bad in (0.0, -1.0, NAN, INF):
        with pytest.raises(ValueError, match="scales that are not"):
            format.check((*codes, scales.index_fill(0, third, bad)))


@pytest.mark.parametrize("peak", [1, 30, 36, 40, 150])
def test_products_in_half_precision_with_large_norms(peak):
    """Eight products are summed in halves: all energy in eight neighbours is the worst case."""
    for K, spread in itertools.product((256, 4096, 8192), (1, 8, 256)):
        norm, x = torch.full((K,), float(peak)).half().to(DEVICE), torch.zeros(1, K)
        x[0, :spread] = 100.0
        (w,) = encoded([Matrix(torch.full((16, K), 448.0, device=DEVICE))], E4M3)
        x, plain = x.half().to(DEVICE), (norm.float(), dense(w))
        products.fit_norm(norm, w)
        assert norm.max() <= products.NORM_LIMIT
        pass_ = SimpleNamespace(norm_eps=1e-5)
        out, exact = (torch.empty(1, 16, device=DEVICE) for _ in range(2))
        kernels.rmsnorm_linear_ref(x.float(), *plain, pass_, exact)
        assert nmse(kernels.rmsnorm_linear(x, norm, w, pass_, out), exact) < ONE_UNIT[torch.float16]


def test_kernels_encode_as_torch_does():
    """All finite halves, numbers between the codes and far beyond them, infinities and NaN."""
    halves = EVERY_HALF[torch.isfinite(EVERY_HALF)].float()
    between = torch.rand(1 << 16) * 2.0 ** torch.randint(-14, 12, (1 << 16,))
    beyond = torch.tensor([1e30, -1e30, torch.inf, -torch.inf, torch.nan])
    x = torch.cat([halves, between, -between, beyond]).to(DEVICE)
    codes = torch.empty(len(x), dtype=torch.int8, device=DEVICE)

    @launch.jit
    def encode(x, codes, N, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(codes + at, fp8.e4m3_encode(tl.load(x + at, mask=at < N)), mask=at < N)

    encode[(-(-len(x) // 4096),)](x, codes, len(x), BLOCK=4096)
    finite = torch.isfinite(x)
    assert torch.equal(codes[finite], E4M3.round(x[finite])) and (codes[~finite] == 0x7F).all()


@pytest.mark.parametrize("T", [1, 3, 80])
@pytest.mark.parametrize("dtype, heads", [
    (torch.float16, (2, 2, 16)), (torch.float16, (6, 2, 24)), (torch.bfloat16, (6, 2, 24)),
], ids=str)  # fmt: skip
def test_ops_on_an_8_bit_cache(dtype, heads, T):
    """The reference of the QKV op writes the nearest codes, its kernel the same, except where it
    rounds the other way; attention reads them exactly."""
    x, layer, pass_ = op_arguments("rmsnorm_qkv_rope", dtype, heads, T, 40)[0]
    caches = [E4M3.round(pass_.k[1]), E4M3.round(pass_.v[1])]
    new = pass_.place.long()
    elsewhere = torch.ones(caches[0].shape[1], dtype=torch.bool, device=DEVICE)
    elsewhere[new] = False
    ours, exact = cloned(caches), cloned(caches)
    unrounded = [pass_.k[1].float(), pass_.v[1].float()]
    with_caches = lambda k, v: changed(pass_, k=(None, k), v=(None, v))
    kernels.fused.rmsnorm_qkv_rope(x, layer, with_caches(*ours))
    for held in (exact, unrounded):
        kernels.reference.rmsnorm_qkv_rope(as_fp32(x), as_fp32(layer), with_caches(*held))
    floats = attention.cached_ref
    for mine, theirs, nearest, before in zip(ours, exact, unrounded, caches):
        assert torch.equal(theirs, E4M3.round(nearest))
        assert torch.equal(mine[:, elsewhere], before[:, elsewhere]), "other places changed"
        off, size = (floats(mine) - floats(theirs)).abs(), floats(theirs).abs()
        # before rope, where terms may cancel
        rounded = 2 * torch.finfo(dtype).eps * size[:, new].max()
        assert (off <= 2.0**-3 * size + 2.0**-9 + rounded).all(), "more than the next code"
        assert (off[:, new] > 0).double().mean() < 0.2
    check_attention(heads, T, 40, kv_fp8=True, dtype=dtype)


@needs_gpu
@pytest.mark.parametrize("accumulate", ["auto", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FLOATS_8)
def test_8_bit_tensor_cores_multiply_a_prompt(form, dtype, accumulate):
    """Activations in E4M3 err by at most 2^-4: a third of its square, halved as most err less."""
    x, w = randn(80, 256, dtype=dtype), Matrix(randn(512, 256, dtype=torch.float16, scale=1 / 16))
    (w,) = encoded([w], FORMATS[form])
    if not products.tensor_core_format(w):
        pytest.skip("this GPU has none")
    residual = randn(80, 512, dtype=dtype)
    y = kernels.linear_add(x, w, added := residual.clone(), accumulate=accumulate)
    assert y is added and 0 < nmse(y, residual.float() + x.float() @ dense(w).data.t()) < 2.0**-10


def test_activations_as_codes():
    x = randn(5, 300, dtype=torch.float16) * torch.logspace(-3, 3, 5, device=DEVICE)[:, None].half()
    codes, scales = products.encode_rows(x)
    peak = x.float().abs().amax(1, keepdim=True)
    assert torch.allclose(scales, peak / 448)
    # x / scales would round differently; half-way between two codes, the rounding of 448 / peak
    # decides
    exact = [E4M3.round(x.float() * (448 / peak) * (1 + bit)) for bit in (0, 2**-23, -(2**-23))]
    assert torch.stack([codes == nearest for nearest in exact]).any(0).all()
    x, norm = x.float(), randn(300, dtype=torch.float32)
    (codes, scales), exact = products.encode_rows(x, norm, 1e-5), kernels.rmsnorm_ref(x, norm, 1e-5)
    assert torch.allclose(scales, exact.abs().amax(1, keepdim=True) / 448)
    nearest = E4M3.floats(E4M3.round(exact / scales))
    # a value half-way between two codes may go to either
    assert nmse(E4M3.floats(codes), nearest) < 1e-5


@pytest.mark.parametrize("form", [*FORMATS.values(), *FILE_FORMATS], ids=lambda f: f.name)
def test_groups_are_as_many_as_their_tensors_say(form):
    """Which kernels go by."""
    widths = [columns for _, (_, columns) in form.shapes(4, 1024).values()]
    if form is others.Q6_K:
        assert form.groups is None and widths == [128, 64, 32, 4, 1]
    elif form.groups is not None:  # without, the kernels that all formats share need to know none
        assert widths[1 : 1 + len(form.groups)] == [1024 // group for group in form.groups]
        assert len(widths) - 1 - len(form.groups) == (form.gain is not None)


@pytest.mark.parametrize("form", [INT4, others.Q4_0, others.Q8_0], ids=lambda f: f.name)
def test_rows_in_the_order_of_a_format(form):
    """As products of many tokens read them on Hopper."""
    for K in (256, 416, 1024):  # INT4 keeps the last 160 of 416 columns in order
        x, norm = randn(3, K, dtype=torch.float16), randn(K, dtype=torch.float16)
        order = form.in_runs(torch.arange(K, device=DEVICE))
        assert not torch.equal(order, torch.arange(K, device=DEVICE))
        assert torch.equal(products.ordered_rows(x, form), x[:, order])
        normed = kernels.rmsnorm_ref(x, norm, 1e-5)[:, order]
        assert_close(products.ordered_rows(x, form, norm, 1e-5), normed)
        assert torch.equal(products.ordered_rows(x, E4M3), x)


@pytest.mark.parametrize("form", [*FORMATS.values(), *FILE_FORMATS, OWN], ids=lambda f: f.name)
def test_many_tokens(form):
    """Tiles of rows and blocks of tokens that are not full; matrices for which several programs
    share a tile on Hopper, and which its own kernel does not take; each epilogue."""
    dtype = torch.float16
    most = 100 if form.bits == 4 else 50  # above that, the library multiplies E4M3 codes of x
    draws = [(12, 200, 2048), (17, 200, 2048), (64, 68, 1024)]
    draws += [(most, 400, 768), (33, 128, 2304)] if ON_GPU else []
    for T, N, K in draws:
        w = random_matrix(form, N, K, bias=randn(N, dtype=dtype))
        exact_w = dense(w)
        x, norm = randn(T, K, dtype=dtype), torch.rand(K, device=DEVICE).to(dtype) + 0.5
        residual = randn(T, N, dtype=dtype)
        layer = SimpleNamespace(ffn_norm=norm, w13=w)
        exact_layer = SimpleNamespace(ffn_norm=norm.float(), w13=exact_w)
        state = SimpleNamespace(norm_eps=1e-5)
        y = kernels.linear_add(x, w, residual.clone(), accumulate="fp32")
        right = kernels.linear_add_ref(x.float(), exact_w, residual.float())
        assert nmse(y, right) < 1e-5, (T, N, K)
        y = kernels.rmsnorm_swiglu(x, layer, state, accumulate="fp32")
        right = kernels.rmsnorm_swiglu_ref(x.float(), exact_layer, state)
        assert nmse(y, right) < 2e-5, (T, N, K)


@pytest.mark.parametrize("K", [96, 4448])
def test_int4_recoded_as_e4m3(K):
    N = 67  # which the rows of a program do not divide
    w = int4_matrix(N, K)
    recoded = E4M3.empty(N, K, w.data.device)
    products.recode(w, *recoded)
    # three bits of mantissa: 2^-8 / 12 to 2^-6 / 12
    assert nmse(E4M3.decoded(recoded), w.dense()) < 2.0**-10


def test_bytes_of_a_copy_that_a_prompt_needs(grouped_folder, monkeypatch):
    """On a card whose tensor cores multiply E4M3: floats and E4M3 as they are stored, 4 bits in
    E4M3, or decoded for the most precise sums, as E5M2 always is. Tiles of experts are decoded one
    by one, unless enough tokens share them."""
    model = load(grouped_folder, device="cpu", dtype="fp32", format="int4")
    largest = 2 * 128 * 64  # w1 and w3
    assert model.prompt_memory(0) == 4 * largest
    N, K = 96, 256
    w = Matrix(torch.zeros(N, K, dtype=torch.float16, device=DEVICE))
    in_fp16, in_e4m3 = 2 * N * K, N * K + 4 * N
    (m,) = encoded([w], INT4)
    assert products.as_e4m3(m).nbytes == in_e4m3 and products.dense_for(m, w.data).nbytes == in_fp16
    monkeypatch.setattr(fp8, "capability", lambda device: 89)
    monkeypatch.setattr(products, "_cublas_scales_rows", lambda device: False)
    for format, auto, fp32 in (
        (None, 0, 0), (E4M3, 0, 0), (E5M2, in_fp16, in_fp16), (INT4, in_e4m3, in_fp16),
    ):  # fmt: skip
        (m,) = encoded([w], format)
        for accumulate, size in (("auto", auto), ("fp32", fp32)):
            assert products.copy_bytes(m, torch.float16, accumulate) == size, (format, accumulate)
        coded = lambda device, bits, kind, each: each >= 16  # instead of launch sizes
        monkeypatch.setattr(experts, "many_sizes", coded)
        of_experts = [experts.copy_bytes(m, "auto", each) for each in (15, 16)]
        assert of_experts == [0, in_e4m3 if format is INT4 else 0], format
        assert experts.copy_bytes(m, "fp32", 16) == 0
    assert model.prompt_memory(0) == largest + 4 * 2 * 128


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_decoded_caches(dtype):
    """Of a sequence in the pool, as far as its segment sees them."""
    codes = torch.arange(-128, 128, device=DEVICE).to(torch.int8)
    caches = codes.repeat(2, 2, 500, 1).view(2, 2, 4000, 32).unbind()
    segments = torch.tensor([[501, 1000, 0, 17]], dtype=torch.int32, device=DEVICE)
    for codes, values in zip(caches, attention.decode_caches(*caches, segments, 2000, dtype)):
        exact, ours = attention.cached_ref(codes)[:, 501:1518].to(dtype), values[:, :1017]
        assert values.shape == (2, 2000, 32)
        assert exact.isnan().any() and ours.nan_to_num(7.0).equal(exact.nan_to_num(7.0))
