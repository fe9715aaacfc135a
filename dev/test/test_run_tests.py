"""run_tests.py: every way a suite can go wrong counts as a failure, and nothing it started is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(tmp_path: Path, *suites: str) -> tuple[int, list[str], str]:
    """(exit status, lines, last line)"""
    result = subprocess.run([sys.executable, str(ROOT / "dev/test/run_tests.py"), "--logs", str(tmp_path / "logs"), *suites],
                            capture_output=True, text=True, timeout=120, cwd=tmp_path)
    lines = result.stdout.splitlines()
    assert lines, result.stderr
    assert (tmp_path / "logs/summary.txt").read_text() == lines[-1] + "\n"
    return result.returncode, lines, lines[-1]


def script(tmp_path: Path, name: str, body: str) -> Path:
    path = tmp_path / name
    path.write_text("#!/usr/bin/env bash\n" + body)
    path.chmod(0o755)
    return path


# Stands in for a GoogleTest binary: writes the report that the last argument asks for, as GoogleTest 1.12 does.
GTEST = """
for last; do :; done
report=${last#--gtest_output=xml:}
cat > "$report" <<'XML'
<?xml version="1.0" encoding="UTF-8"?>
<testsuites tests="4" name="AllTests"><testsuite name="S" tests="4">
<testcase name="a" status="run" result="completed" classname="S" />
<testcase name="b" status="run" result="completed" classname="S"><FAILED></testcase>
<testcase name="c" status="run" result="skipped" classname="S"><skipped message="no GPU"/></testcase>
<testcase name="d" status="notrun" result="suppressed" classname="S" />
</testsuite></testsuites>
XML
"""


def test_all_passed(tmp_path: Path) -> None:
    good = script(tmp_path, "good", GTEST.replace("<FAILED>", ""))
    (tmp_path / "test_x.py").write_text("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no')\n")
    status, lines, last = run(tmp_path, f"gtest {good}", f"pytest {tmp_path}/test_x.py", "run name=counts echo '5 passed, 0 failed'", "run true")
    assert (status, last) == (0, "9 passed, 0 failed, 3 skipped"), lines


def test_failures_are_counted_and_shown(tmp_path: Path) -> None:
    bad = script(tmp_path, "bad", GTEST.replace("<FAILED>", "<failure message='x'/>") + "echo expected 3, got 4\nexit 1\n")
    (tmp_path / "test_x.py").write_text("def test_a(): assert 0\ndef test_b(): pass\n")
    status, lines, last = run(tmp_path, f"gtest {bad}", f"pytest {tmp_path}/test_x.py", "run false", "run name=counts bash -c 'echo 5 passed, 2 failed; exit 1'")
    assert (status, last) == (1, "7 passed, 5 failed, 2 skipped"), lines
    assert any("expected 3, got 4" in line for line in lines)


@pytest.mark.parametrize("body, says", [
    ("kill -SEGV $$", "ended by SIGSEGV"),                          # before a report
    (GTEST.replace("<FAILED>", "") + "kill -ABRT $$", "ended by SIGABRT"),  # after one, e.g. in a destructor
    ("exit 0", "no report"),
    ("echo '<testsuites>' > \"${1#--gtest_output=xml:}\"", "no report"),
    ("echo '<testsuites></testsuites>' > \"${1#--gtest_output=xml:}\"", "ran no test"),
    (GTEST.replace("<FAILED>", "") + "exit 3", "exit status 3"),
])
def test_a_gtest_binary_gone_wrong(tmp_path: Path, body: str, says: str) -> None:
    status, lines, last = run(tmp_path, f"gtest {script(tmp_path, 'bin', body)}", "run true")
    assert status == 1 and " 1 failed" in last, lines
    assert any(line.startswith("FAIL") and says in line for line in lines), lines


def test_pytest_without_tests_and_a_missing_binary(tmp_path: Path) -> None:
    (tmp_path / "test_none.py").write_text("")
    status, lines, last = run(tmp_path, f"pytest {tmp_path}/test_none.py", "gtest /nowhere/test_x", "run true")
    assert (status, last) == (1, "1 passed, 2 failed, 0 skipped"), lines


def test_a_hang_ends_at_the_time_out_with_all_its_processes(tmp_path: Path) -> None:
    # A grandchild in a process group of its own, deaf to SIGTERM, as a rank under mpirun can be.
    hang = script(tmp_path, "hang", f"""set -m
(trap '' TERM; echo $BASHPID > {tmp_path}/pid; while :; do sleep 0.2; done) &
wait
""")
    start = time.monotonic()
    status, lines, last = run(tmp_path, f"run timeout=3 {hang}")
    assert (status, last) == (1, "0 passed, 1 failed, 0 skipped")
    assert any("no end after 3 s" in line for line in lines)
    assert time.monotonic() - start < 20
    pid = int((tmp_path / "pid").read_text())
    time.sleep(0.2)
    assert not os.path.exists(f"/proc/{pid}") or " Z " in Path(f"/proc/{pid}/stat").read_text()


def test_environment_names_and_only(tmp_path: Path) -> None:
    status, lines, last = run(tmp_path, "run COLOR=blue bash -c 'test $COLOR = blue'", "run name=other false", "--only", "COLOR")
    assert (status, last) == (0, "1 passed, 0 failed, 0 skipped"), lines


def test_a_make_around_it_is_not_a_suites_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKEFLAGS", "n -j4 --jobserver-auth=3,4")
    monkeypatch.setenv("MAKELEVEL", "1")
    status, lines, last = run(tmp_path, "run bash -c 'test -z $MAKEFLAGS$MAKELEVEL'")
    assert (status, last) == (0, "1 passed, 0 failed, 0 skipped"), lines


def test_nothing_selected_is_a_failure(tmp_path: Path) -> None:
    status, _, last = run(tmp_path, "run true", "--only", "nothing")
    assert (status, last) == (1, "0 passed, 1 failed, 0 skipped")
