"""PyTorch beside us: dev/gpu/peer_torch.py and dev/gpu/library_bench.py.

What needs no PyTorch runs always: arguments, and that there is a JSON whatever happens. LLMZERO_TORCH=PYTHON names a Python that has torch and
transformers; then both programs also run on the CPU, which tests all but the choice of a backend:

    LLMZERO_TORCH=/path/to/python pytest -q dev/test/test_peer.py
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEER, LIBRARY = ROOT / "dev/gpu/peer_torch.py", ROOT / "dev/gpu/library_bench.py"
SMALL_MODEL = ROOT / "dev/reference/qwen2/config.json"
TORCH_PYTHON = os.environ.get("LLMZERO_TORCH", "")
# Kernels of a few bytes, or of whole numbers, that PyTorch has nothing to set beside.
NO_COUNTERPART = {"count_valid_targets", "set_inv_valid", "decide_step", "checksum", "checksum_fp32"}


def start(program: Path, *options: Any, python: str = sys.executable, path: str = "") -> subprocess.Popen:
    return subprocess.Popen([python, str(program), *map(str, options)], env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}, cwd=ROOT,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(program: Path, *options: Any, **where: str) -> tuple[int, str]:
    process = start(program, *options, **where)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


@pytest.fixture
def torch_that(tmp_path: Path):
    """A folder whose `torch` does what is said, so that the tests are the same where PyTorch is and where it is not."""
    def make(source: str) -> str:
        (tmp_path / "torch.py").write_text(source, encoding="utf-8")
        return str(tmp_path)
    return make


@pytest.fixture
def ours(tmp_path: Path):
    def make(*names: str) -> Path:
        path = tmp_path / "bench.json"
        path.write_text(json.dumps({"context": {"precision": "BF16"}, "benchmarks": [{"name": name, "run_name": name, "us": 1.0} for name in names]}), encoding="utf-8")
        return path
    return make


def peer_options(out: Path, *more: Any) -> list[Any]:
    return ["--config", SMALL_MODEL, "--micro-batch", 2, "--seq-len", 32, "--steps", 5, "--drop", 1, "--device", "cpu", "--out", out, *more]


# ---- peer_torch.py --------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options, words", [
    (["--config", "no/such.json"], "no/such.json: there is no such file"),
    (["--mode", "fast"], "invalid choice: 'fast'"),
    (["--weights", "fp8"], "invalid choice: 'fp8'"),
    (["--steps", 6, "--drop", 4], "counts 2 steps; at least 3 must count, try --steps 7"),
    (["--micro-batch", 0], "--micro-batch is 0; it must be at least 1"),
])
def test_peer_refuses_arguments_before_it_looks_for_torch(tmp_path: Path, torch_that, options: list[Any], words: str):
    out = tmp_path / "peer.json"
    status, output = run(PEER, *peer_options(out, *options), path=torch_that("raise SystemExit('torch was imported')"))
    assert status == 2 and words in output and "torch was imported" not in output, output
    assert not out.exists()


def test_peer_writes_its_json_without_torch(tmp_path: Path, torch_that):
    out = tmp_path / "new" / "peer.json"
    status, output = run(PEER, *peer_options(out), path=torch_that("raise ImportError('there is no torch')"))
    report = json.loads(out.read_text(encoding="utf-8"))
    assert status == 1 and "there is no torch" in report["error"] and "import" in report["error"], (output, report)
    assert report["mode"] == "eager" and "tokens_per_s" not in report
    assert len(output.splitlines()) == 1, output


def test_peer_ends_what_hangs(tmp_path: Path, torch_that):
    out = tmp_path / "peer.json"
    begin = time.monotonic()
    status, output = run(PEER, *peer_options(out, "--seconds-limit", 0.2), path=torch_that("import time; time.sleep(100)"))
    assert status == 1 and time.monotonic() - begin < 30
    assert "still in phase `import` after --seconds-limit 0.2" in json.loads(out.read_text(encoding="utf-8"))["error"]


@pytest.mark.parametrize("program", [PEER, LIBRARY], ids=["peer", "library"])
def test_a_signal_leaves_a_json(tmp_path: Path, torch_that, ours, program: Path):
    out, reached = tmp_path / "out.json", tmp_path / "reached"
    path = torch_that(f"import pathlib, time; pathlib.Path({str(reached)!r}).touch(); time.sleep(100)")
    options = peer_options(out) if program == PEER else ["--ours", ours("adamw_update/n=8"), "--out", out]
    process = start(program, *options, path=path)
    deadline = time.monotonic() + 30
    while not reached.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and "SIGTERM" in out.read_text(encoding="utf-8"), output


# ---- library_bench.py ------------------------------------------------------------------------------------------------------------------

def test_library_refuses_what_is_no_benchmark_report(tmp_path: Path, torch_that):
    path = torch_that("raise SystemExit('torch was imported')")
    refused = {None: "No such file", "{": "is not what bench writes", '{"benchmarks": 3}': "is not what bench writes", '{"benchmarks": []}': "holds no benchmark"}
    for text, words in refused.items():
        report = tmp_path / "ours.json"
        if text is not None:
            report.write_text(text, encoding="utf-8")
        status, output = run(LIBRARY, "--ours", report, "--out", tmp_path / "out.json", path=path)
        assert status == 2 and words in output and "torch was imported" not in output, output


def test_library_writes_its_json_without_torch(tmp_path: Path, torch_that, ours):
    out = tmp_path / "out.json"
    status, output = run(LIBRARY, "--ours", ours("adamw_update/n=8"), "--out", out, path=torch_that("raise ImportError('there is no torch')"))
    report = json.loads(out.read_text(encoding="utf-8"))
    assert status == 1 and report["results"] == {} and "there is no torch" in report["error"], output


def operations() -> set[str]:
    text = LIBRARY.read_text(encoding="utf-8")
    table = text[text.index("\nOPERATIONS"):]
    return set(re.findall(r'^    "(\w+)":', table[:table.index("\n}")], flags=re.MULTILINE))


def test_every_benchmark_of_ours_is_known():
    """From the sources, so that a new benchmark is either given a counterpart or said to have none."""
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "dev/cuda").glob("*.cu")))
    ours = set()
    for name in re.findall(r'bench::add\((?:format\()?"(\w[\w%]*)', sources):
        ours |= {name.replace("%s", way) for way in ("forward", "backward")} if "%s" in name else {name}
    assert len(ours) > 20
    assert ours - operations() == NO_COUNTERPART
    assert operations() <= ours  # and nothing is kept for a benchmark that went away


# ---- with PyTorch ------------------------------------------------------------------------------------------------------------------------

if TORCH_PYTHON:
    @pytest.mark.parametrize("weights", ["bf16", "fp32"])
    @pytest.mark.parametrize("mode", ["eager", "compile"])
    def test_peer_trains(tmp_path: Path, mode: str, weights: str):
        out = tmp_path / "peer.json"
        status, output = run(PEER, *peer_options(out, "--mode", mode, "--weights", weights), python=TORCH_PYTHON)
        report = json.loads(out.read_text(encoding="utf-8"))
        assert status == 0 and "error" not in report, output
        assert report["params"] == 46336 and report["mode"] == mode and report["weights"] == weights
        assert abs(report["loss_first"] - math.log(269)) < 0.1 and report["loss_last"] < report["loss_first"]  # random weights, then the same batch again
        assert len(report["steps_ms"]) == 5 and report["step_ms"] == pytest.approx(statistics.median(report["steps_ms"][1:]), abs=1e-3)
        assert report["tokens_per_s"] == pytest.approx(64e3 / report["step_ms"])

    def test_peer_ends_early_with_what_it_has(tmp_path: Path):
        out = tmp_path / "peer.json"
        status, output = run(PEER, *peer_options(out, "--steps", 1000000, "--seconds-limit", 15), python=TORCH_PYTHON)
        report = json.loads(out.read_text(encoding="utf-8"))
        assert status == 0 and "--seconds-limit 15" in report["ended_early"] and len(report["steps_ms"]) >= 4, output

    def test_peer_says_that_it_had_too_little_time(tmp_path: Path):
        out = tmp_path / "peer.json"
        status, output = run(PEER, *peer_options(out, "--seconds-limit", 0.1), python=TORCH_PYTHON)
        assert status == 1, output
        assert re.search("only [0-2] steps counted|still in phase", json.loads(out.read_text(encoding="utf-8"))["error"])

    def test_library_measures_every_operation(tmp_path: Path, ours):
        names = ["attention_forward/B=2/T=32/NH=4/NKV=2/HD=32", "attention_backward/B=2/T=32/NH=4/NKV=2/HD=32",
                 "matmul_forward/N=64/C=64/OC=96/bias=0", "matmul_forward/N=64/C=64/OC=96/bias=1", "matmul_backward_input/N=64/C=64/OC=96",
                 "matmul_backward_weight/N=64/C=64/OC=96", "bias_backward/N=64/OC=96", "cross_entropy_forward/N=64/V=257/Vp=384",
                 "cross_entropy_forward_backward/N=64/V=257/Vp=384", "rmsnorm_forward/N=64/C=64", "fused_residual_rmsnorm_forward/N=64/C=64",
                 "rmsnorm_backward/N=64/C=64/accumulate=0", "rmsnorm_backward/N=64/C=64/accumulate=1", "qk_norm_forward/N=64/NH=4/NKV=2/HD=32",
                 "qk_norm_backward/N=64/NH=4/NKV=2/HD=32", "swiglu_forward/N=64/F=96", "swiglu_backward/N=64/F=96", "rope_forward/B=2/T=32/heads=6/HD=32/row=256",
                 "rope_backward/B=2/T=32/heads=6/HD=32/row=256", "embedding_forward/N=64/C=64/V=257", "embedding_backward/N=64/C=64/V=257", "adamw_update/n=4096",
                 "sum_of_squares/n=4096", "sum_of_squares_fp32/n=4096", "accumulate_gradient/n=4096", "accumulate_gradient_fp32/n=4096", "copy_to_float/n=4096",
                 "init_normal/n=4096", "fill/n=4096", "sum_rows/P=8/C=64", "sum_to_double/n=64", "sum_partials/n=9"]
        assert {name.split("/")[0] for name in names} == operations()
        out = tmp_path / "library.json"
        status, output = run(LIBRARY, "--ours", ours(*names, "set_inv_valid"), "--out", out, "--device", "cpu", python=TORCH_PYTHON)
        report = json.loads(out.read_text(encoding="utf-8"))
        assert status == 0 and set(report["results"]) == set(names), (output, report["skipped"])
        assert list(report["skipped"]) == ["set_inv_valid"]
        for name, result in report["results"].items():
            exact = [us for label, us in result["tried"].items() if not label.endswith("(inexact)")]
            assert result["us"] == min(exact) > 0 and result["tried"][result["library"]] == result["us"], name

    def test_library_keeps_what_it_has_when_time_is_up(tmp_path: Path, ours):
        out = tmp_path / "library.json"
        names = [f"matmul_forward/N=512/C=512/OC={8 * i}/bias=0" for i in range(100, 5000)]
        status, output = run(LIBRARY, "--ours", ours(*names), "--out", out, "--device", "cpu", "--seconds-limit", 8, python=TORCH_PYTHON)
        report = json.loads(out.read_text(encoding="utf-8"))
        assert status == 0 and 0 < len(report["results"]) < len(names) and "--seconds-limit 8" in report["ended_early"], output
