"""Plots of what bench.py measured: tokens per second beside their bounds, and kernels on a roofline.

A row is what `bench.py -o jsonl` prints, so a plot can be redrawn from recorded rows; both ceilings are derived from the rows.
"""

import json
import math
from contextlib import suppress
from pathlib import Path

OURS, PEERS = "#2b6cb0", "#a0aec0"


NUMBERS = {"test": ("tokens_per_s",), "op": ("us", "MB", "GFLOP", "% of ceiling")}
TEXTS = {"test": ("model", "backend", "device", "dtype", "fp8", "kv"), "op": ("shape", "bound by")}


def read_rows(file: str) -> list[dict]:
    """The rows of a file of JSON lines. Raises ValueError."""
    rows = []
    for number, text in enumerate(Path(file).read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(text))
        if len(rows) < number or not is_row(rows[-1]):
            raise ValueError(f"{file}, line {number}: not a row printed by bench.py -o jsonl")
    return rows


def is_row(row: object) -> bool:
    """Whether it has the fields that are drawn."""
    if not isinstance(row, dict):
        return False
    kind = "test" if "test" in row else "op"
    share = row.get("share_of_ceiling")
    numbers = [row.get(name) for name in NUMBERS[kind]] + ([] if share is None else [share])
    texts = [row.get(name) for name in (kind, *TEXTS[kind])]
    return all(type(n) in (int, float) and 0 < n < 1e15 for n in numbers) and all(isinstance(t, str) for t in texts)


def plot(rows: list[dict], file: str) -> None:
    """Draw rows of tokens per second (generation and prompts apart) and of kernels."""
    import matplotlib

    matplotlib.use("agg")  # draws into files
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "fused-llama", "font.size": 9, "axes.titlesize": 9}
    from matplotlib import pyplot

    speeds = [[row for row in rows if row.get("test", "").startswith(kind)] for kind in ("tg", "pp")]
    ops = [row for row in rows if "op" in row]
    panels = [(len(some), bars, some) for some in speeds if some]
    if ops:
        panels.append((12, roofline, ops))
    if not panels:
        raise ValueError("there is nothing to draw: no row has tokens per second or an op")
    heights = [0.32 * count + 1.1 for count, _, _ in panels]
    figure, axes = pyplot.subplots(len(panels), figsize=(9, sum(heights)), height_ratios=heights, squeeze=False)
    for (_, draw, some), (ax,) in zip(panels, axes):
        draw(ax, some)
    figure.tight_layout()
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.endswith(".svg") else None)
    pyplot.close(figure)


def bars(ax, rows: list[dict]) -> None:
    """One bar a row, from the top, with rows of the same test together; a black line marks each bound."""
    tests = list(dict.fromkeys((row["model"], row["test"]) for row in rows))
    rows = sorted(rows, key=lambda row: tests.index((row["model"], row["test"])))
    for y, row in enumerate(rows):
        speed, share = row["tokens_per_s"], row.get("share_of_ceiling") or 1.0
        bound = speed / share
        ax.barh(y, speed, color=OURS if is_ours(row) else PEERS)
        ax.plot([bound, bound], [y - 0.4, y + 0.4], color="black")
        ax.text(max(speed, bound), y, f"  {speed:,.0f}, {share:.0%}", va="center")
    ax.set_yticks(range(len(rows)), [label(row) for row in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.margins(x=0.15)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    what, bound = ("generation", "reading") if rows[0]["test"].startswith("tg") else ("prompts", "products")
    ax.set_title(f"tokens/s of {what}, {rows[0]['device']} (blue: fused-llama; line: bound by {bound})", loc="left")
    ax.spines[["top", "right"]].set_visible(False)


def is_ours(row: dict) -> bool:
    return row.get("ratio") is None


def label(row: dict) -> str:
    """Model, test, types and, for another program, its name."""
    types = row["dtype"] if row["fp8"] == "none" else row["fp8"]
    kept = "" if row["kv"] == row["dtype"] else f", kv {row['kv']}"
    program = "" if is_ours(row) else f", {row['backend']}"
    return f"{row['model'].removeprefix('random:')} {row['test']}, {types}{kept}{program}"


def roofline(ax, rows: list[dict]) -> None:
    """Operations per second over operations per byte; a kernel at its ceiling lies on a line."""
    points = [(row["op"], row["shape"], 1e3 * row["GFLOP"] / row["MB"], 1e3 * row["GFLOP"] / row["us"]) for row in rows]
    reads, products = ceilings(rows)
    least, most = (round(20 * math.log10(f(x for _, _, x, _ in points))) for f in (min, max))
    reach = [10 ** (i / 20) for i in range(least - 5, most + 6)]  # operations per byte
    for product in products:
        ax.loglog(reach, [min(i * max(reads), product) / 1e12 for i in reach], color="black", linewidth=1)
    colours = {op: f"C{i % 10}" for i, op in enumerate(dict.fromkeys(op for op, *_ in points))}
    shapes = {shape: "osD^vX"[i % 6] for i, shape in enumerate(dict.fromkeys(shape for _, shape, *_ in points))}
    for op, shape, x, y in points:
        ax.loglog(x, y, shapes[shape], color=colours[op], markeredgecolor="white")
    for names, style in ((colours, lambda v: dict(color=v, marker="o")), (shapes, lambda v: dict(color="grey", marker=v))):
        for name, value in names.items():
            ax.plot([], [], linestyle="", label=name, **style(value))
    ax.legend(fontsize=7, loc="lower right")
    ax.set(xlabel="operations per byte", ylabel="TFLOP/s")
    ax.set_title("kernels, and the read and product ceilings of the same run", loc="left")
    ax.spines[["top", "right"]].set_visible(False)


def ceilings(rows: list[dict]) -> tuple[list[float], list[float]]:
    """Read ceilings in bytes per second and product ceilings in operations per second, derived from the rows' shares."""
    at_ceiling = [(row, row["% of ceiling"] / 100 * row["us"] * 1e-6) for row in rows]  # seconds it would take at its ceiling
    copies = ("rmsnorm", "rope")  # measured against the copy ceiling
    reads = [1e6 * row["MB"] / s for row, s in at_ceiling if row["bound by"] == "memory" and row["op"] not in copies]
    products = sorted(1e9 * row["GFLOP"] / s for row, s in at_ceiling if row["bound by"] == "arithmetic")
    apart = [p for p, before in zip(products, [0.0, *products]) if p > 1.1 * before]  # rounding splits one ceiling into several
    return reads or [float("inf")], apart or [float("inf")]
