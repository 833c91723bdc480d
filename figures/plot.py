"""Draw rows that `bench.py -o jsonl` printed: generation beside its bounds, as png, svg or pdf.

python figures/plot.py figures/h200.jsonl figures/h200.svg
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")  # draws into files
from matplotlib import pyplot
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dev.compare import Row

OURS, OTHERS = "#2b6cb0", "#a0aec0"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "fused-llama", "font.size": 9}


def read_rows(file: str) -> list[Row]:
    """The rows of tokens per second in a file of JSON lines. Raises ValueError."""
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows.append(Row(**json.loads(line)))
        except (ValueError, TypeError):
            where = f"{file}, line {number}"
            raise ValueError(f"{where}: not a row printed by bench.py -o jsonl") from None
    return rows


def label(row: Row, rows: list[Row]) -> str:
    """Program and types, and what differs between the rows."""
    parts = ["fused-llama"]
    if row.ratio is not None:
        parts = [row.backend]
    parts.append(row.dtype if row.format == "none" else row.format)
    if row.format != "none" and len({r.dtype for r in rows if r.format == row.format}) > 1:
        parts.append(row.dtype)
    for name in ("model", "test"):
        if len({getattr(r, name) for r in rows}) > 1:
            parts.append(getattr(row, name).removeprefix("random:"))
    if row.kv != row.dtype:
        parts.append(f"kv {row.kv}")
    return ", ".join(parts)


def draw_speed(ax: Axes, row: Row, y: int, longest: float) -> None:
    """A bar, with its number at its end; outside, if the bar is short."""
    ours = row.ratio is None
    ax.barh(y, row.tokens_per_s, height=0.7, color=OURS if ours else OTHERS)
    if row.tokens_per_s > longest / 16:
        place, look = (-4, 0), dict(ha="right", color="white" if ours else "black")
    else:
        place, look = (4, 0), dict(ha="left")
    end = (row.tokens_per_s, y)
    ax.annotate(
        f"{row.tokens_per_s:,.0f}", end, place, "data", "offset points", va="center", **look
    )


def draw_bounds(ax: Axes, rows: list[Row], bounds: list[float], longest: float) -> None:
    """A line for each bound, which neighbours with the same one share."""
    first = 0
    for last, bound in enumerate(bounds):
        if last + 1 < len(rows) and abs(bounds[last + 1] / bound - 1) <= 0.005:
            continue
        ax.vlines(bound, first - 0.45, last + 0.45, color="black", linewidth=1.5)
        size = rows[last].size_gb
        of_size = f"{size:.1f} GB" if size >= 0.1 else f"{1000 * size:.0f} MB"
        # Beyond all bars, so that the text is on none of them
        beyond = max(bound, *(row.tokens_per_s for row in rows[first : last + 1]))
        text = f"at most {bound:,.0f} ({of_size})"
        ax.text(beyond + longest / 90, (first + last) / 2, text, va="center")
        first = last + 1


def plot(rows: list[Row], file: str) -> None:
    """A bar of tokens per second for each row of generation, and its bound: the speed at the read
    ceiling."""
    rows = [row for row in rows if row.test.startswith("tg")]
    if not rows:
        raise ValueError("there is nothing to draw: no row has generated tokens")
    matplotlib.rcParams |= STYLE
    figure, ax = pyplot.subplots(figsize=(9, 0.3 * len(rows) + 0.9))
    bounds = [100 * row.tokens_per_s / row.percent_of_ceiling for row in rows]
    longest = 1.36 * max(bounds + [row.tokens_per_s for row in rows])
    for y, row in enumerate(rows):
        draw_speed(ax, row, y, longest)
    draw_bounds(ax, rows, bounds, longest)
    ax.set_yticks(range(len(rows)), [label(row, rows) for row in rows])
    ax.set(xlim=(0, longest), ylim=(len(rows) - 0.45, -0.55))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    title = ["tokens/s"]
    for values in ({row.model for row in rows}, {row.device for row in rows}):
        if len(values) == 1:
            title.append(values.pop().removeprefix("random:"))
    title = f"{', '.join(title)}; line: the most that reading the weights allows"
    ax.set_title(title, loc="left", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    about = {"Date": None} if file.endswith(".svg") else {}
    figure.savefig(file, dpi=150, metadata=about)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", help="a file of JSON lines")
    parser.add_argument("picture", help="the file to write")
    args = parser.parse_args(argv)
    try:
        plot(read_rows(args.rows), args.picture)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
