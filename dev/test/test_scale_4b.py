"""scripts/scale_4b.sh: where plain data parallelism runs out of memory and ZeRO does not, at full size and trained as a small twin; that the script notices when not.

What it does on GPUs is checked with a trainer made of a few lines, since the tests may have none.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from train_testing import ROOT, TRAINER, needs_trainer

SCRIPT = ROOT / "scripts/scale_4b.sh"
TIMEOUT_SECONDS = 600
GB = 10 ** 9

# Plans and trains in no time: on N ranks stage 0 takes 90 GB, stages 1 to 3 take 90 - 20 x stage x (N - 1) / N, --recompute block 25 GB less.
MADE_UP_TRAINER = r"""
import os, sys, time
words = sys.argv[1:]
value = lambda name, otherwise=None: words[len(words) - 1 - words[::-1].index(name) + 1] if name in words else otherwise
ranks, stage = int(value("--ranks", os.environ.get("RANKS", "1"))), int(value("--zero-stage", "1"))
gigabytes = [90 - 20 * s * (ranks - 1) / ranks - 25 * (value("--recompute") == "block") for s in range(4)]
if "--plan" in words:
    stages = ", ".join('{"total_bytes": %d}' % (g * 1e9) for g in gigabytes)
    print('{"stages": [%s]}' % stages if "--plan-json" in words else "the plan")
    sys.exit(0)
assert value("--device-memory") == "80000000000" and "--allocate-only" not in words and "HOSTCUDA_MEMORY" not in os.environ, words
if gigabytes[stage] > 80 and "--ignore-plan" not in words:
    print("error: " + os.environ.get("REFUSAL", "this run does not fit 80.00 GB of device memory: made up"), file=sys.stderr)
    sys.exit(1)
if gigabytes[stage] > 80:
    print("error: out of device memory: it needs 1 GB, but 79.00 GB of the 80.00 GB that --device-memory allows are taken\n  allocated   90.00\n"
          + os.environ.get("ADVICE", "  --recompute ffn"), file=sys.stderr)
    sys.exit(1)
if "HANG" in os.environ and stage == int(os.environ["HANG"]):
    time.sleep(600)
steps = int(value("--steps"))
for step in range(1, steps + 1):
    print(f"step {step}/{steps} | loss {6 - step / 2:.4f} | 1.0 ms | 100 tok/s | x")
print(f"done: {steps} steps, weights 0")
"""


class Result(NamedTuple):
    status: int
    output: str
    errors: str

    def rows(self) -> list[tuple[str, int, int, float, str, str, str]]:
        """Model, stage, ranks, planned GB, expected, what happened, as expected."""
        table = self.output[self.output.index("\n== summary\n"):].splitlines()[2:-1]
        assert re.split(r"  +", table[0].strip()) == ["model", "stage", "ranks", "planned GB", "expected", "what happened", "as expected"]
        rows = [re.split(r"  +", line.strip()) for line in table[1:]]
        return [(row[0], int(row[1]), int(row[2]), float(row[3]), *row[4:]) for row in rows]

    def section(self, heading: str, number: int = 0) -> str:
        return self.output.split(f"\n== {heading}")[1 + number].split("\n== ")[0]


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "HOSTCUDA_THREADS", "CUDA_VISIBLE_DEVICES")}
    return {**inherited, "LLMZERO_TRAINER": str(TRAINER), **more}


def call(*words: str, script: Path = SCRIPT, **more: str) -> Result:
    process = subprocess.Popen(["bash", str(script), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**more))
    try:
        output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # the script ends its run first
        output, errors = process.communicate(timeout=60)
        pytest.fail(f"no end after {TIMEOUT_SECONDS} s\n{output}\n{errors}")
    return Result(process.returncode, output, errors)


@pytest.fixture(scope="module")
def whole() -> Result:
    return call()


# ---- the script as it is ----------------------------------------------------------------------------------------------------------------------------

@needs_trainer
def test_everything_happens_as_expected(whole: Result) -> None:
    assert whole.status == 0, whole.output + whole.errors
    assert [(row[:3], row[4], re.sub(r" \(.*", "", row[5]), row[6]) for row in whole.rows()] == [
        (("4B", 0, 1), "refused", "refused", "yes"),
        (("4B", 0, 1), "out of memory", "out of memory", "yes"),
        (("4B", 0, 4), "refused", "refused", "yes"),
        (("4B", 0, 4), "out of memory", "out of memory", "yes"),
        (("4B", 1, 4), "allocated", "allocated", "yes"),
        (("4B", 2, 4), "allocated", "allocated", "yes"),
        (("4B", 3, 4), "allocated", "allocated", "yes"),
        (("4B --recompute block", 0, 1), "allocated", "allocated", "yes"),
        (("twin", 0, 4), "refused", "refused", "yes"),
        (("twin", 0, 4), "out of memory", "out of memory", "yes"),
        (("twin", 1, 4), "trained", "trained", "yes"),
        (("twin", 2, 4), "trained", "trained", "yes"),
        (("twin", 3, 4), "trained", "trained", "yes")]
    assert whole.output.endswith("\nall as expected\n")


@needs_trainer
def test_the_full_size_is_what_is_allocated(whole: Result) -> None:
    """4.01 billion parameters: 2 + 2 + 12 bytes each in stage 0, of which stage 1 shards 12, stage 2 and 14, stage 3 all over 4 ranks; the rest is the same or nearly."""
    planned = {(row[1], row[2]): row[3] for row in whole.rows() if row[0] == "4B"}
    assert planned[0, 1] > 80 and planned[0, 4] > 80 > planned[1, 4] > planned[2, 4] > planned[3, 4]
    assert planned[0, 4] - planned[1, 4] == pytest.approx(12 * 4.01 * 3 / 4, abs=0.1)
    for row in whole.rows():
        if row[4] == "allocated":  # to the digits that are shown, every byte of the plan was asked of the device and granted
            assert row[5] == f"allocated ({row[3]:.2f} GB a rank)", row
            assert f"allocated {row[3]:.2f} GB of device memory on this rank" in whole.output
    assert re.search(r"^plan of 4B: 4\.01B parameters in bf16; 4 ranks, .*\n(?s:.*)^  fits +NO +yes +yes +yes$", whole.section("the plan of 4B"), re.MULTILINE)


@needs_trainer
@pytest.mark.parametrize("run", ["4B, stage 0 on 1 rank:", "4B, stage 0 on 4 ranks:", "twin, stage 0 on 4 ranks:"])
def test_a_failed_allocation_shows_memory_and_ways_out(whole: Result, run: str) -> None:
    refused, failed = whole.section(run), whole.section(run, 1)
    assert "expected is 'refused'" in refused and "--ignore-plan" not in refused.splitlines()[1]
    assert "error: this run does not fit" in refused and "out of device memory" not in refused and "\nexit status 1\n" in refused
    assert "expected is 'out of memory'" in failed and "--ignore-plan" in failed.splitlines()[1]
    assert "error: out of device memory: " in failed and "\nexit status 1\n" in failed
    columns = {name: (float(planned), float(taken)) for name, planned, taken in re.findall(r"^  (\w+) +([0-9.]+) +([0-9.]+)$", failed, re.MULTILINE)}
    for category in ("parameters", "gradients", "optimizer", "activations", "workspace"):
        assert columns[category][0] > 0, failed
    planned, taken = columns.pop("allocated")
    assert sum(column[0] for column in columns.values()) == pytest.approx(planned, abs=0.05)
    assert sum(column[1] for column in columns.values()) == pytest.approx(taken, abs=0.05)
    limit = 80.0 if run.startswith("4B") else float(re.search(r"card has ([0-9.]+) GB", whole.output)[1]) * 1e3
    assert taken <= limit < planned
    for text in (refused, failed):
        assert re.search(r"^  --recompute \w+ ", text, re.MULTILINE) and "recommended: " in text, text
    assert (" --zero-stage 2 " in failed) == (" 4 ranks" in run)  # alone there is nobody to share with


@needs_trainer
def test_the_twin_trains_the_same_in_every_stage_within_its_card(whole: Result) -> None:
    card = float(re.search(r"a rank's card has ([0-9.]+) GB", whole.output)[1])
    planned = {row[1]: row[3] for row in whole.rows() if row[0] == "twin"}
    assert planned[0] > 1.1 * card and max(planned[stage] for stage in (1, 2, 3)) < 0.9 * card
    weights, losses = set(), set()
    for stage in (1, 2, 3):
        section = whole.section(f"twin, stage {stage} on 4 ranks:")
        bytes_ = int(re.search(r"HOSTCUDA_MEMORY=(\d+) ", section)[1])
        assert f"--device-memory {bytes_} " in section and bytes_ == pytest.approx(card * GB, abs=1e5)
        weights.add(re.search(r"^done: 4 steps, weights (\w+)", section, re.MULTILINE)[1])
        losses.add(tuple(re.findall(r"\| loss ([0-9.]+) ", section)))
    assert len(weights) == 1 and len(losses) == 1, whole.output
    (of_steps,) = losses
    assert len(of_steps) == 4 and float(of_steps[-1]) < float(of_steps[0])


# ---- what it says when it is otherwise ----------------------------------------------------------------------------------------------------------------

@needs_trainer
def test_a_stage_0_that_fits_is_not_as_expected() -> None:
    """The planted change: a card that is large enough for stage 0."""
    result = call("--quick", "--twin-memory", "200MB")
    assert result.status == 1, result.output + result.errors
    assert [(row[0], row[1], re.sub(r" \(.*", "", row[5]), row[6]) for row in result.rows()] == [
        ("twin", 0, "trained", "NO"), ("twin", 0, "trained", "NO"), ("twin", 1, "trained", "yes"), ("twin", 2, "trained", "yes"), ("twin", 3, "trained", "yes")]
    assert "\n== NOT AS EXPECTED: 'trained', where 'refused' was expected\n" in result.output
    assert "\n== NOT AS EXPECTED: 'trained', where 'out of memory' was expected\n" in result.output
    assert result.output.endswith("\nnot as expected: 2 of 5 runs\n")


@needs_trainer
def test_an_interrupted_script_leaves_nothing_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(["bash", str(SCRIPT), "--quick"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment(TMPDIR=str(tmp_path)))
    for line in process.stdout:
        if line.startswith("== twin, stage 1"):
            break

    def ours() -> list[str]:
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if f"--out\0{tmp_path}" in file.read_text(errors="replace"):
                    found.append(file.parent.name)
            except OSError:  # it has ended
                pass
        return found

    end = time.monotonic() + 60
    while len(ours()) < 6 and time.monotonic() < end:
        time.sleep(0.1)
    assert len(ours()) == 6  # timeout, mpirun and its ranks
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    while ours() and time.monotonic() < end + 20:
        time.sleep(0.1)
    assert ours() == [] and list(tmp_path.glob("tmp.*")) == []  # OpenMPI leaves a folder of its own


def test_arguments() -> None:
    assert call("--help").status == 0 and "--twin-memory" in call("--help").output
    for words, message in ((["--fast"], "unknown argument '--fast'"), (["4"], "unknown argument '4'"), (["--twin-memory"], "--twin-memory needs a size"),
                           (["--twin-memory", "80gb"], "--twin-memory 80gb is not a size"), (["--twin-memory", "0"], "--twin-memory 0 is not a size"),
                           (["--twin-memory", "1.5GB"], "--twin-memory 1.5GB is not a size")):
        result = call(*words)
        assert result.status == 2 and result.output == "" and result.errors.startswith(f"error: {message}"), result
    result = call(LLMZERO_TRAINER="/nonexistent/train_gpt")
    assert result.status == 1 and "no program /nonexistent/train_gpt; run make train_gpt" in result.errors


# ---- GPUs, by a made-up trainer -----------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def on_gpus(tmp_path: Path):
    """on_gpus(MiB of each GPU, environment): the script on a machine that shows such GPUs."""
    def program(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    bash = f"#!{shutil.which('bash')}\n"
    program("ldd", bash + "echo '\tlibcudart.so.12 => /made/up'\n")
    program("mpirun", bash + 'while [ "$1" != -np ]; do shift; done\nexport RANKS=$2\nshift 2\nexec "$@"\n')
    trainer = program("trainer", f"#!{sys.executable}\n{MADE_UP_TRAINER}")

    def start(*mib: int, words: tuple[str, ...] = (), script: Path = SCRIPT, **more: str) -> Result:
        program("nvidia-smi", bash + f"printf '%s\\n' {' '.join(map(str, mib))}\n" if mib else bash + "exit 9\n")
        return call(*words, script=script, PATH=f"{tmp_path}:{os.environ['PATH']}", LLMZERO_TRAINER=str(trainer), **more)

    return start


def test_four_gpus_train_at_full_size(on_gpus) -> None:
    result = on_gpus(81559, 81559, 143771, 81559)
    assert result.status == 0, result.output + result.errors
    assert "\n== GPUs here: 4, the smallest with 85.52 GB\n" in result.output
    assert [(row[0], row[1], row[2], row[5], row[6]) for row in result.rows()] == [
        ("4B", 0, 1, "refused", "yes"), ("4B", 0, 1, "out of memory (79.00 GB taken)", "yes"),
        ("4B", 0, 4, "refused", "yes"), ("4B", 0, 4, "out of memory (79.00 GB taken)", "yes"),
        *[("4B", stage, 4, "trained (4 steps, loss 5.5000 to 4.0000)", "yes") for stage in (1, 2, 3)],
        ("4B --recompute block", 0, 1, "trained (4 steps, loss 5.5000 to 4.0000)", "yes")]


def test_fewer_gpus_do_what_they_can(on_gpus) -> None:
    result = on_gpus(143771)
    assert result.status == 0, result.output + result.errors
    assert "4 of 80.00 GB or more are needed for all of it" in result.output and result.output.endswith("\nnot run: 5 of 8 runs; the others as expected\n")
    assert [row[6] for row in result.rows() if row[2] == 1] == ["yes"] * 3
    assert {row[5:] for row in result.rows() if row[2] == 4} == {("not run: 4 GPUs, here 1", "-")}


def test_small_gpus_run_nothing(on_gpus) -> None:
    result = on_gpus(*[24564] * 4)
    assert result.status == 0 and {row[5:] for row in result.rows()} == {("not run: a GPU has 25.76 GB", "-")}, result.output


def test_what_gpus_cannot_do_is_said(on_gpus) -> None:
    result = on_gpus(143771, words=("--quick",))
    assert result.status == 1 and "error: the twin needs 4 GPUs and 1 is here" in result.errors
    result = on_gpus()
    assert result.status == 1 and "is a GPU build and nvidia-smi shows no GPU" in result.errors


def test_a_failure_without_advice_is_not_as_expected(on_gpus) -> None:
    result = on_gpus(*[81559] * 4, ADVICE="buy more")
    assert result.status == 1 and [row[5] for row in result.rows() if row[6] == "NO"] == ["out of memory, no table or advice"] * 2, result.output


def test_an_error_of_another_kind_is_no_refusal(on_gpus) -> None:
    result = on_gpus(*[81559] * 4, REFUSAL="no training data")
    assert result.status == 1 and [row[4:6] for row in result.rows() if row[6] == "NO"] == [("refused", "exit status 1")] * 2, result.output


def test_a_run_that_hangs_is_ended(on_gpus, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "tree/scripts")
    (tmp_path / "tree/data/python-stdlib").mkdir(parents=True)
    (tmp_path / "tree/data/python-stdlib/train_000.bin").touch()
    script = tmp_path / "tree/scripts/scale_4b.sh"
    text = script.read_text()
    assert text.count("most_seconds=120 ") == 1
    script.write_text(text.replace("most_seconds=120 ", "most_seconds=3 "))
    result = on_gpus(*[81559] * 4, script=script, HANG="2")
    assert result.status == 1 and [row[1:2] + row[4:6] for row in result.rows() if row[6] == "NO"] == [(2, "trained", "no end after 3 s")], result.output
