"""The trainer as a user starts it: real mpirun, real files, every refusal, and the same bits wherever they are promised.

LLMZERO_TRAINER names another binary (default ./train_gpt). Every run has a hard time-out; a hang is a failure.
"""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, Optional

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAINER = Path(os.environ.get("LLMZERO_TRAINER", ROOT / "train_gpt")).resolve()
TIMEOUT_SECONDS = 120
SMALL = ["--num-layers", "2", "--channels", "64", "--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "16", "--ffn-dim", "128",
         "--seq-len", "32", "--micro-batch", "2", "--steps", "6", "--warmup", "2", "--val-every", "0", "--val-batches", "4", "--sample-every", "0"]

pytestmark = pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt is not built; run make train_gpt first")


class Run(NamedTuple):
    status: int
    output: str
    seconds: float
    out: Path

    def records(self, kind: str) -> list[dict]:
        lines = (self.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def bits(self) -> tuple:
        """Everything two runs that promise the same bits must share."""
        steps = [(r["loss"], r["grad_norm"], r["lr"]) for r in self.records("train")]
        return steps, [(r["val_loss"], r["val_tokens"]) for r in self.records("val")], self.records("event")[-1]["weights"]


def mpirun(ranks: int, command: list[str], environment: Optional[dict[str, str]] = None, cwd: Path = ROOT, timeout: float = TIMEOUT_SECONDS) -> tuple[int, str, float]:
    if ranks > 0:
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command = ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command]
    start = time.monotonic()
    # After a rank that failed mpirun waits a second after each signal to the others, also when all are gone; here that would be minutes.
    waiting = {"OMPI_MCA_odls_base_sigkill_timeout": "0"}
    process = subprocess.Popen(command, cwd=cwd, env={**os.environ, **waiting, **(environment or {})}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # mpirun takes its ranks down
        output, _ = process.communicate(timeout=20)
        pytest.fail(f"no end after {timeout} s: {' '.join(command)}\n{output.decode(errors='replace')}")
    return process.returncode, output.decode(errors="replace"), time.monotonic() - start


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of this repository's own sources, bytes as tokens."""
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, str(ROOT / "dev/data/prepare.py"), str(ROOT / "llmc"), str(ROOT / "train_gpt.cu"), "--val-fraction", "0.1", "--out", str(folder)],
                   check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture
def train(data: Path, tmp_path: Path):
    """train(ranks, *options): one run in a folder of its own. ranks 0 = without mpirun."""
    count = 0

    def start(ranks: int, *options: str, environment: Optional[dict[str, str]] = None, timeout: float = TIMEOUT_SECONDS, ok: bool = True) -> Run:
        nonlocal count
        count += 1
        out = tmp_path / f"run{count}"
        common = ["--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin", "--out", str(out), *SMALL]
        status, output, seconds = mpirun(ranks, [str(TRAINER), *common, *options], environment, timeout=timeout)
        if ok:
            assert status == 0, output
        return Run(status, output, seconds, out)

    return start


# ---- the same bits ----------------------------------------------------------------------------------------------------------------

def test_stages_and_overlap_give_the_same_bits(train):
    expected = train(3, "--zero-stage", "1").bits()
    assert len(expected[0]) == 6 and expected[0][-1][0] < expected[0][0][0]
    for options in (["--zero-stage", "0"], ["--zero-stage", "2"], ["--no-overlap"], ["--zero-stage", "2", "--no-overlap"], ["--bucket-mb", "25", "--zero-stage", "2"]):
        assert train(3, *options).bits() == expected, options
    assert train(3, "--seed", "2").bits() != expected  # the comparison can fail


def test_stage_0_equals_stage_1_with_accumulation(train):
    expected = train(2, "--total-batch", "512", "--zero-stage", "0").bits()
    assert train(2, "--total-batch", "512", "--zero-stage", "1").bits() == expected
    assert train(2, "--total-batch", "512", "--zero-stage", "1", "--sync-every-micro-step").bits() == train(2, "--total-batch", "512", "--zero-stage", "2").bits()


@pytest.mark.parametrize("environment", [{"HOSTCUDA_ASYNC": "1", "HOSTCUDA_ASYNC_SEED": str(seed)} for seed in (1, 2, 3)] + [{"HOSTCUDA_PROTECT": "1"}] +
                         [{"HOSTCUDA_SCHEDULE": str(seed)} for seed in (1, 2, 3, 4, 5)] + [{"HOSTCUDA_THREADS": "3"}], ids=str)
def test_checking_modes_give_the_same_bits(train, environment):
    options = ["--total-batch", "256", "--zero-stage", "2", "--steps", "3"]
    assert train(2, *options, environment=environment).bits() == train(2, *options).bits()


def test_a_run_repeats_to_the_bit(train):
    assert train(4).bits() == train(4).bits()


# ---- semantics ----------------------------------------------------------------------------------------------------------------

def windows(output: str) -> list[tuple[str, str, str]]:
    return re.findall(r"position (\d+) .*: (\S+) token (\d+)", output)


def test_any_number_of_ranks_sees_the_same_windows(train):
    # 12 windows a step: 1 x 12, 2 x 6, 3 x 4 and 4 x 3 micro-batches of one.
    seen = {ranks: train(ranks, "--micro-batch", "1", "--total-batch", str(12 * 32), "--show-batch", "7").output for ranks in (1, 2, 3, 4)}
    expected = windows(seen[1])
    assert len(expected) == 12 and len(set(expected)) == 12
    for ranks, output in seen.items():
        assert windows(output) == expected, ranks
        for rank in range(ranks):
            assert len(re.findall(rf"rank {rank} micro-step", output)) == 12 // ranks


def test_first_loss_and_validation_do_not_depend_on_the_ranks(train):
    runs = [train(ranks, "--micro-batch", "1", "--total-batch", str(12 * 32), "--lr", "0", "--steps", "1", "--warmup", "0", "--val-batches", "7") for ranks in (1, 2, 3, 4)]
    for run in runs:
        # Sums of the same fp32 losses in double, in another order.
        assert run.records("train")[0]["loss"] == pytest.approx(runs[0].records("train")[0]["loss"], rel=1e-6)
        assert run.records("val")[0]["val_tokens"] == 7 * 32
        assert run.records("val")[0]["val_loss"] == pytest.approx(runs[0].records("val")[0]["val_loss"], rel=1e-12)


def test_metrics_count_tokens_of_all_ranks(train):
    run = train(2, "--total-batch", "256")
    steps = run.records("train")
    assert [record["step"] for record in steps] == list(range(6))
    assert [record["tokens"] for record in steps] == [256 * (step + 1) for step in range(6)]
    for record in steps:
        assert record["tokens_per_s"] == pytest.approx(256 / (record["step_ms"] * 1e-3), rel=1e-5)
        for field in ("epoch", "grad_norm", "mfu_measured", "mem_bytes", "data_ms", "exposed_comm_ms", "skipped"):
            assert field in record
        phases = [record[field] for field in ("forward_ms", "head_ms", "backward_ms", "update_ms")]
        assert min(phases) > 0 and sum(phases) <= record["step_ms"] + 1e-3
    assert steps[0]["lr"] == pytest.approx(steps[1]["lr"] / 2)
    assert (run.out / "log.rank1").read_text().count("step ") >= 6


def test_every_step_is_reported_once_also_around_evaluations(train):
    run = train(2, "--val-every", "2", "--sample-every", "3", "--sample-tokens", "2")
    assert [record["step"] for record in run.records("train")] == list(range(6))
    assert [record["step"] for record in run.records("val")] == [1, 3, 5]
    assert len(re.findall(r"^step \d+/6 \| loss", run.output, re.MULTILINE)) == 6
    assert len(re.findall(r"^step [36]/6 \| sample", run.output, re.MULTILINE)) == 2
    # Evaluating and sampling leave training alone.
    assert run.bits()[0] == train(2).bits()[0] and run.bits()[2] == train(2).bits()[2]


def test_clipping_changes_the_update_and_not_the_logged_norm(train):
    clipped, free = train(1, "--clip", "0.001"), train(1, "--clip", "0")
    assert clipped.records("train")[0]["grad_norm"] == free.records("train")[0]["grad_norm"] > 0.001
    assert clipped.bits()[2] != free.bits()[2]


def test_a_prompt_is_masked_and_a_rank_without_targets_is_no_harm(train, tmp_path):
    """Half of the windows hold prompts only: the loss is the mean over the answers, whoever holds them."""
    (tmp_path / "dialogue.jsonl").write_text("".join(json.dumps({"prompt": f"{i:04d}" + "q" * 296, "answer": "abcdefgh" * 3}) + "\n" for i in range(400)))
    folder = tmp_path / "dialogue"
    subprocess.run([sys.executable, str(ROOT / "dev/data/prepare.py"), str(tmp_path / "dialogue.jsonl"), "--val-fraction", "0.1", "--out", str(folder)], check=True, stdout=subprocess.DEVNULL)
    runs = [train(ranks, "--train-data", f"{folder}/train_*.bin", "--val-data", f"{folder}/val_*.bin", "--micro-batch", "1", "--total-batch", str(12 * 32), "--lr", "0", "--steps", "4")
            for ranks in (1, 4)]
    for one, four in zip(runs[0].records("train"), runs[1].records("train")):
        assert four["loss"] == pytest.approx(one["loss"], rel=1e-6)
        # bf16 sums in another order: 12 roundings of 2^-7 each at most, far above what happens and far below a wrong scale.
        assert four["grad_norm"] == pytest.approx(one["grad_norm"], rel=12 * 2.0 ** -7)


def test_non_finite_gradients_are_skipped_and_end_the_run(train):
    run = train(2, "--lr", "1e3", "--weight-decay", "100", "--clip", "0", "--warmup", "0", "--steps", "40", "--max-skipped", "3", "--beta2", "0", "--eps", "1e-30", ok=False)
    assert run.status == 1
    assert "not finite" in run.output and "--max-skipped 3" in run.output and "--lr" in run.output
    skips = [record for record in run.records("event") if record["event"] == "skip"]
    assert [record["skipped_in_row"] for record in skips][-1] == 4
    assert run.records("event")[-1]["event"] == "error"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_the_cores(train, monkeypatch, ranks):
    cores = len(os.sched_getaffinity(0))
    for name in ("OMP_NUM_THREADS", "HOSTCUDA_THREADS"):
        monkeypatch.delenv(name, raising=False)
    output = train(ranks, "--steps", "1", "--warmup", "0").output
    assert re.findall(r"rank \d+ .*, (\d+) multiprocessors", output) == [str(max(1, cores // ranks))] * ranks


def test_default_binding_does_not_throttle_threads(data, tmp_path):
    """mpirun without --bind-to ties each of two ranks to a core; one rank must still use all its threads."""
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    status, output, _ = mpirun(0, ["mpirun", *as_root, "-np", "1", str(TRAINER), "--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin", "--out", str(tmp_path / "run"), *SMALL])
    assert status == 0, output
    assert f", {len(os.sched_getaffinity(0))} multiprocessors" in output


def test_sampling_prints_text(train):
    output = train(2, "--sample-every", "6", "--sample-tokens", "5", "--prompt", "int ").output
    assert re.search(r"sample: int .", output)


def test_help_names_every_option_and_its_default(data):
    status, output, _ = mpirun(0, [str(TRAINER), "--help"])
    assert status == 0
    for option in ("--preset", "--zero-stage", "--bucket-mb", "--total-batch", "--clip", "--sync-every-micro-step", "--comm-timeout", "--out", "--plan", "--resume"):
        assert option in output


def test_an_earlier_runs_metrics_are_kept(data, tmp_path):
    command = [str(TRAINER), "--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin", "--out", str(tmp_path / "run"), *SMALL]
    for _ in range(2):
        status, output, _ = mpirun(1, command)
        assert status == 0, output
    first, second = ((tmp_path / "run" / name).read_text().splitlines() for name in ("metrics.1.jsonl", "metrics.jsonl"))
    assert len(first) == len(second) == 8


# ---- bad input: a clear error on all ranks, within seconds, nothing written --------------------------------------------------------

SHARD_HEADER_BYTES = 1024


def write_shard(path: Path, tokens: list[int], magic: int = 20240520, version: int = 1, count: Optional[int] = None) -> None:
    header = struct.pack("<256i", magic, version, len(tokens) if count is None else count, *([0] * 253))
    path.write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))


REFUSED_OPTIONS = [
    (["--train-data", "/nowhere/at_all_*.bin"], 1, ["/nowhere/at_all_*.bin"]),
    (["--val-data", "/nowhere/at_all_*.bin"], 1, ["/nowhere/at_all_*.bin"]),
    (["--total-batch", "200"], 2, ["200", "256"]),
    (["--num-heads", "4", "--num-kv-heads", "3"], 2, ["4", "3"]),
    (["--head-dim", "15"], 2, ["15", "head"]),
    (["--channels", "60"], 2, ["60", "8"]),
    (["--learning-rate", "1"], 2, ["--learning-rate"]),
    (["--zero-stagee", "1"], 2, ["--zero-stagee", "--zero-stage"]),
    (["--lr", "-1"], 2, ["--lr", "-1"]),
    (["--lr", "fast"], 2, ["--lr", "fast"]),
    (["--zero-stage", "4"], 2, ["--zero-stage", "4"]),
    (["--steps", "10", "--epochs", "1"], 2, ["--steps", "--epochs"]),
    (["--schedule", "cosin"], 2, ["cosin", "cosine"]),
    (["--recompute", "all"], 2, ["--recompute", "block"]),
    (["--lmhead-chunks", "3"], 2, ["--lmhead-chunks 3", "64 rows", "2 or 4"]),
    (["--grad-dtype", "fp16"], 2, ["--grad-dtype", "fp32"]),
    (["--plan"], 2, ["--plan"]),
    (["--price", "2.5"], 2, ["--price"]),
    (["--resume", "auto"], 2, ["--resume"]),
    (["--save-every", "5"], 2, ["--save-every"]),
    (["--keep", "2"], 2, ["--keep"]),
    (["--generate"], 2, ["--generate"]),
    (["--profile"], 2, ["--profile"]),
    (["--check-collectives"], 2, ["--check-collectives"]),
    (["--config", "/nowhere/options.toml"], 2, ["/nowhere/options.toml"]),
    (["--from-config", "/nowhere/config.json"], 1, ["/nowhere/config.json"]),
    (["--device-memory", "1MB"], 1, ["device memory", "--device-memory"]),
    (["--total-batch", str(64 * 2 * 10 ** 5)], 1, ["windows"]),
    (["--total-batch", str(64 * 2 * 10 ** 9)], 1, ["host memory", "--total-batch"]),
]


@pytest.mark.parametrize("options, status, words", REFUSED_OPTIONS, ids=lambda value: " ".join(value) if isinstance(value, list) else str(value))
@pytest.mark.parametrize("ranks", [1, 2])
def test_refused_options(train, options, status, words, ranks):
    run = train(ranks, *options, ok=False, timeout=30)
    assert run.status == status, run.output
    for word in words:
        assert word in run.output, run.output
    assert run.output.count("error") <= 3, run.output  # one message, not one a rank
    assert not list(run.out.glob("*.jsonl")) or "--device-memory" in options


def bad_shard(name: str, path: Path) -> list[str]:
    """Writes a broken shard; returns words its error must hold."""
    tokens = [i % 250 for i in range(2000)]
    if name == "magic":
        write_shard(path, tokens, magic=20240521)
        return ["20240521"]
    if name == "version":
        write_shard(path, tokens, version=2)
        return ["version", "2"]
    if name == "width":
        write_shard(path, tokens, magic=20240801, version=7)
        return []
    if name == "count":
        write_shard(path, tokens, count=2001)
        return ["2001"]
    if name == "truncated":
        write_shard(path, tokens)
        path.write_bytes(path.read_bytes()[:-100])
        return ["2000"]
    if name == "short header":
        path.write_bytes(b"\0" * 100)
        return ["100"]
    if name == "folder":
        path.mkdir()
        return []
    if name == "few windows":
        write_shard(path, tokens[:40])
        return ["windows"]
    if name == "only empty":
        write_shard(path, [])
        return []
    if name == "mask size":
        write_shard(path, tokens)
        Path(f"{path}.mask").write_bytes(b"\xff" * 10)
        return ["mask", "10"]
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["magic", "version", "width", "count", "truncated", "short header", "folder", "few windows", "only empty", "mask size"])
def test_broken_shards_are_refused(train, tmp_path, name):
    words = bad_shard(name, tmp_path / "train_000.bin")
    run = train(2, "--train-data", f"{tmp_path}/train_*.bin", ok=False, timeout=30)
    assert run.status == 1, run.output
    for word in [*words, "train_000.bin"] if name not in ("few windows", "only empty") else words:
        assert word in run.output, run.output
    assert not list(run.out.glob("*.jsonl"))


def test_an_id_outside_the_vocabulary_names_file_and_offset(train, tmp_path):
    tokens = [i % 250 for i in range(2000)]
    tokens[1234] = 300
    write_shard(tmp_path / "train_000.bin", tokens)
    run = train(2, "--train-data", f"{tmp_path}/train_*.bin", "--steps", "20", ok=False, timeout=60)
    assert run.status != 0
    for word in ("train_000.bin", "300", "257", str(SHARD_HEADER_BYTES + 2 * 1234)):
        assert word in run.output, run.output


def test_an_empty_shard_is_skipped_with_a_warning(train, tmp_path):
    write_shard(tmp_path / "train_000.bin", [])
    write_shard(tmp_path / "train_001.bin", [i % 250 for i in range(2000)])
    output = train(2, "--train-data", f"{tmp_path}/train_*.bin").output
    assert re.search(r"warning: .*train_000\.bin", output)


def test_an_out_folder_that_cannot_be_written_is_refused(train, tmp_path):
    (tmp_path / "file").write_text("in the way")
    run = train(2, "--out", str(tmp_path / "file" / "run"), ok=False, timeout=30)
    assert run.status == 1 and str(tmp_path / "file") in run.output
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_file_hidden_from_one_rank_ends_all_and_names_it(data, tmp_path):
    """Rank 1 works in a folder where the relative pattern matches nothing."""
    (tmp_path / "empty").mkdir()
    command = f'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then cd {tmp_path}/empty; fi; exec {TRAINER} "$@"'
    options = ["--train-data", "train_*.bin", "--val-data", "val_*.bin", "--out", str(tmp_path / "run"), *SMALL]
    status, output, seconds = mpirun(3, ["sh", "-c", command, "sh", *options], cwd=data, timeout=30)
    assert status == 1 and "rank 1" in output and "train_*.bin" in output, output
    assert not (tmp_path / "run").exists()


def test_ranks_that_see_other_shards_are_refused(data, tmp_path):
    """Rank 1 works in a folder that lacks one of two shards."""
    for folder, shards in (("all", 2), ("some", 1)):
        (tmp_path / folder).mkdir()
        for shard in range(shards):
            write_shard(tmp_path / folder / f"train_{shard}.bin", [i % 250 for i in range(2000)])
    command = f'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then cd {tmp_path}/some; else cd {tmp_path}/all; fi; exec {TRAINER} "$@"'
    options = ["--train-data", "train_*.bin", "--val-data", f"{data}/val_*.bin", "--out", str(tmp_path / "run"), *SMALL]
    status, output, _ = mpirun(3, ["sh", "-c", command, "sh", *options], timeout=30)
    assert status == 1 and "rank 1" in output and "other shards" in output, output
    assert not (tmp_path / "run").exists()


def test_two_runs_cannot_share_a_folder(data, tmp_path):
    command = [str(TRAINER), "--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin", "--out", str(tmp_path / "run"), *SMALL, "--steps", "100000"]
    first = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        status, output, _ = mpirun(0, command, timeout=30)
        assert status == 1 and str(first.pid) in output, output
    finally:
        first.kill()
        first.wait()


def test_a_killed_rank_ends_the_job(data, tmp_path):
    command = [str(TRAINER), "--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin", "--out", str(tmp_path / "run"), *SMALL, "--steps", "100000"]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    process = subprocess.Popen(["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", "2", "sh", "-c",
                                f'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then echo $$ >{tmp_path}/pid; fi; exec "$@"', "sh", *command],
                               cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        assert process.wait(timeout=30) != 0
    finally:
        process.kill()


def test_device_memory_of_the_machine_is_a_limit(train):
    run = train(2, ok=False, environment={"HOSTCUDA_MEMORY": "2MB"}, timeout=30)
    assert run.status == 1 and "out of device memory" in run.output, run.output
