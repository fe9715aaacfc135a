"""Checkpoints as others read them, for test_train_resume.py and resume_matrix.py: with the safetensors package and numpy, none of the trainer's own code.

Optimizer state is merged over the files of all ranks by name and offset; everything is compared as bits, so that NaN and -0 count. Also what both need to run: a run that is
stopped and goes on, beside one that was not.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import safetensors

from train_testing import ROOT, SMALL, TRAINER, Run, mpirun

MPI_TEST = ROOT / "build/cpu-BF16/dev/test/mpi_test_checkpoint"
FP32_TRAINER = ROOT / "build/cpu-FP32/train_gpt"
ARRAYS = ("master", "exp_avg", "exp_avg_sq")
BITS = {"BF16": np.dtype("<u2"), "F32": np.dtype("<u4")}

# ---- reading ------------------------------------------------------------------------------------------------------------------------


class Checkpoint(NamedTuple):
    folder: Path
    info: dict                      # trainer.json
    config: dict                    # config.json
    dtype: str                      # of the weights: BF16 or F32
    weights: dict[str, np.ndarray]  # bits, in the tensor's shape
    state: dict[str, np.ndarray]    # bits of NAME.master, NAME.exp_avg, NAME.exp_avg_sq, whole, of one dimension

    def step(self) -> int:
        return self.info["step"]


def read_tensors(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Name to type and bits of a safetensors file."""
    return {name: (tensor["dtype"], np.frombuffer(tensor["data"], BITS[tensor["dtype"]]).reshape(tensor["shape"])) for name, tensor in safetensors.deserialize(path.read_bytes())}


def read_weights(folder: Path) -> tuple[str, dict[str, np.ndarray]]:
    """model.safetensors, or the files that the index names: each tensor is where the index says it is, and nowhere else."""
    index_path = folder / "model.safetensors.index.json"
    files = sorted(path.name for path in folder.glob("model*.safetensors"))
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for name in files:
        found = read_tensors(folder / name)
        assert not set(found) & set(tensors), f"{folder}: tensors that are in two files: {set(found) & set(tensors)}"
        with safetensors.safe_open(folder / name, framework="np") as file:  # transformers refuses a file without
            assert file.metadata() == {"format": "pt"}, name
        if index_path.exists():
            index = json.loads(index_path.read_text(encoding="utf-8"))
            assert set(found) == {tensor for tensor, file in index["weight_map"].items() if file == name}, name
        tensors.update(found)
    if index_path.exists():
        assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))] and len(files) > 1
        assert set(index["weight_map"]) == set(tensors)
        assert index["metadata"]["total_size"] == sum(bits.nbytes for _, bits in tensors.values())
    else:
        assert files == ["model.safetensors"]
    (dtype,) = {dtype for dtype, _ in tensors.values()}
    return dtype, {name: bits for name, (_, bits) in tensors.items()}


def merge_pieces(name: str, pieces: list[tuple[int, np.ndarray]], count: int) -> np.ndarray:
    """Every element once: none is missing, none is there twice."""
    at = 0
    for first, piece in sorted(pieces, key=lambda piece: piece[0]):
        assert first == at, f"{name}: elements {min(first, at)} to {max(first, at)} are {'missing' if first > at else 'there twice'}"
        at += piece.size
    assert at == count, f"{name}: {at} elements of {count}"
    return np.concatenate([piece for _, piece in sorted(pieces, key=lambda piece: piece[0])])


def read_state(folder: Path, ranks: int, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    assert sorted(path.name for path in folder.glob("optimizer*")) == [f"optimizer-{rank:05d}-of-{ranks:05d}.safetensors" for rank in range(ranks)]
    pieces: dict[str, list[tuple[int, np.ndarray]]] = defaultdict(list)
    for path in folder.glob("optimizer-*.safetensors"):
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata()
        for name, (dtype, bits) in read_tensors(path).items():
            parameter, _, array = name.rpartition(".")
            assert array in ARRAYS and parameter in weights and dtype == "F32" and bits.ndim == 1, (path, name, dtype, bits.shape)
            pieces[name].append((int(metadata[f"offset:{parameter}"]), bits))
    assert set(pieces) == {f"{name}.{array}" for name in weights for array in ARRAYS}
    return {name: merge_pieces(name, parts, weights[name.rpartition(".")[0]].size) for name, parts in pieces.items()}


def rounded_to_bf16(bits: np.ndarray) -> np.ndarray:
    """Of finite fp32 numbers, to nearest, ties to even."""
    return ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads all of it, and checks what must hold in every checkpoint of a trainer."""
    info = json.loads((folder / "trainer.json").read_text(encoding="utf-8"))
    assert info["format"] == "llm.zero checkpoint" and info["version"] == 1
    assert {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "trainer.json"} == {name: file["bytes"] for name, file in info["files"].items()}
    dtype, weights = read_weights(folder)
    assert dtype == {"bf16": "BF16", "fp32": "F32"}[info["precision"]]
    state = read_state(folder, info["ranks"], weights)
    for name, bits in weights.items():
        master = state[f"{name}.master"]
        assert np.array_equal(bits.ravel(), rounded_to_bf16(master) if dtype == "BF16" else master), f"{folder}: {name} is not its master weights rounded"
        assert not np.any(state[f"{name}.exp_avg_sq"] >> 31), f"{folder}: {name} has a second moment below 0"
    return Checkpoint(folder, info, json.loads((folder / "config.json").read_text(encoding="utf-8")), dtype, weights, state)


# What trainer.json says of the run, and not of who wrote it or of the options of a start.
PROGRESS = ("step", "steps", "tokens", "windows_consumed", "data_fingerprint", "precision", "applied_steps", "skipped_total", "skipped_in_row")


def differences(a: Checkpoint, b: Checkpoint) -> list[str]:
    """What the two do not share to the bit, whoever wrote them: empty where they are one state."""
    found = [f"{field}: {a.info[field]} and {b.info[field]}" for field in PROGRESS if a.info[field] != b.info[field]]
    found += [f"config.json: {a.config} and {b.config}"] if a.config != b.config else []
    for one, other in ((a.weights, b.weights), (a.state, b.state)):
        found += [f"{name} is in one only" for name in sorted(set(one) ^ set(other))]
        for name in sorted(set(one) & set(other)):
            if one[name].shape != other[name].shape:
                found.append(f"{name}: shapes {one[name].shape} and {other[name].shape}")
            elif not np.array_equal(one[name], other[name]):
                found.append(f"{name}: {np.count_nonzero(one[name] != other[name])} of {one[name].size} elements")
    return found


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder by its bytes, and every other entry by its kind; the lock of a run left out."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
            for path in sorted(folder.rglob("*")) if path.name != ".lock"}


# ---- runs ---------------------------------------------------------------------------------------------------------------------------


def run(out: Path, ranks: int, *options: str, trainer: Path = TRAINER, ok: bool = True, timeout: float = 120) -> Run:
    """The trainer with these options and no others. ranks 0 = without mpirun."""
    status, output = mpirun(ranks, [str(trainer), "--out", str(out), *options], timeout=timeout)
    if ok:
        assert status == 0, output
    return Run(status, output, out, [])


def run_options(data: Path) -> list[str]:
    """SMALL over the data, ten steps, evaluations after steps 4, 8 and 10."""
    return [*SMALL, "--steps", "10", "--val-every", "4", "--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin"]


def records(run: Run, kind: str, first_step: int = 0) -> dict[int, tuple]:
    """Everything of a run's metrics that does not depend on the clock, by step; the last line of a step wins. Of a train record: loss, norm, rate, tokens, epoch, skipped."""
    fields = {"train": ("loss", "grad_norm", "lr", "tokens", "epoch", "skipped", "comm_bytes"), "val": ("val_loss", "val_tokens")}[kind]
    return {record["step"]: tuple(record[field] for field in fields) for record in run.records(kind) if record["step"] >= first_step}


def last_checkpoint(out: Path) -> Path:
    return sorted(out.glob("step_*"))[-1]


def weights_hash(run: Run) -> str:
    return run.records("event")[-1]["weights"]


def assert_continued(whole: Run, again: Run, step: int) -> None:
    """`again`, which went on after `step` steps, did what `whole` did from there on, and left what it left, to the bit."""
    for kind in ("train", "val"):
        expected, found = records(whole, kind, step), records(again, kind, step)
        assert expected and found == expected, f"{kind} from step {step} on: {found} in {again.out}, {expected} in {whole.out}, which printed\n{whole.output}"
    assert weights_hash(whole) == weights_hash(again)
    ends = [read_checkpoint(last_checkpoint(run.out)) for run in (whole, again)]
    assert differences(*ends) == []
    same_writer = all(ends[0].info[field] == ends[1].info[field] for field in ("ranks", "zero_stage"))
    assert not same_writer or ends[0].info["files"] == ends[1].info["files"]  # the very same files


def check_exact_resume(folder: Path, data: Path, stage: int, ranks: int, accumulation: int, trainer: Path = TRAINER, *options: str) -> None:
    """Ten steps, beside the last five of them from the checkpoint after the fifth, resumed with nothing said but where from and where to."""
    total = str(2 * 32 * max(ranks, 1) * accumulation)
    whole = run(folder / "whole", ranks, *run_options(data), "--zero-stage", str(stage), "--total-batch", total, "--save-every", "5", *options, trainer=trainer)
    again = run(folder / "again", ranks, "--resume", str(whole.out / "step_00000005"), trainer=trainer)
    assert_continued(whole, again, 5)
    steps = records(whole, "train")
    assert sorted(steps) == list(range(10)) and len({step[:2] for step in steps.values()}) == 10  # there is something to compare
    assert differences(read_checkpoint(whole.out / "step_00000005"), read_checkpoint(whole.out / "step_00000010"))


# ---- other ranks and stages -----------------------------------------------------------------------------------------------------------


def copy_checkpoint(checkpoint: Path, out: Path, ranks: int, stage: int, bucket_mb: float, save_mode: str = "stream") -> Path:
    """Loaded by so many ranks in that stage, and saved again at the same step."""
    status, output = mpirun(ranks, [str(MPI_TEST), "copy", str(checkpoint), str(out), str(stage), str(bucket_mb), save_mode])
    assert status == 0, output
    return out / checkpoint.name


def check_copies(folder: Path, checkpoint: Path, chain: list[tuple[int, int, float, str]]) -> None:
    """From copy to copy over other ranks, stages, buckets and ways to save: each holds what the first one does."""
    first = read_checkpoint(checkpoint)
    for i, (ranks, stage, bucket_mb, save_mode) in enumerate(chain):
        checkpoint = copy_checkpoint(checkpoint, folder / f"copy{i}", ranks, stage, bucket_mb, save_mode)
        copy = read_checkpoint(checkpoint)
        assert (copy.info["ranks"], copy.info["zero_stage"]) == (ranks, stage)
        assert len(list(checkpoint.glob("model-*"))) > 1  # in several files
        assert differences(first, copy) == [], chain[:i + 1]


def check_random_bits(folder: Path, writer: tuple[int, int, float, str], reader: tuple[int, int, float]) -> None:
    """Bits that no training gives, written by so many ranks in one stage and read by others in another."""
    ranks, *words = writer
    status, output = mpirun(ranks, [str(MPI_TEST), "write", str(folder), *map(str, words)])
    assert status == 0, output
    ranks, *words = reader
    status, output = mpirun(ranks, [str(MPI_TEST), "check", str(folder), *map(str, words)])
    assert status == 0 and re.search(r"^6 passed, 0 failed$", output, re.MULTILINE), output


TWELVE_WINDOWS = ["--micro-batch", "1", "--total-batch", str(12 * 32)]  # a step of 1, 2, 3 and 4 ranks


def check_changed_ranks(folder: Path, data: Path, chain: list[tuple[int, int]], trainer: Path = TRAINER, *options: str) -> None:
    """A run that goes on after every second step with other ranks in another stage. Each of its parts is held against the one before, which went on to the end as well."""
    (ranks, stage), *rest = chain
    before = run(folder / "0", ranks, *run_options(data), *TWELVE_WINDOWS, "--zero-stage", str(stage), "--save-every", "2", "--keep", "9", *options, trainer=trainer)
    for i, (ranks, stage) in enumerate(rest):
        step = 2 * (i + 1)
        start = read_checkpoint(before.out / f"step_{step:08d}")
        after = run(folder / str(i + 1), ranks, "--resume", str(start.folder), "--zero-stage", str(stage), trainer=trainer)
        assert_close(before, after, start)
        for saved in after.out.glob("step_*"):
            info = json.loads((saved / "trainer.json").read_text(encoding="utf-8"))
            assert (info["ranks"], info["zero_stage"], info["windows_consumed"], info["tokens"]) == (ranks, stage, 12 * info["step"], 12 * 32 * info["step"])
        before = after


def assert_close(before: Run, after: Run, start: Checkpoint) -> None:
    """Two runs from one checkpoint whose sums of 12 micro-batches are made in another order."""
    first = start.step()
    expected, found = records(before, "train", first), records(after, "train")
    assert sorted(found) == sorted(expected) == list(range(first, 10))
    # A sum of 12 micro-batches meets at most 11 roundings, over micro-steps and over ranks, each stochastic: up to twice the roundoff.
    gradient_error = 11 * (2.0 ** -7 if start.dtype == "BF16" else 2.0 ** -23)
    # No element moves by more than this share of the learning rate in a step (Cauchy-Schwarz on the moments' sums with the default beta1 and beta2), decay aside; an update is taken to
    # be off by as large a share as the gradient is, and moves the loss by at most its length times the gradient's.
    longest = 0.1 / math.sqrt(0.05 * (1 - 0.9 ** 2 / 0.95)) * math.sqrt(sum(bits.size for bits in start.weights.values()))
    moved = 0.0
    for step in sorted(found):
        (loss, norm, lr, tokens, epoch, skipped, _), (loss_before, norm_before, lr_before, *counts, _) = found[step], expected[step]
        assert (lr, [tokens, epoch, skipped]) == (lr_before, counts), step
        # The same windows from the same weights: the same fp32 losses, summed in double in another order.
        assert loss == pytest.approx(loss_before, rel=1e-6, abs=moved), (step, loss, loss_before, moved)
        if step == first:
            assert norm == pytest.approx(norm_before, rel=gradient_error), (step, norm, norm_before)
        moved += lr * longest * gradient_error * norm
