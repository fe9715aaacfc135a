"""What goes wrong in a run: ranks that were started differently, a rank that dies, a NaN or a flipped bit in one rank's memory. All ranks end, or go on, together."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from train_testing import ROOT, SMALL, TRAINER, Run, needs_trainer, wait_for, write_shard

pytestmark = needs_trainer


def fault(**what: object) -> str:
    """For the shell: plants it (hostcuda/README.md, "Planting a fault")."""
    return "export HOSTCUDA_FAULT=" + ",".join(f"{key}={value}" for key, value in what.items())


@pytest.fixture
def same_windows(tmp_path: Path) -> list[str]:
    """Options: every window of the data is the same text, and the learning rate stays."""
    write_shard(tmp_path / "train_000.bin", [i % 32 for i in range(2000)])
    return ["--train-data", f"{tmp_path}/train_*.bin", "--schedule", "constant", "--warmup", "0"]


def assert_refused(run: Run, *words: str) -> None:
    """Every rank ended by itself with an error, one message named rank 1, and nothing was written."""
    assert run.statuses == [1] * 3, run.output
    assert run.output.count("error") == 1, run.output
    for word in ("error: rank 1: ", *words):
        assert word in run.output, run.output
    assert not run.out.exists()


# ---- ranks that do not agree --------------------------------------------------------------------------------------------------------

def test_a_file_hidden_from_one_rank_ends_all_and_names_it(train, data, tmp_path):
    """Rank 1 works in a folder where the relative pattern matches nothing."""
    (tmp_path / "empty").mkdir()
    assert_refused(train(3, "--train-data", "train_*.bin", on_rank_1=f"cd {tmp_path}/empty", cwd=data, timeout=30, ok=False), "train_*.bin")


@pytest.mark.parametrize("missing, words", [("train_1.bin", "other shards of --train-data train_*.bin"), ("val_1.bin", "other shards of --val-data val_*.bin"),
                                            ("decode.bin", "other bytes in ./decode.bin (fingerprint missing)")])
def test_ranks_that_see_other_files_are_refused(train, data, tmp_path, missing, words):
    """Rank 1 works in a folder that lacks one of the files."""
    for folder in ("all", "some"):
        (tmp_path / folder).mkdir()
        for name in ("train_0.bin", "train_1.bin", "val_0.bin", "val_1.bin"):
            write_shard(tmp_path / folder / name, [i % 250 for i in range(2000)])
        shutil.copyfile(data / "decode.bin", tmp_path / folder / "decode.bin")
    (tmp_path / "some" / missing).unlink()
    assert_refused(train(3, "--train-data", "train_*.bin", "--val-data", "val_*.bin", on_rank_1=f"cd {tmp_path}/some", cwd=tmp_path / "all", timeout=30, ok=False), words)


def test_ranks_with_other_options_are_refused(train):
    run = train(3, "--lr", "0.003", on_rank_1='set -- "$@" --lr 0.002', timeout=30, ok=False)
    assert_refused(run, "--lr is 0.002 here and 0.003 on rank 0")


def test_ranks_with_another_build_are_refused(train, tmp_path):
    """A byte at a program's end changes nothing that it does."""
    other = tmp_path / "other_build"
    shutil.copyfile(TRAINER, other)
    other.chmod(0o755)
    with other.open("ab") as file:
        file.write(b"\0")
    assert_refused(train(3, on_rank_1=f'shift; set -- {other} "$@"', timeout=30, ok=False), "another build")


def test_help_on_one_rank_alone_does_not_hang(train):
    assert_refused(train(3, on_rank_1='set -- "$@" --help', timeout=30, ok=False), "--help was given on this rank")


# ---- a rank or a machine that fails ---------------------------------------------------------------------------------------------------

def test_a_killed_rank_ends_the_job(data, tmp_path):
    command = [str(TRAINER), "--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin", "--out", str(tmp_path / "run"), *SMALL, "--steps", "100000"]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    process = subprocess.Popen(["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", "2", "sh", "-c",
                                f'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then echo $$ >{tmp_path}/pid; fi; exec "$@"', "sh", *command],
                               cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(tmp_path / "run" / "metrics.jsonl")
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        assert process.wait(timeout=30) != 0
    finally:
        process.kill()


def test_device_memory_of_the_machine_is_a_limit(train):
    run = train(2, ok=False, environment={"HOSTCUDA_MEMORY": "2MB"}, timeout=30)
    assert run.status == 1 and "does not fit 2.00 MB of device memory (all of this device)" in run.output, run.output
    run = train(2, "--device-memory", "80GB", ok=False, environment={"HOSTCUDA_MEMORY": "2MB"}, timeout=30)  # more than there is
    assert run.status == 1 and "does not fit 2.00 MB of device memory (all of this device)" in run.output, run.output


# ---- gradients that are not finite ----------------------------------------------------------------------------------------------------

def test_non_finite_gradients_are_skipped_and_end_the_run(train):
    run = train(2, "--lr", "1e3", "--weight-decay", "100", "--clip", "0", "--warmup", "0", "--steps", "40", "--max-skipped", "3", "--beta2", "0", "--eps", "1e-30", ok=False)
    assert run.status == 1
    assert "not finite" in run.output and "--max-skipped 3" in run.output and "--lr" in run.output
    skips = [record for record in run.records("event") if record["event"] == "skip"]
    assert [record["skipped_in_row"] for record in skips][-1] == 4
    assert run.records("event")[-1]["event"] == "error"


def test_a_nan_on_one_rank_skips_the_step_on_all_and_leaves_everything_as_it_was(train, same_windows):
    """Two micro-steps of two ranks. All addends of a gradient are equal, so no sum of them is rounded: all stages give the same bits, and a step that is made
    later gives what it would have given before."""
    options = [*same_windows, "--total-batch", str(2 * 64 * 2)]
    clean = train(2, *options, "--steps", "3")
    (losses, norms, _), evaluations, weights = zip(*clean.bits()[0]), *clean.bits()[1:]
    assert losses[2] < losses[1] < losses[0]
    # In each stage one, and between them both micro-steps: the first one's gradients are written, the second one's added.
    for stage, micro_step in ((0, 0), (1, 1), (2, 0), (3, 1)):
        planted = fault(kernel="cross_entropy_kernel", launch=2 * 2 + micro_step, argument=1, byte=0, do="nan16")  # a logit's gradient in the third step
        run = train(2, *options, "--steps", "4", "--zero-stage", str(stage), on_rank_1=planted)
        assert "fault planted: " in run.output and "(rank 1)" in run.output, run.output
        # The third step's loss was there before the NaN. The fourth step is what the third would have been, to the bit: weights, moments and their bias
        # corrections are as they were.
        steps = run.records("train")
        assert [record["loss"] for record in steps] == [*losses, losses[2]], stage
        assert [record["grad_norm"] for record in steps] == [*norms[:2], "nan", norms[2]], stage
        assert run.bits()[1:] == ([(loss, tokens) for loss, tokens in evaluations], weights), stage
        # It is said: event, counter, and a line in every rank's log.
        assert [(record["step"], record["skipped_in_row"]) for record in run.records("event") if record["event"] == "skip"] == [(2, 1)]
        assert [record["skipped"] for record in steps] == [0, 0, 1, 1]
        for log in (run.output, (run.out / "log.rank1").read_text()):
            assert len(re.findall(r"^step 3 skipped: the gradient norm is not finite$", log, re.MULTILINE)) == 1
            assert re.search(r"^step 4/4 .* \| skipped 1$", log, re.MULTILINE)


# ---- replicas that are not equal --------------------------------------------------------------------------------------------------------

# Buckets are the embedding, two layers and the head; stage 0 steps the four in turn. A moment that is doubled or halved in the first step has changed a weight after
# the second. In stage 1 what is flipped before the step's last gather is overwritten by it: here it comes after the first checksum of the first evaluation's check
# (the start-up's has four), in what the second one reads.
HEAD_WEIGHT = 128 + 25  # an element of the head's bucket, which begins with the final norm
FLIPS = [(0, {"kernel": "adamw_update_kernel", "launch": 4 + 2, "argument": 1, "byte": 100, "bit": 0}, "fp32 master weights in bucket 2 (layer 1)"),
         (0, {"kernel": "adamw_update_kernel", "launch": 0 + 3, "argument": 2, "byte": 4 * HEAD_WEIGHT + 2, "bit": 7}, "weights in bucket 3 (head)"),
         (1, {"kernel": "checksum_kernel", "launch": 4 + 0, "argument": 1, "byte": 2 * 384 * 64 + 100, "bit": 0}, "weights in bucket 1 (layer 0)")]


@pytest.mark.parametrize("stage, where, what", FLIPS, ids=lambda value: value["kernel"] if isinstance(value, dict) else str(value))
def test_a_flipped_bit_in_one_rank_ends_the_run_at_the_next_evaluation(train, same_windows, stage, where, what):
    run = train(3, *same_windows, "--zero-stage", str(stage), "--bucket-mb", "0", "--val-every", "2", on_rank_1=fault(**where, do="flip"), ok=False)
    assert "fault planted: " in run.output and "(rank 1)" in run.output, run.output
    assert run.statuses == [1] * 3, run.output
    assert re.findall(r"^error.*?:", run.output, re.MULTILINE) == ["error:"], run.output
    assert f"error: rank 1 does not hold the same {what} as the others: " in run.output, run.output
    assert [record["step"] for record in run.records("train")] == [0, 1] and run.records("val") == []
    assert run.records("event")[-1] == {"kind": "event", "step": 1, "event": "error", "reason": "replicas"}
    assert f"ended after step 2: rank 1 does not hold the same {what}" in (run.out / "log.rank2").read_text()
