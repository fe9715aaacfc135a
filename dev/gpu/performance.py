#!/usr/bin/env python3
"""Writes doc/performance.md from the newest record in dev/gpu/results/, so that no number of ours in it is typed by hand.

    dev/gpu/performance.py                          rewrites doc/performance.md
    dev/gpu/performance.py --add REPORT.json        first keeps a report of check.sh as results/DATE-GPU.json
    dev/gpu/performance.py --check                  exit status 1 if doc/performance.md is not what it would write
    dev/gpu/performance.py --attention BENCH.json [LIBRARY.json]
                                                    prints its table of attention from what bench and library_bench.py wrote
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Optional

from check_stages import add_library, kernel_rows

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


# ----------------------------------------------------------------------------------------------------------------------
# Attention beside what others publish

class Published(NamedTuple):
    """TFLOP/s of causal attention on an H100 SXM5. Forward: FlashAttention-3's paper (Shah et al., 2024), figure 5; forward and backward: FlashAttention-2's (Dao, 2023), figure 7."""
    flash2_forward: int
    flash2_both: int
    cudnn_forward: int
    flash3_forward: int


# By head_dim and sequence length; always 16384 tokens, and heads that are 2048 dims together.
PUBLISHED = {(64, 1024): Published(229, 192, 288, 265), (64, 2048): Published(262, 232, 334, 371), (64, 4096): Published(284, 257, 363, 420),
             (128, 1024): Published(260, 221, 410, 423), (128, 2048): Published(298, 265, 484, 521), (128, 4096): Published(319, 294, 518, 579)}


def published_shape(head_dim: int, seq_len: int) -> str:
    heads = 2048 // head_dim
    return f"B={16384 // seq_len}/T={seq_len}/NH={heads}/NKV={heads}/HD={head_dim}"


class Rates(NamedTuple):
    """TFLOP/s. Both: all operations over the sum of the two times, as the papers have it."""
    forward: Optional[float] = None
    backward: Optional[float] = None
    both: Optional[float] = None


def attention_rates(kernels: dict[str, Any], shape: str, label: str = "", suffix: str = "") -> Rates:
    """Of ours (suffix: of another set of ours), or of what PyTorch calls `label`."""
    def figures(way: str) -> tuple[float, Optional[float]]:
        kernel = kernels.get(f"attention_{way}{suffix}/{shape}", {"flops": 0, "us": None})
        us = kernel.get("library_tried", {}).get(label) if label else kernel["us"]
        return kernel["flops"] * 1e-6, us if isinstance(us, (int, float)) else None

    (forward_flops, forward_us), (backward_flops, backward_us) = figures("forward"), figures("backward")
    return Rates(forward_flops / forward_us if forward_us else None, backward_flops / backward_us if backward_us else None,
                 (forward_flops + backward_flops) / (forward_us + backward_us) if forward_us and backward_us else None)


def figure(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def pair(rates: Rates) -> str:
    return "-" if rates == Rates() else f"{figure(rates.forward)} / {figure(rates.both)}"


def library_pair(kernels: dict[str, Any], shape: str, label: str) -> str:
    """Where a kernel takes no grouped heads, library_bench.py repeats keys and values, and its label says so."""
    rates = attention_rates(kernels, shape, label)
    repeated = attention_rates(kernels, shape, f"{label}, k and v repeated")
    return pair(rates) if rates != Rates() or repeated == Rates() else f"{pair(repeated)} (k and v repeated)"


def measured_shapes(kernels: dict[str, Any]) -> list[str]:
    return [name.partition("/")[2] for name in kernels if name.startswith("attention_forward/")]


def shape_words(shape: str) -> str:
    sizes = {key: int(value) for key, _, value in (part.partition("=") for part in shape.split("/"))}
    grouped = f" ({sizes['NKV']} of k and v)" if sizes["NKV"] != sizes["NH"] else ""
    return f"{sizes['NH']} heads{grouped} of {sizes['HD']}, {sizes['B']} x {sizes['T']}"


def share_pair(rates: Rates, ceiling: Optional[float]) -> str:
    return "-" if not ceiling or rates == Rates() else " / ".join("-" if rate is None else f"{100 * rate * 1e12 / ceiling:.0f} %" for rate in (rates.forward, rates.both))


def plain_words(kernels: dict[str, Any]) -> Iterator[str]:
    """How many times as long plain fp32 arithmetic takes, where it was measured."""
    for name in kernels:
        if name.startswith("attention_forward_plain/"):
            shape = name.partition("/")[2]
            ours, plain = attention_rates(kernels, shape), attention_rates(kernels, shape, suffix="_plain")
            if ours.both and plain.both:
                yield (f"{shape_words(shape)}: the kernels with plain fp32 arithmetic take {ours.forward / plain.forward:.1f} times as long forward, "
                       f"{ours.backward / plain.backward:.1f} times backward")


def attention_table(kernels: dict[str, Any], ceiling: Optional[float], shapes: list[str]) -> Iterator[str]:
    yield from header("TFLOP/s", "ours forward", "ours backward", "ours both", "share of products", "SDPA flash", "SDPA cuDNN", "published FlashAttention-2", "published cuDNN",
                      "published FlashAttention-3")
    published = {published_shape(*key): value for key, value in PUBLISHED.items()}
    for shape in shapes:
        ours = attention_rates(kernels, shape)
        others = [published[shape].cudnn_forward, published[shape].flash3_forward] if shape in published else ["-", "-"]
        flash2 = f"{published[shape].flash2_forward} / {published[shape].flash2_both}" if shape in published else "-"
        yield row(shape_words(shape), figure(ours.forward), figure(ours.backward), figure(ours.both), share_pair(ours, ceiling), library_pair(kernels, shape, "SDPA flash"),
                  library_pair(kernels, shape, "SDPA cuDNN"), flash2, *others)
    for words in plain_words(kernels):
        yield f"\n{words}."


def attention_section(report: Optional[dict[str, Any]]) -> Iterator[str]:
    kernels = results_of(report, "benchmarks").get("kernels", {}) if report else {}
    yield "\n## Attention\n"
    yield "Causal, bf16, in TFLOP/s as the FlashAttention papers count: forward 4 T^2 head_dim operations a head, half of it under the mask, backward 2.5 times that. \"Both\" is their"
    yield "\"forward + backward\", all operations over the sum of the two times; two figures in a cell are forward / both. The first six shapes are theirs: 16384 tokens, heads that are"
    yield "2048 dims together. The last three columns are what they publish for an H100 SXM5 (forward of all three: FlashAttention-3's paper, figure 5; both: FlashAttention-2's,"
    yield "figure 7), measured by them on their machine. SDPA is PyTorch's scaled_dot_product_attention by its flash and its cuDNN kernel, measured beside ours in the same way."
    yield ""
    if not report:
        yield "**Ours has not run on a GPU yet**, so its columns are empty and no claim is made."
        yield ""
    elif attention_rates(kernels, published_shape(64, 1024)) == Rates():
        yield "The newest record has none of these shapes."
        yield ""
    shapes = [published_shape(*key) for key in PUBLISHED]
    shapes += [shape for shape in measured_shapes(kernels) if shape not in shapes]
    yield from attention_table(kernels, results_of(report, "machine").get("product_flops_per_second") if report else None, shapes)
    yield ""
    yield "The check fills the table; without it, on a machine with a GPU (the second command needs PyTorch and may be left out):"
    yield ""
    yield "<!-- not run in tests: needs a GPU -->"
    yield "```bash"
    yield "make bench && ./bench --benchmark_filter=^attention --benchmark_out=bench.json --benchmark_out_format=json"
    yield "dev/gpu/library_bench.py --ours bench.json --out library.json"
    yield "dev/gpu/performance.py --attention bench.json library.json"
    yield "```"


def print_attention(bench: Path, library: Optional[Path]) -> None:
    report = json.loads(bench.read_text(encoding="utf-8"))
    kernels = kernel_rows(report)
    if library:
        add_library(kernels, json.loads(library.read_text(encoding="utf-8")))
    context = report["context"]
    print(f"{context['device']}, {context['precision']}, product {float(context['product_flops_per_second']) / 1e12:.1f} TFLOP/s\n")
    print("\n".join(attention_table(kernels, float(context["product_flops_per_second"]), measured_shapes(kernels))))
    for failed in (entry for entry in report["benchmarks"] if entry.get("error_occurred")):
        print(f"\nFAILED {failed['run_name']}: {failed['error_message']}")


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
        return HEAD + NO_RECORD + "\n".join(attention_section(report)) + "\n"
    lines = [HEAD, *machine_section(report), *training_section(report), *attention_section(report), *kernel_section(report)]
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
    parser.add_argument("--attention", type=Path, nargs="+", metavar="JSON")
    parser.add_argument("--results", type=Path, default=RESULTS, help=argparse.SUPPRESS)
    parser.add_argument("--document", type=Path, default=DOCUMENT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.attention:
        if len(options.attention) > 2:
            parser.error("--attention takes bench's report and, after it, library_bench.py's")
        print_attention(options.attention[0], options.attention[1] if len(options.attention) > 1 else None)
        return 0
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
