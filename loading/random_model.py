"""Models with random weights in the shapes of published ones: speed does not depend on what the
weights are."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from cards.cpu import in_cpu_layout, storage_dtype
from formats import Matrix
from loading.checkpoint import read_config
from loading.hub import DEFAULT_MODEL
from loading.loader import llama_of
from loading.names import Formats, Kind, layer_tensors, layer_weights
from loading.place import place as place_of
from model import Config, Llama, Weights
from ranks.processes import Ranks
from settings import Options

# The first fields of Config: dim, layers, heads, key/value heads, head_dim, hidden_dim, vocabulary
SHAPES = {
    "1.1b": (2048, 22, 32, 4, 64, 5632, 32000),  # TinyLlama
    "7b": (4096, 32, 32, 32, 128, 11008, 32000),  # Llama 2, as are 13b and 70b
    "8b": (4096, 32, 32, 8, 128, 14336, 128256),  # Llama 3
    "13b": (5120, 40, 40, 40, 128, 13824, 32000),
    "70b": (8192, 80, 64, 8, 128, 28672, 32000),
    "Llama-3.2-1B": (2048, 16, 32, 8, 64, 8192, 128256),
    "Llama-3.2-3B": (3072, 28, 24, 8, 128, 8192, 128256),
    "Qwen2.5-0.5B": (896, 24, 14, 2, 64, 4864, 151936),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 128, 8960, 151936),
    "SmolLM2-135M": (576, 30, 9, 3, 64, 1536, 49152),
    "SmolLM2-360M": (960, 32, 15, 5, 64, 2560, 49152),
    "Qwen3-30B-A3B": (2048, 48, 32, 4, 128, 768, 151936),
    "Mixtral-8x7B": (4096, 32, 32, 8, 128, 14336, 32000),
}
EXPERTS = {"Qwen3-30B-A3B": (128, 8), "Mixtral-8x7B": (8, 2)}  # and how many a token goes through


def random_config(spec: str) -> Config:
    """The configuration of random:7b, random:70b:8 (8 of its layers), random:tales or
    random:.../config.json. Raises ValueError."""
    name, _, layers = spec.removeprefix("random:").partition(":")
    if layers and not (layers.isdecimal() and int(layers) > 0):
        raise ValueError(f"{spec}: {layers!r} is not a number of layers")
    if name in SHAPES:
        fields = dict(norm_eps=1e-5, max_seq_len=1 << 15, dtype=torch.float16)
        fields["n_experts"], fields["experts_per_token"] = EXPERTS.get(name, (0, 0))
        fields["qkv_bias"] = name.startswith("Qwen2")
        fields["qk_norm"] = name.startswith("Qwen3")
        config = Config(*SHAPES[name], **fields)
    elif name == "tales":
        config = read_config(DEFAULT_MODEL)
    elif name.endswith(".json"):
        config = read_config(Path(name).parent)
    else:
        raise ValueError(f"{spec}: the shapes are {', '.join(SHAPES)}, tales or a config.json")
    if layers:
        config = dataclasses.replace(config, n_layers=int(layers))
    return config


def random_weights(
    c: Config, dtype: torch.dtype, device: torch.device, formats: Formats, backend: str
) -> Weights:
    """Weights of a configuration, made on the device: norms and biases are ones; matrices are
    normally distributed, as large as those that training starts from. Those whose products are
    added to the residual are smaller, as in GPT-2, and the embedding is larger, so that the tokens
    of a prompt stay different, and choose different experts. In a format 64 rows repeat, since
    encoding takes long on a CPU."""

    def normal(
        rows: int, columns: int, dtype: torch.dtype | None = None, std: float = 0.02
    ) -> Tensor:
        return torch.randn(rows, columns, dtype=dtype, device=device).mul_(std)

    def matrix(
        name: str, shape: tuple[int, int], std: float = 0.02, of_experts: bool = False
    ) -> Matrix:
        rows, columns = shape
        format = formats.get(name)
        if format is None:
            w = Matrix(normal(rows, columns, storage_dtype(backend, dtype, device), std))
        else:
            block = format.encode(normal(min(rows, 64), columns, std=std))
            repeated = [t.repeat(-(-rows // len(t)), *[1] * (t.dim() - 1))[:rows] for t in block]
            w = Matrix(tuple(repeated), format)
        if of_experts:
            return w  # products take some of its rows
        return in_cpu_layout(w, backend, dtype, formats.values())

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    layers = []
    for i in tqdm(range(c.n_layers), "random weights", unit=" layers", leave=False, disable=None):
        values = {}
        for tensor in layer_tensors(c, i):
            shape = tensor.shape(c)
            if tensor.is_matrix:
                std = 0.02
                if tensor.field in ("wo", "w2"):
                    std /= math.sqrt(2 * c.n_layers)
                values[tensor.field] = matrix(tensor.name, shape, std, tensor.of_experts)
            elif tensor.kind is Kind.PLAIN:
                values[tensor.field] = Matrix(normal(*shape, dtype))
            else:
                values[tensor.field] = ones(*shape)
        layers.append(layer_weights(values))
    embedding = normal(c.vocab_size, c.dim, dtype, std=1.0)
    return Weights(embedding, layers, ones(c.dim), matrix("output", (c.output_rows, c.dim)))


def random_model(spec: str, options: Options, ranks: Ranks = Ranks()) -> Llama:
    """A model with random weights in the shape that random:... says."""
    config = random_config(spec)
    place = place_of(options, config, ranks)
    with torch.inference_mode():
        weights = random_weights(
            place.config, place.dtype, place.device, place.formats, place.backend
        )
    return llama_of(weights, place, options, ranks)
