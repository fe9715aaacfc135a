"""scripts/bench_parallel.sh: that it runs the trainer, a row a stage, and what it does with a stage or a run that fails. Never a timed test.

Its arithmetic is checked with a trainer made of a few lines, whose step times are known. LLMZERO_TRAINER names another trainer for the rest.
"""

from __future__ import annotations

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

# Run by a mpirun that starts one of it. Step times in ms by stage and round, behind three steps that must not count; stage 5 is refused.
FAKE_TRAINER = r"""
import json, os, sys, time
from pathlib import Path
words = sys.argv[1:]
value = lambda name: words[len(words) - 1 - words[::-1].index(name) + 1]
stage, steps, out, here = int(value("--zero-stage")), int(value("--steps")), Path(value("--out")), Path(__file__).parent
with open(here / "calls", "a") as calls:
    calls.write(" ".join(words) + "\n")
if stage == 5:
    print("error: --zero-stage 5 is too much; use 4")
    sys.exit(2)
if stage == 6:
    print("first a cause\nthen a consequence")
    sys.exit(1)
if stage == 7:
    sys.exit(2)
if stage == 8:
    (here / "pid").write_text(str(os.getpid()))
    print("on my way", flush=True)
    time.sleep(600)
number = sum(f"--zero-stage {stage} " in line for line in (here / "calls").read_text().splitlines()) - 1
step_ms = {0: [100.0, 200.0, 50.0], 1: [120.0, 180.0, 55.0], 2: [50.0, 100.0, 25.0]}[stage][number]
out.mkdir(parents=True)
with open(out / "metrics.jsonl", "w") as file:
    for step in range(steps):
        # The last step is far off: the median must not see it.
        record = {"kind": "train", "step": step, "tokens": 1000 * (step + 1), "loss": "nan" if stage == 2 else 3.0 - 0.25 * step + (number == 2 and stage == 1),
                  "step_ms": 1e6 if step < 3 or step == steps - 1 else step_ms, "mem_bytes": 3_000_000, "exposed_comm_ms": 1.5}
        if stage == 1:
            record["comm_bytes"] = 4_250_000 if step >= 3 else 0
        file.write(json.dumps(record) + "\n")
    file.write(json.dumps({"kind": "val", "step": steps - 1, "val_loss": 1.0}) + "\n")
"""


def bench(*words: str, **environment: str) -> subprocess.CompletedProcess:
    # After a rank that failed mpirun waits a second after each signal to the others, also when all are gone.
    return subprocess.run(["bash", str(SCRIPT), *words], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
                          env={**os.environ, "OMPI_MCA_odls_base_sigkill_timeout": "0", **environment})


@pytest.fixture
def fake(tmp_path: Path):
    """fake(*words): the script with the made-up trainer and a mpirun that takes its own flags away."""
    (tmp_path / "trainer.py").write_text(FAKE_TRAINER)
    for name, body in (("trainer", f'exec {sys.executable} {tmp_path}/trainer.py "$@"'), ("mpirun", 'while [ "$1" != -np ]; do shift; done; shift 2; exec "$@"')):
        (tmp_path / name).write_text(f"#!{shutil.which('bash')}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "tmp").mkdir()

    def start(*words: str) -> subprocess.CompletedProcess:
        result = bench(*words, LLMZERO_TRAINER=str(tmp_path / "trainer"), PATH=f"{tmp_path}:{os.environ['PATH']}", TMPDIR=str(tmp_path / "tmp"))
        assert list((tmp_path / "tmp").iterdir()) == []  # nothing is left behind, however it ended
        return result

    return start


def cells(output: str, stage: int) -> list[str]:
    """The stage's row of the table, split where at least two blanks stand."""
    rows = re.findall(rf"^ +{stage}  +(.*)$", output, re.MULTILINE)
    assert len(rows) == 1, output
    return re.split(r"  +", rows[0])


@pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt is not built; run make train_gpt first")
def test_the_trainer_runs_and_stages_compute_the_same(tmp_path):
    subprocess.run([sys.executable, str(ROOT / "dev/data/prepare.py"), str(ROOT / "llmc"), "--val-fraction", "0.1", "--out", str(tmp_path)],
                   check=True, stdout=subprocess.DEVNULL)
    result = bench("--ranks", "2", "--stages", "0,1,9", "--steps", "5", "--rounds", "1", "--", *SMALL,
                   f"--train-data={tmp_path}/train_*.bin", "--val-data", f"{tmp_path}/val_*.bin", LLMZERO_TRAINER=str(TRAINER))
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [cells(result.stdout, stage) for stage in (0, 1)]
    for row in rows:
        step_ms, tokens_per_s, memory_mb, loss = float(row[0]), float(row[1]), float(row[-2]), float(row[-1])
        assert 0 < step_ms < 1e5 and tokens_per_s == pytest.approx(2 * 2 * 32 / step_ms * 1000, rel=0.02)
        assert 0 < memory_mb < 1000 and 2 < loss < 6
    assert rows[0][2] == "1" and 0 < float(rows[1][2]) and rows[1][3] == f"({rows[1][2]} - {rows[1][2]})"
    assert rows[0][-1] == rows[1][-1]                 # one micro-step: the same bits
    assert float(rows[1][-2]) < float(rows[0][-2])    # the optimizer state is sharded
    assert cells(result.stdout, 9)[0].startswith("refused: ") and "--zero-stage" in cells(result.stdout, 9)[0]


def test_ratios_are_taken_within_a_round(fake, tmp_path):
    result = fake("--ranks", "2", "--stages", "0,1,2", "--steps", "7", "--rounds", "3", "--", "--preset", "tiny")
    assert result.returncode == 0, result.stdout + result.stderr
    # Stage 1: 120/100, 180/200, 55/50, whose median is 1.1; of the two medians it would be 120/100.
    assert cells(result.stdout, 0) == ["100.00", "10000", "1", "1.50", "-", "3.00", "1.5"]
    assert cells(result.stdout, 1) == ["120.00", "8333", "1.100", "(0.900 - 1.200)", "1.50", "4.25", "3.00", "2.5"]
    assert cells(result.stdout, 2) == ["50.00", "20000", "0.500", "(0.500 - 0.500)", "1.50", "-", "3.00", "nan"]
    assert "Stage 1 ended with 2 different losses in 3 equal runs" in result.stdout and result.stdout.count("different losses") == 1
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [re.search(r"--zero-stage (\d)", call)[1] for call in calls] == list("012" "120" "201")
    for call in calls:
        assert call.startswith("--val-every 0 --val-batches 1 --sample-every 0 --preset tiny --zero-stage ") and " --steps 7 --out " in call


def test_a_refused_stage_does_not_stop_the_others(fake, tmp_path):
    result = fake("--stages", "5,1,0", "--rounds", "2", "--steps", "6")
    assert result.returncode == 0, result.stderr
    assert cells(result.stdout, 5) == ["refused: --zero-stage 5 is too much; use 4"]
    assert "time vs stage 1" in result.stdout and cells(result.stdout, 1)[2] == "1" and cells(result.stdout, 0)[2] == "0.972"
    assert (tmp_path / "calls").read_text().count("--zero-stage 5") == 1


def test_all_refused_is_a_wrong_call(fake):
    result = fake("--stages", "5,5")
    assert result.returncode == 2 and "stage 5 refused: --zero-stage 5 is too much; use 4" in result.stdout and "refused every stage" in result.stderr


def test_a_stage_can_be_compared_with_itself(fake):
    result = fake("--stages", "0,0", "--rounds", "1", "--steps", "6")
    assert result.returncode == 0 and re.findall(r"^ +0 +(\S+) ", result.stdout, re.MULTILINE) == ["100.00", "200.00"], result.stdout + result.stderr


@pytest.mark.parametrize("stage, words", [(6, ["first a cause", "stage 6: exit status 1", "--stages"]), (7, ["stage 7: exit status 2"])])
def test_a_failing_run_ends_all_with_its_output(fake, tmp_path, stage, words):
    result = fake("--stages", f"0,{stage},1")
    assert result.returncode == 1 and "stage  " not in result.stdout
    for word in words:
        assert word in result.stderr, result.stderr
    assert "--zero-stage 1 " not in (tmp_path / "calls").read_text()


def test_a_run_that_hangs_is_ended(fake, tmp_path):
    start = time.monotonic()
    result = fake("--stages", "8", "--timeout", "5")
    assert result.returncode == 1 and time.monotonic() - start < 30
    for word in ("on my way", "stage 8", "5 s", "--timeout"):
        assert word in result.stderr, result.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("words, expected", [
    (["--ranks", "0"], ["--ranks", "'0'", "1 to 256"]),
    (["--ranks", "two"], ["--ranks", "'two'"]),
    (["--ranks", "100000"], ["--ranks", "'100000'"]),
    (["--stages", "0;1"], ["--stages", "'0;1'", "0,1,2,3"]),
    (["--stages", ""], ["--stages", "''"]),
    (["--stages", "0,-1"], ["--stages", "'0,-1'"]),
    (["--steps", "3"], ["--steps", "'3'", "from 4", "first 3"]),
    (["--rounds", "1.5"], ["--rounds", "'1.5'"]),
    (["--timeout", "nan"], ["--timeout", "'nan'"]),
    (["--preset", "tiny"], ["'--preset'", "after --"]),
    (["--rank", "2"], ["'--rank'"]),
    (["--", "--zero-stage=1"], ["'--zero-stage=1'", "--stages"]),
    (["--", "--preset", "tiny", "--epochs", "2"], ["'--epochs'", "--steps"]),
    (["--", "--out", "x"], ["'--out'", "temporary"]),
], ids=lambda value: " ".join(value))
def test_nonsense_is_refused(words, expected):
    result = bench(*words)
    assert result.returncode == 2 and result.stdout == "", result.stdout
    for word in expected:
        assert word in result.stderr, result.stderr


def test_a_missing_trainer_is_named(tmp_path):
    result = bench(LLMZERO_TRAINER=str(tmp_path / "none"))
    assert result.returncode == 1 and f"{tmp_path}/none" in result.stderr and "make train_gpt" in result.stderr


def test_help():
    result = bench("--help")
    assert result.returncode == 0 and "--stages" in result.stdout and "LLMZERO_TRAINER" in result.stdout
