"""Tests of untrusted files."""

import json
import os
import pickle
import shutil
import warnings
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dev.checkpoints import write_gguf
from loading.reading import read, safetensors_header
from loading.test_gguf import BAD_GGUF, parts_of_gguf
from loading.test_quantised import BAD_QUANTISED, write_quantised
from tests.helpers import (
    DOWN,
    FAMILIES,
    INDEX,
    NAN,
    NORM,
    POINTER,
    assert_refused_alike,
    both,
    edit,
    hugging_face_model,
    put,
    set_one,
    spoil_config,
    spoil_tensors,
    to_meta,
    to_shards,
    write,
)

# ---- helpers
TABLES = "model.embed_tokens.weight", "lm_head.weight"


# ---- untrusted files


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def torch_file(content, save=torch.save):
    """Write pytorch_model.bin in place of the weights."""

    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with warnings.catch_warnings(action="ignore"):
            save(content() if callable(content) else content, folder / "pytorch_model.bin")

    return spoil


def stored(content: bytes, file: Path, how: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(file, "w", how) as archive:
        archive.writestr("archive/data.pkl", content)


compressed = partial(stored, how=zipfile.ZIP_DEFLATED)


def replace_in_archive(old: bytes, new: bytes):
    """In the names and the contents of a pytorch_model.bin's entries."""

    def spoil(folder: Path) -> None:
        file = folder / "pytorch_model.bin"
        with zipfile.ZipFile(file) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in entries.items():
                name = name.replace(old.decode("latin1"), new.decode("latin1"))
                archive.writestr(name, content.replace(old, new))

    return spoil


def entry_of_pickle(**fields):
    """Let the archive's directory say this of the pickle in a pytorch_model.bin."""

    def spoil(folder: Path) -> None:
        with zipfile.ZipFile(folder / "pytorch_model.bin", "a") as archive:
            vars_of = next(e for e in archive.infolist() if e.filename.endswith("data.pkl"))
            for name, value in fields.items():
                setattr(vars_of, name, value)
            archive._didModify = True  # its directory is written anew

    return spoil


def gguf_with(bad: bytes | dict):
    """Put a GGUF file beside a checkpoint: this one, or the small one with these values in place of its
    own, None to leave one out."""

    def spoil(folder: Path) -> None:
        file = folder / "a.gguf"
        if isinstance(bad, bytes):
            file.write_bytes(bad)
            return
        parts = [dict(part) for part in parts_of_gguf()]
        for key, value in bad.items():
            part = parts[key.endswith(".weight")]
            part[key] = value
            if value is None:
                del part[key]
        write_gguf(file, *parts)

    return spoil


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch PICKLE_HAS_RUN",))


UNSAFE = "pytorch_model.bin is damaged, or cannot be read safely"
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
W13, PTH = "layers.1.w13", "consolidated.01.pth"
index_of = lambda names: both(
    remove("model.safetensors"), write(INDEX, json.dumps({"weight_map": names}))
)
ONES = [1.0] * 8
LONGROPE = dict(rope_type="longrope", short_factor=ONES, long_factor=ONES, attention_factor=1.0)


def of_family(family: str, **fields):
    """Put a model of another family there, of which config.json then says this."""
    model = lambda folder: hugging_face_model(350, **FAMILIES[family]).save_pretrained(folder)
    return both(model, spoil_config(**fields))


# how a checkpoint, or one saved in a format, is corrupted: what the one-line error must contain
SPOILED = {
    "no config": (remove("config.json"), "neither config.json nor params.json"),
    "config is not JSON": (write("config.json", "{"), "config.json is not JSON"),
    "deep JSON": (write("config.json", "[" * 100_000), "config.json is not JSON"),
    "config lacks a field": (spoil_config(hidden_size=None), "config.json lacks the field hidden_size"),
    **{f"{name} {value!r}": (spoil_config(**{name: value}), f"{name} is {value!r}") for name, value in dict(
        num_hidden_layers=-1, vocab_size=10**15, intermediate_size="many", rms_norm_eps=NAN, hidden_act="gelu",
        model_type="gpt2", tie_word_embeddings="false", partial_rotary_factor=0.5,
    ).items()},
    "another family": (
        spoil_config(model_type="gemma2"), "(supported: llama, ", "): take a model of one of these, or run",
    ),
    "no family": (spoil_config(model_type={}), "model_type is {}, which is not supported"),
    "no method": (spoil_config(quantization_config={"quant_method": []}), "quantised as [], which is not supported"),
    "for embeddings": (
        spoil_tensors(lambda t: [t.update({n.removeprefix("model."): t.pop(n)}) for n in [*t]]), "for embeddings or",
    ),
    "for rewards": (
        spoil_tensors(lambda t: t.update({"score.weight": t.pop("lm_head.weight")[:1]})), "or rewards, which",
    ),
    "uneven heads": (spoil_config(num_key_value_heads=3), "4 query heads cannot share 3"),
    "listed dtype": (spoil_config(dtype=["float32"]), "torch_dtype is ['float32']"),
    "both directions": (spoil_config(is_causal=False), "is_causal is False"),
    "rope by layers": (
        spoil_config(rope_parameters={"full_attention": {"rope_theta": 1e6}}), "RoPE of their own (full_attention)",
    ),
    "params.json with yarn": (
        lambda f: [to_meta(f, 1), edit(f / "params.json", yarn={"factor": 4})], "params.json: yarn is {'factor': 4}",
    ),
    "another rope": (spoil_config(rope_parameters={"rope_type": "dynamic"}), "rope_type is 'dynamic'"),
    "params.json with experts": (
        lambda f: [to_meta(f, 1), edit(f / "params.json", moe={"num_experts": 8})], "params.json: moe is {",
    ),
    "fewer experts in the file": (of_family("mixtral", num_local_experts=5), "experts.4.w1.weight is missing; "),
    "more experts in the file": (of_family("mixtral", num_local_experts=3), "experts.3.w1.weight is unexpected; "),
    "more experts a token than there are": (
        of_family("mixtral", num_experts_per_tok=5), "num_experts_per_tok is 5; it must be a whole number from 1 to 4",
    ),
    "too many experts": (of_family("qwen 3 moe", num_local_experts=1 << 16), "num_local_experts is 65536; it must be"),
    **{name: (of_family("qwen 3 moe", **{name: value}), f"{name} is {value}, which is not supported") for name, value
       in dict(mlp_only_layers=[0], decoder_sparse_step=2, shared_expert_intermediate_size=8,
               routed_scaling_factor=2.5).items()},
    **{f"yarn, {name}": (spoil_config(rope_parameters={"rope_type": "yarn", name: value}), f"{name} is {value}")
       for name, value in (("truncate", False), ("partial_rotary_factor", 0.5))},
    **{f"longrope with {name}": (spoil_config(rope_parameters=LONGROPE | {name: value}), "rope_type is 'longrope'")
       for name, value in (("long_factor", [2.0] * 8), ("attention_factor", 1.5))},
    "an eos that is no id": (
        both(remove("generation_config.json"), spoil_config(eos_token_id=[2, "x"])),
        "config.json: eos_token_id is [2, 'x']; it must hold ids",
    ),
    "eos that is none in generation_config.json": (
        lambda f: edit(f / "generation_config.json", eos_token_id=[2, 1.5]), "config.json: eos_token_id is [2, 1.5]",
    ),
    "mlx": (spoil_config(quantization={"bits": 4}), "quantised for mlx: take the original"),
    "gguf beside a config": (lambda f: (f / "model.safetensors").rename(f / "x.gguf"), "x.gguf is not a GGUF file"),
    "adapter": (
        both(remove("config.json"), write("adapter_config.json", '{"base_model_name_or_path": "a/b"}')),
        "an adapter without its base: merge it into a/b",
    ),
    "a huge config": (lambda f: os.truncate(f / "config.json", 1 << 36), "config.json has more than 64,000,000 bytes"),
    "a pipe": (lambda f: [(f / "config.json").unlink(), os.mkfifo(f / "config.json")], "neither config.json"),
    "a link to a device": (
        lambda f: [(f / "generation_config.json").unlink(), (f / "config.json").unlink(),
                   (f / "config.json").symlink_to("/dev/zero")], "neither config.json",
    ),
    "git-lfs weights": (write("model.safetensors", POINTER), "model.safetensors is a git-lfs pointer", "git lfs pull"),
    "a tokenizer beside it": (  # which is where Meta's layout has it
        lambda f: (f / "tokenizer.model").rename(f.parent / "tokenizer.model"), "holds no tokenizer.model",
    ),
    "broken tokenizer": (write("tokenizer.model", b"x" * 99), "is not a SentencePiece model"),
    "empty tokenizer": (write("tokenizer.model", b""), "is not a SentencePiece model"),
    "a piece that is not UTF-8": (
        lambda f: (f / "tokenizer.model").write_bytes(
            (f / "tokenizer.model").read_bytes().replace("▁t".encode(), b"\xe2\x96tt", 1)
        ), "is not a SentencePiece model",
    ),
    "wrong types beside the tokenizer": (
        both(write("tokenizer_config.json", "{}"), write("added_tokens.json", "[]")),
        "added_tokens.json does not hold a JSON object",
    ),
    "no weights": (remove("model.safetensors"), "holds no weights"),
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 5000), "is cut short, or no safetensors file"),
    "too long": (lambda f: os.truncate(f / "model.safetensors", 1 << 20), "no safetensors file"),
    "escape in a name": (spoil_tensors(lambda t: t.update({"\x1b]0;\x07\ny": torch.ones(1)})), "?]0;? y is unexpected"),
    "missing tensor": (spoil_tensors(lambda t: t.pop(DOWN)), f"{DOWN} is missing"),
    "unexpected tensor": (spoil_tensors(lambda t: t.update(extra=torch.ones(1))), "extra is unexpected"),
    "wrong shape": (put(NORM, lambda t: t[:3]), f"{NORM} is [3], expected [64]"),
    "whole numbers": (put(NORM, lambda t: t.char()), f"{NORM} is [64] in int8, expected [64] in float32 or float16"),
    "tensors in two shards": (  # as Meta's layout has them
        both(lambda f: to_shards(f, "safetensors"), lambda f: shutil.copy(f / SHARDS[0], f / SHARDS[1])),
        "the tensors do not fit the config",
    ),
    "Meta's shards differ": (
        lambda f: [to_meta(f, 2), torch.save(torch.load(f / PTH) | {"norm.weight": torch.ones(65)}, f / PTH)],
        "norm.weight is [64] + [65], expected [64]",
    ),
    "one of Meta's shards": (lambda f: [to_meta(f, 2), (f / PTH).unlink()], "expected [350, 64]"),
    "index without shard": (index_of({"": "b.safetensors"}), "b.safetensors, which is missing"),
    **{f"index that names {name}": (index_of({"a": name}), "not a file in its folder")
       for name in ("../x.bin", "/x.bin", "a/../../x.bin", "x", "config.json")},
    "index without a map": (index_of([]), f"{INDEX} lacks the field weight_map"),
    **{f"torch file, {name}": (torch_file(content), UNSAFE) for name, content in {
        "numbered": {1: torch.ones(1)}, "a list": [torch.ones(1)], "nested": {"x": {"y": torch.ones(1)}},
        "sparse": {"x": torch.ones(1).to_sparse()}, "of no device": {"x": torch.ones(1, device="meta")},
        "quantised": lambda: {"x": torch.quantize_per_tensor(torch.ones(1), 1, 0, torch.qint8)},
        "runs code": {"x": Bomb()}, "values beyond it": {"x": torch.ones(1).expand(1 << 30)},
    }.items()},
    "torch file, negated": (torch_file(lambda: {"x": torch.view_as_complex(torch.ones(3, 2)).conj().imag}), UNSAFE),
    "torch file, a large pickle in capitals": (  # torch takes it for the same
        both(torch_file(bytes(65 << 20), stored), replace_in_archive(b"data.pkl", b"DATA.PKL")),
        "a pickle of more than 64,000,000 bytes",
    ),
    "torch file, an entry larger than it": (
        both(torch_file({}), entry_of_pickle(file_size=1 << 30)), "(it has an entry that is larger than itself)",
    ),
    "torch file, one storage many times": (
        torch_file(lambda: dict.fromkeys(map(str, range(9)), torch.ones(1 << 16))), "(its tensors overlap)",
    ),
    "torch file, more elements than it has": (
        both(
            torch_file({"x": torch.zeros(2000)}), replace_in_archive(b"M\xd0\x07", b"M\xff\xff")
        ),
        "(x lies outside it)",
    ),
    "a header of many MB": (
        lambda f: (f / "model.safetensors").write_bytes((9 << 20).to_bytes(8, "little") + bytes(9 << 20)),
        "(a header of 9,437,184 bytes)",
    ),
    "torch file with a large pickle": (torch_file(bytes(65 << 20), stored), "a pickle of more than 64,000,000 bytes"),
    "torch file without dimensions": (torch_file({NORM: torch.tensor(1.0)}), f"{NORM} is [1], expected [64]"),
    "an empty tensor of any shape": (
        both(spoil_config(tie_word_embeddings=True),
             spoil_tensors(lambda t: t.update({name: torch.empty(1 << 60, 0) for name in TABLES}))),
        f"{TABLES[0]} is [1152921504606846976, 0], expected [350, 64]",
    ),
    "plain pickle": (torch_file({"x": Bomb()}, lambda value, file: file.write_bytes(pickle.dumps(value))), UNSAFE),
    "cut torch file": (both(torch_file({}), lambda f: os.truncate(f / "pytorch_model.bin", 99)), UNSAFE),
    "compressed torch file": (torch_file(b"x" * 99, compressed), "(it is compressed)"),
    "saved, another layout": (spoil_tensors(fused_llama="1"), "saved by another version of fused-llama, in the format"),
    "saved, another format": (spoil_tensors(format="e3m4"), "of fused-llama, in the format 'e3m4': save it again"),
    "saved, second output matrix": (
        both(
            spoil_config(tie_word_embeddings=True),
            spoil_tensors(lambda t: t.update({"output.weight": t["tok_embeddings.weight"].clone()})),
        ),
        "output.weight is unexpected",
    ),
    "saved, missing scale": (spoil_tensors(lambda t: t.pop("output.scale")), "output.scale is missing"),
    "saved, short matrix": (put(W13, lambda t: t[:9]), f"{W13} is [9, 64], expected [224, 64]"),
    "saved, another config": (
        spoil_config(intermediate_size=1 << 20), "do not fit the config: layers.0.w13 is [224, 64]",
    ),
    "saved, matrix of floats": (
        put(W13, lambda t: t.half()), f"{W13} is [224, 64] in float16, expected [224, 64] in int8",
    ),
    "saved, codes of another format": (spoil_tensors(format="e5m2"), "has codes of NaN or infinity: save it again"),
    "saved, nan code": (set_one(W13, 0x7F), f"{W13} has codes of NaN or infinity: save it again"),
    "saved, zero scale": (set_one(f"{W13}.scale", 0), f"{W13} has scales that are not positive and finite"),
    "saved, nan norm": (set_one("norm.weight", NAN), "not finite", "norm.weight in model.safetensors holds NaN"),
}  # fmt: skip


SPOILED |= {
    f"quantised, {case}": (both(partial(write_quantised, how=how), spoil), *said)
    for case, (how, spoil, *said) in BAD_QUANTISED.items()
}
SPOILED |= {
    f"gguf, {case}": (gguf_with(bad), "a.gguf", said) for case, (bad, said) in BAD_GGUF.items()
}


@pytest.mark.parametrize("how", SPOILED)
def test_spoiled_checkpoint_is_one_line(cli, tiny, tiny_saved, how, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    original = tiny_saved if how.startswith("saved") else tiny
    folder = Path(shutil.copytree(original, tmp_path / "folder" / "copy"))
    spoil, *expected = SPOILED[how]
    spoil(folder)
    file = folder / "a.gguf"
    assert_refused_alike(cli, file if file.exists() else folder, *expected)
    assert not (tmp_path / "PICKLE_HAS_RUN").exists(), "opening a checkpoint ran its code"


def test_safetensors_cut_short_while_read(tmp_path):
    """Whole, or some rows and columns, by one thread and by several."""
    file, whole = tmp_path / "x.safetensors", torch.randint(-1000, 1000, (3001, 3003)).half()
    tensors = {"small": whole[0].clone(), "large": whole}
    save_file(tensors, file)
    found = {tensor.name: tensor for tensor in safetensors_header(file)[1]}
    assert all(map(torch.equal, read([found[name] for name in tensors]), tensors.values()))
    for rows, columns in ((slice(1, 2999), slice(0, 3003)), (slice(0, 3001), slice(5, 3000))):
        (part,) = read([found["large"].cut([range(3001)[rows], range(3003)[columns]])])
        assert part.equal(whole[rows, columns])
    os.truncate(file, 8 + 100 + min(tensor.offset for tensor in found.values()))
    for tensor in found.values():
        with pytest.raises(OSError, match="x.safetensors was cut short while it was being read"):
            read([tensor])
