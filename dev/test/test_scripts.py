"""The shell scripts: clean by shellcheck, and right about what a bare machine lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("dev/**/*.sh"), ROOT / ".ci/run"])


def bare_path(tmp_path: Path, *programs: str) -> str:
    """A PATH with nothing but a shell's bare necessities and the given programs."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for program in ("bash", "dirname", "id", "cat", "uname", "env", "readlink", "mktemp", "rm", *programs):
        (folder / program).symlink_to(shutil.which(program))
    return str(folder)


def run(script: str, path: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([shutil.which("bash"), str(ROOT / "scripts" / script)], capture_output=True, text=True, timeout=60,
                          stdin=subprocess.DEVNULL, env={"PATH": path, "HOME": "/nonexistent", **environment})


def fake(folder: Path, name: str, body: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(f"#!{shutil.which('bash')}\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck() -> None:
    result = subprocess.run(["shellcheck", "-x", *map(str, SCRIPTS)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_a_bare_machine_is_told_every_package_with_its_reason(tmp_path: Path) -> None:
    result = run("test.sh", bare_path(tmp_path), DRY_RUN="1")
    assert result.returncode == 0, result.stderr
    for package in ("g++", "make", "libopenmpi-dev", "openmpi-bin", "libdnnl-dev", "nlohmann-json3-dev", "libcli11-dev", "libxxhash-dev",
                    "libgtest-dev", "clang", "python3-venv", "shellcheck"):
        lines = [line for line in result.stdout.splitlines() if line.startswith(f"  {package} ")]
        assert lines and len(lines[0].split(None, 1)) == 2, (package, result.stdout)
    assert "would run: " in result.stdout and "--no-install-recommends" in result.stdout


def test_nothing_is_installed_where_all_is_there() -> None:
    if not all(map(shutil.which, ("g++", "make", "mpicc", "mpirun"))):
        pytest.skip("this machine lacks build tools itself")
    result = run("quickstart.sh", os.environ["PATH"], DRY_RUN="1")
    assert result.returncode == 0 and "all there" in result.stdout and "would run" not in result.stdout, result.stdout


def test_packages_are_installed_in_two_goes_and_without_questions(tmp_path: Path) -> None:
    """With a fake apt-get: the compiler first, since the headers are looked for with it; then the rest."""
    path = bare_path(tmp_path)
    calls = tmp_path / "calls"
    fake(tmp_path / "bin", "apt-get", f'echo "$DEBIAN_FRONTEND apt-get $*" >> {calls}; [[ $* != *make* ]] || exit 7')
    if os.geteuid() != 0:
        fake(tmp_path / "bin", "sudo", '"$@"')
    result = run("quickstart.sh", path)
    lines = calls.read_text().splitlines()
    installs = [line for line in lines if " install " in line]
    assert len(installs) == 2 and installs[0].endswith(" g++") and all(line.startswith("noninteractive ") for line in installs)
    # The second go was refused by the fake: the script ends there and says which packages.
    assert result.returncode == 1 and "could not install: " in result.stderr and "libdnnl-dev" in result.stderr, result.stderr


def test_neither_root_nor_sudo_says_what_to_ask_for(tmp_path: Path) -> None:
    path = bare_path(tmp_path)
    fake(tmp_path / "bin", "id", "echo 1000")
    result = run("quickstart.sh", path)
    assert result.returncode == 1 and "have an administrator run: apt-get install g++" in result.stderr, result.stderr


def test_no_apt_names_what_is_missing(tmp_path: Path) -> None:
    path = bare_path(tmp_path)
    fake(tmp_path / "bin", "id", "echo 0")
    result = run("quickstart.sh", path)
    assert result.returncode == 1 and "no apt-get here" in result.stderr and "g++" in result.stdout
