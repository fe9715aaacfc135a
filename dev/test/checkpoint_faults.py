#!/usr/bin/env python3
"""What goes wrong while checkpoints are written and read: kills at any moment, damaged files, full and read-only disks, folders that are none.

    python3 dev/test/checkpoint_faults.py [--only WORD] [--seed N]

runs all of it, about half an hour on two cores; the last line is `N passed, N failed, N skipped`. test_checkpoint_faults.py runs a part of it with smaller numbers.

What must hold: a folder step_... is a whole checkpoint at any moment; the newest one that ever was is there, or a newer one; `--resume auto` with the same command continues to
the same bits; and what is not whole is named and never read.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Optional

import pytest
import xxhash

import train_testing
from run_tests import session_members
from train_testing import ROOT, TRAINER

sys.path.insert(0, str(ROOT / "scripts"))
import plot  # noqa: E402

# A run of one rank starts MPI's own helper process unless it is told not to; that takes longer than the run.
ALONE = {"OMPI_MCA_ess_singleton_isolated": "1"}
TINY = ["--num-layers", "1", "--channels", "16", "--num-heads", "1", "--num-kv-heads", "1", "--head-dim", "16", "--ffn-dim", "16", "--seq-len", "16", "--micro-batch", "1",
        "--warmup", "1", "--val-every", "0", "--val-batches", "1", "--sample-every", "0"]
SMALL = [*train_testing.SMALL, "--total-batch", "128"]  # which one rank and two can share
# 10 million parameters, of which a step of 16 tokens takes less than a save.
LARGE = ["--num-layers", "2", "--channels", "512", "--num-heads", "8", "--num-kv-heads", "2", "--head-dim", "64", "--ffn-dim", "2048", "--seq-len", "16", "--micro-batch", "1",
         "--warmup", "2", "--val-every", "0", "--val-batches", "1", "--sample-every", "0"]


# ---- starting ---------------------------------------------------------------------------------------------------------------------------

class Ended(NamedTuple):
    status: int
    output: str


def command_of(data: Path, out: Path, *options: str) -> list[str]:
    return [str(TRAINER), "--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin", "--out", str(out), *options]


def run(command: list[str], ranks: int = 0, environment: Optional[dict[str, str]] = None, status: Optional[int] = 0, timeout: float = 120) -> Ended:
    """To its end, under a hard time-out. `status` None: any."""
    ended = Ended(*train_testing.mpirun(ranks, command, {**(ALONE if ranks == 0 else {}), **(environment or {})}, timeout=timeout))
    assert status is None or ended.status == status, f"exit status {ended.status}, expected {status}: {' '.join(command)}\n{ended.output}"
    return ended


class Job:
    """A run that is to be killed."""

    def __init__(self, command: list[str], ranks: int, log: Path) -> None:
        self.log = log
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        if ranks > 0:
            command = ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command]
        inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "HOSTCUDA_THREADS")}
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, env={**inherited, "OMPI_MCA_odls_base_sigkill_timeout": "0", **(ALONE if ranks == 0 else {})},
                                            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for_steps(self, steps: int, timeout: float = 120) -> bool:
        """Until that many steps are reported, from this start on; 0: until the ranks are. False if the run ends before."""
        deadline = time.monotonic() + timeout
        while True:
            output = self.output()
            if len(re.findall(r"^step \d+/\d+ \| loss", output, re.MULTILINE)) >= steps and "matrix products" in output:
                return True
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self.kill_all()
                raise AssertionError(f"no {steps} steps after {timeout} s:\n{output}")
            time.sleep(0.001)

    def ranks(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"^  rank \d+ .* pid (\d+),", self.output(), re.MULTILINE)]

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def kill_all(self) -> None:
        while members := session_members(self.process.pid):
            self.kill(members)
        self.process.wait()

    def assert_gone(self, timeout: float = 60) -> None:
        """No process of the run is left, each having ended by itself or through mpirun."""
        deadline = time.monotonic() + timeout
        while members := session_members(self.process.pid):
            self.process.poll()
            if time.monotonic() > deadline:
                self.kill_all()
                raise AssertionError(f"processes {members} are left after {timeout} s:\n{self.output()}")
            time.sleep(0.01)
        self.process.wait()


# ---- judging ----------------------------------------------------------------------------------------------------------------------------

def hash_of(data: bytes) -> str:
    return xxhash.xxh3_64(data).hexdigest()


def checksum_of(info: dict) -> str:
    """Of trainer.json: of the rest as the shortest JSON text with sorted names."""
    rest = {name: value for name, value in info.items() if name != "checksum"}
    return hash_of(json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


def check_checkpoint(folder: Path) -> dict:
    """trainer.json of a folder that is a whole checkpoint; AssertionError where it is none."""
    assert (folder / "trainer.json").is_file(), f"{folder} has no trainer.json"
    info = json.loads((folder / "trainer.json").read_text())
    assert info["checksum"] == checksum_of(info), f"{folder}/trainer.json: wrong checksum"
    assert folder.name == f"step_{info['step']:08d}", (folder, info["step"])
    found = sorted(path.name for path in folder.iterdir())
    assert found == sorted([*info["files"], "trainer.json"]), (folder, found)
    for name, file in info["files"].items():
        data = (folder / name).read_bytes()
        assert (len(data), hash_of(data)) == (file["bytes"], file["xxh3"]), f"{folder}/{name}: not what trainer.json says"
    return info


def whole_checkpoints(out: Path) -> list[int]:
    """Steps of the checkpoints in a run folder, rising. Everything that has the name of one is whole."""
    return [check_checkpoint(folder)["step"] for folder in sorted(out.glob("step_*"))]


def leftovers(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.name.startswith((".saving-", ".removing-")))


def last_complete(out: Path) -> int:
    """The newest step of which metrics.jsonl says that it was saved; 0 if there is none."""
    saved = 0
    if (out / "metrics.jsonl").exists():
        for line in (out / "metrics.jsonl").read_text().splitlines():
            if '"event": "save"' in line and line.endswith("}"):
                saved = max(saved, json.loads(line)["step"] + 1)
    return saved


def assert_same_run(reference: Path, out: Path, checkpoint: bool = True, options_may_differ: bool = False) -> None:
    """Every step once with the same values, the same evaluations, and the same bytes in the last checkpoint."""
    wanted, found = plot.read_run(reference), plot.read_run(out)
    steps = len(wanted.train)
    for read in (wanted, found):
        assert [record["step"] for record in read.train] == list(range(steps)), [record["step"] for record in read.train]
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert [record[name] for record in found.train] == [record[name] for record in wanted.train], name
    assert [(r["step"], r["val_loss"], r["val_tokens"]) for r in found.val] == [(r["step"], r["val_loss"], r["val_tokens"]) for r in wanted.val]
    for line in (out / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    if not checkpoint:
        return
    name = f"step_{steps:08d}"
    assert_same_checkpoint(reference / name, out / name, options_may_differ)


def assert_same_checkpoint(wanted: Path, found: Path, options_may_differ: bool = False) -> None:
    names = sorted(path.name for path in wanted.iterdir())
    assert sorted(path.name for path in found.iterdir()) == names
    for name in names:
        if name == "trainer.json" and options_may_differ:
            infos = [json.loads((folder / name).read_text()) for folder in (wanted, found)]
            assert [{key: value for key, value in info.items() if key not in ("options", "checksum")} for info in infos][0] == \
                   [{key: value for key, value in info.items() if key not in ("options", "checksum")} for info in infos][1]
            continue
        assert (found / name).read_bytes() == (wanted / name).read_bytes(), f"{found / name} has other bytes than {wanted / name}"


def tree_of(folder: Path) -> dict[str, str]:
    """Everything in a folder, by a hash. The lock file says who looked last, and a rank's log may be begun and empty."""
    tree = {}
    for path in sorted(folder.rglob("*")):
        if path.name == ".lock" or (path.name.startswith("log.rank") and path.stat().st_size == 0):
            continue
        kind = "link " + os.readlink(path) if path.is_symlink() else "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        tree[str(path.relative_to(folder))] = kind
    return tree


# ---- kills while training ---------------------------------------------------------------------------------------------------------------

def killed_in_training(data: Path, folder: Path, stage: int, mode: str, kills: int, seed: int, steps: int) -> str:
    """2 ranks, killed again and again: one rank, the whole job, or mpirun alone. The same command continues each time."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    options = [*train_testing.SMALL, "--zero-stage", str(stage), "--bucket-mb", "0", "--steps", str(steps), "--save-every", "2", "--save-mode", mode, "--val-every", "5", "--keep", "2"]
    run(command_of(data, folder / "reference", *options), ranks=2)
    done = chains = 0
    kinds = {"a rank": 0, "the job": 0, "mpirun": 0}
    while done < kills:
        chains += 1
        out = folder / f"run{chains}"
        command = command_of(data, out, *options, "--resume", "auto")
        newest = 0
        while done < kills:
            job = Job(command, 2, folder / "log")
            if not job.wait_for_steps(rng.randrange(max(2, min(8, steps // 4)))):
                job.assert_gone()
                assert job.process.returncode == 0, job.output()
                break  # the run was done before
            end = time.monotonic() + rng.uniform(0, 0.02)
            while time.monotonic() < end:
                pass
            kind = list(kinds)[done % 3]
            ranks = job.ranks()
            assert len(ranks) == 2, job.output()
            job.kill([rng.choice(ranks)] if kind == "a rank" else [job.process.pid] if kind == "mpirun" else session_members(job.process.pid))
            job.assert_gone()
            if job.process.returncode == 0:
                break
            kinds[kind] += 1
            done += 1
            found = whole_checkpoints(out) if out.exists() else []
            newest = max(newest, last_complete(out))
            assert newest == 0 or found[-1] >= newest, f"step {newest} was complete, now there are {found}"
            newest = max([newest, *found])
        run(command, ranks=2)
        assert_same_run(folder / "reference", out)
        run(command, ranks=2)  # and once more: nothing is to be done
        assert_same_run(folder / "reference", out)
    return f"{done} kills ({', '.join(f'{count} of {kind}' for kind, count in kinds.items())}) in {chains} run(s) of {steps} steps"


# ---- kills while saving -----------------------------------------------------------------------------------------------------------------

def killed_while_saving(data: Path, folder: Path, mode: str, kills: int, seed: int, model: list[str] = LARGE, steps: int = 600) -> str:
    """One rank that saves after every step, killed at random moments and continued."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    options = [*model, "--steps", str(steps), "--keep", "2", "--save-mode", mode]
    run(command_of(data, folder / "reference", *options), timeout=300)
    done = chains = in_save = 0
    while done < kills:
        chains += 1
        out = folder / f"run{chains}"
        newest = 0
        while done < kills:
            job = Job(command_of(data, out, *options, "--save-every", "1", "--resume", "auto"), 0, folder / "log")
            alive = job.wait_for_steps(rng.randrange(1, 3))
            end = time.monotonic() + rng.uniform(0, 0.3)
            while alive and time.monotonic() < end:
                time.sleep(0.0005)
            job.kill_all()
            if job.process.returncode == 0:
                break
            assert job.process.returncode == -signal.SIGKILL, job.output()
            done += 1
            in_save += bool(leftovers(out))
            found = whole_checkpoints(out)
            newest = max(newest, last_complete(out))
            assert newest == 0 or (found and found[-1] >= newest), f"step {newest} was complete, now there are {found}"
            newest = max([newest, *found])
        run(command_of(data, out, *options, "--save-every", "0", "--resume", "auto"), timeout=300)
        assert_same_run(folder / "reference", out, options_may_differ=True)
        shutil.rmtree(out)
    assert in_save > 0 or kills < 20, "no kill came in a save: the test shows nothing"
    return f"{done} kills, {in_save} of them in a save, in {chains} run(s) of {steps} steps"


# ---- every moment of a save -------------------------------------------------------------------------------------------------------------

def build_file_calls(folder: Path) -> Path:
    library = folder / "file_calls.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["gcc", "-Wall", "-Wextra", "-O1", "-shared", "-fPIC", "-o", str(library), str(ROOT / "dev/test/file_calls.c"), "-ldl", "-lpthread"], check=True, timeout=60)
    return library


def file_calls(library: Path, under: Path, **settings: object) -> dict[str, str]:
    under.mkdir(parents=True)
    return {"LD_PRELOAD": str(library), "FILE_CALLS_UNDER": str(under), **{f"FILE_CALLS_{name.upper()}": str(value) for name, value in settings.items()}}


def assert_on_disk_in_order(calls: list[tuple[str, str]], out: Path) -> int:
    """What the disk is told, and when: a folder is renamed when all in it is on the disk, an old one goes when the new name is. Returns how many checkpoints became complete."""
    dirty: set[str] = set()
    complete = 0
    for what, path in calls:
        if "metrics" in path or ".lock" in path:
            continue
        if what in ("open", "write", "mkdir") and path != str(out):
            dirty.add(path)
            dirty.add(str(Path(path).parent))
        elif what == "fsync":
            dirty.discard(path)
        elif what == "rename" and ".removing-" not in path:
            saving = str(out / f".saving-{Path(path).name}")
            unsynced = [name for name in dirty if name.startswith(saving)]
            assert unsynced == [], f"{path} gets its name while {unsynced} may not be on the disk"
            dirty.add(str(out))
            complete += 1
        elif what == "rename":
            assert str(out) not in dirty, f"{path}: an old checkpoint goes while the new one's name may not be on the disk"
    return complete


def continue_from_state(data: Path, state: Path, reference: Path, options: list[str]) -> None:
    """The same command where a kill left the folder like this."""
    ended = run(command_of(data, state, *options, "--resume", "auto"))
    assert "passed over" not in ended.output, ended.output
    assert_same_run(reference, state)
    assert leftovers(state) == [] or "nothing to do" in ended.output, (leftovers(state), ended.output)


def every_moment(data: Path, folder: Path, mode: str, continued: int, seed: int) -> str:
    """One run of three saves is copied before each call that changes its folder: each copy is what a kill at that moment leaves. All are judged, some are continued."""
    folder.mkdir(parents=True)
    library = build_file_calls(folder)
    options = [*TINY, "--steps", "3", "--save-every", "1", "--keep", "1", "--save-mode", mode]
    out, snapshots, log = folder / "run", folder / "snapshots", folder / "calls"
    snapshots.mkdir()
    run(command_of(data, out, *options), environment=file_calls(library, out, snapshots=snapshots, log=log))
    calls = [tuple(line.split(" ", 1)) for line in log.read_text().splitlines()]
    assert assert_on_disk_in_order(calls, out) == 3, calls
    states = sorted(snapshots.iterdir())
    assert len(states) == len(calls) > 60
    newest = 0
    for number, state in enumerate(states):
        found = whole_checkpoints(state)
        assert (found or [0])[-1] >= newest, f"before call {number + 1} ({' '.join(calls[number])}) step {newest} was complete, now there are {found}"
        newest = (found or [0])[-1]
    assert newest == 3
    # The calls that are not another write to the same file come first: most are writes.
    turns = [i for i in range(1, len(calls)) if calls[i] != calls[i - 1] or calls[i][0] != "write"]
    for number in sorted(random.Random(seed).sample(turns, min(continued, len(turns)))):
        continue_from_state(data, states[number], out, options)
    return f"{len(states)} moments judged, {min(continued, len(turns))} continued"


def killed_at_every_call(data: Path, folder: Path, mode: str) -> str:
    """The same by real kills, one run for each call, each continued."""
    folder.mkdir(parents=True)
    library = build_file_calls(folder)
    options = [*TINY, "--steps", "3", "--save-every", "1", "--keep", "1", "--save-mode", mode]
    reference = folder / "reference"
    run(command_of(data, reference, *options))
    newest = 0
    for number in range(1, 10000):
        out = folder / f"run{number}"
        ended = run(command_of(data, out, *options), environment=file_calls(library, out, kill_at=number), status=None)
        if ended.status == 0:
            break
        assert ended.status == -signal.SIGKILL, ended.output
        found = whole_checkpoints(out)
        newest = max(newest, last_complete(out))
        # In async mode another thread decides how far the metrics are at the same call, so only this folder's own word counts.
        assert last_complete(out) == 0 or found[-1] >= last_complete(out), (number, found)
        continue_from_state(data, out, reference, options)
        shutil.rmtree(out)
    assert newest == 3 and number > 60, (newest, number)
    return f"killed before each of {number - 1} calls"


def error_at_every_call(data: Path, folder: Path, mode: str, numbers: Optional[int], seed: int, code: int = errno.ENOSPC) -> str:
    """Each call that changes a checkpoint's files or folder fails once: the run goes on, says it, leaves nothing half, and its later saves are whole."""
    folder.mkdir(parents=True)
    library = build_file_calls(folder)
    options = [*TINY, "--steps", "3", "--save-every", "1", "--keep", "1", "--save-mode", mode]
    not_ours = "metrics.jsonl,.lock"  # without them there is no run
    log, reference = folder / "calls", folder / "reference"
    run(command_of(data, reference, *options), environment=file_calls(library, reference, log=log, **{"not": not_ours}))
    calls = log.read_text().splitlines()
    turns = [i + 1 for i in range(len(calls)) if i == 0 or calls[i] != calls[i - 1] or not calls[i].startswith("write")]
    chosen = turns if numbers is None else sorted(random.Random(seed).sample(turns, min(numbers, len(turns))))
    failed_runs = 0
    for number in chosen:
        out = folder / f"run{number}"
        what, path = calls[number - 1].replace(str(reference), str(out)).split(" ", 1)
        ended = run(command_of(data, out, *options), environment=file_calls(library, out, fail_at=number, errno=code, **{"not": not_ours}), status=None)
        where = f"call {number}, {what} {path}\n{ended.output}"
        found = whole_checkpoints(out)
        assert leftovers(out) == [] or ".removing-" in path, f"{leftovers(out)} is left: {where}"
        assert_same_run(reference, out, checkpoint=False)
        if "checkpoint NOT written" in ended.output:
            assert "warning: the checkpoint of step " in ended.output and os.strerror(code) in ended.output and str(out) in ended.output, where
        elif ".removing-" not in path:
            raise AssertionError(f"nothing is said: {where}")
        failed = [int(step) for step in re.findall(r"^step (\d+)/3 \| checkpoint NOT written", ended.output, re.MULTILINE)]
        assert len(failed) <= 1, where
        if failed == [3]:
            assert ended.status == 1 and "error: the last checkpoint of this run was not written: " in ended.output and found[-1:] in ([2], [3]), where
            failed_runs += 1
        else:
            assert ended.status == 0 and found[-1] == 3, where
            # An old one that cannot go is said, and goes with the next save.
            kept = what == "rename" and ".removing-" in path
            assert found == [3] or (kept and found == [2, 3]), where
            assert kept == ("warning: an old checkpoint could not be removed: " in ended.output), where
            assert_same_checkpoint(reference / "step_00000003", out / "step_00000003")
        # And it can be continued.
        run(command_of(data, out, *options, "--resume", "auto"))
        assert_same_run(reference, out)
        shutil.rmtree(out)
    return f"an error at {len(chosen)} of {len(calls)} calls, {failed_runs} of them in the last save"


# ---- damaged files ----------------------------------------------------------------------------------------------------------------------

class Damage(NamedTuple):
    file: str
    what: str
    apply: Callable[[Path], None]


def truncate(at: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, at)


def flip(at: int, bit: int) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << bit
        path.write_bytes(data)
    return apply


def damages(checkpoint: Path, flips: int, seed: int) -> Iterator[Damage]:
    """Each file cut off, at a random place and to nothing, and gone; a bit flipped at random places over all files."""
    rng = random.Random(seed)
    files = sorted(checkpoint.iterdir())
    for path in files:
        at = rng.randrange(1, path.stat().st_size - 1)  # the newline at the end of a text is not missed
        yield Damage(path.name, f"cut off at {at}", truncate(at))
        yield Damage(path.name, "cut off at 0", truncate(0))
        yield Damage(path.name, "gone", lambda damaged: damaged.unlink())
    for i in range(flips):
        path = files[i % len(files)]
        at, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
        yield Damage(path.name, f"bit {bit} of byte {at} flipped", flip(at, bit))


def saved_run(data: Path, folder: Path) -> Path:
    """A finished run of six steps with checkpoints 2, 4 and 6. Copies of it are continued."""
    out = folder / "saved"
    if not out.exists():
        run(command_of(data, out, *SMALL, "--save-every", "2"))
    assert whole_checkpoints(out) == [2, 4, 6]
    return out


def copy_of(run_folder: Path, to: Path, newest: int = 6) -> Path:
    """A run as it was when its newest checkpoint was that one. The metrics know more, as they would after a kill."""
    shutil.copytree(run_folder, to)
    for folder in to.glob("step_*"):
        if int(folder.name[5:]) > newest:
            shutil.rmtree(folder)
    return to


def assert_refused(ended: Ended, *words: str, statuses: tuple[int, ...] = (1,)) -> None:
    assert ended.status in statuses, ended.output
    assert len(re.findall(r"^error(: | on rank )", ended.output, re.MULTILINE)) == 1, ended.output
    for word in words:
        assert word in ended.output, f"`{word}` is not said:\n{ended.output}"


def damaged_files(data: Path, folder: Path, flips: int, seed: int, only_every: int = 1) -> str:
    """The newest checkpoint is damaged: by name it is refused and the file is named, auto takes the older one and says why, and what comes out has that one's bits."""
    saved = saved_run(data, folder)
    chosen = list(damages(saved / "step_00000006", flips, seed))[::only_every]
    for number, damage in enumerate(chosen):
        out = copy_of(saved, folder / f"damaged{number}")
        newest = out / "step_00000006"
        damage.apply(newest / damage.file)
        what = f"{damage.file}, {damage.what}"
        try:
            before = tree_of(out)
            assert_refused(run(command_of(data, out, *SMALL, "--resume", str(newest)), status=None), f"error: --resume {newest}: ", f"{newest}/{damage.file}")
            assert tree_of(out) == before
            ended = run(command_of(data, out, *SMALL, "--save-every", "2", "--resume", "auto"))
            (passed_over,) = re.findall(r"^passed over (\S+): (.*)$", ended.output, re.MULTILINE)
            assert passed_over[0] == str(newest) and f"{newest}/{damage.file}" in passed_over[1], ended.output
            assert f"resumed                 {out}/step_00000004: step 4 of 6" in ended.output, ended.output
            assert_same_run(saved, out)
            assert leftovers(out) == []
            assert (out / "earlier.1" / "step_00000006").is_dir() and f"moved to {out}/earlier.1" in ended.output, ended.output
        except Exception as error:
            raise AssertionError(f"{what}: {error}") from error
        shutil.rmtree(out)
    return f"{len(chosen)} damaged files"


def all_damaged(data: Path, folder: Path) -> str:
    """None is whole: auto does not begin anew over them, and names each."""
    out = copy_of(saved_run(data, folder), folder / "all_damaged")
    for checkpoint in out.glob("step_*"):
        (checkpoint / "model.safetensors").write_bytes(b"")
    before = tree_of(out)
    assert_refused(run(command_of(data, out, *SMALL, "--resume", "auto"), status=None), f"no checkpoint in {out} is whole", "give another --out",
                   *(f"{out}/step_0000000{step}/model.safetensors: has 0 bytes" for step in (2, 4, 6)))
    assert tree_of(out) == before
    return "3 checkpoints"


# ---- disks ------------------------------------------------------------------------------------------------------------------------------

def private_mounts() -> Optional[list[str]]:
    """The command under which a mount is ours alone; None where the system does not let us."""
    for command in (["unshare", "-m"], ["unshare", "-rm"]):
        try:
            with tempfile.TemporaryDirectory() as folder:
                if subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", folder], stdin=subprocess.DEVNULL, capture_output=True, timeout=20).returncode == 0:
                    return command
        except (OSError, subprocess.TimeoutExpired):
            pass
    return None


NO_MOUNTS = "neither unshare -m nor unshare -rm may mount a tmpfs here"


def on_a_small_disk(template: Path, disk: Path, copy: Path, command: list[str], disk_options: str, ranks: int = 0, before: str = "", remount: str = "",
                    status: Optional[int] = 0) -> Ended:
    """A run whose folder `disk` is a tmpfs of its own, filled from `template`; what it holds in the end is in `copy`. A namespace ends with its last process."""
    prefix = private_mounts()
    if prefix is None:
        pytest.skip(NO_MOUNTS)
    disk.mkdir(exist_ok=True)
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 or "-rm" in prefix else []
    if ranks > 0:
        command = ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command]
    quoted = {"disk": shlex.quote(str(disk)), "template": shlex.quote(str(template)), "copy": shlex.quote(str(copy))}
    script = ("mount -t tmpfs -o {options} tmpfs {disk} && cp -a {template}/. {disk}/ || exit 99; {before}\n{remount}\n{command}; status=$?\ncp -a {disk}/. {copy}; exit $status"
              .format(options=disk_options, before=before, remount=f"mount -o remount,{remount} {quoted['disk']}" if remount else "", command=shlex.join(command), **quoted))
    copy.mkdir()
    return run([*prefix, "sh", "-c", script], environment={"OMPI_MCA_orte_abort_on_non_zero_status": "0"}, status=status)


def full_disk(data: Path, folder: Path, mode: str) -> str:
    """A save that does not fit is refused before anything is written; the run goes on; the last one makes it fail. What was there stays."""
    if private_mounts() is None:
        pytest.skip(NO_MOUNTS)
    template = copy_of(saved_run(data, folder), folder / f"template_{mode}", newest=2)
    disk, copy = folder / f"disk_{mode}", folder / f"copy_{mode}"
    command = command_of(data, disk, *SMALL, "--save-every", "1", "--save-mode", mode, "--resume", "auto")
    # A checkpoint has 1.5 MB, and 2.3 are asked for. Beside the first there is room for a second, not for a third.
    ended = on_a_small_disk(template, disk, copy, command, "size=4500k", status=1)
    assert f"step 3/6 | saved {disk}/step_00000003" in ended.output, ended.output
    refused = rf"a checkpoint takes [0-9.]+ MB and only [0-9.]+ MB are free in {disk}; free some space, keep fewer \(--keep\)"
    for step in (4, 5, 6):
        assert re.search(rf"^step {step}/6 \| checkpoint NOT written: {refused}", ended.output, re.MULTILINE), ended.output
        assert re.search(rf"^warning: the checkpoint of step {step} was not written: {refused}", ended.output, re.MULTILINE), ended.output
    assert_refused(ended)
    assert re.search(rf"^error: the last checkpoint of this run was not written: {refused}", ended.output, re.MULTILINE), ended.output
    assert whole_checkpoints(copy) == [2, 3] and leftovers(copy) == []
    assert_same_checkpoint(template / "step_00000002", copy / "step_00000002")
    assert_same_run(saved_run(data, folder), copy, checkpoint=False)
    events = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event.get("event") == "save_failed"] == [3, 4, 5]
    # No room for one at the start: refused then, not after hours.
    shutil.rmtree(copy)
    ended = on_a_small_disk(template, disk, copy, command, "size=3000k", status=1)
    assert_refused(ended)
    assert re.search(rf"^error: {refused}", ended.output, re.MULTILINE) and "step 3/6" not in ended.output, ended.output
    assert tree_of(copy) == tree_of(template)
    return "3 saves and a start refused"


def disk_without_inodes(data: Path, folder: Path, mode: str) -> str:
    """Bytes are free, but no more files can be made: each save fails after some of its files. The system's own error, in the middle."""
    if private_mounts() is None:
        pytest.skip(NO_MOUNTS)
    template = copy_of(saved_run(data, folder), folder / f"template_inodes_{mode}", newest=2)
    disk, copy = folder / f"disk_inodes_{mode}", folder / f"copy_inodes_{mode}"
    count = 1 + sum(1 for _ in template.rglob("*"))
    command = command_of(data, disk, *SMALL, "--save-every", "2", "--save-mode", mode, "--resume", "auto")
    ended = on_a_small_disk(template, disk, copy, command, f"size=200M,nr_inodes={count + 3}", status=1)
    for step in (4, 6):
        assert re.search(rf"^step {step}/6 \| checkpoint NOT written: {disk}/\.saving-step_0000000{step}/\S+: cannot be created: No space left on device", ended.output, re.MULTILINE), ended.output
    assert_refused(ended, f"error: the last checkpoint of this run was not written: {disk}/.saving-step_00000006/", "free space on that disk")
    assert whole_checkpoints(copy) == [2] and leftovers(copy) == [], leftovers(copy)
    assert_same_run(saved_run(data, folder), copy, checkpoint=False)
    return "2 saves failed in the middle"


def read_only_disk(data: Path, folder: Path) -> str:
    if private_mounts() is None:
        pytest.skip(NO_MOUNTS)
    template = copy_of(saved_run(data, folder), folder / "template_ro", newest=4)
    disk, copy = folder / "disk_ro", folder / "copy_ro"
    for number, more in enumerate((["--resume", "auto"], ["--resume", str(disk / "step_00000004")], [])):
        ended = on_a_small_disk(template, disk, Path(f"{copy}{number}"), command_of(data, disk, *SMALL, *more), "size=100M", remount="ro", status=None)
        assert_refused(ended, f"--out {disk}: a file cannot be written there: Read-only file system")
        assert tree_of(Path(f"{copy}{number}")) == tree_of(template)
    return "3 starts"


def one_rank_cannot_write(data: Path, folder: Path, mode: str) -> str:
    """A limit on the size of a file on rank 1 alone: all ranks agree that the save failed, nothing of it is left, and the run goes on. The limit is above the 64 MiB that the
    device on a CPU makes for itself, so the model is large enough for a rank's file to pass it."""
    folder.mkdir(parents=True)
    model = ["--num-layers", "2", "--channels", "512", "--num-heads", "8", "--num-kv-heads", "8", "--head-dim", "64", "--ffn-dim", "3072", "--seq-len", "16", "--micro-batch", "1"]
    ended = train_testing.start(data, folder, 2, *model, "--save-every", "2", "--save-mode", mode, on_rank_1="trap '' XFSZ; ulimit -f 133000", ok=False)  # of 512 bytes
    assert ended.statuses == [1, 1], ended.output
    name = "optimizer-00001-of-00002.safetensors"
    for step in (2, 4, 6):
        words = f"rank 1: {ended.out}/.saving-step_0000000{step}/{name}: cannot be written: File too large"
        assert f"step {step}/6 | checkpoint NOT written: {words}" in ended.output and "raise the limit on a file's size (ulimit -f)" in ended.output, ended.output
        assert f"step {step}/6 | checkpoint NOT written: {words}" in (ended.out / "log.rank1").read_text()
    assert_refused(Ended(ended.statuses[1], ended.output), "error: the last checkpoint of this run was not written: rank 1: ")
    assert len(ended.records("train")) == 6
    assert whole_checkpoints(ended.out) == [] and leftovers(ended.out) == []
    # The limit comes off: the same command begins anew, as there is no checkpoint, and saves.
    again = train_testing.start(data, folder, 2, *model, "--save-every", "2", "--save-mode", mode, "--resume", "auto")
    assert whole_checkpoints(again.out) == [2, 4, 6]
    return "3 saves failed on rank 1"


def one_call_fails_on_rank_1(data: Path, folder: Path, mode: str) -> str:
    """One write, fsync or open of rank 1's file in the first of three saves: that one is none on all ranks, the other two are whole, and the run is the one it would have been."""
    folder.mkdir(parents=True)
    library = build_file_calls(folder)
    name = "optimizer-00001-of-00002.safetensors"
    options = ["--save-every", "2", "--save-mode", mode]
    reference = train_testing.start(data, folder / "reference", 2, *options)
    for number, (what, said) in enumerate((("open", "cannot be created"), ("write", "cannot be written"), ("fsync", "could not be brought to the disk")), 1):
        out = folder / what / "run"
        settings = file_calls(library, out, fail_at=number, errno=errno.EDQUOT, **{"not": "log.rank,.lock"})
        ended = train_testing.start(data, folder / what, 2, *options, on_rank_1="export " + " ".join(f"{key}={shlex.quote(value)}" for key, value in settings.items()), ok=False)
        assert ended.statuses == [0, 0], ended.output
        words = f"step 2/6 | checkpoint NOT written: rank 1: {out}/.saving-step_00000002/{name}: {said}: {os.strerror(errno.EDQUOT)}; the user's quota there is used up"
        assert words in ended.output and words in (out / "log.rank1").read_text(), ended.output
        assert ended.output.count("checkpoint NOT written") == 1
        assert whole_checkpoints(out) == [4, 6] and leftovers(out) == []
        assert [record["step"] for record in ended.records("event") if record["event"] == "save_failed"] == [1]
        assert_same_run(reference.out, out)
    return "3 calls"


# ---- folders that are none --------------------------------------------------------------------------------------------------------------

def reseal(folder: Path) -> None:
    """trainer.json says of the files what they are now, so that only what is in them can be wrong."""
    info = json.loads((folder / "trainer.json").read_text())
    for name in info["files"]:
        data = (folder / name).read_bytes()
        info["files"][name] = {"bytes": len(data), "xxh3": hash_of(data)}
    write_info(folder, info)


def write_info(folder: Path, info: dict) -> None:
    info["checksum"] = checksum_of(info)
    (folder / "trainer.json").write_text(json.dumps(info, indent=1, sort_keys=True) + "\n")


def edit_tensors(path: Path, change: Callable[[dict, dict], None]) -> None:
    """Rewrites a safetensors file: change(tensors, metadata), tensors as (type, shape, bytes)."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {name: (entry["dtype"], entry["shape"], raw[8 + length + entry["data_offsets"][0]: 8 + length + entry["data_offsets"][1]]) for name, entry in header.items()}
    change(tensors, metadata)
    header, data = {"__metadata__": metadata}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


class Bad(NamedTuple):
    name: str
    make: Callable[[Path], Any]  # changes the checkpoint (the folder of step 4)
    words: tuple[str, ...]       # {0}: that folder
    options: tuple[str, ...] = ()
    statuses: tuple[int, ...] = (1,)


MODEL, STATE = "model.safetensors", "optimizer-00000-of-00001.safetensors"
A_WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def tensors(file: str, change: Callable[[dict, dict], None]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        edit_tensors(folder / file, change)
        reseal(folder)
    return make


def rename_tensor(old: str, new: str) -> Callable[[dict, dict], None]:
    return lambda t, _: t.update({new: t.pop(old)})


def edit_info(change: Callable[[dict], Any], seal: bool = True) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        info = json.loads((folder / "trainer.json").read_text())
        change(info)
        if seal:
            write_info(folder, info)
        else:
            (folder / "trainer.json").write_text(json.dumps(info))
    return make


def replaced(file: str, by: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / file).unlink()
        if by == "a folder":
            (folder / file).mkdir()
        elif by == "a pipe":
            os.mkfifo(folder / file)
        else:
            (folder / file).symlink_to("nowhere")
    return make


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def foreign(folder: Path) -> None:
    emptied(folder)
    (folder / "notes.txt").write_text("something else")


def foreign_json(folder: Path) -> None:
    emptied(folder)
    (folder / "trainer.json").write_text('{"format": "of another program", "version": 1}')


BAD = [
    Bad("missing", shutil.rmtree, ("{0}/trainer.json is missing: the folder is no checkpoint",)),
    Bad("empty", emptied, ("{0}/trainer.json is missing: the folder is no checkpoint",)),
    Bad("foreign", foreign, ("{0}/trainer.json is missing: the folder is no checkpoint",)),
    Bad("foreign-json", foreign_json, ("{0}/trainer.json: its format is not `llm.zero checkpoint`",)),
    Bad("half-written", lambda folder: (folder / "trainer.json").unlink(), ("{0}/trainer.json is missing: the folder is no checkpoint, or an incomplete one",)),
    Bad("newer", edit_info(lambda info: info.update(version=2), seal=False), ("{0}/trainer.json: version 2 is newer than the 1 this program reads",)),
    Bad("newer-sealed", edit_info(lambda info: info.update(version=2)), ("{0}/trainer.json: version 2 is newer than the 1 this program reads",)),
    Bad("edited", edit_info(lambda info: info.update(step=5), seal=False), ("{0}/trainer.json: its checksum does not match",)),
    Bad("no-step", edit_info(lambda info: info.pop("step")), ("{0}/trainer.json: `step` is missing",)),
    Bad("text-step", edit_info(lambda info: info.update(step="4")), ("{0}/trainer.json: `step` is not a whole number",)),
    Bad("file-outside", edit_info(lambda info: info["files"].update({"../metrics.jsonl": {"bytes": 1, "xxh3": "0"}})), ("{0}/trainer.json: `files` names a file that no checkpoint holds",)),
    Bad("no-config", edit_info(lambda info: info["files"].pop("config.json")), ("{0}/trainer.json names no config.json",)),
    Bad("unknown-option", edit_info(lambda info: info["options"].update(flux="9")), ("the checkpoint keeps an option `flux`",), (), (1, 2)),
    Bad("other-vocabulary", lambda folder: None, ("vocab-size was 257, now 300", "leave the options of the model out"), ("--vocab-size", "300"), (2,)),
    Bad("other-model", lambda folder: None, ("num-layers was 2, now 3",), ("--num-layers", "3"), (2,)),
    Bad("other-data", lambda folder: None, ("train-data was ",), ("--train-data", "{data}/val_*.bin"), (2,)),
    Bad("missing-tensor", tensors(MODEL, lambda t, _: t.pop(A_WEIGHT)), (f"the weights of `{A_WEIGHT}` from element 0 of 4096 on are in no file of the checkpoint",)),
    Bad("missing-state", tensors(STATE, lambda t, _: t.pop(A_WEIGHT + ".exp_avg")), (f"the exp_avg of `{A_WEIGHT}` from element 0 of 4096 on are in no file of the checkpoint",)),
    Bad("extra-tensor", tensors(MODEL, lambda t, _: t.update({"extra.weight": ("BF16", [2], b"\0" * 4)})), ("{0}/" + MODEL + ": tensor `extra.weight` is none of this model's",)),
    Bad("extra-state", tensors(STATE, lambda t, _: t.update({"extra.weight.master": ("F32", [1], b"\0" * 4)})), ("{0}/" + STATE + ": tensor `extra.weight.master` is none of this model's",)),
    Bad("other-name", tensors(STATE, rename_tensor(A_WEIGHT + ".master", A_WEIGHT + ".momentum")), ("{0}/" + STATE + f": tensor `{A_WEIGHT}.momentum` is none of this model's",)),
    Bad("wrong-shape", tensors(MODEL, lambda t, _: t.update({A_WEIGHT: ("BF16", [32, 128], t[A_WEIGHT][2])})), ("{0}/" + MODEL, A_WEIGHT, "has shape (32, 128), expected (64, 64)")),
    Bad("wrong-type", tensors(MODEL, lambda t, _: t.update({A_WEIGHT: ("F16", t[A_WEIGHT][1], t[A_WEIGHT][2])})), ("{0}/" + MODEL, A_WEIGHT, "F16")),
    Bad("state-too-short", tensors(STATE, lambda t, _: t.update({A_WEIGHT + ".master": ("F32", [4095], t[A_WEIGHT + ".master"][2][4:])})), (A_WEIGHT, "from element 4095 of 4096 on are in no file")),
    Bad("state-of-two-dimensions", tensors(STATE, lambda t, _: t.update({A_WEIGHT + ".master": ("F32", [64, 64], t[A_WEIGHT + ".master"][2])})), ("{0}/" + STATE, "has 2 dimensions")),
    Bad("wrong-offset", tensors(STATE, lambda _, metadata: metadata.update({"offset:" + A_WEIGHT: "1"})), (A_WEIGHT, "from element 0 on are missing before it")),
    Bad("no-offset", tensors(STATE, lambda _, metadata: metadata.pop("offset:" + A_WEIGHT)), ("{0}/" + STATE, "there is no offset of")),
    Bad("other-weights", tensors(MODEL, lambda t, _: t.update({A_WEIGHT: (*t[A_WEIGHT][:2], bytes(len(t[A_WEIGHT][2])))})), (f"the weights of `{A_WEIGHT}` are not its master weights rounded",)),
    Bad("a-folder-for-a-file", replaced(MODEL, "a folder"), ("{0}/" + MODEL + ": is not a regular file",)),
    Bad("a-folder-for-trainer-json", replaced("trainer.json", "a folder"), ("{0}/trainer.json", "s a directory")),
    Bad("a-dangling-link", replaced(STATE, "a link"), ("{0}/" + STATE + ": is missing",)),
    Bad("a-dangling-trainer-json", replaced("trainer.json", "a link"), ("{0}/trainer.json is missing",)),
    Bad("a-pipe", replaced("config.json", "a pipe"), ("{0}/config.json: is not a regular file",)),
    Bad("a-pipe-for-trainer-json", replaced("trainer.json", "a pipe"), ("{0}/trainer.json",)),
]


def bad_checkpoint(data: Path, folder: Path, bad: Bad, ranks: int = 0) -> str:
    """Refused with a message that says what, and nothing is touched."""
    out = copy_of(saved_run(data, folder), folder / f"bad_{bad.name}", newest=4)
    checkpoint = out / "step_00000004"
    bad.make(checkpoint)
    before = {name: kind for name, kind in tree_of_all(out).items()}
    options = [option.replace("{data}", str(data)) for option in bad.options]
    ended = run([str(TRAINER), "--resume", str(checkpoint), *options], ranks=ranks, status=None, timeout=60)
    assert_refused(ended, *(word.replace("{0}", str(checkpoint)) for word in bad.words), statuses=bad.statuses)
    assert tree_of_all(out) == before
    return f"status {ended.status}"


def tree_of_all(folder: Path) -> dict[str, str]:
    """As tree_of, with pipes, which must not be read."""
    pipes = {str(path.relative_to(folder)): "pipe" for path in folder.rglob("*") if path.is_fifo()}
    moved = [(folder / name, os.lstat(folder / name)) for name in pipes]
    for path, _ in moved:
        path.unlink()
    tree = tree_of(folder)
    for path, _ in moved:
        os.mkfifo(path)
    return {**tree, **pipes}


def unfinished_by_name(data: Path, folder: Path) -> str:
    """A folder under its temporary name is refused although all is in it but trainer.json, and auto does not see it."""
    out = copy_of(saved_run(data, folder), folder / "unfinished", newest=4)
    saving = out / ".saving-step_00000006"
    shutil.copytree(out / "step_00000004", saving)
    (saving / "trainer.json").unlink()
    before = tree_of(out)
    assert_refused(run([str(TRAINER), "--resume", str(saving)], status=None), f"{saving}/trainer.json is missing: the folder is no checkpoint, or an incomplete one")
    assert tree_of(out) == before
    # The run's own folder is none of its checkpoints: the message names one.
    assert_refused(run([str(TRAINER), "--resume", str(out)], status=None), f"{out}/trainer.json is missing", f"give one of its checkpoints, such as {out}/step_00000004, or --resume auto --out {out}")
    assert tree_of(out) == before
    # A new run does not write over it.
    assert_refused(run(command_of(data, out, *SMALL), status=None), f"--out {out} holds a run that stands at step 4 of 6", "--resume auto")
    assert tree_of(out) == before
    ended = run(command_of(data, out, *SMALL, "--save-every", "2", "--resume", "auto"))
    assert "passed over" not in ended.output
    assert_same_run(saved_run(data, folder), out)
    return "4 starts"


def ranks_see_other_folders(data: Path, folder: Path) -> str:
    """Another file system on rank 1: over --out, and over a checkpoint that lies elsewhere."""
    prefix = private_mounts()
    if prefix is None:
        pytest.skip(NO_MOUNTS)
    two = folder / "two_ranks"
    two.mkdir(parents=True)
    first = train_testing.start(data, two, 2, "--save-every", "2")
    shutil.rmtree(first.out / "step_00000006")
    before = tree_of(first.out)

    def elsewhere(hidden: Path, fill: Path) -> str:
        script = f"mount -t tmpfs tmpfs {shlex.quote(str(hidden))} && cp -a {shlex.quote(str(fill))}/. {shlex.quote(str(hidden))}/ && exec \"$@\""
        return f"set -- {shlex.join(prefix)} sh -c {shlex.quote(script)} sh \"$@\""

    other = folder / "other_copy"
    shutil.copytree(first.out, other, ignore=shutil.ignore_patterns(".lock"))
    for more in (["--resume", "auto"], ["--resume", str(first.out / "step_00000004")]):
        ended = train_testing.start(data, two, 2, *more, on_rank_1=elsewhere(first.out, other), ok=False, timeout=60)
        assert ended.statuses == [1, 1], ended.output
        assert_refused(Ended(ended.statuses[1], ended.output), "error: rank 1: --out ", "is not the folder that rank 0 sees: every rank must see one file system")
        assert tree_of(first.out) == before
    # --out is shared, but the checkpoint's folder is on each host's own disk: rank 1 has another checkpoint of the same name, whole in itself, or none.
    local = folder / "local" / "checkpoint"
    shutil.copytree(first.out / "step_00000004", local)
    (folder / "nothing").mkdir()
    before = tree_of(folder / "local")
    out = folder / "shared_out"
    for fill, words in ((first.out / "step_00000002", (f"--resume {local}: rank 1: {local} is another checkpoint here (step 2)", "every rank must see")), (folder / "nothing", (f"rank 1: {local}/trainer.json is missing",))):
        ended = train_testing.start(data, folder / "third", 2, "--resume", str(local), "--out", str(out), on_rank_1=elsewhere(local, fill), ok=False, timeout=60)
        assert ended.statuses == [1, 1], ended.output
        assert_refused(Ended(ended.statuses[1], ended.output), *words)
        assert tree_of(folder / "local") == before
    return "4 starts"


# ---- the long program -------------------------------------------------------------------------------------------------------------------

def cases(seed: int) -> Iterator[tuple[str, Callable[[Path, Path], str]]]:
    for stage in (1, 3):
        for mode in ("stream", "async"):
            yield f"killed-in-training-{stage}-{mode}", lambda d, f, stage=stage, mode=mode: killed_in_training(d, f, stage, mode, kills=20, seed=seed, steps=160)
    for mode in ("stream", "async"):
        yield f"killed-while-saving-{mode}", lambda d, f, mode=mode: killed_while_saving(d, f, mode, kills=200, seed=seed)
        yield f"every-moment-{mode}", lambda d, f, mode=mode: every_moment(d, f, mode, continued=20, seed=seed)
        yield f"killed-at-every-call-{mode}", lambda d, f, mode=mode: killed_at_every_call(d, f, mode)
        for code in (errno.ENOSPC, errno.EIO):
            yield f"error-at-every-call-{mode}-{errno.errorcode[code]}", lambda d, f, mode=mode, code=code: error_at_every_call(d, f, mode, None, seed, code)
        yield f"full-disk-{mode}", lambda d, f, mode=mode: full_disk(d, f, mode)
        yield f"disk-without-inodes-{mode}", lambda d, f, mode=mode: disk_without_inodes(d, f, mode)
        yield f"one-rank-cannot-write-{mode}", lambda d, f, mode=mode: one_rank_cannot_write(d, f, mode)
        yield f"one-call-fails-on-rank-1-{mode}", lambda d, f, mode=mode: one_call_fails_on_rank_1(d, f, mode)
    yield "damaged-files", lambda d, f: damaged_files(d, f, flips=50, seed=seed)
    yield "all-damaged", all_damaged
    yield "read-only-disk", read_only_disk
    yield "unfinished-by-name", unfinished_by_name
    yield "ranks-see-other-folders", ranks_see_other_folders
    for bad in BAD:
        yield f"bad-{bad.name}", lambda d, f, bad=bad: bad_checkpoint(d, f, bad)
        yield f"bad-{bad.name}-2-ranks", lambda d, f, bad=bad: bad_checkpoint(d, f, bad, ranks=2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORD", default="", help="only cases whose name holds WORD")
    parser.add_argument("--seed", type=int, default=None, help="of the random moments and places; default: another one each time, printed")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    passed = failed = skipped = 0
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        train_testing.prepare(str(ROOT / "llmc"), str(ROOT / "train_gpt.cu"), "--out", str(data))
        for name, case in cases(seed):
            if arguments.only not in name:
                continue
            begun = time.monotonic()
            try:
                print(f"ok    {name:44} {case(data, Path(folder) / name)}, {time.monotonic() - begun:.1f} s", flush=True)
                passed += 1
            except pytest.skip.Exception as reason:
                print(f"skip  {name:44} {reason}", flush=True)
                skipped += 1
            except (Exception, pytest.fail.Exception) as error:
                where = " < ".join(f"line {frame.lineno}" for frame in reversed(traceback.extract_tb(error.__traceback__)) if Path(frame.filename).name == Path(__file__).name)
                lines = str(error).splitlines()
                print("\n      ".join([f"FAIL  {name:44} (seed {seed}) {type(error).__name__} ({where})", *lines[:4], *(["..."] if len(lines) > 24 else []), *lines[4:][-20:]]), flush=True)
                failed += 1
            shutil.rmtree(Path(folder) / name, ignore_errors=True)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
