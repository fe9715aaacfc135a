"""What the stages of the GPU check share: the pack, the clock, and running programs under a time limit with everything logged."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev/test"))
from run_tests import kill_session  # noqa: E402


class Skip(Exception):
    """A stage that cannot run here, and why."""


class Finished(NamedTuple):
    status: int       # the exit status; negative: ended by a signal
    output: str       # stdout and stderr together
    seconds: float
    timed_out: bool

    def problem(self, what: str) -> str:
        """"" if it ended well, else one line that says how it did not, with the error it printed or its last line."""
        if self.timed_out:
            return f"{what}: no end after {self.seconds:.0f} s"
        if self.status == 0:
            return ""
        how = f"ended by {signal.Signals(-self.status).name}" if self.status < 0 else f"exit status {self.status}"
        lines = [line.strip() for line in self.output.splitlines() if line.strip(" -=")]
        said = next((line for line in lines if line.lower().startswith("error")), lines[-1] if lines else "no output")
        return f"{what}: {how}: {said[:200]}"


class Check:
    """What the stages share: where things are, the clock, and a way to run programs of the pack."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.host: bool = options.host
        self.quick: bool = options.quick
        self.pack: Path = options.pack.resolve()
        self.out: Path = options.out.resolve()
        self.work = Path(tempfile.mkdtemp(prefix="gpu-check-"))  # runs' folders, removed at the end: not in `out`, which travels
        self.info: dict[str, Any] = json.loads((self.pack / "pack.json").read_text(encoding="utf-8"))
        self.end = time.monotonic() + options.limit
        self.stage_end = self.end
        self.results: dict[str, dict[str, Any]] = {}  # of the stages that ran
        self.out.mkdir(parents=True, exist_ok=True)
        self.log = open(self.out / "log.txt", "w", encoding="utf-8")

    def seconds_left(self) -> float:
        """Until the stage's limit."""
        return self.stage_end - time.monotonic()

    def seconds_left_in_all(self) -> float:
        return self.end - time.monotonic()

    def program(self, name: str) -> Path:
        return self.pack / "bin" / name

    def start(self, command: list[Any], name: str) -> "Running":
        """Starts a program of the pack, or a tool around one, inside the pack's environment; its working folder is the repository root."""
        return Running(self, [str(self.pack / "launch"), *map(str, command)], name)

    def run(self, command: list[Any], name: str, limit: float = float("inf")) -> Finished:
        return self.start(command, name).wait(limit)

    def run_outside(self, command: list[Any], name: str, limit: float = float("inf")) -> Finished:
        """A program of the machine, which must not meet the pack's libraries: PyTorch brings its own."""
        return Running(self, list(map(str, command)), name).wait(limit)


class Running:
    def __init__(self, check: Check, command: list[str], name: str) -> None:
        self.check, self.command = check, command
        self.path = check.work / f"{name}.output"
        self.began = time.monotonic()
        with open(self.path, "wb") as output:
            try:
                self.process: Optional[subprocess.Popen[bytes]] = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                                                                   start_new_session=True)
            except OSError as error:  # as a shell would say it
                self.process = None
                output.write(f"{command[0]}: {error.strerror}\n".encode())

    def wait(self, limit: float = float("inf")) -> Finished:
        timed_out, status = False, 127
        try:
            if self.process:
                status = self.process.wait(timeout=max(1.0, min(limit, self.check.seconds_left())))
        except subprocess.TimeoutExpired:
            timed_out, status = True, -signal.SIGKILL
        finally:
            if self.process:
                kill_session(self.process.pid)
                self.process.wait()
        seconds = time.monotonic() - self.began
        output = self.path.read_text(encoding="utf-8", errors="replace")
        ending = "time limit" if timed_out else f"exit status {status}"
        self.check.log.write(f"$ {' '.join(self.command)}\n{output}[{seconds:.1f} s, {ending}]\n\n")
        self.check.log.flush()
        return Finished(status, output, seconds, timed_out)


class Stage(NamedTuple):
    name: str
    seconds: float  # its own limit on a GPU
    function: Callable[[Check, dict[str, Any]], list[str]]  # fills its results, returns what went wrong
