"""scripts/plot.py: which records count, and that both plots come out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import plot  # noqa: E402


def write(folder: Path, records: list, tail: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return folder


def run(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(ROOT / "scripts/plot.py"), *map(str, arguments)], capture_output=True, timeout=60)


RECORDS = [{"kind": "train", "step": s, "loss": 5.0 - 0.1 * s, "lr": 1e-3} for s in range(20)]


def test_last_line_of_a_step_wins(tmp_path: Path) -> None:
    again = [{"kind": "event", "event": "resume", "step": 15}, {"kind": "train", "step": 15, "loss": 9.0}]
    loaded = plot.read_run(write(tmp_path / "run", RECORDS + again))
    assert [record["step"] for record in loaded.train] == list(range(20))
    assert loaded.train[15]["loss"] == 9.0 and loaded.train[16]["loss"] == pytest.approx(3.4)


def test_half_a_last_line_and_non_finite_losses_are_left_out(tmp_path: Path) -> None:
    records = RECORDS + [{"kind": "train", "step": 20, "loss": None}, {"kind": "train", "step": 21, "loss": float("nan")}]
    loaded = plot.read_run(write(tmp_path / "run", records, tail='{"kind": "train", "st'))
    assert len(plot.points(loaded.train, "loss")) == 20


@pytest.mark.parametrize("ascii_only", [False, True])
def test_text_plot(tmp_path: Path, ascii_only: bool) -> None:
    folder = write(tmp_path / "run", RECORDS + [{"kind": "val", "step": 19, "val_loss": 3.2}])
    result = run(folder, "--width", 60, "--height", 12, *(["--ascii"] if ascii_only else []))
    assert result.returncode == 0, result.stderr
    text = result.stdout.decode("utf-8")
    assert ascii_only == text.isascii()
    lines = text.splitlines()
    assert max(map(len, lines[:11])) <= 60
    assert "train 3.1000" in text and "val 3.2000" in text
    marked = [i for i, line in enumerate(lines[:9]) if line.rstrip()[-1] not in "│┤|+"]
    assert marked == list(range(9))  # a falling line has a mark in every row


def test_one_point_and_a_flat_line(tmp_path: Path) -> None:
    assert run(write(tmp_path / "one", RECORDS[:1])).returncode == 0
    assert run(write(tmp_path / "flat", [{"kind": "train", "step": s, "loss": 2.0} for s in range(3)])).returncode == 0


def test_png(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", RECORDS)
    result = run(folder)
    try:
        import matplotlib  # noqa: F401
        assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    except ImportError:
        assert b"matplotlib is not installed" in result.stdout and not (folder / "loss.png").exists()


def test_refusals(tmp_path: Path) -> None:
    result = run(tmp_path / "nothing")
    assert result.returncode == 1 and b"cannot read" in result.stderr and b"Traceback" not in result.stderr
    result = run(write(tmp_path / "empty", [{"kind": "event", "event": "save"}]))
    assert result.returncode == 1 and b"no train or val record" in result.stderr
