"""The settings of a sampler, a row each: default, range, and what it is called elsewhere. The flags
of run.py, the checks of requests and the reader of generation_config.json are made from these rows.
What the settings do is in sampling.py.

This needs no torch, so flags are checked before it is imported."""

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
