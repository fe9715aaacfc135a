#!/usr/bin/env python3
"""Writes doc/performance.md from the newest record in dev/gpu/results/, so that no number in it is typed by hand.

    dev/gpu/performance.py                          rewrites doc/performance.md
    dev/gpu/performance.py --add REPORT.json        first keeps a report of check.sh as results/DATE-GPU.json
    dev/gpu/performance.py --check                  exit status 1 if doc/performance.md is not what it would write
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, Iterator, Optional

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "dev/gpu/results"
DOCUMENT = ROOT / "doc/performance.md"

HEAD = """# Performance

Written by `dev/gpu/performance.py` from the newest record in `dev/gpu/results/`; do not edit it by hand.
"""

NO_RECORD = """
**There is no record of a GPU yet.** Everything so far ran on CPUs, through `hostcuda/`. The check that makes a record is ready:
[dev/gpu/README.md](../dev/gpu/README.md) says how to run it in eight minutes on a machine with an NVIDIA GPU.

What the compiler makes of each kernel (registers, shared memory, width of loads) is known without a GPU:
[dev/gpu/kernels.md](../dev/gpu/kernels.md).
"""


def row(*cells: Any) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def header(*cells: str) -> list[str]:
    return [row(*cells), "|" + "---|" * len(cells)]


def results_of(report: dict[str, Any], stage: str) -> dict[str, Any]:
    return report["stages"].get(stage, {}).get("results", {})


def machine_section(report: dict[str, Any]) -> Iterator[str]:
    machine = results_of(report, "machine")
    gpu = machine.get("gpu", {})
    yield f"Record of {report['date'][:10]}, commit {report['pack'].get('commit', '?')[:12]}" + (", made with `--quick`" if report["quick"] else "") + "."
    yield ""
    yield from header("", "")
    if gpu:
        yield row("GPU", f"{gpu['name']}, {gpu['memory.total']}, driver {gpu['driver_version']}, power limit {gpu['power.limit']}")
    if machine.get("libraries"):
        yield row("libraries", ", ".join(machine["libraries"].values()))
    if "copy_bytes_per_second" in machine:
        yield row("device copy, bytes read + written", f"{machine['copy_bytes_per_second'] / 1e12:.2f} TB/s")
        yield row("matrix product, bf16, random data", f"{machine['product_flops_per_second'] / 1e12:.0f} TFLOP/s")
    yield row("stages of the check", ", ".join(f"{name} {stage['status']}" for name, stage in report["stages"].items()))


def peer_cells(report: dict[str, Any], model: str, weights: str, ours: float) -> list[str]:
    """The fastest PyTorch run with these weights: tokens/s and mode, and how many times that ours is."""
    runs = [(run["tokens_per_s"], key.split()[1]) for key, run in results_of(report, "peer").items() if key.split()[0] == model and key.split()[2] == weights and "tokens_per_s" in run]
    if not runs:
        return ["-", "-"]
    tokens_per_s, mode = max(runs)
    return [f"{tokens_per_s:.0f} ({mode})", f"{ours / tokens_per_s:.2f}"]


def training_section(report: dict[str, Any]) -> Iterator[str]:
    training = results_of(report, "training")
    if not training:
        return
    yield "\n## Training\n"
    yield "Qwen2.5 shapes in bf16 with fp32 master weights, sequences of 1024 random tokens, one GPU; medians after warm-up. MFU counts causal attention at half and includes"
    yield "the head. PyTorch is `transformers` with SDPA and fused AdamW on the same batch, the faster of eager and compiled where both ran: with fp32 weights and autocast, as exact as"
    yield "ours, and with weights, gradients and moments in bf16, less exact and the fastest it can be."
    yield ""
    yield from header("model", "tokens/s", "step", "MFU, datasheet", "MFU, measured products", "memory, ours", "memory, beside", "PyTorch fp32 tokens/s", "ours / that", "PyTorch bf16 tokens/s",
                      "ours / that")
    for model, run in training.items():
        mfu = "-" if run["mfu"] is None else f"{100 * run['mfu']:.1f} %"
        yield row(model, f"{run['tokens_per_s']:.0f}", f"{run['step_ms']:.1f} ms", mfu, f"{100 * run['mfu_measured']:.1f} %", f"{run['own_bytes'] / 1e9:.2f} GB",
                  f"{max(0, run['used_bytes'] - run['own_bytes']) / 1e9:.2f} GB", *peer_cells(report, model, "fp32", run["tokens_per_s"]), *peer_cells(report, model, "bf16", run["tokens_per_s"]))
    yield ""
    yield "Where a step's time goes (ms; waiting for communication counts within the phase it is in):"
    yield ""
    yield from header("model", "forward", "head and loss", "backward", "update", "of these, exposed communication", "data")
    for model, run in training.items():
        yield row(model, *(f"{run[field]:.1f}" for field in ("forward_ms", "head_ms", "backward_ms", "update_ms", "exposed_comm_ms", "data_ms")))


def kernel_section(report: dict[str, Any]) -> Iterator[str]:
    kernels = results_of(report, "benchmarks").get("kernels", {})
    if not kernels:
        return
    yield "\n## Kernels\n"
    yield "Median time with cold caches; the share is of the measured ceiling that binds (copy or product), with the fewest bytes and the useful operations. Beside it"
    yield "PyTorch's best time for the same shape, where there is one."
    yield ""
    yield from header("kernel", "us", "share", "of", "PyTorch us", "PyTorch / ours", "with")
    for name, kernel in kernels.items():
        beside = [f"{kernel['library_us']:.1f}", f"{kernel['library_us'] / kernel['us']:.2f}", kernel["library"]] if "library_us" in kernel else ["-"] * 3
        yield row(f"`{name}`", f"{kernel['us']:.1f}", f"{100 * kernel['share']:.1f} %", kernel["of"], *beside)


def document(report: Optional[dict[str, Any]]) -> str:
    if report is None:
        return HEAD + NO_RECORD
    lines = [HEAD, *machine_section(report), *training_section(report), *kernel_section(report)]
    return "\n".join(lines) + "\n"


def newest(folder: Path) -> Optional[dict[str, Any]]:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    return max(records, key=lambda record: record["date"], default=None)


def add(report_path: Path, folder: Path) -> Path:
    """Keeps a report under its date and GPU; a second one of a day gets a number. Refuses one of a CPU."""
    report = json.loads(report_path.read_text(encoding="utf-8"))
    if report.get("mode") != "gpu":
        raise SystemExit(f"{report_path} is a record of mode {report.get('mode')!r}; only one of a GPU is kept")
    name = report["date"][:10] + "-" + re.sub(r"[^A-Za-z0-9]+", "-", results_of(report, "machine").get("gpu", {}).get("name", "unknown-gpu"))
    folder.mkdir(parents=True, exist_ok=True)
    path, number = folder / f"{name}.json", 2
    while path.exists():
        path, number = folder / f"{name}-{number}.json", number + 1
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return path


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="performance.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, metavar="REPORT")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS, help=argparse.SUPPRESS)
    parser.add_argument("--document", type=Path, default=DOCUMENT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.add:
        print(f"kept as {add(options.add, options.results)}")
    text = document(newest(options.results))
    if options.check:
        if not options.document.exists() or options.document.read_text(encoding="utf-8") != text:
            print(f"{options.document} is not what the newest record gives; run dev/gpu/performance.py", file=sys.stderr)
            return 1
        return 0
    options.document.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
