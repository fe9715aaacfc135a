"""scripts/bench_parallel.sh: that it runs the trainer, a row a setting, what stands beside the plan, and what it does with a run that does not fit or fails.

Never a timed test: its arithmetic is checked with a trainer made of a few lines, whose times and plan are known. LLMZERO_TRAINER names another trainer for the rest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/bench_parallel.sh"
TRAINER = Path(os.environ.get("LLMZERO_TRAINER", ROOT / "train_gpt")).resolve()
SMALL = ["--num-layers", "2", "--channels", "64", "--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "16", "--ffn-dim", "128", "--seq-len", "32", "--micro-batch", "2"]
sys.path.insert(0, str(ROOT / "scripts"))
import bench_parallel as bench  # noqa: E402

# Run by a mpirun that says how many ranks it was asked for and starts one. A run's name is RANKS/STAGE, with /every or /MB behind it; told.json says of a name what
# differs from 100 ms a step, none of it waiting, the planned memory and the planned bytes.
MADE_UP_TRAINER = r"""
import json, os, sys, time
from pathlib import Path
words, here = sys.argv[1:], Path(__file__).parent
value = lambda name, otherwise=None: words[len(words) - 1 - words[::-1].index(name) + 1] if name in words else otherwise
told = json.loads((here / "told.json").read_text())
with open(here / "calls", "a") as calls:
    calls.write(" ".join(words) + "\n")
ranks, stage = int(value("--ranks", os.environ.get("RANKS", "1"))), int(value("--zero-stage", "1"))
name = f"{ranks}/{stage}" + ("/every" if "--sync-every-micro-step" in words else "") + (f"/{value('--bucket-mb')}" if "--bucket-mb" in words else "")
of_name = told.get(name, {})
micro = int(value("--micro-batch")) * int(value("--seq-len")) * ranks
tokens = int(value("--total-batch", "0")) or micro
memory, sent = 4_000_000 + 1000 * stage, 0 if ranks == 1 else 2_000_000 * (stage + 1)
if "--plan" in words:
    if "no_plan" in of_name and "--step-seconds" in words:
        print("error: " + of_name["no_plan"], file=sys.stderr)
        sys.exit(1)
    seconds, exposed = float(value("--step-seconds", "1")), of_name.get("planned_exposed_ms", 0.0) / 1e3
    print(json.dumps({"model": "made-up", "parameters": 1000, "ranks": ranks, "micro_batch": int(value("--micro-batch")), "seq_len": int(value("--seq-len")),
                      "micro_steps": tokens // micro, "tokens_per_step": tokens, "chosen_stage": stage, "recommended_stage": None, "advice": [],
                      "stages": [{"stage": s, "memory_bytes": {}, "total_bytes": memory if s == stage else 1, "fits": None, "links": [],
                                  "sent_bytes_per_step": sent if s == stage else 1,
                                  "step_seconds": seconds + exposed, "compute_seconds": seconds, "comm_seconds": 0.5, "exposed_comm_seconds": exposed, "tokens_per_s": 1.0}
                                 for s in range(4)]}))
    sys.exit(0)
if "says" in of_name:
    print("model made-up")
    print(of_name["says"], file=sys.stderr)
    sys.exit(of_name["status"])
if "hangs" in of_name:
    (here / "pid").write_text(str(os.getpid()))
    print("on my way", flush=True)
    time.sleep(600)
with open(here / "names", "a+") as names:
    names.seek(0)
    number = names.read().splitlines().count(name)  # of the round
    names.write(name + "\n")
steps, out = int(value("--steps")), Path(value("--out"))
step_ms = of_name.get("step_ms", [100.0] * 9)[number]
print("  parameters   1000 in bf16, 6 units, 3 bucket(s) of up to 1 MB")
out.mkdir(parents=True)
with open(out / "metrics.jsonl", "w") as file:
    begun = {"kind": "event", "event": "start", "step": -1, "device": "hostcuda (made up)", "ranks": ranks, "devices_shared": told.get("shared", True),
             "product_flops": of_name.get("product_flops", 1e9)}
    if ranks > 1:
        begun["link_bytes_per_s"] = told.get("link", 2.5e8)
    file.write(json.dumps(begun) + "\n")
    for step in range(steps):
        # The first two are dropped, the last is far off: the median must not see them.
        record = {"kind": "train", "step": step, "tokens": tokens * (step + 1), "mfu": "nan", "mfu_measured": 0.125,
                  "loss": 3.0 + (of_name.get("loss", [0.0] * 9)[number] - 0.25) * step, "exposed_comm_ms": of_name.get("exposed_ms", 0.0),
                  "step_ms": 1e6 if step < 2 or step == steps - 1 else step_ms,
                  "mem_bytes": memory + of_name.get("memory", 0), "comm_bytes": sent + (of_name.get("sent", 0) if step == 3 else 0)}
        file.write(json.dumps(record) + "\n")
    file.write(json.dumps({"kind": "val", "step": steps - 1, "val_loss": 1.0}) + "\n")
"""


def call(*words: str, **environment: str) -> subprocess.CompletedProcess:
    # This Python first, since it is the one that may have matplotlib. After a rank that failed mpirun waits a second after each signal to the others, also when all are gone.
    return subprocess.run(["bash", str(SCRIPT), *words], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
                          env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMPI_MCA_odls_base_sigkill_timeout": "0", **environment})


class Result:
    """Of a call: exit status, texts, and what lies in the folder."""
    def __init__(self, process: subprocess.CompletedProcess, out: Path) -> None:
        self.status, self.stdout, self.stderr = process.returncode, process.stdout, process.stderr
        self.table = json.loads((out / "table.json").read_text()) if (out / "table.json").exists() else None
        self.markdown = (out / "table.md").read_text() if (out / "table.md").exists() else None
        self.out = out

    def row(self, name: str, where: str = "rows") -> dict:
        return next(row for row in self.table[where] if row["setting"] == name)


@pytest.fixture
def made_up(tmp_path: Path):
    """made_up(told, *words): the script with the made-up trainer and a mpirun that takes its own flags away."""
    (tmp_path / "trainer.py").write_text(MADE_UP_TRAINER)
    for name, body in (("trainer", f'exec {sys.executable} -S {tmp_path}/trainer.py "$@"'),
                       ("mpirun", 'while [ "$1" != -np ]; do shift; done; export RANKS=$2; shift 2; exec "$@"')):
        (tmp_path / name).write_text(f"#!{shutil.which('bash')}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "tmp").mkdir()

    def begin(told: dict, *words: str) -> Result:
        (tmp_path / "told.json").write_text(json.dumps(told))
        process = call("--steps", "6", "--drop", "2", "--out", str(tmp_path / "out"), *words, LLMZERO_TRAINER=str(tmp_path / "trainer"),
                       PATH=f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", TMPDIR=str(tmp_path / "tmp"))
        assert list((tmp_path / "tmp").iterdir()) == []  # nothing is left behind, however it ended
        return Result(process, tmp_path / "out")

    return begin


def tables(markdown: str) -> list[list[list[str]]]:
    """Every table: rows of cells, without the line of dashes; checks that all rows have the same number of cells."""
    out: list[list[list[str]]] = []
    before = ""
    for line in markdown.splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                out.append([])
            assert line.endswith("|")
            out[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        before = line
    for table in out:
        assert len(table) > 2 and all(re.fullmatch(r"-+:?", cell) for cell in table[1]), markdown
        assert len({len(row) for row in table}) == 1, markdown
        del table[1]
    return out


# ---- the trainer itself ----

@pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt is not built; run make train_gpt first")
def test_the_trainer_fills_the_table(tmp_path):
    subprocess.run([sys.executable, str(ROOT / "dev/data/prepare.py"), str(ROOT / "llmc"), "--val-fraction", "0.1", "--out", str(tmp_path)],
                   check=True, stdout=subprocess.DEVNULL)
    (tmp_path / "tmp").mkdir()
    process = call("--ranks", "2", "--steps", "5", "--drop", "2", "--buckets", "0,1", "--sweep-stage", "3", "--out", str(tmp_path / "out"), "--", *SMALL,
                   f"--train-data={tmp_path}/train_*.bin", "--val-data", f"{tmp_path}/val_*.bin", LLMZERO_TRAINER=str(TRAINER), TMPDIR=str(tmp_path / "tmp"))
    result = Result(process, tmp_path / "out")
    assert result.status == 0, result.stdout + result.stderr
    table = result.table
    names = ["1 rank", "2 ranks, stage 0", "2 ranks, stage 0, every micro-step", "2 ranks, stage 1", "2 ranks, stage 2", "2 ranks, stage 3"]
    assert [row["setting"] for row in table["rows"]] == names and all(row["status"] == "ran" for row in table["rows"])
    assert [row["setting"] for row in table["sweep"]] == ["--bucket-mb 0", "--bucket-mb 1"]
    assert (table["micro_steps"], table["tokens_per_step"], table["faults"]) == (2, 2 * 2 * 32 * 2, [])
    for row in table["rows"] + table["sweep"]:  # the plan is right, to the byte
        assert row["verdict"]["memory_bytes"] == row["verdict"]["sent_bytes"] == "equal"
        for name in ("memory_bytes", "sent_bytes"):
            assert row["measured"][name] == row["planned"][name] and (row["measured"][name] > 0 or row["ranks"] == 1)
        assert row["tokens_per_s"] > 0 and row["planned"]["step_ms"] > 0 and len(row["rounds"][0]["step_ms"]) == 3
    sent, memory = ([result.row(name)["measured"][what] for name in names] for what in ("sent_bytes", "memory_bytes"))
    assert sent[0] == 0 and sent[2] == pytest.approx(2 * sent[1], rel=0.01)  # every one of two micro-steps
    assert memory[1] > memory[3]                                              # the optimizer state is sharded
    assert result.row("--bucket-mb 0", "sweep")["buckets"] > result.row("--bucket-mb 1", "sweep")["buckets"] > 0
    # One curve: stages 0 and 1, 2 and 3 are the same bits, all the others the same but for rounding to bf16 (2^-8 of a gradient) in three steps.
    losses = {name: result.row(name)["rounds"][0]["loss"] for name in names}
    assert losses[names[1]] == losses[names[3]] and losses[names[4]] == losses[names[5]]
    for loss in losses.values():
        assert loss == pytest.approx(losses["1 rank"], rel=2 ** -6) and 2 < loss[-1] < loss[0] < 6
    assert [len(rows) for rows in tables(result.markdown)] == [7, 7, 3]
    assert result.markdown in result.stdout and "share one processor" in result.markdown
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt is not built; run make train_gpt first")
@pytest.mark.parametrize("options, words", [([], "this run does not fit"), (["--ignore-plan"], "out of device memory: ")])
def test_the_trainers_words_for_no_room_are_known(data, tmp_path, options, words):
    process = call("--stages", "1", "--out", str(tmp_path), "--", *SMALL, f"--train-data={data}/train_*.bin", f"--val-data={data}/val_*.bin", "--device-memory", "1MB", *options,
                   LLMZERO_TRAINER=str(TRAINER))
    assert process.returncode == 1 and list(tmp_path.iterdir()) == []
    for name in ("1 rank", "2 ranks, stage 1"):
        assert f"{name} | {words}" in process.stderr


# ---- arithmetic ----

def test_rows_rounds_and_what_the_plan_is_told(made_up, tmp_path):
    told = {"1/0": {"step_ms": [100.0, 200.0, 50.0], "product_flops": 4e9}, "2/1": {"step_ms": [120.0, 180.0, 55.0], "loss": [0.125] * 3}, "2/2": {"step_ms": [50.0, 100.0, 25.0]}}
    result = made_up(told, "--stages", "1,2", "--rounds", "3", "--buckets", "0,2.5", "--sweep-stage", "3", "--", "--preset", "tiny")
    assert result.status == 0, result.stdout + result.stderr
    # Stage 1: 100/120, 200/180, 50/55 of one rank's speed, whose median is 0.909; of the medians 100/120. All say 12.5 % of what each measured: 1 GFLOP/s on each of two
    # ranks, 4 GFLOP/s on one; against the latter two ranks do half.
    choice, plan, sweep = tables(result.markdown)
    assert choice[0] == ["setting", "tokens/s", "against 1 rank", "MFU (of products)", "memory MB", "sent MB", "step ms", "exposed comm ms", "share", "last loss"]
    assert choice[1:] == [["1 rank", "20,480", "1.00", "12.5 %", "4.00", "0.00", "100.00", "0.00", "0.0 %", "1.75"],
                          ["2 ranks, stage 1", "17,067", "0.91 (0.83 - 1.11)", "6.2 %", "4.00", "4.00", "120.00", "0.00", "0.0 %", "2.375"],
                          ["2 ranks, stage 2", "40,960", "2.00 (2.00 - 2.00)", "6.2 %", "4.00", "6.00", "50.00", "0.00", "0.0 %", "1.75"]]
    assert plan[1][3] == "given to the plan" and plan[2][1:4] == ["120.00", "100.00", "as planned"] and plan[3][1:4] == ["50.00", "100.00", "2.00 times faster than planned"]
    assert plan[3][-2:] == ["equal", "equal"]
    assert [row[:2] for row in sweep[1:]] == [["--bucket-mb 0", "3"], ["--bucket-mb 2.5", "3"]]
    assert "2 ranks, stage 1: at most 0.62 from 1 rank (step 6)" in result.markdown and "2 ranks, stage 2: the same bits as 1 rank" in result.markdown
    assert [run["step_ms"] for run in result.row("2 ranks, stage 1")["rounds"]] == [[ms] * 3 + [1e6] for ms in (120.0, 180.0, 55.0)]  # not the two that are dropped
    relative = {"to": "1 rank", "median": pytest.approx(50 / 55), "smallest": pytest.approx(100 / 120), "largest": pytest.approx(200 / 180)}
    assert result.row("2 ranks, stage 1")["relative"] == relative

    calls = (tmp_path / "calls").read_text().splitlines()
    trained = [line for line in calls if " --plan" not in line]
    assert [re.search(r"--zero-stage (\d)", line)[1] for line in trained] == list("012" "120" "201") + ["3"] * 6
    for line in trained:
        assert line.startswith("--val-every 0 --val-batches 1 --sample-every 0 --no-save --lr 3e-4 --seq-len 128 --micro-batch 4 --preset tiny --total-batch 2048 --zero-stage ")
        assert " --steps 6 --out " in line
    plans = [line for line in calls if " --plan" in line]
    assert plans[0].endswith("--preset tiny --plan --plan-json --ranks 2") and len(plans) == 6
    assert plans[1].endswith("--zero-stage 0 --step-seconds 0.1 --plan --plan-json --ranks 1")
    assert plans[2].endswith("--zero-stage 1 --link measured=0.25 --step-seconds 0.1 --plan --plan-json --ranks 2")
    assert plans[4].endswith("--zero-stage 3 --bucket-mb 0 --link measured=0.25 --step-seconds 0.1 --plan --plan-json --ranks 2")


def test_devices_of_their_own_divide_the_computation(made_up, tmp_path):
    result = made_up({"shared": False, "4/1": {"step_ms": [26.0], "exposed_ms": 4.0}}, "--ranks", "4", "--stages", "1", "--buckets", "none")
    assert result.status == 0, result.stdout + result.stderr
    row = result.row("4 ranks, stage 1")
    assert row["planned"]["step_ms"] == pytest.approx(25.0) and row["verdict"]["step_ms"] == "as planned"
    assert row["verdict"]["exposed_comm_ms"] == "15 % of the step, next to nothing planned"
    assert "device of its own" in result.markdown and result.table["sweep"] == [] and "Bucket sizes" not in result.markdown


def test_users_sizes_win(made_up, tmp_path):
    result = made_up({}, "--stages", "0", "--buckets", "none", "--", "--micro-batch", "1", "--seq-len", "8", "--total-batch", "16")
    assert result.status == 0 and result.table["tokens_per_step"] == 16 and "One micro-step a step" in result.markdown
    assert [row["setting"] for row in result.table["rows"]] == ["1 rank", "2 ranks, stage 0", "2 ranks, stage 0, every micro-step"]
    made_up({}, "--stages", "0", "--buckets", "none", "--", "--config", "none", "--micro-batch", "1", "--seq-len", "8")
    assert not re.search("--seq-len 128|--lr", (tmp_path / "calls").read_text().splitlines()[-1])


@pytest.mark.parametrize("told, expected", [
    ({"2/1": {"memory": 1}}, "2 ranks, stage 1: device memory DIFFERS by +1 byte from 4,001,000 planned"),
    ({"2/1": {"sent": -8}}, "2 ranks, stage 1: bytes sent a step DIFFERS by -8 bytes from 4,000,000 planned"),  # in one of the steps
    ({"1/0": {"memory": -1}}, "1 rank: device memory DIFFERS by -1 byte from 4,000,000 planned"),
    ({"2/1/5": {"memory": 1}}, "--bucket-mb 5: device memory DIFFERS by +1 byte from 4,001,000 planned"),
    ({"2/1": {"no_plan": "the moon is not right"}}, "2 ranks, stage 1: no plan to compare with: --plan ended with status 1: error: the moon is not right"),
], ids=["memory", "sent", "one rank", "sweep", "no plan"])
def test_a_byte_that_is_not_planned_is_a_fault(made_up, told, expected):
    result = made_up(told, "--stages", "1", "--buckets", "5")
    assert result.status == 1 and "bytes are not as planned" in result.stderr
    assert f"- {expected}" in result.markdown.splitlines() and result.table["faults"] == [expected]
    assert len(tables(result.markdown)) == 3  # all of it is written before


def test_a_run_without_room_and_a_refused_one_are_rows(made_up, tmp_path):
    told = {"2/0": {"status": 1, "says": "error: rank 1: out of device memory: gradients needs 3 GB | more than there is"},
            "2/2": {"status": 2, "says": "error: --zero-stage 2 is too much; use 1"},
            "2/3": {"status": 1, "says": f"error: this run does not fit: tiny\nmemory  5 GB\nuse --recompute block\n{'-' * 74}\nPrimary job terminated"},
            "2/1/5": {"status": 1, "says": "error on rank 1 (host, pid 12): out of device memory: slots needs 1 GB"}}
    result = made_up(told, "--rounds", "2", "--buckets", "0,5")
    assert result.status == 0, result.stdout + result.stderr
    choice, plan, sweep = tables(result.markdown)
    assert [row[:2] for row in choice if row[2] == ""] == [
        ["2 ranks, stage 0", r"rank 1: out of device memory: gradients needs 3 GB \| more than there is"],
        ["2 ranks, stage 2", "refused: --zero-stage 2 is too much; use 1"],
        ["2 ranks, stage 3", "this run does not fit: tiny"]]
    assert "\n## What the trainer says of 2 ranks, stage 3\n\n```\nthis run does not fit: tiny\nmemory  5 GB\nuse --recompute block\n```\n" in result.markdown
    assert [row[0] for row in plan[1:]] == ["1 rank", "2 ranks, stage 0, every micro-step", "2 ranks, stage 1"]
    assert sweep[2][:2] == ["--bucket-mb 5", "out of device memory: slots needs 1 GB"]
    assert [row["status"] for row in result.table["rows"]] == ["ran", "does not fit", "ran", "ran", "refused", "does not fit"]
    assert result.row("2 ranks, stage 2")["message"] == "--zero-stage 2 is too much; use 1"
    assert (tmp_path / "calls").read_text().count("--zero-stage 2") == 1  # a second round would get the same answer


def test_without_one_rank_the_first_that_ran_is_compared_with(made_up):
    result = made_up({"1/0": {"status": 1, "says": "error: out of device memory: all of it"}, "shared": False}, "--stages", "0,3", "--buckets", "none")
    assert result.status == 0 and "against 2 ranks, stage 0" in result.markdown
    assert result.row("2 ranks, stage 3")["planned"]["step_ms"] == pytest.approx(100.0)  # of as many ranks: not divided


def test_all_refused_is_a_wrong_call(made_up):
    told = {name: {"status": 2, "says": "error: no"} for name in ("1/0", "2/1")}
    result = made_up(told, "--stages", "1")
    assert result.status == 2 and "1 rank | refused: no" in result.stderr and result.markdown is None
    told["2/1"] = {"status": 1, "says": "error: out of device memory: x"}
    assert made_up(told, "--stages", "1").status == 1


def test_verdicts():
    assert [bench.bytes_verdict(7, 7), bench.bytes_verdict(8, 7), bench.bytes_verdict(1000, 3000)] == [
        "equal", "DIFFERS by +1 byte from 7 planned", "DIFFERS by -2,000 bytes from 3,000 planned"]
    assert [bench.time_verdict(ms, 100.0) for ms in (75.0, 125.0, 74.0, 126.0)] == [
        "as planned", "as planned", "1.35 times faster than planned", "1.26 times slower than planned"]
    assert bench.exposed_verdict(0.9, 0.001, 100.0) == "as planned"  # 900 times as much, and nobody would notice
    assert bench.exposed_verdict(20.0, 10.0, 100.0) == "2.00 times slower than planned"
    assert bench.exposed_verdict(20.0, 0.0, 100.0) == "20 % of the step, next to nothing planned"
    assert bench.exposed_verdict(0.5, 10.0, 100.0) == "next to nothing, 10 % of the step planned"
    assert bench.farthest([5, 7, 6], 5) == 7
    assert bench.largest_difference([1.0, 2.0, float("nan")], [1.0, 1.5, float("nan")]) == (float("inf"), 3)


def test_a_slow_row_has_a_likely_reason(made_up):
    result = made_up({"2/0": {"step_ms": [300.0], "exposed_ms": 200.0, "planned_exposed_ms": 20.0}, "2/1": {"step_ms": [40.0]}}, "--stages", "0,1", "--buckets", "none")
    row = result.row("2 ranks, stage 0")
    assert row["verdict"]["step_ms"] == "2.50 times slower than planned" and row["verdict"]["exposed_comm_ms"] == "10.00 times slower than planned"
    sharing, stepping = row["likely_reasons"][-2:]
    assert "share the processor" in sharing and "every rank steps all weights" in stepping and "busier" in result.row("2 ranks, stage 1")["likely_reasons"][-1]
    assert f"- {stepping} (2 ranks, stage 0)" in result.markdown.splitlines() and "likely_reasons" not in result.row("2 ranks, stage 0, every micro-step")


def test_reasons_are_from_what_was_seen():
    def row(ranks: int, step_ms: list[float], others: float = 0.0) -> bench.Row:
        run = bench.Run(step_ms, [0.0] * len(step_ms), [0], 0, None, 0.1, [1.0], {}, None, others)
        return bench.Row(bench.Setting("a row", ranks, 1, [], len(step_ms), 0), [run], None, bench.Planned(0, 0, 100.0, 0.0))

    quiet = row(1, [100.0] * 20)
    assert bench.likely_reasons(row(2, [150.0] * 20), quiet, False) == ["what does not get shorter with more ranks: launches, and in stage 0 AdamW"]
    assert bench.likely_reasons(row(2, [50.0] * 20), quiet, False) == ["unknown"]
    assert bench.likely_reasons(row(2, [50.0] * 20, 0.11), quiet, False) == ["other programs took more than 10 % of the processor meanwhile"]
    assert "while a row ran, whose time the plan is told" in bench.likely_reasons(row(2, [50.0] * 20), row(1, [100.0], 0.11), False)[0]
    assert "differ by more than 30 %" in bench.likely_reasons(row(2, [50.0] * 16 + [70.0] * 4), quiet, False)[0]
    assert bench.likely_reasons(row(2, [50.0] * 18 + [70.0] * 2), quiet, False) == ["unknown"]


def test_what_others_take_of_the_processor(monkeypatch):
    class Usage:
        ru_utime, ru_stime = 3.0, 0.5
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(bench.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(bench, "busy_seconds", lambda: 1000.0)
    monkeypatch.setattr(bench.resource, "getrusage", lambda who: Usage)
    clock = bench.OthersClock()
    # 10 s later, of 40 the cores had: 24 busy, 12 of them with children of this script.
    monkeypatch.setattr(bench.time, "monotonic", lambda: 110.0)
    monkeypatch.setattr(bench, "busy_seconds", lambda: 1024.0)
    Usage.ru_utime, Usage.ru_stime = 13.0, 2.5
    assert clock.share() == pytest.approx(0.3)
    monkeypatch.setattr(bench, "busy_seconds", lambda: 0.0)  # a system that does not tell
    assert clock.share() == 0.0


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not tell what its cores did")
def test_busy_seconds_counts_a_busy_child():
    before, children = bench.busy_seconds(), bench.OthersClock.now()[1]
    subprocess.run([sys.executable, "-S", "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    others = bench.OthersClock.now()[1] - children
    passed = bench.busy_seconds() - before
    assert passed > 0.25 and others < passed - 0.25  # the child's time is not that of others; the system counts in ticks of 10 ms


def test_losses_that_are_no_numbers(made_up):
    result = made_up({"2/1": {"loss": [float("nan")]}}, "--stages", "0,1", "--buckets", "none")
    assert result.status == 0 and "stages 0 and 1: differ by at most inf" in result.markdown
    assert result.row("2 ranks, stage 1")["rounds"][0]["loss"][-1] == "nan"  # JSON without NaN
    assert "different curves" not in result.markdown


def test_curves_that_should_be_the_same(made_up):
    result = made_up({"2/0/every": {"loss": [1e-3, 2e-3]}}, "--stages", "0,1", "--buckets", "none", "--rounds", "2")
    assert "stages 0 and 1: the same bits" in result.markdown  # as they synchronise once a step, both of them
    assert "2 ranks, stage 0, every micro-step: 2 different curves in 2 equal runs" in result.markdown and result.markdown.count("different curves") == 1


def test_png(made_up):
    folder = made_up({}, "--buckets", "none").out
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert not (folder / "loss.png").exists() and "matplotlib is not installed" in (folder / "table.md").read_text()
        return
    assert (folder / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and "(loss.png)" in (folder / "table.md").read_text()


def test_what_an_earlier_benchmark_left_is_gone(made_up, tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("table.md", "table.json", "loss.png"):
        (tmp_path / "out" / name).write_text("old")
    result = made_up({"2/1": {"status": 1, "says": "broken"}}, "--stages", "1")
    assert result.status == 1 and list((tmp_path / "out").iterdir()) == []


# ---- runs that fail, and nonsense ----

@pytest.mark.parametrize("told, words", [({"status": 1, "says": "first a cause\nerror: then a consequence"}, ["first a cause", "stage 3: exit status 1", "--stages"]),
                                         ({"status": 2, "says": "no word"}, ["stage 3: exit status 2"])])
def test_a_failing_run_ends_all_with_its_output(made_up, tmp_path, told, words):
    result = made_up({"2/3": told}, "--stages", "0,3,1")
    assert result.status == 1 and result.markdown is None
    for word in words:
        assert word in result.stderr, result.stderr
    assert "--zero-stage 1 " not in (tmp_path / "calls").read_text()


def test_a_run_that_hangs_is_ended(made_up, tmp_path):
    start = time.monotonic()
    result = made_up({"2/1": {"hangs": True}}, "--stages", "1", "--timeout", "3")
    assert result.status == 1 and time.monotonic() - start < 30
    for word in ("on my way", "2 ranks, stage 1", "3 s", "--timeout"):
        assert word in result.stderr, result.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_wrong_trainer_option_is_the_trainers_to_refuse(made_up, tmp_path):
    (tmp_path / "trainer.py").write_text("import sys\nprint('error: unknown option --nonsense', file=sys.stderr)\nsys.exit(2)\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "told.json").write_text("{}")
    process = call("--out", str(tmp_path / "out"), "--", "--nonsense", LLMZERO_TRAINER=str(tmp_path / "trainer"))
    assert process.returncode == 2 and "unknown option --nonsense" in process.stderr and "makes no plan" in process.stderr


@pytest.mark.parametrize("words, expected", [
    (["--ranks", "1"], ["--ranks", "'1'", "2 to 256"]),
    (["--ranks", "two"], ["--ranks", "'two'"]),
    (["--ranks", "100000"], ["--ranks", "'100000'"]),
    (["--stages", "0;1"], ["--stages", "'0;1'", "0,1,2,3"]),
    (["--stages", ""], ["--stages", "''"]),
    (["--stages", "0,4"], ["--stages", "'0,4'"]),
    (["--stages", "1,1"], ["--stages", "'1,1'", "different"]),
    (["--steps", "10"], ["--drop 10", "--steps 10"]),
    (["--drop", "0"], ["--drop", "'0'", "from 1"]),
    (["--rounds", "1.5"], ["--rounds", "'1.5'"]),
    (["--buckets", "1,-2"], ["--buckets", "'1,-2'", "none"]),
    (["--sweep-stage", "4"], ["--sweep-stage", "'4'", "0 to 3"]),
    (["--timeout", "nan"], ["--timeout", "'nan'"]),
    (["--preset", "tiny"], ["'--preset'", "after --"]),
    (["--rank", "2"], ["'--rank'"]),
    (["--", "--zero-stage=1"], ["'--zero-stage=1'", "--stages"]),
    (["--", "--preset", "tiny", "--epochs", "2"], ["'--epochs'", "--steps"]),
    (["--", "--out", "x"], ["'--out'", "temporary"]),
    (["--", "--step-seconds", "1"], ["'--step-seconds'", "measured here"]),
], ids=lambda value: " ".join(value))
def test_nonsense_is_refused(words, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.parse_arguments(words)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    for word in expected:
        assert word in err, err


def test_nonsense_ends_the_script_before_anything_is_made(tmp_path):
    result = call("--out", str(tmp_path / "out"), "--ranks", "0")
    assert result.returncode == 2 and "--ranks" in result.stderr and result.stdout == "" and not (tmp_path / "out").exists()


def test_a_missing_trainer_is_named(tmp_path):
    result = call("--out", str(tmp_path / "out"), LLMZERO_TRAINER=str(tmp_path / "none"))
    assert result.returncode == 1 and f"{tmp_path}/none" in result.stderr and "make train_gpt" in result.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    result = call("--out", str(tmp_path / "file/out"), LLMZERO_TRAINER="/bin/true")
    assert result.returncode == 1 and f"{tmp_path}/file/out" in result.stderr and "--out" in result.stderr


def test_help():
    result = call("--help")
    assert result.returncode == 0 and "--stages" in result.stdout and "LLMZERO_TRAINER" in result.stdout
