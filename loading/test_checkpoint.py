"""Tests of loading/checkpoint.py."""

import io
import json

import pytest
import torch
import transformers

from engine import generate
from loading import checkpoint, loader
from loading.checkpoint import load, open_tokenizer, read_config, save
from tests.helpers import (
    DEVICE,
    FAMILIES,
    NORM,
    UNDIVIDED,
    assert_close,
    conversation,
    hugging_face_model,
    logits_of,
    oracle,
    spoil_config,
    spoil_tensors,
    with_dense_weights,
    write,
)


@pytest.mark.parametrize("family, fp8, backend", [
    ("mixtral", "e4m3", "triton"), (UNDIVIDED, None, "triton"),
    ("qwen 2.5", "e4m3", "torch"), ("qwen 3", "e5m2", "torch"),
    # for Triton's kernels, the others are as the model of most tests
    ("qwen 2.5", None, "triton"), ("qwen 3", None, "triton"), ("qwen 3 moe", None, "triton"),
    ("mixtral", "e4m3", "torch"), ("qwen 3 moe", "int4", "torch"), ("granite code", None, "triton"),
    ("granite code", "e4m3", "torch"), ("granite code", "int4", "torch"), ("smollm 3", None, "triton"),
    ("ministral 3", None, "triton"),
])  # fmt: skip
def test_families_in_formats_and_kernels(tmp_path, family, fp8, backend):
    """Logits of a prompt, whole and in parts: those of transformers or, in a format, of our model with
    decoded weights."""
    theirs = hugging_face_model(**FAMILIES[family])
    theirs.save_pretrained(tmp_path)
    T = 70 if backend == "torch" else 15  # the interpreter is slow
    prompt = torch.randint(5, 300, (T,))
    device = DEVICE.type if backend == "triton" else "cpu"
    ours = load(tmp_path, dtype="fp32", device=device, backend=backend, format=fp8)
    if not fp8:
        assert_close(logits_of(ours, prompt, T - 12, 1, 10, 1), oracle(theirs, prompt.tolist()))
        return
    decoded = load(tmp_path, dtype="fp32", device="cpu", format=fp8)
    with_dense_weights(decoded)
    expected = logits_of(decoded, prompt)
    if device == "cuda":  # one at a time, since it rounds those of several tokens to 8 bits
        assert_close(logits_of(ours, prompt, *[1] * T), expected)
        return
    pieces = logits_of(ours, prompt, T - 12, 1, 10, 1)
    assert_close(pieces, expected, 0.02)  # with an activation in fp16 on a CPU
    assert_close(logits_of(ours, prompt), expected)


@pytest.mark.parametrize("text", ["mistral nemo", "ministral 3"])
def test_text_of_a_model_that_also_knows_images(copy, cli, text):
    """Its text is that of transformers; a note says that images are left out."""
    size = read_config(copy).vocab_size
    of_text = hugging_face_model(size, **FAMILIES[text]).config
    vision = dict(
        model_type="pixtral", hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        image_size=28, patch_size=14,
    )  # fmt: skip
    config = transformers.Mistral3Config(text_config=of_text, vision_config=vision)
    theirs = transformers.Mistral3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(copy)
    ours = load(copy, dtype="fp32", device="cpu")
    ids = torch.randint(250, (50,)).tolist()
    assert_close(logits_of(ours, ids), oracle(theirs, ids))
    code, _, err = cli("-m", copy, "-p", "Once", "-n", 2)
    assert code == 0 and "note: config.json: model_type is 'mistral3': images are left out" in err


def test_head_dim_that_the_kernels_cannot_run(cli, copy):
    size = open_tokenizer(copy).vocabulary.sp.vocab_size()
    hugging_face_model(size, head_dim=20).save_pretrained(copy)
    flags = ("-m", copy, "-p", "Once", "-n", 2, "--device")
    code, _, err = cli(*flags, DEVICE.type, "--backend", "triton")
    said = "head_dim is 20; the kernels need a multiple of 8: use backend torch"
    assert code == 1 and said in err.splitlines()[-1]
    assert cli(*flags, "cpu")[0] == 0


def test_messages_are_one_line(copy):
    folder = copy.rename(copy.parent / "a\n\x1b[31mb")
    spoil_tensors(lambda t: t[NORM].fill_(torch.nan))(folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('a\nb\x1b[31m' * 999) }}")
    model, tokenizer = load(folder, device="cpu"), open_tokenizer(folder)
    sampling = write("generation_config.json", json.dumps({"temperature": "x\ny\x1b" * 999}))
    more_tensors = spoil_tensors(lambda t: t.update({"\n" * 9: torch.ones(1)}))
    for act in (
        lambda: list(generate(model, [1, 5])),
        lambda: tokenizer.apply_chat_template(conversation("hello")),
        lambda: more_tensors(folder) or load(folder),
        lambda: checkpoint.Checkpoint(folder),
        lambda: spoil_config(hidden_act="x\ny" * 100_000)(folder) or load(folder),
        lambda: save(folder, folder / "new"),
        lambda: sampling(folder) and checkpoint.Checkpoint(folder).sampling(),
    ):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            act()
        assert len(str(raised.value)) <= 500 and str(raised.value).isprintable(), raised.value


@pytest.mark.parametrize("shape", ["gqa", "mqa, tied"])
def test_loading_bar_ends_full(copy, monkeypatch, shape):
    bars, original, shown = [], loader.tqdm, dict(disable=False, file=io.StringIO())
    made = lambda **options: bars.append(original(**options | shown)) or bars[-1]
    monkeypatch.setattr(loader, "tqdm", made)
    hugging_face_model(read_config(copy).vocab_size, **FAMILIES[shape]).save_pretrained(copy)
    saved = save(copy, copy.parent / "saved", format="e4m3").parent
    for folder, form in ((copy, None), (copy, "e4m3"), (saved, None)):
        load(folder, format=form)
        assert bars[-1].n == bars[-1].total > 0, (folder, form)
