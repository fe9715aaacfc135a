"""The table that check.py prints last: the record in at most 60 lines."""

from __future__ import annotations

from typing import Any, Iterator

from performance import PUBLISHED, Rates, attention_rates, pair, plain_words, published_shape


def si(value: float, unit: str) -> str:
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def machine_lines(results: dict[str, Any]) -> Iterator[str]:
    gpu = results.get("gpu", {})
    if gpu:
        loaded = results.get("gpu_after_load", {})
        yield f"{gpu['name']}, driver {gpu['driver_version']}, {gpu['memory.total']}, SM clock {loaded.get('clocks.sm', '?')} of {gpu['clocks.max.sm']} under load, limit {gpu['power.limit']}"
        yield ", ".join(results.get("libraries", {}).values())
    if "copy_bytes_per_second" in results:
        yield f"{results['device']}: copy {si(results['copy_bytes_per_second'], 'B/s')} (read + write), product {si(results['product_flops_per_second'], 'FLOP/s')}"


def test_lines(results: dict[str, Any]) -> Iterator[str]:
    for name, row in results.items():
        yield f"{name}: {row['passed']} passed, {row['failed']} failed, {row['seconds']} s"


def same_run_lines(results: dict[str, Any]) -> Iterator[str]:
    for precision, fields in results.items():
        yield f"{precision}: " + "; ".join(f"{field} {row['here'][0]:.4f} to {row['here'][-1]:.4f} (CPU {row['host'][-1]:.4f}), off by typically {row['typical']:.1e} "
                                           f"(controls {row['control']:.1e}), at most {row['largest']:.1e} ({row['largest_control']:.1e})" for field, row in fields.items())


def rank_lines(results: dict[str, Any]) -> Iterator[str]:
    for what, outcome in results.items():
        yield f"{what}: {outcome}"


KERNEL_LINES = 17


def attention_lines(kernels: dict[str, Any]) -> Iterator[str]:
    """A line for each head_dim of the published shapes: ours, forward / both together, beside FlashAttention-2's."""
    for head_dim in sorted({head_dim for head_dim, _ in PUBLISHED}):
        rates = {seq_len: attention_rates(kernels, published_shape(head_dim, seq_len)) for width, seq_len in PUBLISHED if width == head_dim}
        if any(rate != Rates() for rate in rates.values()):
            beside = {seq_len: PUBLISHED[head_dim, seq_len] for seq_len in rates}
            yield f"attention, head_dim {head_dim}, TFLOP/s forward / both: " + ", ".join(
                f"T {seq_len} {pair(rate)} (FlashAttention-2 {beside[seq_len].flash2_forward} / {beside[seq_len].flash2_both})" for seq_len, rate in rates.items())
    yield from plain_words(kernels)


def benchmark_lines(results: dict[str, Any]) -> Iterator[str]:
    """One line an operation: its largest shape. The longest of them, the others are in the record."""
    largest: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, row in results.get("kernels", {}).items():
        operation = name.split("/")[0]
        if operation.endswith("_plain"):
            continue  # beside what replaced it, in attention_lines
        if operation not in largest or max(row["bytes"], row["flops"]) >= max(largest[operation][1]["bytes"], largest[operation][1]["flops"]):
            largest[operation] = (name, row)
    shown = sorted((row["us"] for _, row in largest.values()), reverse=True)[:KERNEL_LINES]
    for name, row in largest.values():
        if row["us"] < shown[-1]:
            continue
        beside = f"   {row['library']} {row['library_us']:.1f} us" if "library_us" in row else ""
        yield f"{name:58} {row['us']:10.1f} us  {100 * row['share']:5.1f}% of {row['of']}{beside}"
    if len(largest) > len(shown):
        yield f"and {len(largest) - len(shown)} shorter ones, other shapes: report.json"
    yield from attention_lines(results.get("kernels", {}))
    if results.get("library_problem"):
        yield results["library_problem"]


def training_lines(results: dict[str, Any]) -> Iterator[str]:
    for name, row in results.items():
        mfu = f"MFU {100 * row['mfu']:.1f}% of datasheet, " if row["mfu"] is not None else "MFU "
        yield (f"{name}: {row['tokens_per_s']:.0f} tokens/s, {row['step_ms']:.1f} ms, {mfu}{100 * row['mfu_measured']:.1f}% of products; forward {row['forward_ms']:.1f} head and loss {row['head_ms']:.1f} "
               f"backward {row['backward_ms']:.1f} update {row['update_ms']:.1f} ms; {row['own_bytes'] / 1e9:.2f} GB ours, {max(0, row['used_bytes'] - row['own_bytes']) / 1e9:.2f} GB beside of a reserve of "
               f"{row.get('reserve_bytes', 0) / 1e9:.2f}")


def peer_lines(results: dict[str, Any], training: dict[str, Any]) -> Iterator[str]:
    for key, row in results.items():
        ours = training.get(key.split()[0], {}).get("tokens_per_s")
        if "tokens_per_s" in row:
            yield f"PyTorch {key}: {row['tokens_per_s']:.0f} tokens/s" + (f", ours is {ours / row['tokens_per_s']:.2f} times that" if ours else "")
        else:
            yield f"PyTorch {key}: {row.get('error') or row.get('skipped')}"


def sanitizer_lines(results: dict[str, Any]) -> Iterator[str]:
    for key, summary in results.items():
        yield f"{key}: {summary}"


LINES = {"machine": machine_lines, "tests": test_lines, "same-run": same_run_lines, "ranks": rank_lines, "benchmarks": benchmark_lines, "training": training_lines, "sanitizer": sanitizer_lines}


def table(report: dict[str, Any]) -> list[str]:
    stages = report["stages"]
    lines = []
    for name, stage in stages.items():
        lines.append(f"{stage['status'].upper():8}{name}  {stage['seconds']} s" + (f"  ({stage['reason']})" if "reason" in stage else ""))
        lines += [f"  ! {problem[:220]}" for problem in stage["problems"][:4]]
        if len(stage["problems"]) > 4:
            lines.append(f"  ! and {len(stage['problems']) - 4} more, in report.json")
        results = stage["results"]
        shown = peer_lines(results, stages.get("training", {}).get("results", {})) if name == "peer" else LINES[name](results)
        lines += [f"  {line}" for line in shown]
    count = {status: sum(stage["status"] == status for stage in stages.values()) for status in ("passed", "failed", "skipped")}
    lines.append(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped ({report['seconds']:.0f} s, mode {report['mode']}{', quick' if report['quick'] else ''})")
    return lines
