#!/usr/bin/env python3
"""The static record of the GPU kernels: what ptxas reports and what the disassembly holds, one row a kernel.

    kernel_table.py --nvcc VERSION --table FILE [--write] CUBIN...

Each CUBIN is named PROGRAM.sm_ARCH.cubin and has ptxas's report (nvcc -Xptxas -v) beside it as PROGRAM.sm_ARCH.ptxas.txt; `make kernel-table` makes
them and calls this. cuobjdump, nvdisasm and c++filt are looked for on the path. VERSION is what `nvcc --version` says, or the whole of its text.

--write writes the table. Without it the table is checked: it must be the one these cubins give, which holds only under the nvcc it was made with,
and is skipped (and said so) under another; no kernel may spill registers or use local memory, but for those in EXPLAINED; and the kernels of
tensor-core attention must be as in PLAN. The last line is `N passed, N failed[, N skipped]`, one for the table, one for each kernel and architecture
and one more for each kernel of PLAN; the exit status is 1 when anything failed.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Callable, Iterable, NamedTuple, Optional

# Kernels that may use local memory without being slow for it, and why. One that stops doing so must leave this list.
EXPLAINED: dict[str, str] = {
    "init_normal_kernel<bf16>": "the argument reduction of `cosf` and `sinf` beyond 105615, which an angle below 2 pi never enters, indexes an array; runs once a run",
}

# Tensor-core attention: the blocks that are to be on a multiprocessor at once, on the cards where the launcher runs the kernel. All are compiled for all
# cards. (BackwardShape)0 is kLarge, for cards that give a block 163 KiB of shared memory; 1 is kSmall. Each kernel must hold HMMA, LDSM and LDGSTS and no
# atomics on every card.
PLAN: dict[str, dict[str, int]] = {
    "attention_forward_mma_kernel<AttentionForwardMma<64, false>>": {"sm_80": 2, "sm_89": 2, "sm_90a": 2},
    "attention_forward_mma_kernel<AttentionForwardMma<80, false>>": {"sm_80": 2, "sm_89": 2, "sm_90a": 2},
    "attention_forward_mma_kernel<AttentionForwardMma<96, false>>": {"sm_80": 2, "sm_89": 1, "sm_90a": 2},
    "attention_forward_mma_kernel<AttentionForwardMma<128, false>>": {"sm_80": 2, "sm_89": 1, "sm_90a": 2},
    "attention_backward_mma_kernel<AttentionBackwardMma<64, (BackwardShape)1>>": {"sm_80": 2, "sm_89": 1, "sm_90a": 2},
    "attention_backward_mma_kernel<AttentionBackwardMma<80, (BackwardShape)0>>": {"sm_80": 1, "sm_90a": 1},
    "attention_backward_mma_kernel<AttentionBackwardMma<80, (BackwardShape)1>>": {"sm_89": 1},
    "attention_backward_mma_kernel<AttentionBackwardMma<96, (BackwardShape)0>>": {"sm_80": 1, "sm_90a": 1},
    "attention_backward_mma_kernel<AttentionBackwardMma<96, (BackwardShape)1>>": {"sm_89": 1},
    "attention_backward_mma_kernel<AttentionBackwardMma<128, (BackwardShape)0>>": {"sm_80": 1, "sm_90a": 1},
    "attention_backward_mma_kernel<AttentionBackwardMma<128, (BackwardShape)1>>": {"sm_89": 1},
}
MMA_KERNEL = re.compile(r"attention_\w+_mma_kernel<(.+)>")  # each must be in PLAN; within is the struct that holds its kThreads and kBytes
ROOT = Path(__file__).resolve().parents[2]


class TableError(Exception):
    pass


class Usage(NamedTuple):
    """What ptxas says of one function, in bytes but for the registers."""
    is_kernel: bool
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


class Row(NamedTuple):
    """One kernel on one architecture."""
    registers: int
    shared: int
    stack: int
    spilled: int
    local: int
    wide_loads: int
    narrow_loads: int
    wide_stores: int
    narrow_stores: int
    atomics: int
    hmma: int
    ldsm: int
    ldgsts: int
    instructions: int


class Tile(NamedTuple):
    """What a launcher asks for: threads and bytes of dynamic shared memory of a block."""
    threads: int
    shared: int


class Card(NamedTuple):
    """What a multiprocessor holds at most: warps, blocks, bytes of shared memory."""
    warps: int
    blocks: int
    shared: int


# CUDA programming guide, "Technical Specifications per Compute Capability". All have 64 K registers. A block gets at most 1 KiB less than all shared memory.
CARDS = {"sm_80": Card(64, 32, 164 * 1024), "sm_89": Card(48, 24, 100 * 1024), "sm_90a": Card(64, 32, 228 * 1024)}


# Heading and meaning of each field of a Row.
COLUMNS = {
    "registers": ("registers", "a thread"),
    "shared": ("static shared", "bytes of shared memory known at compile time. What a launcher asks for at run time (the attention kernels' tiles) is not in it"),
    "stack": ("stack", "bytes of stack frame a thread"),
    "spilled": ("spilled", "bytes of spill stores and spill loads together"),
    "local": ("local", "accesses to local memory (`LDL`, `STL`), which holds spills, stack and arrays that registers cannot hold"),
    "wide_loads": ("16 B loads", "loads from global memory of 16 bytes a thread (`LDG.E.128`, `LDGSTS...128`)"),
    "narrow_loads": ("narrower", "loads from global memory of 1 to 8 bytes a thread"),
    "wide_stores": ("16 B stores", "`STG.E.128`"),
    "narrow_stores": ("narrower stores", "of 1 to 8 bytes"),
    "atomics": ("atomics", "on global memory (`RED`, `ATOM`)"),
    "hmma": ("HMMA", "tensor-core products of one warp"),
    "ldsm": ("LDSM", "`ldmatrix`: tiles from shared memory into the registers of tensor-core products"),
    "ldgsts": ("LDGSTS", "`cp.async`: those of the loads above that go to shared memory past the registers"),
    "instructions": ("instructions", "all of them, without the `NOP`s that fill up the end"),
}


def parse_ptxas(text: str) -> dict[str, Usage]:
    """Mangled name -> usage, of the kernels and of functions they call without inlining."""
    usages: dict[str, Usage] = {}
    kernels: set[str] = set()
    kernel = name = ""
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '([^']+)'", line):
            kernel = name = found[1]
            kernels.add(kernel)
        elif found := re.search(r"Function properties for '?([^\s']+)", line):
            name = found[1]
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            usages[name] = Usage(name in kernels, 0, int(found[1]), int(found[2]), int(found[3]), 0)
        elif (found := re.search(r": Used (\d+) registers", line)) and kernel in usages:
            shared = re.search(r"(\d+) bytes smem", line)
            usages[kernel] = usages[kernel]._replace(registers=int(found[1]), shared=int(shared[1]) if shared else 0)
    missing = [each for each in kernels if each not in usages or usages[each].registers == 0]
    if missing or not kernels:
        raise TableError("ptxas's report " + (f"is cut off: nothing on {missing[0]}" if missing else "names no kernel"))
    return usages


def parse_sass(text: str) -> dict[str, Counter[str]]:
    """Mangled name -> how often each instruction, with its modifiers, stands in the listing of `cuobjdump -sass`."""
    listings: dict[str, Counter[str]] = {}
    current: Optional[Counter[str]] = None
    for line in text.splitlines():
        if found := re.match(r"\s*Function : (\S+)", line):
            current = listings.setdefault(found[1], Counter())
        elif current is not None and (found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)", line)):
            current[found[1]] += 1
    return listings


def count(listing: Counter[str], operations: str, wide: Optional[bool] = None) -> int:
    """Instructions whose name without modifiers matches; wide: only those of 16 bytes, or only the others."""
    total = 0
    for instruction, times in listing.items():
        operation, *modifiers = instruction.split(".")
        if re.fullmatch(operations, operation) and (wide is None or wide == ("128" in modifiers)):
            total += times
    return total


def short_name(demangled: str) -> str:
    """`void f_kernel<__nv_bfloat16, Tile<4> >(float*, int)` -> `f_kernel<bf16, Tile<4>>`."""
    name = re.sub(r"^(void|__global__) ", "", demangled.strip())
    if name.endswith(")"):
        depth = 0
        for i in range(len(name) - 1, -1, -1):
            depth += (name[i] == ")") - (name[i] == "(")
            if depth == 0:
                name = name[:i]
                break
    name = name.replace("__nv_bfloat16", "bf16").replace("(anonymous namespace)::", "")
    while "> >" in name:
        name = name.replace("> >", ">>")
    return name


def demangle(names: list[str]) -> list[str]:
    return run(["c++filt"], "\n".join(names)).splitlines()


def rows_of(report: str, sass: str, demangler: Callable[[list[str]], list[str]] = demangle) -> dict[str, Row]:
    """Short name -> row, of one architecture."""
    usages, listings = parse_ptxas(report), parse_sass(sass)
    kernels = [name for name, usage in usages.items() if usage.is_kernel]
    if set(kernels) != set(listings):
        odd = sorted(set(kernels) ^ set(listings))[0]
        raise TableError(f"the report and the disassembly hold different kernels: {odd} is in only one of them")
    # A function that is not inlined is listed within its callers, so what it keeps in local memory shows in their counts.
    rows: dict[str, Row] = {}
    for name, demangled in zip(kernels, demangler(kernels)):
        usage, listing, short = usages[name], listings[name], short_name(demangled)
        instructions = sum(listing.values()) - count(listing, "NOP")
        if instructions == 0:
            raise TableError(f"the disassembly of {short} holds no instruction that could be read")
        if short in rows:
            raise TableError(f"two kernels are called {short}; give them names of their own")
        # Generic LD and ST may go anywhere; this code has them for global memory only.
        loads, stores = "LDG|LD|LDGSTS", "STG|ST"
        rows[short] = Row(usage.registers, usage.shared, usage.stack, usage.spill_stores + usage.spill_loads, count(listing, "LDL|STL"),
                          count(listing, loads, True), count(listing, loads, False), count(listing, stores, True), count(listing, stores, False),
                          count(listing, "RED|REDG|ATOM|ATOMG"), count(listing, "HMMA"), count(listing, "LDSM"),
                          count(listing, "LDGSTS"), instructions)
    return rows


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def most_blocks(card: Card, registers: int, threads: int, shared: int) -> dict[str, int]:
    """Blocks that each resource of a multiprocessor has room for; the fewest are there at once. The rule is that of NVIDIA's cuda_occupancy.h for these cards:
    a warp gets registers in units of 256 from one of four equal parts, a block shared memory in units of 128 bytes and 1 KiB of it for the system."""
    warps = round_up(threads, 32) // 32
    return {
        "registers": 65536 // 4 // round_up(32 * registers, 256) * 4 // warps,
        "shared memory": card.shared // round_up(shared + 1024, 128),
        "warps": card.warps // warps,
        "blocks": card.blocks,
    }


def blocks_of(architecture: str, row: Row, tile: Tile) -> tuple[int, str]:
    """Blocks on a multiprocessor at once, and what allows no more."""
    if architecture not in CARDS:
        raise TableError(f"what a multiprocessor of {architecture} holds is not known: add it to CARDS in dev/gpu/kernel_table.py")
    most = most_blocks(CARDS[architecture], row.registers, tile.threads, row.shared + tile.shared)
    blocks = min(most.values())
    return blocks, " and ".join(what for what, number in most.items() if number == blocks)


def read_tiles(names: Iterable[str], header: Path = ROOT / "llmc/attention_mma.cuh") -> dict[str, Tile]:
    """Tile of each kernel that is called as MMA_KERNEL says. No cubin knows what a launcher asks for, and a number written here would drift from the header,
    so a compiler reads it from there: the same sources compile for a CPU, and constants stand in the assembly."""
    kernels = {name: found[1] for name in sorted(set(names)) if (found := MMA_KERNEL.fullmatch(name))}
    if not kernels:
        return {}
    numbers = ", ".join(f"{tile}::kThreads, {tile}::kBytes" for tile in kernels.values())
    source = f'#include "{header}"\n#include <cstdint>\nextern "C" {{ extern const uint64_t tile_numbers[]; const uint64_t tile_numbers[] = {{{numbers}}}; }}\n'
    compiler = [os.environ.get("CXX", "g++"), "-std=c++20", "-w", f"-I{ROOT}", f"-I{ROOT / 'hostcuda/include'}", "-S", "-x", "c++", "-", "-o", "-"]
    found = re.search(r"^_?tile_numbers:\n((?:\s+\.(?:quad|xword|8byte)\s.*\n)+)", run(compiler, source), re.MULTILINE)
    values = [int(value) for value in re.findall(r"^\s+\.\w+\s+(\d+)", found[1], re.MULTILINE)] if found else []
    if len(values) != 2 * len(kernels):
        raise TableError(f"the assembly of {compiler[0]} does not show the numbers of {header} as expected")
    return {name: Tile(values[2 * i], values[2 * i + 1]) for i, name in enumerate(kernels)}


def cell(values: list[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else "/".join(map(str, values))


def table_of(rows: dict[str, dict[str, Row]], nvcc: str, tiles: dict[str, Tile]) -> str:
    """The Markdown of architecture -> kernel -> row. Cells are not padded, so that a change touches its own line only."""
    architectures = list(rows)
    names = sorted(set().union(*rows.values()))
    lines = [
        "# The GPU kernels as compiled",
        "",
        "Made by `make kernel-table` (`dev/gpu/kernel_table.py`) from the BF16 build of `train_gpt.cu`; do not edit. `dev/test/check_cuda_build.sh` compares.",
        "",
        f"nvcc {nvcc}; {', '.join(architectures)}. Numbers `a/b/c` are of these in this order; one number where all agree.",
        "",
        "Instructions are counted where they stand in the program, not as often as they run. The columns:",
        "",
        *(f"- {heading}: {meaning}" for heading, meaning in COLUMNS.values()),
        "",
        "| kernel | " + " | ".join(heading for heading, _ in COLUMNS.values()) + " |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    for name in names:
        there = [rows[architecture][name] for architecture in architectures if name in rows[architecture]]
        only = "" if len(there) == len(architectures) else f" ({', '.join(a for a in architectures if name in rows[a])})"
        lines.append(f"| `{name}`{only} | " + " | ".join(cell([getattr(row, field) for row in there]) for field in COLUMNS) + " |")
    explained = [name for name in names if name in EXPLAINED]
    if explained:
        lines += ["", "Local memory that is known and does no harm:", "", *(f"- `{name}`: {EXPLAINED[name]}" for name in explained)]
    return "\n".join(lines + occupancy_of(rows, tiles)) + "\n"


def occupancy_of(rows: dict[str, dict[str, Row]], tiles: dict[str, Tile]) -> list[str]:
    """Lines of the table of PLAN: each kernel on the cards where it runs."""
    planned = [(name, architecture) for name in PLAN for architecture in rows if architecture in PLAN[name] and name in rows[architecture]]
    if not planned:
        return []
    lines = [
        "",
        "## Tensor-core attention on a multiprocessor",
        "",
        "Each kernel on the cards where the launcher runs it. Threads and shared bytes of a block are those of its tile in `llmc/attention_mma.cuh`. From",
        "them and the registers follows, by the rule of NVIDIA's `cuda_occupancy.h`, how many blocks a multiprocessor has at once: as many as `PLAN` in",
        "`dev/gpu/kernel_table.py` says, or the check fails. Occupancy: their warps, of those that a multiprocessor can hold. How much of the L1 cache",
        "is shared memory is the driver's choice at each launch; these are the figures for the most it can give.",
        "",
        "| kernel | card | threads | registers | shared bytes | blocks | warps | occupancy | no more for lack of |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, architecture in planned:
        row, tile = rows[architecture][name], tiles[name]
        blocks, lack = blocks_of(architecture, row, tile)
        warps = blocks * tile.threads // 32
        lines.append(f"| `{name}` | {architecture} | {tile.threads} | {row.registers} | {row.shared + tile.shared} | {blocks} | {warps} | "
                     f"{100 * warps / CARDS[architecture].warps:.1f} % | {lack} |")
    return lines


def off_plan(name: str, architecture: str, kernels: dict[str, Row], tiles: dict[str, Tile]) -> str:
    """What is wrong with a kernel of tensor-core attention; "" when it is as planned."""
    if name not in PLAN:
        return "has no plan: add it to PLAN in dev/gpu/kernel_table.py"
    if name not in kernels:
        return "is planned and not in the program: take it out of PLAN in dev/gpu/kernel_table.py, or compile it"
    row = kernels[name]
    wrong = [f"has no {COLUMNS[field][0]}" for field in ("hmma", "ldsm", "ldgsts") if getattr(row, field) == 0]
    if row.atomics:
        wrong.append(f"has atomics on global memory ({row.atomics}), which add in no fixed order")
    if architecture in PLAN[name]:
        tile, planned = tiles[name], PLAN[name][architecture]
        blocks, lack = blocks_of(architecture, row, tile)
        if blocks != planned:
            wrong.append(f"is to have {planned} at once on a multiprocessor and has {blocks}, no more for lack of {lack}: "
                         f"{row.registers} registers, {tile.threads} threads, {row.shared + tile.shared} shared bytes a block")
    return "; ".join(wrong)


def spills(name: str, row: Row) -> str:
    """What is wrong with the memory of one kernel; "" when nothing."""
    uses = [f"{value} {what}" for value, what in ((row.spilled, "bytes of spills"), (row.stack, "bytes of stack"), (row.local, "local accesses")) if value]
    if name in EXPLAINED and not row.spilled:
        return "" if uses else "is listed as a user of local memory and uses none: take it out of EXPLAINED in dev/gpu/kernel_table.py"
    return "uses local memory: " + ", ".join(uses) if uses else ""


def version_of(text: str) -> str:
    """13.0.88 of `nvcc --version`'s text, of the table's own line, or of itself."""
    found = re.search(r"\bV(\d+\.\d+\.\d+)", text) or re.search(r"^nvcc (\d+\.\d+\.\d+);", text, re.MULTILINE) or re.fullmatch(r"(\d+\.\d+\.\d+)", text.strip())
    if not found:
        raise TableError(f"no version of nvcc in {text[:80]!r}")
    return found[1]


def check(rows: dict[str, dict[str, Row]], nvcc: str, table: Path, tiles: dict[str, Tile]) -> tuple[int, int, int]:
    """(passed, failed, skipped); says what failed."""
    passed = failed = skipped = 0
    for architecture, kernels in rows.items():
        attention = sorted({*PLAN, *filter(MMA_KERNEL.fullmatch, kernels)})
        problems = [(name, spills(name, row)) for name, row in kernels.items()] + [(name, off_plan(name, architecture, kernels, tiles)) for name in attention]
        for name, problem in problems:
            if problem:
                print(f"FAIL  {name} on {architecture} {problem}")
            passed, failed = passed + (not problem), failed + bool(problem)
        print(f"{architecture}: {len(kernels)} kernels, the largest {max(row.registers for row in kernels.values())} registers")
    try:
        old = table.read_text(encoding="utf-8")
        old_nvcc = version_of(old)
    except (OSError, TableError):
        print(f"FAIL  there is no table of kernels in {table}; make it: make kernel-table")
        return passed, failed + 1, skipped
    if old_nvcc != nvcc:
        print(f"the table was made with nvcc {old_nvcc} and this is {nvcc}, which allots registers in its own way: the table was not compared")
        return passed, failed, skipped + 1
    new = table_of(rows, nvcc, tiles)
    if old == new:
        return passed + 1, failed, skipped
    print(f"FAIL  {table} is not what this source compiles to; look at what changed, and commit it: make kernel-table")
    print("".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"{table} (committed)", f"{table} (this source)", n=0)), end="")
    return passed, failed + 1, skipped


def run(command: list[str], text: str = "") -> str:
    try:
        result = subprocess.run(command, input=text, capture_output=True, text=True)
    except OSError as error:
        raise TableError(f"cannot start {command[0]}: {error.strerror}; is it on the path?") from error
    if result.returncode:
        raise TableError(f"{' '.join(command)} failed: {(result.stderr or result.stdout).strip()}")
    return result.stdout


def read_rows(cubins: list[Path]) -> dict[str, dict[str, Row]]:
    rows: dict[str, dict[str, Row]] = {}
    for cubin in cubins:
        named = re.fullmatch(r".+\.(sm_\w+)\.cubin", cubin.name)
        if not named:
            raise TableError(f"{cubin} is not named PROGRAM.sm_ARCH.cubin")
        report = cubin.with_suffix(".ptxas.txt")
        if not report.is_file():
            raise TableError(f"{report}, ptxas's report, is missing; remove {cubin} and run: make kernel-table")
        try:
            rows[named[1]] = rows_of(report.read_text(encoding="utf-8"), run(["cuobjdump", "-sass", str(cubin)]))
        except TableError as error:
            raise TableError(f"{cubin}: {error}") from error
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="kernel_table.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", required=True, metavar="VERSION")
    parser.add_argument("--table", type=Path, required=True, metavar="FILE")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("cubins", nargs="+", type=Path, metavar="CUBIN")
    arguments = parser.parse_args()
    try:
        nvcc, rows = version_of(arguments.nvcc), read_rows(arguments.cubins)
        tiles = read_tiles(name for kernels in rows.values() for name in kernels)
        if arguments.write:
            arguments.table.write_text(table_of(rows, nvcc, tiles), encoding="utf-8")
            print(f"{arguments.table}: {len(set().union(*rows.values()))} kernels for {', '.join(rows)}")
            return 0
        passed, failed, skipped = check(rows, nvcc, arguments.table, tiles)
    except TableError as error:
        print(f"error: {error}", file=sys.stderr)
        if not arguments.write:
            print("0 passed, 1 failed")
        return 1
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
