"""Starting the trainer as a user does, for test_train.py and test_train_faults.py: real mpirun, real files. The fixtures are in conftest.py.

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
UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}

needs_trainer = pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt is not built; run make train_gpt first")


class Run(NamedTuple):
    status: int
    output: str
    out: Path
    statuses: list[int]  # of each rank, where something was done on rank 1

    def records(self, kind: str) -> list[dict]:
        lines = (self.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def bits(self) -> tuple:
        """Everything two runs that promise the same bits must share."""
        steps = [(r["loss"], r["grad_norm"], r["lr"]) for r in self.records("train")]
        return steps, [(r["val_loss"], r["val_tokens"]) for r in self.records("val")], self.records("event")[-1]["weights"]

    def row(self, title: str, name: str) -> tuple[float, float]:
        """Bytes in a row of the start-up table, and how far off they may be: two decimals are shown."""
        section = self.output[self.output.index(f"\n{title}\n"):]
        number, unit = re.search(rf"\n  {name} +([0-9.]+) (B|kB|MB|GB)\b", section).groups()
        return float(number) * UNITS[unit], 0.00501 * UNITS[unit]

    def memory(self, category: str) -> float:
        return self.row("device memory of a rank", category)[0]

    def sent(self) -> int:
        """Bytes each rank sends a step: the same in every step, and what the start-up table says."""
        (sent,) = {record["comm_bytes"] for record in self.records("train")}
        shown, error = self.row("model", "sent")
        assert abs(sent - shown) <= error, (sent, shown)
        return sent


def mpirun(ranks: int, command: list[str], environment: Optional[dict[str, str]] = None, cwd: Path = ROOT, timeout: float = TIMEOUT_SECONDS) -> tuple[int, str]:
    """ranks 0 = without mpirun. The ranks share the cores, whatever the tests' own environment says."""
    if ranks > 0:
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command = ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command]
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "HOSTCUDA_THREADS")}
    # After a rank that failed mpirun waits a second after each signal to the others, also when all are gone; here that would be minutes.
    waiting = {"OMPI_MCA_odls_base_sigkill_timeout": "0"}
    process = subprocess.Popen(command, cwd=cwd, env={**inherited, **waiting, **(environment or {})}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # mpirun takes its ranks down
        output, _ = process.communicate(timeout=20)
        pytest.fail(f"no end after {timeout} s: {' '.join(command)}\n{output.decode(errors='replace')}")
    return process.returncode, output.decode(errors="replace")


def start(data: Path, folder: Path, ranks: int, *options: str, on_rank_1: str = "", environment: Optional[dict[str, str]] = None, cwd: Path = ROOT,
          timeout: float = TIMEOUT_SECONDS, ok: bool = True) -> Run:
    """One run into folder/run. `on_rank_1` is what the shell does first on rank 1 alone; then mpirun ends no rank because another one failed, and `statuses`
    tells how each ended by itself."""
    folder.mkdir(exist_ok=True)
    common = ["--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin", "--out", str(folder / "run"), *SMALL]
    command = [str(TRAINER), *common, *options]
    if on_rank_1:
        script = (f'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then {on_rank_1}; fi; "$@"; status=$?; echo $status >{folder}/status.$OMPI_COMM_WORLD_RANK; exit $status')
        command = ["sh", "-c", script, "sh", *command]
        environment = {**(environment or {}), "OMPI_MCA_orte_abort_on_non_zero_status": "0"}
    status, output = mpirun(ranks, command, environment, cwd, timeout)
    statuses = [int((folder / f"status.{rank}").read_text()) for rank in range(ranks)] if on_rank_1 else []
    if ok:
        assert status == 0 and not any(statuses), output
    return Run(status, output, folder / "run", statuses)


def prepare(*arguments: str) -> None:
    subprocess.run([sys.executable, str(ROOT / "dev/data/prepare.py"), *arguments, "--val-fraction", "0.1"], check=True, stdout=subprocess.DEVNULL)


def wait_for(path: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)


SHARD_HEADER_BYTES = 1024


def write_shard(path: Path, tokens: list[int], magic: int = 20240520, version: int = 1, count: Optional[int] = None) -> None:
    header = struct.pack("<256i", magic, version, len(tokens) if count is None else count, *([0] * 253))
    path.write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))
