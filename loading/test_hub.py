"""Tests of loading/hub.py."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from loading.checkpoint import load, open_checkpoint, open_tokenizer
from tests.helpers import FILES, HASH, PATIENCE, assert_refused, of_hub, program, set_hub

NEEDED = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.model"]


def test_hub_downloads_once_what_is_needed(hub, tiny, cli, monkeypatch, tmp_path):
    """First by a process of its own, in which no test has imported or set anything."""
    flags = ("someone/tiny", "-p", "Once", "-n", 4, "--temp", 0, "--quiet")
    expected = cli("-m", tiny, *flags[1:])
    process = program("-hf", *flags)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out.decode(), err.decode()) == expected
    assert hub.fetched() == NEEDED
    again = "the second time is without the network"
    assert cli("-m", *flags) == expected and not hub.asked, again
    set_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
    next((tmp_path / "cache").rglob("snapshots/*/generation_config.json")).unlink()
    assert cli("-m", *flags) == expected, "offline, what is there has to do"


@pytest.mark.parametrize("layout, listed", [
    ("a left-over index and a .bin", True), ("safetensors shards", False), ("meta, 2 shards", False)
])  # fmt: skip
def test_hub_finishes_a_download(hub, copy, monkeypatch, tmp_path, layout, listed):
    """One of the files is not there yet, and the disk has room for that one only. listed: whether
    the cache remembers what the repository holds; if another program made it, it does not."""
    FILES[layout](copy)
    hub.files = of_hub(copy)
    whole = load("someone/tiny", dtype="fp32", device="cpu")
    if listed:
        assert hub.fetched() == NEEDED, "nothing else that lies there"
    files = (tmp_path / "cache").rglob("snapshots/*/*")
    *_, last = sorted(path for path in files if path.stat().st_size > 9999)
    size = last.stat().st_size
    last.resolve().unlink()
    last.unlink()
    if not listed:
        shutil.rmtree(tmp_path / "cache" / "models--someone--tiny" / "trees")
    disk = SimpleNamespace(free=size - 1)
    monkeypatch.setattr("loading.hub.shutil.disk_usage", lambda _: disk)
    needs = f"takes {size / 1e9:.2f} GB, but .* has {size / 1e9:.2f} GB free \\(see HF_HOME\\)"
    with pytest.raises(ValueError, match=f"someone/tiny {needs}"):
        load("someone/tiny", device="cpu")
    disk.free = size
    hub.fetched()
    again = load("someone/tiny", dtype="fp32", device="cpu")
    assert torch.equal(whole.weights.layers[1].w2.data, again.weights.layers[1].w2.data)
    assert hub.fetched() == [last.name]


@pytest.fixture
def cached_by_another(hub, tmp_path):
    """Weights and a tokenizer are in the cache, which does not know what else the repository has."""
    cache = tmp_path / "cache" / "models--someone--tiny"
    snapshot = cache / "snapshots" / HASH
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(HASH)
    for name in ("config.json", "model.safetensors", "tokenizer.model"):
        (snapshot / name).write_bytes(hub.files[name])
    hub.files["generation_config.json"] = b'{"temperature": 0.25}'
    hub.files["chat_template.jinja"] = b"{{ messages[0].content }}"


def test_hub_is_asked_once_for_what_another_program_has_not_cached(hub, cached_by_another):
    for fetched in (["chat_template.jinja", "generation_config.json"], []):
        opened = open_checkpoint("someone/tiny")
        assert (opened.sampling(), opened.notes) == ({"temp": 0.25}, [])
        assert hub.fetched() == fetched
    tokenizer = open_tokenizer(opened.folder)
    assert tokenizer.template_name == "the checkpoint's own (chat_template.jinja)"


def test_offline_files_may_be_missing(cached_by_another, cli, monkeypatch, tmp_path):
    set_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
    code, _, err = cli("-m", "someone/tiny", "-p", "Once", "-n", 2)
    assert code == 0 and "repository has it: generation_config.json, tokenizer_config.json" in err


GEMMA = {"config.json": b'{"model_type": "gemma2"}', "model.safetensors": b"x"}
HUB_REFUSALS = {  # the hub, whether it is there, the repository: what the line says
    "gated": (dict(token="secret"), "", "tiny", "it is gated: accept its licence on its page, and set HF_TOKEN"),
    "gguf": (dict(files={"a.IQ2_M.gguf": b"x"}), "", "tiny", "holds no weights that this program reads"),
    "another family": (dict(files=GEMMA), "", "tiny", "config.json: model_type is 'gemma2', which is not supported"),
    "another kind": (dict(files={"a.Q4_0.gguf": b"x"}), "", "tiny:Q4_K_M", "holds no GGUF file of kind Q4_K_M"),
    "forbidden": (dict(forbidden="/config.json"), "", "tiny", "failed (HfHubHTTPError: 403 Forbidden"),
    "unknown": ({}, "", "other", "no folder someone/other here, and no such repository on http://127.0.0.1:"),
    "offline": ({}, "offline", "tiny", "offline mode is enabled. To disable it, please unset the `HF_HUB_OFFLINE`"),
    "not there": ({}, "not there", "tiny", "and the download from http://127.0.0.1:9 failed (Conn"),
}  # fmt: skip


@pytest.mark.parametrize("how", HUB_REFUSALS)
def test_hub_refusals_are_one_line(hub, cli, monkeypatch, tmp_path, how):
    settings, state, name, expected = HUB_REFUSALS[how]
    for field, value in settings.items():
        setattr(hub, field, value)
    if state:
        set_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=state == "offline")
    assert_refused(cli("-m", f"someone/{name}", "-p", "Once", "-n", 2), expected)
    weights = [name for name in hub.fetched() if name.endswith(("safetensors", "gguf"))]
    assert not weights, "refused only after gigabytes were fetched"
    if hub.token:
        monkeypatch.setenv("HF_TOKEN", "secret")
        assert cli("-m", "someone/tiny", "-p", "Once", "-n", 2)[0] == 0
