"""Tests of layouts on disk, and what lies in files."""

import os
import shutil

import pytest
import torch

from loading import checkpoint, tensors
from loading.checkpoint import load
from passes import PROMPT_CHUNK
from tests.helpers import (
    FAMILIES,
    FILES,
    LAYOUTS,
    assert_equals_transformers,
    assert_reads_alike,
    hugging_face_model,
    spoil_tensors,
    to_bin,
)

IN_ONE_TENSOR = "experts in one tensor"  # as transformers 5 keeps them in memory


@pytest.mark.parametrize("family, how", [
    *((family, "safetensors") for family in FAMILIES), *(("gqa", how) for how in FILES), ("qwen 3 moe", "bin"),
    ("mixtral", IN_ONE_TENSOR), ("qwen 3 moe", IN_ONE_TENSOR),
])  # fmt: skip
def test_checkpoints_equal_transformers(tmp_path, family, how, monkeypatch):
    """Also by ranks, and a few rows at a time; a prompt is evaluated in chunks."""
    monkeypatch.setitem(PROMPT_CHUNK, "cpu", 16)
    theirs = hugging_face_model(**FAMILIES[family])
    theirs.save_pretrained(tmp_path, save_original_format=how != IN_ONE_TENSOR)
    if how in FILES:
        FILES[how](tmp_path)
    assert_reads_alike(assert_equals_transformers(tmp_path, theirs), monkeypatch)


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
