"""Tests of saved models."""

import os
import resource
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from fp8 import E4M3
from loading import place
from loading.checkpoint import Checkpoint, load, read_config, save
from loading.place import FORMATS
from loading.templates import TEMPLATES, find_template
from session import Session
from tests.helpers import (
    DOWN,
    FAMILIES,
    FILES,
    assert_reads_alike,
    assert_refused,
    edit,
    fails,
    hugging_face_model,
    logits_of,
    set_one,
    spoil_config,
    spoil_tensors,
)

# ---- helpers


@pytest.fixture
def hears_signals():
    """SIGTERM and SIGHUP as a program usually has them, even where the tests' own parent ignores
    them (nohup)."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield numbers
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)


# ---- save.py: saved models


def test_a_model_is_named(tmp_path):
    for wrong in 5, None, torch.nn.Identity():
        for take in Session, partial(save, target=str(tmp_path / "saved")):
            with pytest.raises(TypeError, match=f"hub, not as {type(wrong).__name__}"):
                take(wrong)


@pytest.mark.parametrize("shape, layout, form", [
    ("gqa", None, "e4m3"), ("mqa, tied", None, "e5m2"), ("gqa", "meta, 2 shards", "e4m3"),
    ("gqa", "config.json beside Meta's", "e4m3"),
    ("mixtral", None, "e4m3"), ("granite code", None, "e4m3"), ("qwen 3", None, "e5m2"),
    ("granite 3", None, "e4m3"), ("phi 4", None, "e4m3"),
])  # fmt: skip
def test_saved_model_is_the_model(cli, copy, shape, layout, form, monkeypatch):
    """Also its chat template, which the name of the original's folder says."""
    copy = copy.rename(copy.parent / "Llama-2-7b-chat")
    saved = copy.parent / "saved"
    hugging_face_model(read_config(copy).vocab_size, **FAMILIES[shape]).half().save_pretrained(copy)
    if layout:
        FILES[layout](copy)
        (copy / "tokenizer.model").rename(copy.parent / "tokenizer.model")
        (copy / "tokenizer.json").touch()  # the other comes first
    code, out, err = cli("-m", copy, "--save", saved, "--fp8", form)
    assert (code, out, err.count("\n")) == (0, "", 1) and f"{saved}: {form} matrices" in err, err
    assert find_template(copy, {})[0] == find_template(saved, {})[0] == TEMPLATES["llama2"]
    tensors = load_file(saved / "model.safetensors")
    rows = {"mixtral": 4 * 224, "granite code": 256}.get(shape, 224)
    written = {"layers.1.w13": (rows, 64), "layers.1.w13.scale": (rows,), "norm.weight": (64,)}
    if shape == "qwen 3":
        written["layers.1.qk_norm.weight"] = (2, 24)
    found = {name: tuple(tensors[name].shape) for name in written}
    assert found == written, "folders that were saved earlier stay readable"
    for dtype in ("fp32", "bf16"):
        # where it was encoded: a GPU may round an error the other way
        options = dict(dtype=dtype, device="cpu")
        models = load(copy, format=form, **options), load(saved, **options)
        for one, other in zip(*(model.weights.matrices for model in models)):
            same = all(map(torch.equal, one.tensors, other.tensors))
            assert same, "codes depend on the dtype"
        ours, theirs = (logits_of(model, torch.arange(5, 25) * 7, 19, 1) for model in models)
        assert torch.equal(ours, theirs), "a saved model says something else"
    assert_reads_alike(models[1], monkeypatch, FORMATS[form])
    code, _, err = cli("-m", saved, "--fp8", form, "-p", "Once", "-n", 1)
    assert code == 0 and f"with {form} matrices" in err
    lossy = "would lose precision a second time: run it as it is, or encode"
    other = "e4m3" if form == "e5m2" else "e5m2"
    for wanted, refused in ((other, ("-p", "Once")), ("e4m3", ("--save", copy.parent / "again"))):
        why = f"its matrices are {form}, and {wanted} {lossy}"
        assert_refused(cli("-m", saved, "--fp8", wanted, *refused), why)


def test_transformers_refuses_what_was_saved(tiny_saved, tmp_path):
    """Otherwise it would make random weights for the names that it does not find."""
    with pytest.raises(ValueError, match="model type `fused-llama` but Transformers does not rec"):
        transformers.AutoModelForCausalLM.from_pretrained(tiny_saved)
    earlier = shutil.copytree(tiny_saved, tmp_path / "earlier")
    edit(earlier / "config.json", model_type="llama", original_model_type=None)
    assert Checkpoint(earlier).config == Checkpoint(tiny_saved).config, "stays readable"


@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp16"])
def test_what_is_saved_is_encoded_from_the_original(tiny, cli, tmp_path, dtype):
    """Codes are those of the weights in the file, in fp32; the dtype is that of all else."""
    code, *_ = cli("-m", tiny, "--save", tmp_path / "saved", "--fp8", "--dtype", dtype)
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    codes, scale = E4M3.encode(load_file(tiny / "model.safetensors")[DOWN])
    assert code == 0 and torch.equal(tensors["layers.1.w2"], codes)
    assert torch.equal(tensors["layers.1.w2.scale"], scale.flatten())
    types = {tensors[f"{name}.weight"].dtype for name in ("norm", "tok_embeddings")}
    assert types == {place.DTYPES.get(dtype, torch.float32)}


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_an_infinite_weight_is_not_saved(copy, cli, form):
    """In fp16, where the largest number of fp32 would be infinite, too."""
    spoil_tensors(lambda t: t.update({name: value.half() for name, value in t.items()}))(copy)
    set_one(DOWN, torch.inf)(copy)
    spoil_config(dtype="float16")(copy)
    said = cli("-m", copy, "--save", copy / "saved", "--fp8", form)
    assert_refused(said, f"{DOWN} in model.safetensors holds NaN or inf")


def test_save_is_whole_or_not_at_all(cli, copy, monkeypatch, tmp_path, hears_signals):
    (tmp_path / "file").touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    before = sorted(tmp_path.rglob("*"))

    def refused(to: str, expected: str, code: int = 1) -> None:
        seen, out, err = cli("-m", copy, "--save", tmp_path / to, "--fp8")
        assert (seen, out, err.count("\n")) == (code, "", code == 1) and expected in err, err
        assert sorted(tmp_path.rglob("*")) == before, "something is left of a save that failed"

    refused("copy", "copy is not an empty folder: save to a new one")
    refused("file", "file is not an empty folder")
    refused("no/where", "No such file or directory")
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))  # a disk that becomes full
    try:
        refused("new", "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    full = lambda _: SimpleNamespace(free=0)
    ends = [  # a step, what happens in it, what is said, the exit code
        ("loading.place.free_memory", lambda _: 100_000, "GB free: try a", 1),
        ("loading.checkpoint.shutil.disk_usage", full, "has 0.00 GB free: save elsewhere", 1),
        ("loading.loader.Loader.load", fails(KeyboardInterrupt()), "", 130),
    ]
    for number in hears_signals:
        killed = lambda *_, number=number: signal.raise_signal(number)
        ends.append(("loading.saved.save_file", killed, "", 128 + number))
    for step, end, expected, code in ends:
        with monkeypatch.context() as patch:
            patch.setattr(step, end)
            refused("new", expected, code)
    rename = lambda file, to: os.rename(file, to) if file.name != "model.safetensors" else 1 / 0
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)  # its last step
        refused("new", "division by zero")
        refused("empty", "division by zero")


def test_save_to_a_folder_that_exists(tiny, cli, tmp_path):
    """Inside it, since it may be a mount point, and with its own mode."""
    tmp_path.chmod(0o2750)
    (tmp_path / "lost+found").mkdir()  # as in a new file system
    place = tmp_path.stat()
    assert cli("-m", tiny, "--save", tmp_path, "--fp8", "--quiet") == (0, "", "")
    assert (place.st_ino, place.st_mode) == (tmp_path.stat().st_ino, tmp_path.stat().st_mode)
    (tmp_path / "lost+found").rmdir()
    modes = {file.stat().st_mode for file in (*tmp_path.iterdir(), tiny / "config.json")}
    assert len(modes) == 1
