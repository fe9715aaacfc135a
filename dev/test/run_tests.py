#!/usr/bin/env python3
"""Runs test suites one after the other, each under a hard time-out, and counts what passed.

    run_tests.py [--logs DIR] [--only WORD] SUITE...

A SUITE is one argument: `KIND [key=value...] COMMAND...`, split as a shell would.

    "gtest build/.../test_rmsnorm"                       a GoogleTest binary; counted from its XML report
    "gtest HOSTCUDA_SCHEDULE=3 name=races build/..."     NAME=value in capitals goes into the environment
    "mpi np=4 timeout=60 build/.../mpi_test_nccl"        under mpirun
    "pytest dev/test"                                    counted from its XML report
    "run name=bits bash dev/test/bits.sh"                any command

A suite of kind mpi or run that prints `N passed, N failed[, N skipped]` alone on a line is counted by its last such line,
otherwise it is one test, passed when it exits with 0. A suite that crashes, hangs, exits non-zero or runs no test counts as
failed. timeout= is in seconds (default 300). Output goes to DIR/NAME.log; the end of it is shown for a failed suite.
The last line is `N passed, N failed, N skipped`, also written to DIR/summary.txt; the exit status is 1 when anything failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple, Optional

KINDS = ("gtest", "mpi", "pytest", "run")
DEFAULT_TIMEOUT_SECONDS = 300.0
PLAIN_COUNT = re.compile(r"^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?$", re.MULTILINE)
SHOWN_LINES = 40


class Suite(NamedTuple):
    name: str
    kind: str
    command: list[str]
    environment: dict[str, str]
    timeout_seconds: float
    ranks: int


class Result(NamedTuple):
    passed: int
    failed: int
    skipped: int
    seconds: float
    problem: str  # "" when nothing failed


def parse_suite(text: str, taken: set[str]) -> Suite:
    words = shlex.split(text)
    kind, words = (words[0], words[1:]) if words else ("", [])
    if kind not in KINDS:
        raise SystemExit(f"run_tests.py: suite {text!r} begins with {kind!r}; it must begin with one of {', '.join(KINDS)}")
    settings: dict[str, str] = {}
    environment: dict[str, str] = {}
    while words and re.match(r"^[A-Za-z_][A-Za-z0-9_]*=", words[0]):
        key, value = words.pop(0).split("=", 1)
        (environment if key.isupper() else settings)[key] = value
    unknown = set(settings) - {"name", "timeout", "np"}
    if unknown or not words:
        raise SystemExit(f"run_tests.py: suite {text!r}: " + (f"unknown setting {sorted(unknown)[0]}= (name, timeout, np)" if unknown else "no command"))
    name = settings.get("name") or Path(words[0] if kind != "run" else words[-1]).name
    if kind == "pytest":
        name = settings.get("name", "pytest")
    if kind == "mpi" and "name" not in settings:
        name += f" np={settings.get('np', '2')}"
    if environment and "name" not in settings:
        name += " " + " ".join(f"{key}={value}" for key, value in environment.items())
    unique, number = name, 2
    while unique in taken:
        unique, number = f"{name} ({number})", number + 1
    taken.add(unique)
    return Suite(unique, kind, words, environment, float(settings.get("timeout", DEFAULT_TIMEOUT_SECONDS)), int(settings.get("np", 2)))


def full_command(suite: Suite, report: Path) -> list[str]:
    if suite.kind == "gtest":
        return [*suite.command, f"--gtest_output=xml:{report}"]
    if suite.kind == "pytest":
        return [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", f"--junitxml={report}", *suite.command]
    if suite.kind == "mpi":
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", str(suite.ranks), *suite.command]
    return suite.command


def outer_environment() -> dict[str, str]:
    """Ours without what a `make` that started us says to its own: a suite that runs make is not part of that one."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")}


def session_members(session: int) -> list[int]:
    """Processes of a session that have not ended: mpirun puts its ranks into process groups of their own, but not into sessions."""
    members = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            # The fields after the command's name, which is in parentheses and may hold anything.
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            members.append(int(entry))
    return members


def kill_session(session: int) -> None:
    """Ends every process of a session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        members = session_members(session)
        for pid in members:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        if not members:
            return
        if number == signal.SIGTERM:
            time.sleep(1.0)


def count_report(report: Path) -> Optional[tuple[int, int, int]]:
    """(passed, failed, skipped) of a JUnit-like report as GoogleTest and pytest write it; None without a whole one."""
    try:
        root = ElementTree.parse(report).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    passed = failed = skipped = 0
    for case in root.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None or case.get("status") == "notrun" or case.get("result") == "skipped":
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def run_suite(suite: Suite, logs: Path) -> Result:
    stem = re.sub(r"[^A-Za-z0-9_.=-]+", "_", suite.name)
    log, report = logs / f"{stem}.log", logs / f"{stem}.xml"
    report.unlink(missing_ok=True)
    command = full_command(suite, report)
    start = time.monotonic()
    timed_out = False
    with open(log, "wb") as output:
        output.write(("$ " + " ".join([*(f"{k}={v}" for k, v in suite.environment.items()), shlex.join(command)]) + "\n").encode())
        output.flush()
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                       env={**outer_environment(), **suite.environment}, start_new_session=True)
        except OSError as error:
            output.write(f"{error}\n".encode())
            return Result(0, 1, 0, 0.0, f"cannot start: {error.strerror}")
        try:
            status = process.wait(timeout=suite.timeout_seconds)
        except subprocess.TimeoutExpired:
            timed_out, status = True, -signal.SIGKILL
        except BaseException:
            kill_session(process.pid)
            raise
        kill_session(process.pid)  # also what a suite left running
        process.wait()
    seconds = time.monotonic() - start

    if suite.kind in ("gtest", "pytest"):
        counted = count_report(report)
    else:
        lines = PLAIN_COUNT.findall(log.read_text(errors="replace"))
        counted = tuple(int(number or 0) for number in lines[-1]) if lines else ((1, 0, 0) if status == 0 and not timed_out else None)
    passed, failed, skipped = counted or (0, 0, 0)
    problem = ""
    if timed_out:
        problem = f"no end after {suite.timeout_seconds:g} s"
    elif status < 0:
        problem = f"ended by {signal.Signals(-status).name}"
    elif counted is None:
        problem = f"exit status {status}, no report"
    elif failed:
        problem = f"{failed} failed"
    elif passed == 0 and skipped == 0:
        problem = "ran no test"
    elif status != 0:
        problem = f"exit status {status}"
    if problem and not failed:
        failed = 1
    return Result(passed, failed, skipped, seconds, problem)


def main() -> int:
    parser = argparse.ArgumentParser(prog="run_tests.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=Path("build/test-logs"), metavar="DIR")
    parser.add_argument("--only", metavar="WORD", help="only suites whose name holds WORD")
    parser.add_argument("suites", nargs="+", metavar="SUITE")
    arguments = parser.parse_args()
    taken: set[str] = set()
    suites = [parse_suite(text, taken) for text in arguments.suites]
    if arguments.only:
        suites = [suite for suite in suites if arguments.only in suite.name]
    arguments.logs.mkdir(parents=True, exist_ok=True)
    summary_file = arguments.logs / "summary.txt"
    summary_file.unlink(missing_ok=True)

    totals = [0, 0, 0]
    bad: list[str] = []
    start = time.monotonic()
    for suite in suites:
        result = run_suite(suite, arguments.logs)
        totals = [total + more for total, more in zip(totals, result[:3])]
        print(f"{'FAIL' if result.problem else 'ok':4}  {suite.name:44}  {result.passed:4} passed, {result.failed} failed, {result.skipped} skipped  "
              f"{result.seconds:6.1f} s{'  ' + result.problem if result.problem else ''}", flush=True)
        if result.problem:
            stem = re.sub(r"[^A-Za-z0-9_.=-]+", "_", suite.name)
            log = arguments.logs / f"{stem}.log"
            lines = log.read_text(errors="replace").splitlines()
            print(f"----- {log}, its last {min(SHOWN_LINES, len(lines))} lines")
            # A line of a failed suite must not look like this run's own count.
            print("\n".join("    " + line[:300] for line in lines[-SHOWN_LINES:]))
            print("-----", flush=True)
            bad.append(suite.name)
    if not suites or totals[0] == totals[1] == 0:
        print("no test ran")
        totals[1] += 1
    if bad:
        print(f"failed: {', '.join(bad)}")
    print(f"{len(suites)} suites in {time.monotonic() - start:.0f} s")
    summary = f"{totals[0]} passed, {totals[1]} failed, {totals[2]} skipped"
    summary_file.write_text(summary + "\n")
    print(summary, flush=True)
    return 1 if totals[1] else 0


if __name__ == "__main__":
    sys.exit(main())
