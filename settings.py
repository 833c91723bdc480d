"""The settings of a sampler and the options of a run, a row each: default, range, and what it is called
elsewhere. Flags, the checks of requests and the reader of generation_config.json are made from these
rows. What the settings do is in sampling.py, what the options mean for a model in loading/place.py.

This needs no torch, so flags are checked before it is imported."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

INF = float("inf")
# What files and requests may ask for, where a range has no end. Flags may ask for any number
LARGEST = {int: (1 << 31) - 1, float: 1e9}
RANDOM = -1  # a flag's or a request's seed that stands for a random one


class Setting(NamedTuple):
    """What is known of a setting besides its default."""

    kind: type
    low: float
    high: float
    help: str  # of its flag
    checkpoint: str  # its field in generation_config.json; empty if a checkpoint does not give it
    full: str  # its field in a request, and another name of its flag; empty if it is not another

    @property
    def largest(self) -> float:
        """The end of its range in files and requests."""
        return min(self.high, LARGEST[self.kind])


def _row(
    default: float, low: float, high: float, help: str = "", checkpoint: str = "", full: str = ""
):
    setting = Setting(type(default), low, high, help, checkpoint, full)
    return field(default=default, metadata={"setting": setting})


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. temp 0 is greedy; top_k 0 or -1, top_p 1, min_p 0 and
    repeat_penalty 1 are off. repeat_last_n is how many tokens the penalty looks back on, -1 for
    all. presence_penalty and frequency_penalty, which look at generated tokens alone, are off at 0.
    Another seed gives another text. Raises ValueError for a value out of range."""

    # fmt: off
    temp: float = _row(0.8, 0, INF, "temperature; 0 is greedy", "temperature", "temperature")
    top_k: int = _row(40, -1, INF, "keep the N best tokens; 0 or -1 is off", "top_k")
    top_p: float = _row(
        0.95, 0, 1, "keep the best tokens that together have this probability; 1 is off", "top_p")
    min_p: float = _row(
        0.05, 0, 1, "drop tokens less probable than X times the best; 0 is off", "min_p")
    repeat_penalty: float = _row(
        1.0, 0.01, 100, "divide the logits of recent tokens; 1 is off", "repetition_penalty")
    repeat_last_n: int = _row(64, -1, INF, "how many tokens are recent; -1: all")
    presence_penalty: float = _row(
        0.0, -2, 2, "subtract from the logits of tokens that were generated; 0 is off")
    frequency_penalty: float = _row(
        0.0, -2, 2, "subtract as often as a token was generated; 0 is off")
    seed: int = _row(0, 0, (1 << 63) - 1)
    # fmt: on

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            if not setting.low <= value <= setting.high:
                limit = f"from {setting.low} to {setting.high}"
                if setting.high == INF:
                    limit = f"{setting.low} or more"
                raise ValueError(f"{name} is {value}; it must be {limit}")


SETTINGS: dict[str, Setting] = {f.name: f.metadata["setting"] for f in fields(Sampling)}
# Those that say which tokens are probable, as a checkpoint may. The seed is the user's alone
FILTERS = {name: setting for name, setting in SETTINGS.items() if name != "seed"}


# ---- what a run can be told

DTYPE_NAMES = ("fp32", "fp16", "bf16")


class FormatRow(NamedTuple):
    """A format that matrices can be kept in, as far as that needs no torch."""

    module: str  # which has it, under its name in capitals
    flag: str  # if several share one, its value names one of them, and without a value it is the first
    help: str = ""  # of the flag, with its first format


FORMAT_ROWS = {
    "e4m3": FormatRow("fp8", "--fp8", "keep matrices as 8-bit floats; without a value: e4m3"),
    "e5m2": FormatRow("fp8", "--fp8"),
    "int4": FormatRow(
        "bits.int4",
        "--int4",
        "keep matrices as 4-bit integers with a scale and a zero point for each 32 columns: 4.5 bits"
        " a weight",
    ),
}
FORMAT_FLAGS = tuple(dict.fromkeys(row.flag for row in FORMAT_ROWS.values()))


class Option(NamedTuple):
    """What is known of an option besides its default."""

    kind: Callable  # of its value, from the text of a flag; bool for a flag alone
    choices: tuple  # empty if a range says what it may be, or the hardware
    low: float
    high: float
    help: str  # of its flag
    flag: str  # another name of that; empty if there is none
    placed: bool  # the programs place its flag themselves, instead of with all others
    generates: bool  # it matters only where text is generated


def _option(
    default: object,
    help: str,
    *choices,
    kind: Callable = str,
    low: float = 0,
    high: float = INF,
    flag: str = "",
    placed: bool = False,
    generates: bool = False,
):
    option = Option(kind, choices, low, high, help, flag, placed, generates)
    return field(default=default, metadata={"option": option})


def device_name_of(text: str) -> str:
    """cpu, cuda or cuda:N; llama.cpp's spellings, none and CUDAN, are accepted as well."""
    if text == "none":
        return "cpu"
    return re.sub(r"^CUDA(\d+)$", r"cuda:\1", text)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is run. parallel: how many texts may be written at once. ctx_size: the context of
    each in tokens, which must fit into memory beside the weights; 0 is the model's own; None is that
    as far as memory holds it, see loading/place.py. format: the one for the matrices;
    what --save wrote has its own. kv_fp8: keys and values in 8 bits. accumulate: how a prompt's
    products are summed, see kernels.py. threads: of the CPU; None is one for a small model, otherwise
    one per core. Raises ValueError for a value out of range."""

    # fmt: off
    ctx_size: int | None = _option(None,
        "context in tokens; 0: as much as the model was trained for [the same as far as memory holds"
        " it, at most 32,768, on a CPU 8,192]",
        kind=int, high=1 << 24, flag="-c", placed=True)
    parallel: int = _option(1, "texts written at once, each with a context of its own",
        kind=int, low=1, high=64, flag="-np", placed=True)
    dtype: str = _option("auto", "auto: the checkpoint's; on a CPU bf16 or fp32",
        "auto", *DTYPE_NAMES, placed=True)
    format: str | None = _option(None, "", placed=True)  # a name of FORMAT_ROWS
    kv_fp8: bool = _option(False, "keep keys and values as 8-bit floats: half the context's memory",
        kind=bool, placed=True, generates=True)
    device: str = _option("auto", "cpu, cuda or cuda:N", kind=device_name_of, flag="-dev")
    threads: int | None = _option(None,
        "CPU threads [one for a model of at most 32 MB, otherwise one per core]",
        kind=int, low=1, high=4096, flag="-t")
    backend: str = _option("auto", "auto: triton on a GPU, torch on a CPU",
        "auto", "torch", "triton", generates=True)
    accumulate: str = _option("auto",
        "how a prompt's products are summed; auto: faster and less exact for 8 bits; fp16: needs"
        " a GPU and --dtype fp16",
        "auto", "fp32", "fp16", generates=True)
    # fmt: on

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if option.choices and value not in option.choices:
                listed = ", ".join(map(str, option.choices))
                raise ValueError(f"{name} is {value!r}; it must be one of {listed}")
            if option.kind is int and value is not None and not option.low <= value <= option.high:
                limit = f"from {option.low} to {option.high}"
                raise ValueError(f"{name} is {value}; it must be {limit}")


OPTIONS: dict[str, Option] = {f.name: f.metadata["option"] for f in fields(Options)}
