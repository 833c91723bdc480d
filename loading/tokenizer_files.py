"""The files of a tokenizer in a folder, for step 2 of loading (see loading/checkpoint.py): which they are, and
what transformers makes of them. Those of a GGUF file are translated in loading/gguf_tokenizer.py.

This needs no torch."""

import json
import re
from contextlib import suppress
from pathlib import Path

from loading.files import read_bytes, read_json, read_text
from loading.gguf_tokenizer import QWEN2
from loading.templates import find_template, named_template
from tokenizer import TokenizerFiles


def files_in(
    folder: Path,
    chat_template: str | None = None,
    model_type: str = "llama",
    or_above: bool = False,
) -> TokenizerFiles:
    """chat_template: a name or a file, instead of the folder's own. model_type: transformers' name
    for such models. or_above: see tokenizer_file. Raises OSError, ValueError."""

    def read(name: str) -> dict:
        file = folder / name
        return read_json(file) if file.is_file() else {}

    file = tokenizer_file(folder, or_above)
    vocabulary = read_bytes(file) if file.suffix == ".model" else read_json(file)
    config: dict = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        # as in transformers, the second is read only of old tokenizers
        if "added_tokens_decoder" not in config:
            config |= read(name)
    if file.name == "vocab.json":
        vocabulary = of_two_files(vocabulary, folder, config)
    beside = []
    if isinstance(vocabulary, dict):
        as_llama(vocabulary, model_type, config)
    else:
        with suppress(ValueError, TypeError):  # optional: it may be damaged, or have no such list
            beside += read("tokenizer.json").get("added_tokens") or []
    added = {}
    if not isinstance(config.get("added_tokens_decoder"), dict):
        added = read("added_tokens.json")
    files = dict(file=file, vocabulary=vocabulary, added=added, beside=beside)
    return with_template(folder, chat_template, config, **files)


def with_template(path: Path, chat_template: str | None, config: dict, **files) -> TokenizerFiles:
    """These files, and the template that is meant. path: of the checkpoint. files: the fields of
    TokenizerFiles that do not depend on a template."""
    template, name = find_template(path, config, chat_template)
    of_tools = None if chat_template else named_template(config, "tool_use")
    return TokenizerFiles(
        config=config,
        template=template,
        template_name=name,
        tool_template=of_tools or template,
        **files,
    )


def tokenizer_file(folder: Path, or_above: bool = False) -> Path:
    """tokenizer.json or tokenizer.model of a folder, in transformers' order, or vocab.json, which
    has merges.txt beside it. or_above: tokenizer.model may lie in the folder's parent instead.
    Raises OSError, ValueError."""
    whole = folder / "tokenizer.json"
    files = [folder / "tokenizer.model"]
    if or_above:
        files.append(folder.parent / "tokenizer.model")
    files = [file for file in files if file.is_file()]
    # some only add tokens to a tokenizer.model
    if whole.is_file() and (not files or re.search(rb'"model"\s*:\s*\{', read_bytes(whole))):
        return whole
    if files:
        return files[0]
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder} here")
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return folder / "vocab.json"
    lacks = f"{folder} holds no tokenizer.model and no tokenizer.json"
    if (folder / "tekken.json").is_file():
        lacks += "; of tekken.json, which it has, take the version in Hugging Face's layout or GGUF"
    raise FileNotFoundError(lacks)


def of_two_files(vocab: dict, folder: Path, config: dict) -> dict:
    """The tokenizer.json that transformers makes of vocab.json and merges.txt. Raises OSError,
    ValueError."""
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    if kind not in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        remedy = "save it by transformers' AutoTokenizer, which writes a tokenizer.json"
        raise ValueError(f"{folder} has vocab.json and merges.txt of {kind}: {remedy}")
    is_qwen = kind == "Qwen2Tokenizer"
    lines = read_text(folder / "merges.txt").splitlines()
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True)
    cuts = [byte_level | {"use_regex": not is_qwen}]
    if is_qwen:
        split = dict(type="Split", pattern={"Regex": QWEN2}, behavior="Isolated", invert=False)
        cuts.insert(0, split)
    return {
        "version": "1.0",
        "normalizer": {"type": "NFC"} if is_qwen else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [line for line in lines if line and not line.startswith("#version")],
        },
    }


def as_llama(raw: dict, model_type: str, config: dict) -> None:
    """Change a tokenizer.json of Llama 2's kind to what transformers 5 makes of it where the
    configuration says LlamaTokenizer: the flags there decide about the space before a text."""
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    model = raw.get("model")
    if kind != "LlamaTokenizer" or model_type != "llama":
        return
    if not isinstance(model, dict) or model.get("type") != "BPE":
        return
    if '"ByteLevel"' in json.dumps([raw.get("decoder"), raw.get("pre_tokenizer")]):
        return
    scheme = "always" if config.get("legacy") else "first"
    if config.get("add_prefix_space") is False:
        scheme = "never"
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "split": False}
    raw["pre_tokenizer"] = metaspace | {"prepend_scheme": scheme}
    raw["normalizer"] = None
    model |= {"fuse_unk": True, "byte_fallback": True}
