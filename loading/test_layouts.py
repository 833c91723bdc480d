"""Tests of layouts on disk, and what lies in files."""

import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from formats import Matrix
from fp8 import E4M3
from loading import checkpoint, reading, tensors
from loading.checkpoint import load, read_config, save
from loading.names import model_tensors, tensor_in
from tests.helpers import (
    FAMILIES,
    FILES,
    LAYOUTS,
    assert_equals_transformers,
    assert_two_ranks_have,
    hugging_face_model,
    loaded,
    spoil_tensors,
    to_bin,
)


@pytest.mark.parametrize("how", FILES)
def test_layouts_and_files_beside_others_equal_transformers(tmp_path, how):
    theirs = hugging_face_model(**FAMILIES["gqa"])
    theirs.save_pretrained(tmp_path)
    FILES[how](tmp_path)
    assert_equals_transformers(tmp_path, theirs)


@pytest.mark.parametrize("family, layout", [
    ("gqa", "safetensors"), ("gqa", "bin"), ("gqa", "meta, 2 shards"), ("gqa", "saved"),
    ("qwen 3 moe", "safetensors"), ("qwen 3 moe", "bin"), ("qwen 3 moe", "saved"),
])  # fmt: skip
def test_tensors_are_read_piece_by_piece(copy, monkeypatch, family, layout):
    """A few rows at a time, and several of these together, they are what they are as a whole; also
    by ranks, each of which has its share of every expert."""
    hugging_face_model(read_config(copy).vocab_size, **FAMILIES[family]).save_pretrained(copy)
    form = None
    if layout == "saved":
        form = E4M3
        copy = save(copy, copy.parent / "saved", format="e4m3", device="cpu").parent
    elif layout != "safetensors":
        LAYOUTS[layout](copy)
    opened = SimpleNamespace(checkpoint=checkpoint.Checkpoint(copy))
    opened.config = opened.checkpoint.config
    whole = loaded(opened, form)
    monkeypatch.setattr(tensors, "AT_ONCE", 900)
    monkeypatch.setattr(reading, "TOGETHER", 9000)
    pieces = loaded(opened, form)
    for t in model_tensors(opened.config):
        stored = [tensor_in(weights, t) for weights in (whole, pieces)]
        if isinstance(stored[0], Matrix):
            stored = [matrix.dense() for matrix in stored]
        assert torch.equal(*stored), t.name
    assert_two_ranks_have(opened, whole.layers[1], form)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("head", ["same", "other", "other at the end", "alone"])
def test_tied_embeddings_are_what_the_tensors_say(tmp_path, monkeypatch, head, suffix):
    """Also where they are compared a few rows at a time."""
    monkeypatch.setattr(tensors, "AT_ONCE", 900)
    theirs = hugging_face_model(**FAMILIES["mqa, tied"])
    theirs.save_pretrained(tmp_path)

    def put_head(tensors: dict) -> None:
        table = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = table.flip(0) if head == "other" else table.clone()
        if head == "other at the end":
            tensors["lm_head.weight"][-1, -1] += 1
        if head == "alone":
            del tensors["model.embed_tokens.weight"]

    spoil_tensors(put_head)(tmp_path)
    if suffix == "bin":
        to_bin(tmp_path)
    theirs = type(theirs).from_pretrained(tmp_path, dtype=torch.float32)
    ours = assert_equals_transformers(tmp_path, theirs)
    assert ours.config.tie_embeddings == ("other" not in head)


@pytest.mark.parametrize("layout", [None, "bin"])
@pytest.mark.parametrize("how", ["replaced", "cut"])
def test_weights_that_change_while_they_are_read(copy, layout, how):
    LAYOUTS.get(layout, lambda folder: None)(copy)
    opened = checkpoint.Checkpoint(copy)
    file = opened.layout.files.weights.files[0]
    if how == "cut":
        os.truncate(file, 9999)
    else:
        os.replace(shutil.copy(file, copy / "new"), file)
    with pytest.raises(OSError, match=f"{file.name} was (replaced|cut short) while it was being"):
        load(opened, device="cpu")


@pytest.mark.parametrize("family", ["mixtral", "qwen 3 moe"])
def test_experts_in_one_tensor_equal_transformers(tmp_path, monkeypatch, family):
    """As transformers 5 keeps them in memory; also a few rows at a time, and by ranks."""
    theirs = hugging_face_model(**FAMILIES[family])
    theirs.save_pretrained(tmp_path, save_original_format=False)
    ours = assert_equals_transformers(tmp_path, theirs)
    whole = loaded(ours, None)
    monkeypatch.setattr(tensors, "AT_ONCE", 900)
    for one, other in zip(loaded(ours, None).matrices, whole.matrices, strict=True):
        assert torch.equal(one.dense(), other.dense())
    assert_two_ranks_have(ours, whole.layers[1], None)
