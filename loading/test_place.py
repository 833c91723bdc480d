"""Tests of loading/place.py."""

import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import launch
from bits.int4 import INT4
from fp8 import E4M3
from loading import place
from loading.names import formats_of
from loading.place import check_memory, context_that_fits, memory_of
from ranks.processes import Ranks
from settings import Options
from tests.helpers import read_config_like

LLAMA_7B = read_config_like(
    dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=128, hidden_dim=11008,
    vocab_size=32000,
)  # fmt: skip
EIGHT_EXPERTS = dict(n_experts=8, experts_per_token=2)


@pytest.mark.parametrize("dtype, device, options, weights, cache, room", [
    # 32 layers of 202,375,168 weights and an output matrix of 131,072,000, as many in the
    # embedding, and 65 norms of 4096: 6,738,415,616 in all. A token's keys and values are
    # 2 * 32 * 4096 numbers. A GPU has the activations of 4096 tokens twice, 2 * 4096 + 3 * 11008 of
    # each, and half a GB more; on a CPU the output matrix, the largest, counts six times
    ("fp16", "cuda", {}, 13.48, 2.15, 1.21),
    ("fp32", "cpu", {}, 26.95, 4.29, 3.15),
    ("fp16", "cuda", dict(ctx_size=1), 13.48, 0.00, 0.54),
    # half the cache, and room for a layer's 2 * 4096 * 4096, decoded
    ("fp16", "cuda", dict(kv_fp8=True), 13.48, 1.07, 1.35),
    # 6,607,077,376 codes, a scale for each of 1,391,872 rows, the embedding. The 90,177,536 weights of
    # a layer's w1 and w3 may be decoded, twice
    ("fp16", "cuda", dict(format=E4M3), 6.88, 2.15, 1.57),
    # 9 bits for two of 6,476,005,376 codes, a scale for each of 1,359,872 rows; the output matrix
    # in 8 bits, and the embedding. A CPU keeps 5/8 of a byte more for each code, for bf16
    ("fp16", "cuda", dict(format=INT4), 4.04, 2.15, 1.57),
    ("fp32", "cpu", dict(format=INT4), 4.30, 4.29, 3.15),
    ("bf16", "cpu", dict(format=INT4), 8.09, 2.15, 1.57),
    # 8 experts: 30,299,652,096 weights more, and a router of 32,768 in each layer. Room is for one
    # expert at a time, and a CPU keeps no copy of them. A token has 2 * 4096 + 2 * 3 * 11008 numbers
    ("fp16", "cuda", dict(shape=EIGHT_EXPERTS), 74.08, 2.15, 1.75),
    # a stack's 721,420,288 weights in E4M3, twice
    ("fp16", "cuda", dict(shape=EIGHT_EXPERTS, format=INT4), 21.11, 2.15, 3.20),
    ("bf16", "cpu", dict(shape=EIGHT_EXPERTS, format=INT4), 22.45, 2.15, 1.57),
    # while they are encoded from fp32, all 721,420,288 weights of a layer's w1 and w3 are in memory
    (
        "fp16", "cuda", dict(shape=EIGHT_EXPERTS, format=E4M3, encoded_from=torch.float32),
        37.20, 2.15, 2.89,
    ),
    # half of the matrices and of the cache, and 2 * 4096 + 3 * 5504 numbers for each token
    ("fp16", "cuda", dict(ranks=Ranks(1, 2)), 6.87, 1.07, 0.94),
    # a large output matrix, of 151,936 rows: decoded for the scores of a prompt, and for many texts
    # in a graph as well
    ("fp16", "cuda", dict(shape=dict(vocab_size=151936), format=INT4), 5.52, 2.15, 2.30),
    ("fp16", "cuda", dict(shape=dict(vocab_size=151936), format=INT4, parallel=17), 5.52, 36.51, 3.03),
])  # fmt: skip
def test_memory_of_7b(monkeypatch, dtype, device, options, weights, cache, room):
    """In GB, worked out by hand: if these change, so must what users are told that they need."""
    given = dict(ctx_size=4096, shape={}, ranks=Ranks(), format=None, encoded_from=None) | options
    ranks, device = given["ranks"], torch.device(device)
    config = replace(LLAMA_7B, **given["shape"]).cut(ranks.size)
    fields = ("kv_fp8", "ctx_size", "parallel")
    run = Options(**{name: given[name] for name in fields if name in given})
    formats = formats_of(config, given["format"])
    need = memory_of(config, place.DTYPES[dtype], device, formats, run, given["encoded_from"])
    monkeypatch.setattr("loading.place.free_memory", lambda device: 1e6)
    with pytest.raises(MemoryError) as error:
        check_memory(need, given["ctx_size"], device, ranks)
    said = re.findall(r"(?:weights|tokens|workspace|=|has) ([\d.]+) GB", str(error.value))
    total = float(said.pop(3))
    assert said == [f"{weights:.2f}", f"{cache:.2f}", f"{room:.2f}", "0.00"]
    assert total == pytest.approx(weights + cache + room, abs=0.016)
    where = f"{device} for rank 1 of 2 has" if ranks.size > 1 else f"but {device} has"
    assert where in str(error.value)


def test_memory_that_is_just_enough(monkeypatch):
    cpu = torch.device("cpu")
    asked = memory_of(LLAMA_7B, torch.float16, cpu, {}, Options()), 4096, cpu
    need = 2 * 6_738_415_616 + 2 * 2 * 32 * 4096 * 4096 + 6 * 2 * 131_072_000
    for has, ranks in ((need, Ranks()), (4 * need, Ranks(1, 4, 1, 4))):  # which share a host's
        monkeypatch.setattr("loading.place.free_memory", lambda device, has=has: has)
        assert check_memory(*asked, ranks) is None
        monkeypatch.setattr("loading.place.free_memory", lambda device, has=has: has - 1)
        with pytest.raises(MemoryError, match=f"= {need / 1e9:.2f} GB, but cpu.* has .* free: try"):
            check_memory(*asked, ranks)


def test_contexts_that_fit(monkeypatch):
    """All slots have the same; a tenth of the memory stays free."""
    gpu = torch.device("cuda")
    for parallel in (1, 4):
        need = memory_of(LLAMA_7B, torch.float16, gpu, {}, Options(parallel=parallel))
        monkeypatch.setattr("loading.place.free_memory", lambda device: 24e9)
        fits = context_that_fits(need, 1 << 20, gpu, Ranks())
        # weights and workspace are 14.69 GB, and a token's keys and values 524,288 bytes
        assert fits == (0.9 * 24e9 - need.at(0)) // (524_288 * parallel)
        assert context_that_fits(need, 1000, gpu, Ranks()) == 1000
        with pytest.raises(MemoryError, match=f"at most {int((24e9 - need.at(0)) / need.cache)}"):
            check_memory(need, 32768, gpu, Ranks(), parallel)
    monkeypatch.setattr("loading.place.free_memory", lambda device: 13e9)
    assert context_that_fits(need, 1000, gpu, Ranks()) == 512, "an error then says what is missing"


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_container(monkeypatch, tmp_path, version):
    """What its limit leaves, apart from files that the system can drop; without a limit, what the
    machine has."""
    limit, used = {1: ("limit_in_bytes", "usage_in_bytes"), 2: ("max", "current")}[version]
    names = (tmp_path, f"memory.{limit}", f"memory.{used}")
    monkeypatch.setattr(place, "CGROUPS", (("/nowhere", "a", "b"), tuple(map(str, names))))
    (tmp_path / names[1]).write_text("5000000\n")
    (tmp_path / names[2]).write_text("4000000\n")
    stat = "anon 9\ninactive_file 200000\nactive_file 100000\ntotal_active_file 7\n"
    (tmp_path / "memory.stat").write_text(stat)
    cpu = torch.device("cpu")
    assert place.free_memory(cpu) == 1_300_000
    (tmp_path / names[1]).write_text("max\n" if version == 2 else f"{(1 << 63) - 4096}\n")
    assert 1e8 < place.free_memory(cpu) < 1e15


def test_where_the_kernels_run(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "This card")
    monkeypatch.setattr(launch, "capability", lambda device: 80)
    assert place.pick_backend("auto", gpu) == "triton"
    monkeypatch.setattr(launch, "capability", lambda device: 79)
    with pytest.raises(ValueError, match="This card is older than compute capability 8.0"):
        place.pick_backend("auto", gpu)
    assert place.pick_backend("torch", gpu) == place.pick_backend("auto", cpu) == "torch"
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1"):
        place.pick_backend("triton", cpu)


def test_a_gpu_that_torch_does_not_see(monkeypatch, tmp_path):
    """Whoever asks for no device is told what to do, and gets the CPU."""
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda p: str(p) != "/dev/nvidia0" and exists(p))
    assert place.unused_gpu() == ""
    tool.touch(0o755)
    told = rf"although there is {tool}: torch \S+ is made for CUDA 13.0: CUDA 13 needs a driver"
    with pytest.warns(UserWarning, match=f"{told}.* 580 or later.*; this runs on the CPU$"):
        assert place.pick_device() == torch.device("cpu")
    with pytest.raises(ValueError, match=f"cuda:0 was asked for, but torch sees no GPU, {told}"):
        place.pick_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert place.unused_gpu().endswith("for CPUs alone: `make clean run` installs the one for GPUs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with warnings.catch_warnings(action="error"):
        assert place.pick_device() == torch.device("cpu")
    with pytest.raises(ValueError, match="but torch sees 0 CUDA devices$"):
        place.pick_device("cuda")
