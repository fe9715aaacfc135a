#!/usr/bin/env python3
"""Draw a run's losses: in the terminal always, as a PNG where matplotlib is installed.

    python3 scripts/plot.py runs/tiny                       # the run folder, or a metrics.jsonl
    python3 scripts/plot.py runs/a runs/b --png compare.png
    python3 scripts/plot.py runs/tiny --tensorboard tb/     # TensorBoard events, where tensorboardX is installed

After a resume a step can occur twice in metrics.jsonl; its last line counts.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from typing import NamedTuple, Optional

# Dots of a braille character, by (column, row from the top).
BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
COLORS = ("\033[36m", "\033[33m", "\033[35m", "\033[32m", "\033[31m", "\033[34m")


class Run(NamedTuple):
    """One run's records, each list by rising step with one record a step."""
    name: str
    train: list[dict]
    val: list[dict]


class Curve(NamedTuple):
    label: str
    points: list[tuple[float, float]]  # (step, loss in nats)
    connect: bool


def read_run(path: Path) -> Run:
    """Reads metrics.jsonl. A last line without its end is a write in progress and is left out; any other line that is not
    an object is reported."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SystemExit(f"plot.py: cannot read {file}: {error.strerror}; give a run folder (train_gpt --out) or its metrics.jsonl")
    records: dict[str, dict[int, dict]] = {"train": {}, "val": {}}
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            kind, step = record["kind"], record.get("step")
        except (ValueError, TypeError, KeyError, AttributeError):
            if number < len(lines):
                print(f"plot.py: {file}:{number} is not a metrics record, left out", file=sys.stderr)
            continue
        if kind in records and isinstance(step, int):
            records[kind][step] = record
    if not records["train"] and not records["val"]:
        raise SystemExit(f"plot.py: {file} holds no train or val record")
    return Run(path.name if path.is_dir() else (path.parent.name or path.stem),
               *([by_step[step] for step in sorted(by_step)] for by_step in records.values()))


def points(records: list[dict], field: str) -> list[tuple[float, float]]:
    """(step, value) of the records that have a finite value."""
    return [(record["step"], float(record[field])) for record in records
            if isinstance(record.get(field), (int, float)) and math.isfinite(record[field])]


def curves_of(runs: list[Run]) -> list[Curve]:
    several = len(runs) > 1
    out = []
    for run in runs:
        for label, data, connect in (("train", points(run.train, "loss"), False), ("val", points(run.val, "val_loss"), True)):
            if data:
                out.append(Curve(f"{run.name} {label}" if several else label, data, connect))
    return out


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within [low, high]."""
    if high <= low:
        return [low]
    raw = (high - low) / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def text_plot(curves: list[Curve], width: int, height: int, unicode: bool, color: bool) -> str:
    """A plot with axes, `width` x `height` characters in all; braille dots, or letters where the terminal has no Unicode."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    if x1 == x0:
        x1 = x0 + 1
    if y1 - y0 < 1e-9 * max(1.0, abs(y1)):
        y0, y1 = y0 - 0.5, y1 + 0.5
    labels = [f"{tick:g}" for tick in ticks(y0, y1, height // 3)]
    margin = max(map(len, labels), default=1)
    columns, rows = max(10, width - margin - 3), max(4, height - 3)
    across, down = (2, 4) if unicode else (1, 1)
    dots_x, dots_y = columns * across, rows * down
    cells = [[0] * columns for _ in range(rows)]
    owner = [[-1] * columns for _ in range(rows)]

    def at(x: float, y: float) -> tuple[int, int]:
        return round((x - x0) / (x1 - x0) * (dots_x - 1)), round((y1 - y) / (y1 - y0) * (dots_y - 1))

    def dot(px: int, py: int, which: int) -> None:
        column, row = px // across, py // down
        if unicode and owner[row][column] not in (-1, which):
            cells[row][column] = 0  # the later curve takes the cell: two colors in one cell would be unreadable
        cells[row][column] |= BRAILLE[px % 2][py % 4] if unicode else 1
        owner[row][column] = which

    for which, curve in enumerate(curves):
        last: Optional[tuple[int, int]] = None
        for x, y in curve.points:
            here = at(x, y)
            dot(*here, which)
            if last and (curve.connect or len(curve.points) < columns):  # scattered dots read as a line only where they are dense
                distance = max(abs(here[0] - last[0]), abs(here[1] - last[1]), 1)
                for i in range(1, distance):
                    dot(round(last[0] + (here[0] - last[0]) * i / distance), round(last[1] + (here[1] - last[1]) * i / distance), which)
            last = here

    vertical, corner, horizontal, notch = ("│", "└", "─", "┤") if unicode else ("|", "+", "-", "+")
    marks = {at(x0, tick)[1] // down: f"{tick:g}" for tick in ticks(y0, y1, height // 3)}
    lines = []
    for row in range(rows):
        body = ""
        for column in range(columns):
            which = owner[row][column]
            if which < 0:
                body += " "
                continue
            mark = chr(0x2800 + cells[row][column]) if unicode else "abcdefghijkl"[which % 12]
            body += f"{COLORS[which % len(COLORS)]}{mark}\033[0m" if color else mark
        lines.append(f"{marks.get(row, ''):>{margin}} {notch if row in marks else vertical}{body.rstrip()}")
    lines.append(" " * (margin + 1) + corner + horizontal * columns)
    axis = [" "] * columns
    for tick in ticks(x0, x1, columns // 12):
        label = f"{tick:g}"
        start = min(max(0, at(tick, y0)[0] // across - len(label) // 2), columns - len(label))
        if all(cell == " " for cell in axis[max(0, start - 1): start + len(label) + 1]):
            axis[start: start + len(label)] = label
    lines.append(" " * (margin + 2) + "".join(axis).rstrip())
    legend = []
    for which, curve in enumerate(curves):
        mark = "⠶" if unicode else "abcdefghijkl"[which % 12]
        mark = f"{COLORS[which % len(COLORS)]}{mark}\033[0m" if color else mark
        legend.append(f"{mark} {curve.label} {curve.points[-1][1]:.4f}")
    lines.append(" " * (margin + 2) + "   ".join(legend) + "   (loss in nats a token, by step; last values)")
    return "\n".join(lines)


def write_png(curves: list[Curve], path: Path) -> bool:
    """False where matplotlib is missing."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    figure, axes = plt.subplots(figsize=(9, 5))
    for curve in curves:
        axes.plot(*zip(*curve.points), label=f"{curve.label} ({curve.points[-1][1]:.4f})", marker="o" if curve.connect else None,
                  markersize=3, linewidth=1.6 if curve.connect else 0.9)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def write_tensorboard(runs: list[Run], folder: Path) -> None:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise SystemExit("plot.py: --tensorboard needs the Python package tensorboardX; pip install tensorboardX")
    for run in runs:
        with SummaryWriter(str(folder / run.name if len(runs) > 1 else folder)) as writer:
            for prefix, records in (("train", run.train), ("val", run.val)):
                for field in sorted({field for record in records for field in record} - {"kind", "step"}):
                    for step, value in points(records, field):
                        writer.add_scalar(f"{prefix}/{field}", value, int(step))


def main() -> None:
    parser = argparse.ArgumentParser(prog="plot.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders or metrics.jsonl files")
    parser.add_argument("--png", type=Path, metavar="FILE", help="where the PNG goes (default: loss.png in the first run folder)")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="also write TensorBoard events")
    parser.add_argument("--width", type=int, metavar="N", help="characters across (default: the terminal's)")
    parser.add_argument("--height", type=int, default=20, metavar="N", help="lines (default 20)")
    parser.add_argument("--ascii", action="store_true", help="no Unicode")
    arguments = parser.parse_args()

    runs = [read_run(path) for path in arguments.runs]
    curves = curves_of(runs)
    if not curves:
        raise SystemExit(f"plot.py: no finite loss in {arguments.runs[0]}")
    width = arguments.width or min(120, shutil.get_terminal_size((100, 24)).columns)
    # A C locale (common in containers) still shows UTF-8 on nearly every terminal, so the stream is switched, not the plot.
    if not arguments.ascii and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")
    print(text_plot(curves, width, arguments.height, unicode=not arguments.ascii, color=sys.stdout.isatty()))

    first = arguments.runs[0]
    png = arguments.png or (first if first.is_dir() else first.parent) / "loss.png"
    if write_png(curves, png):
        print(f"wrote {png}")
    elif arguments.png:
        raise SystemExit("plot.py: --png needs the Python package matplotlib; pip install matplotlib")
    else:
        print("(no PNG: matplotlib is not installed)")
    if arguments.tensorboard:
        write_tensorboard(runs, arguments.tensorboard)
        print(f"wrote TensorBoard events to {arguments.tensorboard}")


if __name__ == "__main__":
    main()
