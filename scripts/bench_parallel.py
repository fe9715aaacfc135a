#!/usr/bin/env python3
"""Fill the table that a parallel setting is chosen by, on this machine.

    bash scripts/bench_parallel.sh                                         # one rank, then 2 ranks at stages 0 to 3, preset tiny
    bash scripts/bench_parallel.sh --ranks 8 --stages 1,3 -- --preset 0.5B --recompute ffn
    bash scripts/bench_parallel.sh --rounds 5 --buckets none               # how much equal runs differ here, no bucket sizes

Rows: one rank; data parallel (stage 0); the same with every micro-step synchronised; stages 1, 2, 3. All train on the same tokens with the same seed, so that
all loss curves are one curve; one rank takes as many times the micro-steps as there are ranks. Every number stands beside what the trainer's --plan says for the
same options: bytes must be equal, times are judged. Then stage 1 again with several bucket sizes.

A round runs every row once, and each round begins with another row, so that a machine that gets slower or busier does so for all of them. A run's time is
the median step after the dropped ones. table.md, table.json and loss.png (where matplotlib is installed) go to --out; nothing else is kept of the runs.

On a CPU build the sizes are --seq-len 128 --micro-batch 4 unless given after the --, on a GPU build the preset's own; --total-batch gives every rank two
micro-steps and --lr is 3e-4 unless given (a large one makes visible differences of curves out of rounding). LLMZERO_TRAINER names another binary than ./train_gpt.
A run that the trainer refuses, or that does not fit, is a row that says so.

The exit status is 0 when the table is complete and bytes are as planned; 1 when they differ, when a run failed, or when nothing fits; 2 for bad arguments,
which is also what it means when the trainer refuses every row.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Callable, NamedTuple, NoReturn, Optional

ROOT = Path(os.path.abspath(__file__)).parents[1]
MOST_RANKS = 256  # all of them on one machine: more is a slip of the finger
SWEEP_STEPS, SWEEP_DROP = 20, 5  # at most; a bucket size only moves when communication starts
AS_PLANNED = 0.25   # times within this share of the plan agree with it
NEGLIGIBLE = 0.01   # of a step: communication below it is hidden
BUSY = 0.1          # of the processor that other programs take: beyond it a time says little
# Evaluation, sampling and checkpoints are not part of a training step. --val-every 0 still evaluates once at the end.
NO_EVALUATION = ["--val-every", "0", "--val-batches", "1", "--sample-every", "0", "--no-save"]
CPU_SIZES = ["--seq-len", "128", "--micro-batch", "4"]
# Ranks and stages add the same gradients in another order; a large learning rate makes the roundings to bf16 grow until the curves part.
SMALL_LR = ["--lr", "3e-4"]
# Trainer options that this script sets itself, or that leave no steps to time, and what to do instead.
NOT_FOR_THE_TRAINER = {
    "--zero-stage": "give --stages before the --",
    "--sync-every-micro-step": "leave it out: one row has it",
    "--steps": "give --steps before the --",
    "--epochs": "give --steps before the --",
    "--ranks": "give --ranks before the --",
    "--out": "give --out before the --: it is the folder of the table, runs go to a temporary one",
    "--resume": "leave it out: every run starts anew",
    **{name: "leave it out: it trains nothing" for name in ("--show-batch", "--generate", "--allocate-only", "--plan", "--plan-json")},
    **{name: "leave it out: what is planned with is measured here" for name in ("--link", "--step-seconds", "--device-tflops", "--mfu", "--ranks-per-node", "--price")},
    "--params": "leave it out: a model of a number cannot be trained",
    "--grad-accum": "give --total-batch",
    "--help": "run ./train_gpt --help",
    "-h": "run ./train_gpt --help",
}
# As llmc/process.cpp prints an error; behind it mpirun says under a line of dashes that a rank failed.
ERROR = re.compile(r"^error(?: on rank \d+ \(.*?\))?: (.*?)(?=^-{20,}$|\Z)", re.MULTILINE | re.DOTALL)
# Of its first line: an allocation that failed, the plan's refusal, and that others have the memory.
NO_ROOM = re.compile(r"out of device memory|this run does not fit|this run needs .* of device memory")


class Setting(NamedTuple):
    """A row: what is started."""
    name: str
    ranks: int
    stage: int
    options: list[str]
    steps: int
    drop: int


class Run(NamedTuple):
    step_ms: list[float]          # of the steps that count, as the next two
    exposed_comm_ms: list[float]
    sent_bytes: list[int]
    memory_bytes: int             # largest
    mfu: Optional[float]          # median; None where the datasheet is not known
    mfu_of_products: float        # against the products' speed that this very run measured
    loss: list[float]             # of all steps
    start: dict                   # the event the trainer wrote at its start
    buckets: Optional[int]
    others_share: float           # of the processor, that other programs took meanwhile; 0 where the system does not tell


class Refusal(NamedTuple):
    status: int   # 2 refused, 1 does not fit
    message: str  # the tables show its first line


class Planned(NamedTuple):
    memory_bytes: int
    sent_bytes: int
    step_ms: float
    exposed_comm_ms: float


@dataclass
class Row:
    setting: Setting
    runs: list[Run] = field(default_factory=list)
    refusal: Optional[Refusal] = None
    planned: Planned | str | None = None  # a text: why there is no plan
    given_step_ms: Optional[float] = None  # computation of a step that the plan was told

    @property
    def ran(self) -> bool:
        return self.refusal is None and bool(self.runs)

    def over_rounds(self, name: str) -> float:
        return median(median(getattr(run, name)) for run in self.runs)


# ---- arguments ------------------------------------------------------------------------------------------------------------------

def whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
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
    if not re.fullmatch(r"[0-3](,[0-3])*", text) or len(set(text.split(","))) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different stages; give numbers from 0 to 3 with commas between, such as 0,1,2,3")
    return [int(part) for part in text.split(",")]


def bucket_list(text: str) -> list[str]:
    if text == "none":
        return []
    parts = text.split(",")
    if not all(re.fullmatch(r"\d+(\.\d+)?", part, re.ASCII) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of bucket sizes; give MB with commas between, such as 0,1,25, or none")
    return parts


def parse_arguments(words: list[str]) -> argparse.Namespace:
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="bench_parallel.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                                     usage="%(prog)s [options] [-- TRAINER OPTIONS]")
    parser.add_argument("--ranks", type=whole(2, MOST_RANKS), default=2, metavar="N", help="ranks of all rows but the first (default 2)")
    parser.add_argument("--stages", type=stage_list, default=[0, 1, 2, 3], metavar="LIST", help="stages to run beside one rank (default 0,1,2,3)")
    parser.add_argument("--steps", type=whole(2, 10 ** 6), default=50, metavar="N", help="steps of a run (default 50)")
    parser.add_argument("--drop", type=whole(1, 10 ** 6), default=10, metavar="N",
                        help="first steps that do not count: first touches of memory, set-up of libraries, the step that fills the pipeline (default 10)")
    parser.add_argument("--rounds", type=whole(1, 1000), default=1, metavar="N", help="times every row is run (default 1, which shows no spread)")
    parser.add_argument("--buckets", type=bucket_list, default=["0", "1", "5", "25", "100"], metavar="LIST",
                        help=f"--bucket-mb of the second table, {SWEEP_STEPS} steps each at most, {SWEEP_DROP} dropped, or none (default 0,1,5,25,100)")
    parser.add_argument("--sweep-stage", type=whole(0, 3), default=1, metavar="N", help="stage of the second table (default 1)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench_parallel", metavar="DIR", help="folder of the results (default runs/bench_parallel)")
    parser.add_argument("--timeout", type=seconds, default=600.0, metavar="SECONDS", help="longest time of one run (default 600)")
    arguments, unknown = parser.parse_known_args(words[:split])
    if unknown:
        parser.error(f"unknown argument {unknown[0]!r}; options of the trainer come after --, such as: bench_parallel.sh --ranks 2 -- --preset tiny")
    if arguments.drop >= arguments.steps:
        parser.error(f"--drop {arguments.drop} leaves no step of --steps {arguments.steps}; give more steps, or drop fewer")
    arguments.trainer_options = words[split + 1:]
    for word in arguments.trainer_options:
        name = word.split("=", 1)[0]
        if name in NOT_FOR_THE_TRAINER:
            parser.error(f"trainer option {word!r} cannot be given here; {NOT_FOR_THE_TRAINER[name]}")
    return arguments


# ---- runs -----------------------------------------------------------------------------------------------------------------------

def fail(message: str, output: str = "", status: int = 1) -> NoReturn:
    sys.stdout.flush()
    if output:
        print(output.rstrip("\n"), file=sys.stderr)
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)


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


class Ended(NamedTuple):
    status: Optional[int]  # None: it ran out of time
    stdout: str
    stderr: str


def start(command: list[str], timeout_seconds: float) -> Ended:
    """Runs a command to its end. Nothing of it is left, also when this script is interrupted."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:  # files and not pipes, since a stray rank may hold them open
        try:
            # A session of its own, so that the whole tree can be ended.
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True)
        except OSError as error:
            fail(f"cannot start {command[0]}: {error.strerror}" + ("; scripts/quickstart.sh installs OpenMPI" if command[0] == "mpirun" else ""))
        timed_out = False
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            if process.poll() is None:
                end(process)
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Ended(None if timed_out else process.returncode, *texts)


def refusal_of(ended: Ended) -> Optional[Refusal]:
    """Of a run that the trainer did not want to start, or that found no room; None for one that broke."""
    found = ERROR.search(ended.stderr) or ERROR.search(ended.stdout)
    message = found[1].strip() if found else ""
    if message and (ended.status == 2 or (ended.status == 1 and NO_ROOM.search(message.splitlines()[0]))):
        return Refusal(ended.status, message)
    return None


def busy_seconds() -> float:
    """Of all cores since the machine started, with what a hypervisor took from them."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class OthersClock:
    """From here to share(): the part of the processor's time that went neither into idling nor into children of this script."""
    def __init__(self) -> None:
        self.begun = self.now()

    @staticmethod
    def now() -> tuple[float, float]:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.monotonic(), busy_seconds() - children.ru_utime - children.ru_stime

    def share(self) -> float:
        seconds_passed, others = (after - before for after, before in zip(self.now(), self.begun))
        return max(0.0, others / seconds_passed / (os.cpu_count() or 1)) if busy_seconds() else 0.0


def read_run(file: Path, setting: Setting, output: str, others_share: float) -> Run:
    """Numbers of rank 0, which writes metrics.jsonl. float() takes "nan" and "inf", too, as the trainer writes them."""
    try:
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        train = [record for record in records if record["kind"] == "train"]
        begun = next((record for record in records if record.get("event") == "start"), None)
        if begun is None or len(train) != setting.steps:
            fail(f"{file.name} of the run holds {len(train)} steps of {setting.steps}{'' if begun else ' and no start event'}; is this binary a train_gpt of this repository?")
        counted = train[setting.drop:]
        mfu = median(float(record["mfu"]) for record in counted)
        buckets = re.search(r"(\d+) bucket\(s\)", output)
        return Run([float(record["step_ms"]) for record in counted], [float(record["exposed_comm_ms"]) for record in counted],
                   [int(record["comm_bytes"]) for record in counted], max(int(record["mem_bytes"]) for record in train), mfu if math.isfinite(mfu) else None,
                   median(float(record["mfu_measured"]) for record in counted), [float(record["loss"]) for record in train], begun,
                   int(buckets[1]) if buckets else None, others_share)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fail(f"{file} cannot be read as metrics: {type(error).__name__} {error}; is this binary a train_gpt of this repository?")


def run_trainer(setting: Setting, trainer: Path, words: list[str], timeout_seconds: float) -> Run | Refusal:
    """One run. Does not return when it fails: a benchmark of a broken trainer has nothing to say."""
    with tempfile.TemporaryDirectory(prefix="bench_parallel.") as folder:
        command = [*mpirun_command(setting.ranks), str(trainer), *words, *setting.options, "--steps", str(setting.steps), "--out", f"{folder}/run"]
        others = OthersClock()
        ended = start(command, timeout_seconds)
        if ended.status == 0:
            return read_run(Path(folder) / "run/metrics.jsonl", setting, ended.stdout, others.share())
    if ended.status is None:
        fail(f"{setting.name}: no end after {timeout_seconds:g} s, see above; give more with --timeout, or leave the stage out with --stages. "
             f"Command: {shlex.join(command)}", ended.stdout + ended.stderr)
    refusal = refusal_of(ended)
    if refusal is None:
        fail(f"{setting.name}: exit status {ended.status}, see above; a stage can be left out with --stages. Command: {shlex.join(command)}", ended.stdout + ended.stderr)
    return refusal


def run_rounds(rows: list[Row], trainer: Path, words: list[str], arguments: argparse.Namespace) -> None:
    for number in range(arguments.rounds):
        for row in (rows[(number + i) % len(rows)] for i in range(len(rows))):
            if row.refusal:
                continue
            result = run_trainer(row.setting, trainer, words, arguments.timeout)
            if isinstance(result, Refusal):
                row.refusal = result
                print(f"round {number + 1}/{arguments.rounds} | {row.setting.name} | {refused(*result)}", flush=True)
            else:
                row.runs.append(result)
                print(f"round {number + 1}/{arguments.rounds} | {row.setting.name} | {median(result.step_ms):.2f} ms a step", flush=True)


def main_rows(ranks: int, stages: list[int], steps: int, drop: int) -> list[Row]:
    rows = [Row(Setting("1 rank", 1, 0, ["--zero-stage", "0"], steps, drop))]
    for stage in stages:
        rows.append(Row(Setting(f"{ranks} ranks, stage {stage}", ranks, stage, ["--zero-stage", str(stage)], steps, drop)))
        if stage == 0:
            rows.append(Row(Setting(f"{ranks} ranks, stage 0, every micro-step", ranks, 0, ["--zero-stage", "0", "--sync-every-micro-step"], steps, drop)))
    return rows


# ---- the plan -------------------------------------------------------------------------------------------------------------------

def plan_json(trainer: Path, words: list[str], ranks: int, timeout_seconds: float) -> dict | Ended:
    ended = start([str(trainer), *words, "--plan", "--plan-json", "--ranks", str(ranks)], timeout_seconds)
    if ended.status != 0:
        return ended
    try:
        plan = json.loads(ended.stdout)
        return plan if {"model", "stages", "micro_steps", "tokens_per_step", "micro_batch", "seq_len"} <= plan.keys() else ended
    except (ValueError, AttributeError):
        return ended


def plan_row(row: Row, trainer: Path, words: list[str], link_bytes_per_s: Optional[float], timeout_seconds: float) -> None:
    """Asks the trainer what it says of a row that ran, told the speed of its link and how long its computation takes."""
    link = ["--link", f"measured={link_bytes_per_s / 1e9:.9g}"] if link_bytes_per_s else []
    plan = plan_json(trainer, [*words, *row.setting.options, *link, "--step-seconds", f"{row.given_step_ms / 1e3:.9g}"], row.setting.ranks, timeout_seconds)
    if isinstance(plan, Ended):
        lines = (plan.stderr or plan.stdout).strip().splitlines() or ["no output"]
        row.planned = f"--plan ended with {'no status in time' if plan.status is None else f'status {plan.status}'}: {lines[-1]}"
        return
    try:
        stage = next(stage for stage in plan["stages"] if stage["stage"] == row.setting.stage)
        row.planned = Planned(stage["total_bytes"], stage["sent_bytes_per_step"], stage["step_seconds"] * 1e3, stage["exposed_comm_seconds"] * 1e3)
    except (KeyError, TypeError, StopIteration) as error:
        row.planned = f"its JSON lacks {error.args[0] if error.args else 'the stage'}"


def computation_ms(setting: Setting, base: Row, shared: bool) -> float:
    """Of a step on each rank, from the run that is compared with. On devices of their own N ranks take 1/N of one rank's time; where they share the processor,
    as on a CPU, they take the same time together."""
    measured = base.over_rounds("step_ms") - base.over_rounds("exposed_comm_ms")
    return measured if shared else measured * base.setting.ranks / setting.ranks


def bytes_verdict(measured: int, planned: int) -> str:
    difference = measured - planned
    return "equal" if difference == 0 else f"DIFFERS by {difference:+,} byte{'s' if abs(difference) != 1 else ''} from {planned:,} planned"


def time_verdict(measured: float, planned: float) -> str:
    if abs(measured - planned) <= AS_PLANNED * planned:
        return "as planned"
    slower = measured > planned
    return f"{measured / planned if slower else planned / measured:.2f} times {'slower' if slower else 'faster'} than planned"


def exposed_verdict(measured: float, planned: float, step: float) -> str:
    """As time_verdict(), but what is next to nothing of a step has no meaningful ratio."""
    if max(measured, planned) <= NEGLIGIBLE * step:
        return "as planned"
    if planned <= NEGLIGIBLE * step:
        return f"{100 * measured / step:.0f} % of the step, next to nothing planned"
    if measured <= NEGLIGIBLE * step:
        return f"next to nothing, {100 * planned / step:.0f} % of the step planned"
    return time_verdict(measured, planned)


def farthest(values: list[int], planned: int) -> int:
    return max(values, key=lambda value: abs(value - planned))


def likely_reasons(row: Row, base: Row, shared: bool) -> list[str]:
    """Of a row whose time is not the planned one, from what can be seen."""
    reasons = []
    if median(run.others_share for run in row.runs) > BUSY:
        reasons.append(f"other programs took more than {100 * BUSY:.0f} % of the processor meanwhile")
    if median(run.others_share for run in base.runs) > BUSY:
        reasons.append(f"other programs took more than {100 * BUSY:.0f} % of the processor while {base.setting.name} ran, whose time the plan is told: needs a quiet machine")
    steps = sorted(ms for run in row.runs for ms in run.step_ms)
    if steps[-1 - len(steps) // 10] > 1.3 * steps[len(steps) // 10]:
        reasons.append("the steps of a run differ by more than 30 %, the extreme tenths left out")
    slower = row.over_rounds("step_ms") > row.planned.step_ms
    if shared and row.setting.ranks > 1 and slower:
        reasons.append("ranks share the processor: what one copies or computes while another waits counts as waiting for communication")
        if row.setting.stage == 0:
            reasons.append("in stage 0 every rank steps all weights, on the same cores")
    elif shared and row.setting.ranks > base.setting.ranks:
        reasons.append("more ranks of fewer threads keep the cores busier than one rank of many")
    elif not shared and slower:
        reasons.append("what does not get shorter with more ranks: launches, and in stage 0 AdamW")
    return reasons or ["unknown"]


# ---- results --------------------------------------------------------------------------------------------------------------------

@dataclass
class Context:
    """What all rows have in common."""
    shared: bool = False
    device: str = ""
    cores: int = 1
    tokens_per_step: int = 0
    link_bytes_per_s: Optional[float] = None
    product_flops: float = 0.0  # of a rank's device; of the processor where it is shared


def refused(status: int, message: str) -> str:
    """In one line. That there is no room the trainer says itself."""
    return ("refused: " if status == 2 else "") + message.splitlines()[0]


def base_of(rows: list[Row]) -> Row:
    """What the others are compared with: one rank, or the first that ran."""
    return next(row for row in rows if row.ran)


def summary(row: Row, base: Row, context: Context) -> dict[str, Any]:
    """All that is known of a row, as it goes into table.json; the tables show parts of it."""
    setting = row.setting
    out: dict[str, Any] = {"setting": setting.name, "ranks": setting.ranks, "zero_stage": setting.stage, "options": setting.options, "steps": setting.steps, "drop": setting.drop}
    if not row.ran:
        return {**out, "status": "refused" if row.refusal.status == 2 else "does not fit", "message": row.refusal.message}
    planned = row.planned if isinstance(row.planned, Planned) else None
    step_ms, exposed_ms = row.over_rounds("step_ms"), row.over_rounds("exposed_comm_ms")
    ratios = [median(other.step_ms) / median(run.step_ms) for run, other in zip(row.runs, base.runs)]
    memory = [run.memory_bytes for run in row.runs]
    sent = [count for run in row.runs for count in run.sent_bytes]
    # Every run measures its own products at its start; against one and the same speed rows can be compared. MFU x that speed is what was computed.
    computed = median(run.mfu_of_products * run.start["product_flops"] for run in row.runs) * setting.ranks
    mfu_of_products = computed / (context.product_flops * (1 if context.shared else setting.ranks))
    measured = {"memory_bytes": farthest(memory, planned.memory_bytes) if planned else max(memory), "sent_bytes": farthest(sent, planned.sent_bytes) if planned else max(sent),
                "step_ms": step_ms, "exposed_comm_ms": exposed_ms}
    out.update(status="ran", tokens_per_s=context.tokens_per_step / step_ms * 1e3,
               relative={"to": base.setting.name, "median": median(ratios), "smallest": min(ratios), "largest": max(ratios)},
               mfu=median(run.mfu for run in row.runs) if all(run.mfu is not None for run in row.runs) else None, mfu_of_products=mfu_of_products,
               buckets=row.runs[0].buckets, measured=measured, given_computation_ms=row.given_step_ms)
    if planned:
        verdicts = {name: bytes_verdict(measured[name], getattr(planned, name)) for name in ("memory_bytes", "sent_bytes")}
        if row is not base:
            verdicts["step_ms"] = time_verdict(step_ms, planned.step_ms)
            verdicts["exposed_comm_ms"] = exposed_verdict(exposed_ms, planned.exposed_comm_ms, step_ms)
            if {verdicts["step_ms"], verdicts["exposed_comm_ms"]} != {"as planned"}:
                out["likely_reasons"] = likely_reasons(row, base, context.shared)
        out.update(planned={**planned._asdict(), "tokens_per_s": context.tokens_per_step / planned.step_ms * 1e3}, verdict=verdicts)
    elif row.planned:
        out["no_plan"] = row.planned
    out["rounds"] = [{"step_ms": run.step_ms, "exposed_comm_ms": run.exposed_comm_ms, "sent_bytes": run.sent_bytes, "memory_bytes": run.memory_bytes,
                      "product_flops": run.start["product_flops"], "link_bytes_per_s": run.start.get("link_bytes_per_s"), "others_share": run.others_share, "loss": run.loss}
                     for run in row.runs]
    return out


def faults_of(summaries: list[dict]) -> list[str]:
    """Bytes are arithmetic: a difference is a fault of the plan or of the trainer."""
    out = []
    for row in summaries:
        for name, what in (("memory_bytes", "device memory"), ("sent_bytes", "bytes sent a step")):
            verdict = row.get("verdict", {}).get(name, "equal")
            if verdict != "equal":
                out.append(f"{row['setting']}: {what} {verdict}")
        if "no_plan" in row:
            out.append(f"{row['setting']}: no plan to compare with: {row['no_plan']}")
    return out


def markdown_table(headings: list[str], rows: list[list[str]]) -> list[str]:
    """Also readable as it is: columns are padded. A row of two cells is a name and a message, which does not widen its column."""
    clean = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in [headings, *rows]]
    widths = [max(len(row[column]) for row in clean if len(row) == len(headings) or column == 0) for column in range(len(headings))]
    lines = []
    for number, row in enumerate(clean):
        row = row + [""] * (len(headings) - len(row))
        lines.append("| " + " | ".join(f"{cell:<{width}}" if column == 0 else f"{cell:>{width}}" for column, (cell, width) in enumerate(zip(row, widths))) + " |")
        if number == 0:
            lines.append("|" + "|".join("-" * (width + 1) + ("-" if column == 0 else ":") for column, width in enumerate(widths)) + "|")
    return lines


def message_of(row: dict) -> list[str]:
    return [row["setting"], refused(2 if row["status"] == "refused" else 1, row["message"])]


def mb(count: float) -> str:
    return f"{count / 1e6:,.2f}"


def choice_table(summaries: list[dict], base: Row, rounds: int) -> list[str]:
    ran = [row for row in summaries if row["status"] == "ran"]
    datasheet = all(row["mfu"] is not None for row in ran)
    headings = ["setting", "tokens/s", f"against {base.setting.name}", "MFU (datasheet)" if datasheet else "MFU (of products)", "memory MB", "sent MB", "step ms",
                "exposed comm ms", "share", "last loss"]
    rows = []
    for row in summaries:
        if row["status"] != "ran":
            rows.append(message_of(row))
            continue
        relative, measured = row["relative"], row["measured"]
        spread = f" ({relative['smallest']:.2f} - {relative['largest']:.2f})" if rounds > 1 and row["setting"] != base.setting.name else ""
        mfu, share = row["mfu"] if datasheet else row["mfu_of_products"], measured["exposed_comm_ms"] / measured["step_ms"]
        rows.append([row["setting"], f"{row['tokens_per_s']:,.0f}", f"{relative['median']:.2f}{spread}", f"{100 * mfu:.1f} %", mb(measured["memory_bytes"]),
                     mb(measured["sent_bytes"]), f"{measured['step_ms']:.2f}", f"{measured['exposed_comm_ms']:.2f}", f"{100 * share:.1f} %",
                     f"{row['rounds'][-1]['loss'][-1]:.6g}"])
    return markdown_table(headings, rows)


def plan_cells(row: dict) -> list[str]:
    """Step and waiting, measured and planned, and the verdicts on all four."""
    measured, planned, verdict = row["measured"], row.get("planned"), row.get("verdict", {})
    if not planned:
        return [f"{measured['step_ms']:.2f}", "-", "no plan", f"{measured['exposed_comm_ms']:.2f}", "-", "no plan", "no plan", "no plan"]
    given = "given to the plan"
    return [f"{measured['step_ms']:.2f}", f"{planned['step_ms']:.2f}", verdict.get("step_ms", given), f"{measured['exposed_comm_ms']:.2f}", f"{planned['exposed_comm_ms']:.2f}",
            verdict.get("exposed_comm_ms", given), verdict["memory_bytes"], verdict["sent_bytes"]]


PLAN_HEADINGS = ["step ms", "planned", "verdict", "exposed comm ms", "planned", "verdict", "memory bytes", "sent bytes"]


def plan_table(summaries: list[dict]) -> list[str]:
    return markdown_table(["setting", *PLAN_HEADINGS], [[row["setting"], *plan_cells(row)] for row in summaries if row["status"] == "ran"])


def sweep_table(summaries: list[dict]) -> list[str]:
    rows = [[row["setting"], str(row["buckets"] or "-"), mb(row["measured"]["memory_bytes"]), *plan_cells(row)] if row["status"] == "ran" else message_of(row) for row in summaries]
    return markdown_table(["setting", "buckets", "memory MB", *PLAN_HEADINGS], rows)


def largest_difference(curve: list[float], other: list[float]) -> tuple[float, int]:
    """And its step, from 1. A loss that is no number differs from every other one."""
    differences = [0.0 if a == b else abs(a - b) if math.isfinite(a - b) else math.inf for a, b in zip(curve, other)]
    step = max(range(len(differences)), key=differences.__getitem__)
    return differences[step], step + 1


def loss_lines(rows: list[Row], base: Row) -> list[str]:
    out = []
    for row in rows:
        if row.ran and row is not base:
            difference, step = largest_difference(base.runs[0].loss, row.runs[0].loss)
            out.append(f"{row.setting.name}: " + (f"at most {difference:.2g} from {base.setting.name} (step {step})" if difference else f"the same bits as {base.setting.name}"))
    by_stage = {row.setting.stage: row.runs[0].loss for row in reversed(rows) if row.ran and row.setting.ranks > 1}  # reversed: the deferred one of stage 0
    for first, second in ((0, 1), (2, 3)):
        if first in by_stage and second in by_stage:
            difference, step = largest_difference(by_stage[first], by_stage[second])
            out.append(f"stages {first} and {second}: " +
                       (f"differ by at most {difference:.2g} (step {step}); on a CPU that is a fault, they compute the same" if difference else "the same bits"))
    for row in rows:
        count = len({repr(run.loss) for run in row.runs})  # repr: a NaN equals itself
        if count > 1:
            out.append(f"{row.setting.name}: {count} different curves in {len(row.runs)} equal runs; on a CPU that is a fault, the same run gives the same bits")
    return out


def draw(path: Path, rows: list[Row], summaries: list[dict], base: Row) -> bool:
    """Loss curves over each other, their distance, and speed beside the plan. False where matplotlib is missing."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    shown = [row for row in rows if row.ran and (row is base or (row.setting.ranks > 1 and row.setting.stage in (1, 3)))]
    figure = plt.figure(figsize=(13, 6))
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 1), width_ratios=(1.25, 1))
    losses = figure.add_subplot(grid[0, 0])
    distance = figure.add_subplot(grid[1, 0], sharex=losses)
    speed = figure.add_subplot(grid[:, 1])

    steps = range(1, len(base.runs[0].loss) + 1)
    largest = 0.0
    for row, color, style, width in zip(shown, ("#c8c8c8", "#1f77b4", "#d62728"), ("-", "-", "--"), (7.0, 2.0, 1.5)):
        label = row.setting.name
        if row is not base:
            difference, _ = largest_difference(base.runs[0].loss, row.runs[0].loss)
            largest = max(largest, difference)
            label += f" (at most {difference:.2g} away)"
            distance.plot(steps, [ours - theirs for ours, theirs in zip(row.runs[0].loss, base.runs[0].loss)], color=color, linestyle=style, linewidth=1.2)
        losses.plot(steps, row.runs[0].loss, label=label, color=color, linestyle=style, linewidth=width, solid_capstyle="round")
    losses.set_title(f"Loss: largest difference to {base.setting.name} is {largest:.2g} nats a token", fontsize=11)
    losses.set_ylabel("loss (nats a token)")
    losses.tick_params(labelbottom=False)
    losses.legend(frameon=False)
    distance.axhline(0, color="#c8c8c8", linewidth=3, zorder=0)
    distance.set_ylabel("minus\n" + base.setting.name)
    distance.set_xlabel("optimizer step")
    for axes in (losses, distance):
        axes.grid(alpha=0.3)

    ran = [row for row in summaries if row["status"] == "ran"]
    places = range(len(ran))
    planned = [row["planned"]["tokens_per_s"] if "planned" in row else math.nan for row in ran]
    bars = speed.barh([place - 0.2 for place in places], [row["tokens_per_s"] for row in ran], 0.38, color="#1f77b4", label="measured")
    speed.barh([place + 0.2 for place in places], planned, 0.38, color="#ffffff", edgecolor="#1f77b4", hatch="///", label="planned")
    speed.bar_label(bars, [f" {row['tokens_per_s']:,.0f}" for row in ran], fontsize=9)
    speed.set_yticks(list(places), [row["setting"].replace(", every", ",\nevery").replace("ranks, ", "ranks,\n") for row in ran])
    speed.invert_yaxis()
    speed.set_xlim(0, 1.2 * max([row["tokens_per_s"] for row in ran] + [value for value in planned if value == value]))
    speed.set_xlabel("tokens/s, all ranks together")
    speed.set_title("Speed beside the plan", fontsize=11)
    speed.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    speed.grid(alpha=0.3, axis="x")
    speed.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def reading_notes(rows: list[Row], sweep: list[Row], base: Row, context: Context, micro_steps: int, rounds: int) -> list[str]:
    ranks = max(row.setting.ranks for row in rows)
    given = f"{base.over_rounds('step_ms') - base.over_rounds('exposed_comm_ms'):.2f} ms"
    out = []
    if context.shared:
        out.append(f"The ranks share one processor, so more ranks do not compute faster: planned computation of {ranks} ranks is what {base.setting.name} takes for the same "
                   f"tokens, {given} a step. Where each rank has a GPU of its own it is 1/N of one rank's.")
    else:
        out.append(f"Each rank has a device of its own: planned computation is what {base.setting.name} takes without its waiting, {given} a step, spread over the ranks.")
    if context.link_bytes_per_s:
        out.append(f"Planned communication: the trainer's own measurement at its start, {context.link_bytes_per_s / 1e9:.3g} GB/s a rank while all ranks gather.")
    out.append(f"Bytes must be equal to the plan. Times are as planned within {100 * AS_PLANNED:.0f} %; waiting also where planned and measured are below "
               f"{100 * NEGLIGIBLE:.0f} % of a step.")
    out.append("Numbers are rank 0's: exposed communication is the part of a step spent waiting for other ranks, sent is a step's, memory is all that the program "
               "allocates on its device.")
    out.append("A single round shows no spread: a difference between two rows may be chance. --rounds 5 shows how much equal runs differ." if rounds == 1 else
               "Against: the median of the ratios within a round (smallest - largest). Where they lie on both sides of 1, these runs show no difference.")
    buckets = [row.runs[0].buckets for row in sweep if row.ran]
    if len(set(buckets)) < len(buckets):
        out.append("Bucket sizes that give the same number of buckets are the same run: what differs between them is chance.")
    out.append("Loss curves differ by the rounding of gradients to bf16, since ranks and stages add in different orders; with -- --grad-dtype fp32 next to nothing is left.")
    if micro_steps == 1:
        out.append("One micro-step a step: synchronising every micro-step is the same as once a step. A larger --total-batch shows the difference.")
    return out


def plain(value: Any) -> Any:
    """JSON has no NaN and no infinity; they become the texts that metrics.jsonl has for them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def processor() -> str:
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    arguments = parse_arguments(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of the clean-up
    trainer = Path(os.path.abspath(os.environ.get("LLMZERO_TRAINER") or ROOT / "train_gpt"))
    if not os.access(trainer, os.X_OK) or trainer.is_dir():
        fail(f"no program {trainer}; run make train_gpt, or name another in LLMZERO_TRAINER")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for name in ("table.md", "table.json", "loss.png"):
            (arguments.out / name).unlink(missing_ok=True)  # of an earlier benchmark: what is there in the end is of this one
        tempfile.TemporaryFile(dir=arguments.out).close()  # before the runs, not after
    except OSError as error:
        fail(f"cannot write to {arguments.out}: {error.strerror}; give another folder with --out")
    context = Context(cores=len(os.sched_getaffinity(0)))

    # The last of several values wins in train_gpt: the user's options over the defaults here. A config file's values are the user's too.
    given = {word.split("=", 1)[0] for word in arguments.trainer_options}
    gpu_build = b"libcublasLt.so" in trainer.read_bytes()
    words = [*NO_EVALUATION, *([] if "--config" in given else SMALL_LR), *([] if gpu_build or "--config" in given else CPU_SIZES), *arguments.trainer_options]
    sizes = plan_json(trainer, words, arguments.ranks, arguments.timeout)
    if isinstance(sizes, Ended):
        fail(f"{trainer.name} makes no plan of these options (see above): {shlex.join(words)}", sizes.stdout + sizes.stderr, 2 if sizes.status == 2 else 1)
    micro_steps, context.tokens_per_step = sizes["micro_steps"], int(sizes["tokens_per_step"])
    if micro_steps == 1 and "--total-batch" not in given:
        micro_steps, context.tokens_per_step = 2, 2 * context.tokens_per_step  # so that synchronising every one of them shows
    words += ["--total-batch", str(context.tokens_per_step)]

    rows = main_rows(arguments.ranks, arguments.stages, arguments.steps, arguments.drop)
    sweep_steps = min(SWEEP_STEPS, arguments.steps)
    sweep = [Row(Setting(f"--bucket-mb {size}", arguments.ranks, arguments.sweep_stage, ["--zero-stage", str(arguments.sweep_stage), "--bucket-mb", size], sweep_steps,
                         min(SWEEP_DROP, arguments.drop, sweep_steps - 1))) for size in arguments.buckets]
    batch = f"{context.tokens_per_step} tokens a step: micro-batch {sizes['micro_batch']} x seq-len {sizes['seq_len']} x {micro_steps} micro-step(s) x {arguments.ranks} ranks"
    print(f"{len(rows)} settings and {len(sweep)} bucket sizes, {arguments.rounds} round(s); {batch}", flush=True)
    run_rounds(rows, trainer, words, arguments)
    if not any(row.ran for row in rows):
        lines = "\n".join(f"{row.setting.name} | {refused(*row.refusal)}" for row in rows)
        fail("no setting ran; see the trainer's words above", lines, 2 if all(row.refusal.status == 2 for row in rows) else 1)
    run_rounds(sweep, trainer, words, arguments)

    base = base_of(rows)
    ran = [row for row in rows + sweep if row.ran]
    context.device, context.shared = base.runs[0].start["device"], base.runs[0].start["devices_shared"] or any(row.runs[0].start["devices_shared"] for row in ran)
    context.product_flops = max(run.start["product_flops"] for run in base.runs) * (base.setting.ranks if context.shared else 1)
    speeds = [run.start["link_bytes_per_s"] for row in ran for run in row.runs if "link_bytes_per_s" in run.start]
    context.link_bytes_per_s = median(speeds) if speeds else None
    for row in ran:
        row.given_step_ms = computation_ms(row.setting, base, context.shared)
        plan_row(row, trainer, words, context.link_bytes_per_s if row.setting.ranks > 1 else None, arguments.timeout)

    summaries = [summary(row, base, context) for row in rows]
    swept = [summary(row, base, context) for row in sweep]
    faults = faults_of(summaries + swept)
    drawn = draw(arguments.out / "loss.png", rows, summaries, base)
    losses, notes = loss_lines(rows, base), reading_notes(rows, sweep, base, context, micro_steps, arguments.rounds)
    command = shlex.join(["bash", "scripts/bench_parallel.sh", *sys.argv[1:]])
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    others = median(run.others_share for row in ran for run in row.runs)
    machine = f"{context.device}; {processor()}, {context.cores} cores, of which other programs took {100 * others:.0f} % meanwhile"
    refusals = {row["message"]: row["setting"] for row in reversed(summaries + swept) if "\n" in row.get("message", "")}  # reversed: the first row that has it
    reasons: dict[str, list[str]] = {}
    not_as_planned = sum("likely_reasons" in row for row in summaries + swept)
    for row in summaries + swept:
        for reason in row.get("likely_reasons", []):
            reasons.setdefault(reason, []).append(row["setting"])
    reason_lines = [f"{reason} ({'all of them' if len(names) == not_as_planned > 2 else '; '.join(names)})" for reason, names in reasons.items()]

    def section(title: str, lines: list[str], bullets: list[str] = []) -> list[str]:
        return ["", f"## {title}", "", *lines, *([""] if lines and bullets else []), *(f"- {line}" for line in bullets)] if lines or bullets else []

    text = "\n".join([
        f"# {sizes['model']}: one rank and {arguments.ranks} ranks", "",
        f"- machine: {machine}", f"- command: `{command}`", f"- date: {date}", f"- batch: {batch}",
        f"- runs: {arguments.rounds} round(s) of {arguments.steps} steps, the first {arguments.drop} dropped",
        *section("Settings", choice_table(summaries, base, arguments.rounds)),
        *section("Measured and planned", plan_table(summaries)),
        *(section(f"Bucket sizes: stage {arguments.sweep_stage}, {arguments.ranks} ranks, {sweep_steps} steps", sweep_table(swept)) if sweep else []),
        *(line for message, name in reversed(refusals.items()) for line in section(f"What the trainer says of {name}", ["```", *message.splitlines(), "```"])),
        *section("Likely reasons of times that are not as planned", [], reason_lines),
        *section("Loss curves", [], [*losses, "![loss curves](loss.png)" if drawn else "no loss.png: matplotlib is not installed"]),
        *section("How to read this", [], notes),
        *section("Faults", [], faults)]) + "\n"
    everything = {"command": command, "date": date, "machine": {"device": context.device, "processor": processor(), "cores": context.cores,
                  "devices_shared": context.shared, "product_flops": context.product_flops, "link_bytes_per_s": context.link_bytes_per_s}, "model": sizes["model"],
                  "trainer_options": words, "ranks": arguments.ranks, "rounds": arguments.rounds, "micro_batch": sizes["micro_batch"], "seq_len": sizes["seq_len"],
                  "micro_steps": micro_steps,
                  "tokens_per_step": context.tokens_per_step, "rows": summaries, "sweep": swept, "losses": losses, "faults": faults}
    (arguments.out / "table.md").write_text(text, encoding="utf-8")
    (arguments.out / "table.json").write_text(json.dumps(plain(everything), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(f"\n{text}\nwrote {', '.join(str(arguments.out / name) for name in ['table.md', 'table.json', *(['loss.png'] if drawn else [])])}", flush=True)
    if faults:
        fail("bytes are not as planned, see Faults above")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130)
