#!/usr/bin/env python3
"""Compare ZeRO stages side by side on this machine.

    bash scripts/bench_parallel.sh                                        # stages 0 to 3, 4 ranks, preset tiny
    bash scripts/bench_parallel.sh --ranks 2 --stages 1,2 -- --preset tiny --total-batch 8192
    bash scripts/bench_parallel.sh --stages 1,1                           # how much two equal runs differ here

A round runs every stage once, and each round begins with another stage, so that a machine that gets slower or busier does so for
all of them. A run's time is the median step after its first 3. Every run is compared with the first stage's run of its own round;
the table shows the median of these ratios, the smallest and the largest. Nothing is kept of the runs.

LLMZERO_TRAINER names another binary than ./train_gpt. The exit status is 0 when at least one stage ran, also if the trainer refused
others; 1 when a run failed; 2 for bad arguments, which is also what it means when the trainer refuses every stage.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Callable, NamedTuple, NoReturn, Optional

ROOT = Path(os.path.abspath(__file__)).parents[1]
WARM_UP_STEPS = 3  # first touches of memory, library set-up, and the step that still fills the pipeline
MOST_RANKS = 256   # all of them on one machine: more is a slip of the finger
# Evaluation and sampling are not part of a training step. --val-every 0 still evaluates once at the end.
NO_EVALUATION = ["--val-every", "0", "--val-batches", "1", "--sample-every", "0"]
# Trainer options that this script sets itself, or that leave no steps to time, and what to do instead.
NOT_FOR_THE_TRAINER = {
    "--zero-stage": "give --stages before the --",
    "--steps": "give --steps before the --",
    "--epochs": "give --steps before the --",
    "--out": "leave it out: runs go to a temporary folder",
    "--resume": "leave it out: every run starts anew",
    "--show-batch": "leave it out: it trains nothing",
    "--plan": "leave it out: it trains nothing",
    "--generate": "leave it out: it trains nothing",
    "--help": "run ./train_gpt --help",
    "-h": "run ./train_gpt --help",
}


class Run(NamedTuple):
    step_ms: float              # median over the steps that count, as the two below
    exposed_comm_ms: Optional[float]
    comm_bytes: Optional[float]
    mem_bytes: Optional[float]  # largest
    tokens: int                 # of a step
    loss: float                 # of the last step


class Refusal(NamedTuple):
    message: str


# ---- arguments ------------------------------------------------------------------------------------------------------------------

def whole(low: int, high: int, why: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}{why}")
        return value
    return parse


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0; give one such as 600")
    return value


def stage_list(text: str) -> list[int]:
    """Which stages exist is the trainer's to say; it refuses the others with words of its own."""
    parts = text.split(",")
    if not all(part.isdecimal() and part.isascii() and len(part) < 3 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of stages; give numbers with commas between, such as 0,1,2,3")
    return [int(part) for part in parts]


def parse_arguments(words: list[str]) -> argparse.Namespace:
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="bench_parallel.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                                     usage="%(prog)s [--ranks N] [--stages LIST] [--steps N] [--rounds N] [--timeout SECONDS] [-- TRAINER OPTIONS]")
    parser.add_argument("--ranks", type=whole(1, MOST_RANKS, ""), default=4, metavar="N", help="ranks of every run (default 4)")
    parser.add_argument("--stages", type=stage_list, default=[0, 1, 2, 3], metavar="LIST",
                        help="stages to run; the first is what the others are compared with (default 0,1,2,3)")
    parser.add_argument("--steps", type=whole(WARM_UP_STEPS + 1, 10 ** 6, f"; the first {WARM_UP_STEPS} steps of a run are not counted"), default=20, metavar="N",
                        help="steps of a run (default 20)")
    parser.add_argument("--rounds", type=whole(1, 1000, ""), default=5, metavar="N", help="times every stage is run (default 5)")
    parser.add_argument("--timeout", type=seconds, default=600.0, metavar="SECONDS", help="longest time of one run (default 600)")
    arguments, unknown = parser.parse_known_args(words[:split])
    if unknown:
        parser.error(f"unknown argument {unknown[0]!r}; options of the trainer come after --, such as: bench_parallel.sh --ranks 2 -- --preset tiny")
    arguments.trainer_options = words[split + 1:]
    for word in arguments.trainer_options:
        name = word.split("=", 1)[0]
        if name in NOT_FOR_THE_TRAINER:
            parser.error(f"trainer option {word!r} cannot be given here; {NOT_FOR_THE_TRAINER[name]}")
    return arguments


# ---- runs -----------------------------------------------------------------------------------------------------------------------

def fail(message: str, output: str = "") -> NoReturn:
    sys.stdout.flush()
    if output:
        print(output.rstrip("\n"), file=sys.stderr)
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(1)


def mpirun_command(ranks: int) -> list[str]:
    """What scripts/lib.sh says about OpenMPI on this machine."""
    flags = subprocess.run(["bash", "-c", '. "$0" && mpirun_flags', str(ROOT / "scripts/lib.sh")], check=True, capture_output=True, text=True).stdout
    return ["mpirun", *flags.split(), "-np", str(ranks)]


def end(process: subprocess.Popen) -> None:
    """mpirun takes its ranks down when it is asked to end; whoever is left after that is killed."""
    for number, wait_seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait_seconds)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            pass


def read_run(file: Path, steps: int) -> Run:
    """Numbers of rank 0, which writes metrics.jsonl. Fields an older trainer does not write are None."""
    try:
        records = [record for record in map(json.loads, file.read_text(encoding="utf-8").splitlines()) if record["kind"] == "train"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{file} cannot be read as metrics: {error}; is this binary a train_gpt of this repository?")
    if len(records) != steps:
        fail(f"{file} holds {len(records)} steps, the run was asked for {steps}; is this binary a train_gpt of this repository?")
    counted = records[WARM_UP_STEPS:]

    def over_steps(field: str, combine: Callable) -> Optional[float]:
        values = [float(record[field]) for record in counted if field in record]  # float() takes "nan" and "inf" too
        return combine(values) if values else None

    return Run(median(float(record["step_ms"]) for record in counted), over_steps("exposed_comm_ms", median), over_steps("comm_bytes", median),
               over_steps("mem_bytes", max), records[-1]["tokens"] // steps, float(records[-1]["loss"]))


def run_trainer(stage: int, command: list[str], arguments: argparse.Namespace, folder: Path) -> Run | Refusal:
    """One run. Does not return when it fails: a benchmark of a broken trainer has nothing to say."""
    what = f"stage {stage}"
    # The last of several values wins in train_gpt: the user's options over those for evaluation, ours over the user's.
    command = [*command, *NO_EVALUATION, *arguments.trainer_options, "--zero-stage", str(stage), "--steps", str(arguments.steps), "--out", str(folder / "run")]
    with open(folder / "output", "w+b") as file:
        # A session of its own, so that the whole tree can be ended; a file and not a pipe, since a stray rank may hold it open.
        try:
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            fail(f"cannot start {command[0]}: {error.strerror}; scripts/quickstart.sh installs OpenMPI")
        timed_out = False
        try:
            process.wait(arguments.timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:  # also when this script is interrupted
            if process.poll() is None:
                end(process)
        file.seek(0)
        output = file.read().decode(errors="replace")
    if timed_out:
        fail(f"{what}: no end after {arguments.timeout:g} s, see above; give more with --timeout, or leave the stage out with --stages. "
             f"Command: {shlex.join(command)}", output)
    if process.returncode == 2:
        messages = [line[len("error: "):] for line in output.splitlines() if line.startswith("error: ")]
        if messages:
            return Refusal(messages[0])
    if process.returncode != 0:
        fail(f"{what}: exit status {process.returncode}, see above; a stage can be left out with --stages. Command: {shlex.join(command)}", output)
    return read_run(folder / "run/metrics.jsonl", arguments.steps)


# ---- the table ------------------------------------------------------------------------------------------------------------------

HEADINGS = ("stage", "step ms", "tokens/s", "time vs stage {}", "(smallest - largest)", "comm wait ms", "sent MB", "memory MB", "loss")


def over_rounds(runs: list[Run], field: str, scale: float = 1.0, digits: int = 2) -> str:
    values = [getattr(run, field) for run in runs if getattr(run, field) is not None]
    return f"{median(values) / scale:.{digits}f}" if values else "-"


def table(stages: list[int], results: list[list[Run] | Refusal]) -> list[str]:
    """A row a stage. Compared is with the first stage that was not refused."""
    base = next(position for position, result in enumerate(results) if isinstance(result, list))
    rows: list[list[str] | str] = [[heading.format(stages[base]) for heading in HEADINGS]]
    for position, (stage, result) in enumerate(zip(stages, results)):
        if isinstance(result, Refusal):
            rows.append(f"refused: {result.message}")
            continue
        ratios = [run.step_ms / other.step_ms for run, other in zip(result, results[base])]
        ratio = [f"{median(ratios):.3f}", f"({min(ratios):.3f} - {max(ratios):.3f})"] if position != base else ["1", ""]
        rows.append([str(stage), over_rounds(result, "step_ms"), f"{result[0].tokens / median(run.step_ms for run in result) * 1000:.0f}", *ratio,
                     over_rounds(result, "exposed_comm_ms"), over_rounds(result, "comm_bytes", 1e6), over_rounds(result, "mem_bytes", 1e6), f"{result[-1].loss:.6g}"])
    widths = [max(len(row[column]) for row in rows if isinstance(row, list)) for column in range(len(HEADINGS))]
    lines = []
    for stage, row in zip(["", *map(str, stages)], rows):
        if isinstance(row, str):
            lines.append(f"{stage:>{widths[0]}}  {row}")
        else:
            lines.append("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths)).rstrip())
    return lines


def notes(stages: list[int], results: list[list[Run] | Refusal]) -> list[str]:
    out = ["Compare by the ratios (below 1 is faster): step ms and tokens/s also hold what else the machine did, which differs from round to round.",
           "Where smallest and largest lie on both sides of 1, these runs show no difference.",
           "Numbers are rank 0's: comm wait is the part of a step spent waiting for other ranks, sent is a step's, memory is the device's."]
    for stage, result in zip(stages, results):
        losses = {repr(run.loss) for run in result} if isinstance(result, list) else set()  # repr: a NaN equals itself
        if len(losses) > 1:
            out.append(f"Stage {stage} ended with {len(losses)} different losses in {len(result)} equal runs; on a CPU that is a fault, the same run gives the same bits.")
    return out


def main() -> None:
    arguments = parse_arguments(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of the clean-up
    trainer = Path(os.path.abspath(os.environ.get("LLMZERO_TRAINER") or ROOT / "train_gpt"))
    if not os.access(trainer, os.X_OK) or trainer.is_dir():
        fail(f"no program {trainer}; run make train_gpt, or name another in LLMZERO_TRAINER")
    command = [*mpirun_command(arguments.ranks), str(trainer)]
    stages, count = arguments.stages, len(arguments.stages)
    print(f"{arguments.ranks} rank(s), {arguments.rounds} round(s) of {arguments.steps} steps a stage, the first {WARM_UP_STEPS} not counted: "
          f"{shlex.join([trainer.name, *arguments.trainer_options])}", flush=True)

    # By position and not by stage: the same stage twice is a fair question.
    results: list[list[Run] | Refusal] = [[] for _ in stages]
    for number in range(arguments.rounds):
        for position in ((number + i) % count for i in range(count)):
            done = results[position]
            if isinstance(done, Refusal):
                continue
            with tempfile.TemporaryDirectory(prefix="bench_parallel.") as folder:
                result = run_trainer(stages[position], command, arguments, Path(folder))
            if isinstance(result, Refusal):
                results[position] = result
            else:
                done.append(result)
        if all(isinstance(result, Refusal) for result in results):
            print("\n".join(f"stage {stage} refused: {result.message}" for stage, result in zip(stages, results)))
            print(f"error: the trainer refused every stage of {','.join(map(str, stages))}; see its words above", file=sys.stderr)
            raise SystemExit(2)
        times = [f"stage {stage}: {result[-1].step_ms:.2f} ms" for stage, result in zip(stages, results) if isinstance(result, list)]
        print(" | ".join([f"round {number + 1}/{arguments.rounds}", *times]), flush=True)
    print()
    print("\n".join([*table(stages, results), *notes(stages, results)]))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130)
