#!/usr/bin/env python3
"""Every combination of which test_train_resume.py runs a covering part: what a run does after a resume, and what a checkpoint holds on other ranks and in another stage.

    python3 dev/test/resume_matrix.py [--only WORD] [--keep FOLDER]

Needs train_gpt and mpi_test_checkpoint of the BF16 build and train_gpt of the FP32 build; see checkpoint_testing.py. --keep leaves what the runs wrote there. The last line is
`N passed, N failed`; exit status 1 when anything failed. About five minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Callable

import pytest

import checkpoint_testing as ct
from train_testing import ROOT, TRAINER, prepare

TRAINERS = {"bf16": TRAINER, "fp32": ct.FP32_TRAINER}
STAGES, RANKS = (0, 1, 2, 3), (1, 2, 3, 4)
# Of the ranks and stages of a run's parts, one after every second step.
CHAINS = [[(4, 0), (2, 3), (1, 1), (3, 2), (4, 0)], [(1, 3), (4, 2), (3, 0), (2, 1), (1, 0)], [(3, 1), (3, 0), (3, 3), (3, 2), (3, 1)]]


def all_cases(data: Path) -> list[tuple[str, Callable[[Path], None]]]:
    """Name and check, which takes a folder to run in."""
    cases: list[tuple[str, Callable[[Path], None]]] = []

    def add(name: str, check: Callable[..., None], *arguments: object) -> None:
        cases.append((name, lambda folder: check(folder, *arguments)))

    for precision, accumulation, stage, ranks in itertools.product(TRAINERS, (1, 4), STAGES, RANKS):
        add(f"exact: {precision}, stage {stage}, {ranks} ranks, {accumulation} micro-steps", ct.check_exact_resume, data, stage, ranks if ranks > 1 else 0, accumulation,
            TRAINERS[precision])
    for stage in STAGES:
        options = ["--grad-dtype", "fp32", "--bucket-mb", "0", "--recompute", "block", "--lmhead-chunks", "2", "--save-mode", "async", "--tied"]
        add(f"exact: bf16, stage {stage}, 3 ranks, 4 micro-steps, {' '.join(options)}", ct.check_exact_resume, data, stage, 3, 4, TRAINER, *options)
    for precision, (i, chain) in itertools.product(TRAINERS, enumerate(CHAINS)):
        add(f"changed: {precision}, {' '.join(f'{ranks}@{stage}' for ranks, stage in chain)}", ct.check_changed_ranks, data, chain, TRAINERS[precision],
            "--bucket-mb", "0" if i == 1 else "25")
    # Each number of ranks reads each, each stage reads each.
    for (i, writer), (j, reader) in itertools.product(enumerate(RANKS), enumerate(RANKS)):
        written, read = STAGES[(i + j) % 4], STAGES[(i + 2 * j) % 4]
        add(f"random bits: {writer} ranks in stage {written} write, {reader} in stage {read} read", ct.check_random_bits,
            (writer, written, (0.0, 0.02, 25.0)[j % 3], ("stream", "async")[(i + j) % 2]), (reader, read, (0.02, 25.0, 0.0)[i % 3]))
    add("copies: over every number of ranks in every stage", check_all_copies, data)
    return cases


def check_all_copies(folder: Path, data: Path) -> None:
    source = ct.run(folder / "source", 3, *ct.run_options(data), "--zero-stage", "2", "--qkv-bias", "--tied")
    chain = [(ranks, (stage + ranks) % 4, (0.0, 25.0, 0.02)[(ranks + stage) % 3], ("stream", "async")[stage % 2]) for stage, ranks in itertools.product(STAGES, (4, 2, 1, 3))]
    ct.check_copies(folder, ct.last_checkpoint(source.out), chain)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--keep", type=Path, help="folder for what the runs write; it is not removed")
    arguments = parser.parse_args()
    for program in (*TRAINERS.values(), ct.MPI_TEST):
        if not program.exists():
            raise SystemExit(f"resume_matrix.py: {program.relative_to(ROOT) if program.is_relative_to(ROOT) else program} is not built; make build-tests builds it")
    passed = failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        top = arguments.keep or Path(temporary)
        top.mkdir(parents=True, exist_ok=True)
        data = top / "data"
        prepare(str(ROOT / "llmc"), str(ROOT / "train_gpt.cu"), "--out", str(data))
        for number, (name, check) in enumerate(all_cases(data)):
            if arguments.only not in name:
                continue
            folder = top / f"case{number}"
            folder.mkdir()
            begun = time.monotonic()
            try:
                check(folder)
            except (Exception, pytest.fail.Exception):
                failed += 1
                print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
                continue
            passed += 1
            print(f"ok     {name} ({time.monotonic() - begun:.1f} s)", flush=True)
            if not arguments.keep:
                shutil.rmtree(folder)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
