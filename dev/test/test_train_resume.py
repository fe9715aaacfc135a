"""Checkpoints: a run that was stopped and goes on is the run that was not, to the bit; on other ranks and in another stage it has the same state and the same data.

The covering part; dev/test/resume_matrix.py runs every combination. What is read is read by checkpoint_testing.py, which knows nothing of the trainer's own reader.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import checkpoint_testing as ct
from train_testing import ROOT, TRAINER, Run, needs_trainer, write_shard

pytestmark = needs_trainer
needs_mpi_test = pytest.mark.skipif(not ct.MPI_TEST.exists(), reason=f"{ct.MPI_TEST.name} is not built; make mpi-tests builds it")


@pytest.fixture(scope="module")
def base(data, tmp_path_factory) -> Run:
    """Ten steps of two ranks in stage 1, saved after steps 4, 8 and 10. Tests copy it before they change anything."""
    return ct.run(tmp_path_factory.mktemp("base") / "run", 2, *ct.run_options(data), "--save-every", "4")


@pytest.fixture
def unfinished(base, tmp_path) -> Path:
    """A run folder that stands at step 4 of 10."""
    shutil.copytree(base.out, tmp_path / "unfinished")
    for name in ("step_00000008", "step_00000010"):
        shutil.rmtree(tmp_path / "unfinished" / name)
    return tmp_path / "unfinished"


def events(run: Run) -> list[str]:
    return [record["event"] for record in run.records("event")]


# ---- the same run -------------------------------------------------------------------------------------------------------------------

# stage, ranks, micro-steps: gradients of four micro-steps are rounded stochastically.
@pytest.mark.parametrize("stage, ranks, accumulation", [(0, 3, 4), (1, 2, 1), (2, 2, 4), (3, 3, 1), (1, 0, 4)])
def test_a_resumed_run_is_the_uninterrupted_one(data, tmp_path, stage, ranks, accumulation):
    ct.check_exact_resume(tmp_path, data, stage, ranks, accumulation)


@pytest.mark.skipif(not ct.FP32_TRAINER.exists(), reason="the FP32 build is not there")
def test_a_resumed_run_in_fp32_is_the_uninterrupted_one(data, tmp_path):
    ct.check_exact_resume(tmp_path, data, 3, 2, 4, ct.FP32_TRAINER)


def test_saving_leaves_training_alone(data, base, tmp_path):
    """By a run that never saves: the others are held against runs that do. Both ways to save write the same bytes, and the newest --keep stay."""
    never = ct.run(tmp_path / "never", 2, *ct.run_options(data), "--no-save")
    later = ct.run(tmp_path / "later", 2, *ct.run_options(data), "--save-every", "2", "--save-mode", "async", "--keep", "2")
    for run in (never, later):
        assert ct.records(run, "train") == ct.records(base, "train") and ct.records(run, "val") == ct.records(base, "val")
        assert ct.weights_hash(run) == ct.weights_hash(base)
    assert not list(never.out.glob("step_*"))
    assert sorted(path.name for path in later.out.glob("*step_*")) == ["step_00000008", "step_00000010"]
    assert events(later).count("save") == 5
    for name in ("step_00000008", "step_00000010"):
        stream, written = ct.tree(base.out / name), ct.tree(later.out / name)
        assert {file for file in stream if stream[file] != written[file]} == {"trainer.json"}  # which holds --save-every and --save-mode
        assert ct.differences(ct.read_checkpoint(base.out / name), ct.read_checkpoint(later.out / name)) == []


SCHEDULES = [("cosine", 5, [3, 6], 0), ("linear", 2, [6], 2), ("wsd", 2, [9], 0)]  # warm-up of so many steps, resumed after these, on so many ranks


@pytest.mark.parametrize("schedule, warmup, resumed_at, ranks", SCHEDULES, ids=[case[0] for case in SCHEDULES])
def test_resumed_in_a_later_epoch_in_the_midst_of_every_schedule(data, tmp_path, schedule, warmup, resumed_at, ranks):
    """An epoch is 13 windows, a step 8 in four micro-steps of one rank or two of two: steps run over the ends of epochs."""
    write_shard(tmp_path / "train_000.bin", list((data / "train_000.bin").read_bytes()[2000:2000 + 13 * 32 + 5]))
    whole = ct.run(tmp_path / "whole", ranks, *ct.run_options(data), "--train-data", f"{tmp_path}/train_*.bin", "--total-batch", str(8 * 32), "--schedule", schedule,
                   "--warmup", str(warmup), "--save-every", "3", "--keep", "9")
    rates = [record["lr"] for record in whole.records("train")]
    for step in resumed_at:
        epoch = whole.records("train")[step - 1]["epoch"]
        assert epoch == pytest.approx(8 * step / 13, rel=1e-12) and epoch > 1 and epoch % 1 != 0
        assert rates[step] not in (rates[step - 1], 3e-3)  # on the way up or down
        ct.assert_continued(whole, ct.run(tmp_path / f"again{step}", ranks, "--resume", str(whole.out / f"step_{step:08d}")), step)


def test_a_run_goes_on_in_its_own_folder(base, tmp_path):
    """From a checkpoint that is not the newest: newer ones are set aside, metrics go on behind what is there, and of two lines of a step the last one holds."""
    out = tmp_path / "run"
    shutil.copytree(base.out, out)
    newer = {name: ct.tree(out / name) for name in ("step_00000008", "step_00000010")}
    again = ct.run(out, 2, "--resume", str(out / "step_00000004"))
    assert {name: ct.tree(out / "earlier.1" / name) for name in newer} == newer
    assert sorted(path.name for path in out.glob("step_*")) == ["step_00000004", *newer]
    ct.assert_continued(base, again, 4)
    assert ct.records(again, "train") == ct.records(base, "train") and ct.records(again, "val") == ct.records(base, "val")
    assert [record["step"] for record in again.records("train")] == [*range(10), *range(4, 10)]
    assert events(again) == ["start", "save", "save", "save", "done", "start", "resume", "save", "save", "done"]


# ---- other ranks, other stages --------------------------------------------------------------------------------------------------------


@needs_mpi_test
def test_other_ranks_stages_and_buckets_hold_the_same_state(base, tmp_path):
    ct.check_copies(tmp_path, base.out / "step_00000010", [(4, 0, 0.0, "stream"), (2, 3, 25.0, "async"), (1, 1, 0.05, "stream"), (3, 2, 0.0, "stream"), (4, 0, 25.0, "async")])


@needs_mpi_test
def test_random_bits_survive_other_ranks_and_stages(tmp_path):
    ct.check_random_bits(tmp_path / "a", (4, 0, 0.0, "async"), (3, 3, 25.0))
    ct.check_random_bits(tmp_path / "b", (3, 2, 25.0, "stream"), (2, 1, 0.02))


def test_a_run_on_changing_ranks_sees_the_same_windows(data, tmp_path):
    ct.check_changed_ranks(tmp_path, data, [(4, 0), (2, 3), (1, 1), (3, 2), (4, 0)])


def test_a_difference_is_found(base, tmp_path):
    """The comparisons of this file can fail: one bit of one moment, an element twice, an element nowhere."""
    first = ct.read_checkpoint(base.out / "step_00000010")
    assert ct.differences(first, first) == []
    name = "model.norm.weight.exp_avg_sq"
    changed = first.state[name].copy()
    changed[7] ^= 1
    assert ct.differences(first, first._replace(state={**first.state, name: changed})) == [f"{name}: 1 of 64 elements"]
    whole = np.arange(10, dtype=np.uint32)
    assert np.array_equal(ct.merge_pieces("x", [(4, whole[4:]), (0, whole[:4])], 10), whole)
    for pieces, what in (([(0, whole[:4]), (5, whole[5:])], "missing"), ([(0, whole[:5]), (4, whole[4:])], "there twice"), ([(0, whole[:9])], "9 elements of 10")):
        with pytest.raises(AssertionError, match=what):
            ct.merge_pieces("x", pieces, 10)


# ---- what may change and what may not -----------------------------------------------------------------------------------------------------

CHANGES = [("lr", ["--lr", "0.002"]), ("total-batch", ["--total-batch", "256"]), ("steps", ["--steps", "12"]), ("seq-len", ["--seq-len", "16"]), ("num-layers", ["--num-layers", "3"]),
           ("seed", ["--seed", "2"]), ("train-data", [])]


@pytest.mark.parametrize("name, options", CHANGES, ids=[name for name, _ in CHANGES])
def test_another_run_is_refused(data, unfinished, tmp_path, name, options):
    if name == "train-data":
        shutil.copyfile(data / "val_000.bin", tmp_path / "train_000.bin")
        options = ["--train-data", f"{tmp_path}/train_*.bin"]
    if name != "total-batch":  # which two ranks made
        options = [*options, "--total-batch", "128"]
    before = ct.tree(unfinished)
    run = ct.run(unfinished, 2 if name == "seed" else 0, "--resume", "auto", *options, ok=False)
    assert run.status == 2, run.output
    assert re.search(rf"^  {name} was .*, now .*$", run.output, re.MULTILINE), run.output
    assert run.output.count("error: ") == 1
    assert ("another shape" if name == "num-layers" else f"--allow-change {name}") in run.output, run.output
    assert ct.tree(unfinished) == before


def test_changes_by_leave(base, unfinished):
    run = ct.run(unfinished, 2, "--resume", "auto", "--steps", "12", "--total-batch", "512", "--allow-change", "steps,total-batch")
    assert "steps was 10, now 12" in run.output and "total-batch was 128, now 512" in run.output, run.output
    assert re.search(r"square-root rule would suggest --lr 0\.006\b", run.output), run.output  # 0.003 x sqrt(512 / 128)
    steps = ct.records(run, "train")
    assert sorted(steps) == list(range(12))
    assert [steps[step][3] for step in range(12)] == [128 * min(step + 1, 4) + 512 * max(0, step - 3) for step in range(12)]
    last = ct.read_checkpoint(ct.last_checkpoint(unfinished))
    assert (last.info["step"], last.info["steps"], last.info["windows_consumed"]) == (12, 12, 4 * 4 + 8 * 16)
    assert steps[4][0] != ct.records(base, "train")[4][0]  # more windows of the same order


def test_a_run_at_its_end_is_left_alone(base, tmp_path):
    shutil.copytree(base.out, tmp_path / "run")
    before = ct.tree(tmp_path / "run")
    run = ct.run(tmp_path / "run", 2, "--resume", "auto")
    assert "nothing to do" in run.output and "--allow-change steps" in run.output
    assert ct.tree(tmp_path / "run") == before


def test_a_new_run_does_not_bury_one(data, base, unfinished, tmp_path):
    """An unfinished one is kept as it is; the checkpoints of a finished one are moved."""
    before = ct.tree(unfinished)
    refused = ct.run(unfinished, 2, *ct.run_options(data), ok=False)
    assert refused.status == 1 and "step 4 of 10" in refused.output and "--resume auto" in refused.output, refused.output
    assert ct.tree(unfinished) == before
    out = tmp_path / "run"
    shutil.copytree(base.out, out)
    earlier = {path.name: ct.tree(path) for path in out.glob("step_*")}
    again = ct.run(out, 2, *ct.run_options(data))
    assert {path.name: ct.tree(path) for path in (out / "earlier.1").iterdir()} == earlier
    assert [path.name for path in out.glob("step_*")] == ["step_00000010"]
    assert ct.weights_hash(again) == ct.weights_hash(base)


def test_a_checkpoint_of_another_folder_does_not_bury_a_run(base, unfinished, tmp_path):
    """What is in --out is of another run then, also what is older than the checkpoint: --keep must not count it."""
    elsewhere, before = str(base.out / "step_00000008"), ct.tree(unfinished)
    refused = ct.run(unfinished, 2, "--resume", elsewhere, "--keep", "1", ok=False)
    assert refused.status == 1 and "step 4 of 10" in refused.output, refused.output
    assert ct.tree(unfinished) == before
    out = tmp_path / "run"
    shutil.copytree(base.out, out)
    earlier, metrics = {path.name: ct.tree(path) for path in out.glob("step_*")}, (out / "metrics.jsonl").read_bytes()
    again = ct.run(out, 2, "--resume", elsewhere, "--keep", "1")
    assert {path.name: ct.tree(path) for path in (out / "earlier.1").iterdir()} == earlier and (out / "metrics.1.jsonl").read_bytes() == metrics
    assert [path.name for path in out.glob("step_*")] == ["step_00000010"] and events(again) == ["start", "resume", "save", "done"]
    assert ct.weights_hash(again) == ct.weights_hash(base)


def test_resume_auto_begins_anew_where_there_is_nothing(data, base, tmp_path):
    run = ct.run(tmp_path / "run", 2, "--resume", "auto", *ct.run_options(data))
    assert ct.records(run, "train") == ct.records(base, "train") and events(run) == ["start", "save", "done"]


# ---- when it is saved -----------------------------------------------------------------------------------------------------------------


def test_saved_by_time_on_all_ranks_at_the_same_step(data, base, tmp_path):
    """So short a time is over after every step; rank 0's clock decides."""
    run = ct.run(tmp_path / "run", 2, *ct.run_options(data), "--save-minutes", "0.000001", "--keep", "99")
    assert ct.records(run, "train") == ct.records(base, "train")
    saved = sorted(run.out.glob("step_*"))
    assert len(saved) > 3 and events(run).count("save") == len(saved)
    assert (run.out / "log.rank1").read_text().count("validation loss") == 3
    for folder in saved:
        info = ct.read_checkpoint(folder).info
        assert folder.name == f"step_{info['step']:08d}" and info["windows_consumed"] == 4 * info["step"]
    for name in ("step_00000004", "step_00000008"):
        if (run.out / name).exists():
            assert ct.differences(ct.read_checkpoint(run.out / name), ct.read_checkpoint(base.out / name)) == []


def read_until(pipe: int, text: bytes, seconds: float = 60) -> bytes:
    got = b""
    deadline = time.monotonic() + seconds
    while text not in got:
        assert time.monotonic() < deadline, got
        if select.select([pipe], [], [], 0.1)[0]:
            got += os.read(pipe, 4096)
            if not got:
                time.sleep(0.01)  # nobody has opened the other end yet
    return got


def wait_for_status(pid: int, line: str, seconds: float = 60) -> None:
    """Until /proc/PID/status has a line like that."""
    deadline = time.monotonic() + seconds
    while not re.search(line, status := Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
        assert time.monotonic() < deadline, status
        time.sleep(0.01)


def test_sigusr1_saves_and_ends_and_the_run_goes_on(data, tmp_path):
    """To mpirun, which hands it to all ranks. Rank 1 writes its log into a pipe that holds some 30 steps, so the run cannot end before the signal is there; and rank 1 stands still
    until the signal waits for it, so it comes in the midst of the run."""
    options = [*ct.run_options(data), "--steps", "120", "--val-every", "0"]
    out = tmp_path / "stopped"
    out.mkdir()
    os.mkfifo(out / "log.rank1")
    pipe = os.open(out / "log.rank1", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    with (tmp_path / "output").open("wb") as output_file:
        process = subprocess.Popen(["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", "2", str(TRAINER), "--out", str(out), *options], cwd=ROOT,
                                   stdin=subprocess.DEVNULL, stdout=output_file, stderr=subprocess.STDOUT)
    try:
        rank_1 = int(re.search(rb"rank 1 .*, pid (\d+),", read_until(pipe, b"\nstep 2/120 ")).group(1))
        os.kill(rank_1, signal.SIGSTOP)
        wait_for_status(rank_1, r"^State:\s*T")
        process.send_signal(signal.SIGUSR1)
        wait_for_status(rank_1, rf"^ShdPnd:\s*0*{1 << (signal.SIGUSR1 - 1):x}$")
        os.kill(rank_1, signal.SIGCONT)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if select.select([pipe], [], [], 0.1)[0]:
                os.read(pipe, 1 << 16)
        status = process.wait(timeout=1)
    finally:
        if process.poll() is None:
            process.terminate()  # mpirun takes its ranks down, one that stands still as well
            process.wait(timeout=30)
        os.close(pipe)
    output = (tmp_path / "output").read_text()
    assert status == 0, output
    step = int(re.search(r"^stopped by SIGUSR1 after step (\d+)/120; --resume auto goes on, weights [0-9a-f]{16}$", output, re.MULTILINE).group(1))
    assert [path.name for path in out.glob("*step_*")] == [f"step_{step:08d}"] and 2 <= step < 120
    (out / "log.rank1").unlink()
    again = ct.run(out, 2, "--resume", "auto")
    whole = ct.run(tmp_path / "whole", 2, *options)
    ct.assert_continued(whole, again, 0)
    assert [record["step"] for record in again.records("train")] == list(range(120))


# ---- what others read -------------------------------------------------------------------------------------------------------------------

REFERENCE = ROOT / "dev/reference"
FIELDS = ("architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "max_position_embeddings",
          "rms_norm_eps", "rope_theta", "tie_word_embeddings", "hidden_act")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_weights_are_those_of_transformers(data, tmp_path, kind):
    """Names and shapes as `transformers` itself wrote them for the same config.json; values are the master weights rounded (read_checkpoint)."""
    config = REFERENCE / kind / "config.json"
    options = ["--from-config", str(config), "--seq-len", "32", "--micro-batch", "2", "--steps", "2", "--warmup", "0", "--val-every", "0", "--val-batches", "1", "--sample-every", "0",
               "--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin"]
    saved = ct.read_checkpoint(ct.last_checkpoint(ct.run(tmp_path / "run", 0, *options).out))
    _, reference = ct.read_weights(REFERENCE / kind)
    assert {name: bits.shape for name, bits in saved.weights.items()} == {name: bits.shape for name, bits in reference.items()}
    assert saved.dtype == "BF16"
    expected = json.loads(config.read_text())
    assert {field: saved.config[field] for field in FIELDS} == {field: expected[field] for field in FIELDS}
    assert saved.config.get("head_dim", expected["hidden_size"] // expected["num_attention_heads"]) == expected.get("head_dim", expected["hidden_size"] // expected["num_attention_heads"])
    assert saved.config.get("torch_dtype", saved.config.get("dtype")) == "bfloat16"
    scaling = saved.config.get("rope_scaling")
    assert (scaling and {name: scaling[name] for name in expected["rope_scaling"]}) == expected["rope_scaling"]
