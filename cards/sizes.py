"""Launch sizes: how each kernel divides its work on each card. They stand in launch.json, which
dev/tune.py writes for another card."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from launch import capability


class VectorSizes(NamedTuple):
    """How a product with one token is divided. Each program takes `rows` rows of W and reads
    `block` columns of them at a time."""

    rows: int
    block: int
    warps: int


class StreamSizes(NamedTuple):
    """How bits/stream.py divides such a product. There are `programs` programs for each SM,
    with a warp for every 2048 columns of a block. A program loops over tiles of `rows` rows, of
    which `stages` - 1 are in flight. The launcher enlarges `block` if three blocks do not cover a
    row (products.stream_block)."""

    rows: int
    block: int
    programs: int
    stages: int


class FewSizes(NamedTuple):
    """How a product with a few tokens is divided: each program takes `rows` rows of W. Of a
    row, a warp reads `steps` times what four threads load at once (16 bytes each, in most formats:
    see products.launch_few), with `ahead` such tiles in flight. `lanes` threads load neighbouring
    bytes of a row."""

    rows: int
    warps: int
    steps: int
    lanes: int
    ahead: int


class ManySizes(NamedTuple):
    """How a product of many tokens is divided: tiles of `block` tokens, or slots of an expert, by
    `rows` rows of W, `columns` columns at a time in 16 bits, half as many in 32 and twice as many in
    8, of which `stages` - 1 are in flight. In cards/hopper.py `programs` programs have room on an
    SM; other kernels have up to four stages."""

    block: int
    rows: int
    columns: int
    warps: int
    stages: int
    programs: int


class SplitSizes(NamedTuple):
    """How attention divides the positions: into at most `programs` splits per SM, read in tiles of
    `block` positions."""

    programs: int
    block: int
    warps: int
    stages: int
    least: int  # up to this many positions there is one split


TABLES_FILE = Path(__file__).with_name("launch.json")


@cache
def tables() -> dict[str, Any]:
    """The contents of launch.json. Each table is looked up by compute capability (0 is the
    interpreter), then by the numbers listed here. Where a number is missing, the next smaller one
    is taken, or the smallest if there is none, unless the list says that it must be exact.

    vector    bits per weight, op ("default" for any other), columns of W: VectorSizes
    stream    the same, with the columns of all matrices whose products are added up: StreamSizes
    few       bits per weight, tokens (padded to 8 or 16), op, the exact shape of W ("6144x4096") or
              its exact columns (0 for any other): FewSizes. null stands for the library, or for the
              kernel of prompts with experts: where that was faster, and for 16-bit weights on cards
              that were not measured
    many      bits per weight, "dense", "experts" or "codes", tokens, or slots for each expert on
              average: ManySizes. "codes" are prompts with experts in E4M3. null stands for "few" up
              to 16 tokens, for the library with more, and for decoded values instead of codes
    single_rows  segments of one query row per key/value head each: SplitSizes
    split     query rows of a segment per key/value head, if there are several: SplitSizes
    few_rows  exact capability: SplitSizes of cards/hopper.py's kernel for a few rows, whose tiles
              are 16 positions per warp

    Hopper's are measured. "few" and "many" of 100 are those of 80. "stream" of 86, which 89 shares,
    and of 120 is derived, as is what else 120 has: such an SM has 100 kB of shared memory and 48
    warps and reads 8 to 11 GB/s, so that 10 kB in flight are enough. All programs of a stream fit on
    the SMs at once, and 4096 rows divide evenly among 128 SMs (an RTX 4090's), or nearly so among
    170 (a 5090's).
    """

    def with_numbers(table: dict) -> dict:
        return {int(key) if key.isdecimal() else key: value for key, value in table.items()}

    return json.loads(TABLES_FILE.read_text(), object_hook=with_numbers)


def save_tables() -> None:
    """Write the tables, which the tuner has changed in place, to launch.json: a line for each
    op."""
    on_one_line = lambda innermost: json.dumps(json.loads(innermost[0]))
    text = re.sub(r"{[^{}]*}", on_one_line, json.dumps(tables(), indent=1))
    TABLES_FILE.write_text(f"{text}\n")


def nearest(table: dict, key: int):
    """The entry with the largest key that is not above this one, or the smallest."""
    return table[max((k for k in table if k <= key), default=min(table))]


def vector_sizes(device: torch.device, bits: int, op: str, columns: int) -> VectorSizes:
    return VectorSizes(*_single_sizes("vector", device, bits, op, columns))


def stream_sizes(device: torch.device, bits: int, op: str, columns: int) -> StreamSizes:
    return StreamSizes(*_single_sizes("stream", device, bits, op, columns))


def _single_sizes(kind: str, device: torch.device, bits: int, op: str, columns: int) -> list[int]:
    ops = nearest(nearest(tables()[kind], capability(device)), bits)
    return nearest(ops.get(op, ops["default"]), columns)


def few_sizes(
    device: torch.device, bits: int, op: str, shape: tuple[int, int], tokens: int
) -> FewSizes | None:
    """shape: of W. Returns None if such products are computed as those of a prompt."""
    ops = nearest(nearest(tables()["few"], capability(device)), bits)[tokens]
    sizes = ops.get(op, ops["default"])
    rows, columns = shape
    found = sizes.get(f"{rows}x{columns}", sizes.get(columns, sizes[0]))
    return FewSizes(*found) if found else None


def many_sizes(device: torch.device, bits: int, kind: str, each: int) -> ManySizes | None:
    """Returns None where another way is faster."""
    kinds = nearest(nearest(tables()["many"], capability(device)), bits)
    found = nearest(kinds[kind], each)
    return ManySizes(*found) if found else None


def single_row_sizes(device: torch.device, segments: int) -> SplitSizes:
    return SplitSizes(*nearest(nearest(tables()["single_rows"], capability(device)), segments))


def split_sizes(device: torch.device, rows: int) -> SplitSizes:
    return SplitSizes(*nearest(nearest(tables()["split"], capability(device)), rows))


def few_rows_sizes(device: torch.device) -> SplitSizes | None:
    """Returns None on cards for which cards/hopper.py has no kernel for a few rows."""
    found = tables()["few_rows"].get(capability(device))
    return SplitSizes(*found) if found else None
