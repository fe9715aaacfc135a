"""PyTorch beside us: dev/gpu/peer_torch.py, dev/gpu/library_bench.py, and the table that sets attention beside PyTorch's and what is published.

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
sys.path.insert(0, str(ROOT / "dev/gpu"))
import check_stages  # noqa: E402
import check_table  # noqa: E402
import performance  # noqa: E402

PEER, LIBRARY = ROOT / "dev/gpu/peer_torch.py", ROOT / "dev/gpu/library_bench.py"
SMALL_MODEL = ROOT / "dev/reference/qwen2/config.json"
TORCH_PYTHON = os.environ.get("LLMZERO_TORCH", "")
# Kernels of a few bytes, or of whole numbers, that PyTorch has nothing to set beside; and attention's plain kernels, whose counterpart stands beside the others.
NO_COUNTERPART = {"count_valid_targets", "set_inv_valid", "decide_step", "checksum", "checksum_fp32", "attention_forward_plain", "attention_backward_plain"}


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


# Stands for PyTorch as far as attention() uses it. Its cuDNN takes no grouped heads, its flash attention everything; each call leaves a line.
TORCH_OF_ATTENTION = """
import contextlib, sys, types
__path__, __version__ = [], "0"

class Tensor:
    def __init__(self, *shape): self.shape = shape
    def transpose(self, a, b):
        shape = list(self.shape)
        shape[a], shape[b] = shape[b], shape[a]
        return Tensor(*shape)
    def split(self, sizes, dim): return [Tensor(*self.shape[:dim], size, *self.shape[dim + 1:]) for size in sizes]
    def repeat_interleave(self, times, dim): return Tensor(*self.shape[:dim], self.shape[dim] * times, *self.shape[dim + 1:])
    def detach(self): return self
    def requires_grad_(self): return self

class Generator:
    def __init__(self, device): pass
    def manual_seed(self, seed): return self

bfloat16, float32, current = "bf16", "fp32", []
cuda = types.SimpleNamespace()
def set_num_threads(count): pass
def randn(*shape, device, dtype, generator): return Tensor(*shape)

@contextlib.contextmanager
def sdpa_kernel(which):
    current[:] = [which]
    try: yield
    finally: current.clear()

def scaled_dot_product_attention(q, k, v, is_causal, enable_gqa):
    if current == ["cuDNN"] and enable_gqa:
        raise RuntimeError("no grouped heads")
    with open(CALLS, "a") as file:
        print(*current, *q.shape, *k.shape, is_causal, enable_gqa, file=file)
    return Tensor(*q.shape)

def grad(out, inputs, d_out, retain_graph):
    assert out.shape == d_out.shape
    return [Tensor(*x.shape) for x in inputs]

autograd = types.SimpleNamespace(grad=grad)
nn = types.ModuleType("torch.nn")
nn.functional = types.SimpleNamespace(scaled_dot_product_attention=scaled_dot_product_attention)
nn.attention = types.SimpleNamespace(sdpa_kernel=sdpa_kernel, SDPBackend=types.SimpleNamespace(FLASH_ATTENTION="flash", CUDNN_ATTENTION="cuDNN"))
sys.modules.update({"torch.nn": nn, "torch.nn.functional": nn.functional, "torch.nn.attention": nn.attention})
"""


def test_attention_by_each_backend(tmp_path: Path, torch_that, ours):
    calls, out = tmp_path / "calls", tmp_path / "out.json"
    grouped, even = "B=2/T=32/NH=4/NKV=2/HD=64", "B=2/T=32/NH=4/NKV=4/HD=64"
    names = [f"attention_{way}/{shape}" for way in ("forward", "backward") for shape in (grouped, even)]
    status, output = run(LIBRARY, "--ours", ours(*names), "--out", out, "--device", "cpu", path=torch_that(f"CALLS = {str(calls)!r}" + TORCH_OF_ATTENTION))
    assert status == 0, output
    results = json.loads(out.read_text(encoding="utf-8"))["results"]
    for way in ("forward", "backward"):
        tried = results[f"attention_{way}/{even}"]["tried"]
        assert set(tried) == {"SDPA flash", "SDPA cuDNN"} and all(us > 0 for us in tried.values())
        tried = results[f"attention_{way}/{grouped}"]["tried"]
        assert set(tried) == {"SDPA flash", "SDPA cuDNN", "SDPA cuDNN, k and v repeated"}  # what took grouped heads needs no second try
        assert tried["SDPA cuDNN"] == "RuntimeError: no grouped heads" and tried["SDPA flash"] > 0 and tried["SDPA cuDNN, k and v repeated"] > 0
    # Causal always; (B, heads, T, HD); grouped heads are PyTorch's business unless they were repeated before.
    assert set(calls.read_text(encoding="utf-8").splitlines()) == {"flash 2 4 32 64 2 2 32 64 True True", "cuDNN 2 4 32 64 2 4 32 64 True False",
                                                                   "flash 2 4 32 64 2 4 32 64 True False"}


# ---- attention beside PyTorch's and what is published --------------------------------------------------------------------------------------

def attention_row(flops: float, us: float, **tried: float) -> dict[str, Any]:
    return {"us": us, "bytes": 1.0, "flops": flops, "share": 0.5, "of": "product", "library_tried": {label.replace("_", " "): value for label, value in tried.items()}}


def attention_record() -> dict[str, Any]:
    """One published shape (forward 1.374 x 10^11 operations, so 550 us are 249.9 TFLOP/s), a grouped one of a model, and plain kernels."""
    published, model = "B=8/T=2048/NH=16/NKV=16/HD=128", "B=16/T=1024/NH=14/NKV=2/HD=64"
    flops, small = 4 * 2048 * 2048 * 128 / 2 * 16 * 8, 4 * 1024 * 1024 * 64 / 2 * 14 * 16
    kernels = {f"attention_forward/{published}": attention_row(flops, 550.0, SDPA_flash=500.0, SDPA_cuDNN=400.0),
               f"attention_backward/{published}": attention_row(2.5 * flops, 1600.0, SDPA_flash=1500.0),
               f"attention_forward/{model}": attention_row(small, 200.0, **{"SDPA_flash,_k_and_v_repeated": 150.0}),
               f"attention_forward_plain/{published}": attention_row(flops, 5500.0),
               f"attention_backward_plain/{published}": attention_row(2.5 * flops, 24000.0)}
    kernels[f"attention_forward/{model}"]["library_tried"]["SDPA flash"] = "RuntimeError: no grouped heads"
    stage = {"status": "passed", "problems": [], "seconds": 1.0}
    return {"date": "2031-02-03T04:05:06Z", "mode": "gpu", "quick": False, "seconds": 1.0, "pack": {}, "stages": {
        "machine": {**stage, "results": {"device": "NVIDIA H200", "copy_bytes_per_second": 4.3e12, "product_flops_per_second": 7.5e14}},
        "benchmarks": {**stage, "results": {"kernels": kernels}}}}


# Forward 1.37439e11 / 550 us = 249.9; backward 3.43597e11 / 1600 us = 214.7; both 4.81036e11 / 2150 us = 223.7. Of 750: 33.3 and 29.8 %. Flash: 274.9, and
# 4.81036e11 / 2000 us = 240.5; cuDNN without a backward: 343.6.
PUBLISHED_ROW = "| 16 heads of 128, 8 x 2048 | 250 | 215 | 224 | 33 % / 30 % | 275 / 241 | 344 / - | 298 / 265 | 484 | 521 |"
# 3.0065e10 / 200 us = 150.3, of 750: 20.0 %; with keys repeated 200.4.
MODEL_ROW = "| 14 heads (2 of k and v) of 64, 16 x 1024 | 150 | - | - | 20 % / - | 200 / - (k and v repeated) | - | - | - | - |"
PLAIN_LINE = "16 heads of 128, 8 x 2048: the kernels with plain fp32 arithmetic take 10.0 times as long forward, 15.0 times backward"


def test_the_page_sets_attention_beside_others():
    page = performance.document(attention_record()).splitlines()
    assert PUBLISHED_ROW in page and MODEL_ROW in page and PLAIN_LINE + "." in page
    assert "| 32 heads of 64, 4 x 4096 | - | - | - | - | - | - | 284 / 257 | 363 | 420 |" in page  # not measured
    assert sum(line.startswith("| 32 heads of 64, ") or line.startswith("| 16 heads of 128, ") for line in page) == 6
    assert not any("has not run on a GPU" in line for line in page)


def test_the_page_without_a_record_claims_nothing():
    page = performance.document(None)
    assert "**Ours has not run on a GPU yet**" in page
    rows = [line for line in page.splitlines() if " heads of " in line]
    assert len(rows) == 6 and all(" | - | - | - | - | - | - | " in line for line in rows)


def test_the_check_prints_attention():
    lines = check_table.table(attention_record())
    assert any(line.strip() == "attention, head_dim 128, TFLOP/s forward / both: T 1024 - (FlashAttention-2 260 / 221), T 2048 250 / 224 (FlashAttention-2 298 / 265), "
                               "T 4096 - (FlashAttention-2 319 / 294)" for line in lines)
    assert any(line.strip() == PLAIN_LINE for line in lines) and not any("head_dim 64" in line or "attention_forward_plain" in line for line in lines)


def test_attention_from_the_reports_of_the_programs(tmp_path: Path, capsys):
    """bench.json and library.json, as the programs write them, give the same table without a record."""
    kernels = attention_record()["stages"]["benchmarks"]["results"]["kernels"]
    rows = [{"run_name": name, "us": row["us"], "bytes": 1.0, "flops": row["flops"], "share": 0.5, "label": "product"} for name, row in kernels.items()]
    rows.append({"run_name": "attention_forward/B=1/T=8/NH=1/NKV=1/HD=8", "error_occurred": True, "error_message": "out[3] is 0.5"})
    bench, library = tmp_path / "bench.json", tmp_path / "library.json"
    bench.write_text(json.dumps({"context": {"device": "NVIDIA H200", "precision": "BF16", "product_flops_per_second": "7.5e14"}, "benchmarks": rows}), encoding="utf-8")
    library.write_text(json.dumps({"results": {name: {"library": "", "us": 1.0, "tried": row["library_tried"]} for name, row in kernels.items()}}), encoding="utf-8")
    assert performance.main(["--attention", str(bench), str(library)]) == 0
    printed = capsys.readouterr().out
    assert all(line in printed for line in (PUBLISHED_ROW, MODEL_ROW, PLAIN_LINE, "NVIDIA H200, BF16, product 750.0 TFLOP/s", "FAILED attention_forward/B=1/T=8/NH=1/NKV=1/HD=8: out[3] is 0.5"))
    assert "32 heads" not in printed  # not measured
    assert performance.main(["--attention", str(bench)]) == 0
    assert "| 250 | 215 | 224 | 33 % / 30 % | - | - | 298 / 265 |" in capsys.readouterr().out
    assert check_stages.kernel_rows(json.loads(bench.read_text(encoding="utf-8"))).keys() == kernels.keys()


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
                 "sum_of_squares/n=4096", "sum_of_squares_fp32/n=4096", "accumulate_gradient/n=4096", "accumulate_gradient_fp32/n=4096",
                 "accumulate_gradient_fp32_addend/n=4096", "copy_to_float/n=4096", "init_normal/n=4096", "fill/n=4096", "sum_rows/P=8/C=64", "sum_to_double/n=64", "sum_partials/n=9"]
        assert {name.split("/")[0] for name in names} == operations()
        out = tmp_path / "library.json"
        status, output = run(LIBRARY, "--ours", ours(*names, "set_inv_valid"), "--out", out, "--device", "cpu", python=TORCH_PYTHON)
        report = json.loads(out.read_text(encoding="utf-8"))
        assert status == 0 and set(report["results"]) == set(names), (output, report["skipped"])
        assert list(report["skipped"]) == ["set_inv_valid"]
        for name, result in report["results"].items():
            exact = [us for label, us in result["tried"].items() if isinstance(us, float) and not label.endswith("(inexact)")]  # cuDNN is no CPU's
            assert result["us"] == min(exact) > 0 and result["tried"][result["library"]] == result["us"], name

    def test_repeated_keys_are_the_same_attention():
        """Outputs of flash attention, and gradients, with grouped heads and with keys and values repeated beforehand."""
        script = """
import sys
from library_bench import Library, attention
sizes = {"B": 2, "T": 48, "NH": 6, "NKV": 2, "HD": 64}
def outcome(repeated, backward):
    candidate = [c for c in attention(Library("cpu", "FP32"), sizes, backward) if c.label == "SDPA flash" + (", k and v repeated" if repeated else "")][0]
    with candidate.context():
        return candidate.make()()
def close(a, b): assert a.shape == b.shape and (a - b).abs().max() < 1e-5, (a.shape, b.shape)
close(outcome(False, False), outcome(True, False))
grouped, repeated = outcome(False, True), outcome(True, True)
close(grouped[0], repeated[0])
for a, b in zip(grouped[1:], repeated[1:]): close(a, b.unflatten(1, (2, 3)).sum(2))
print("same")
"""
        done = subprocess.run([TORCH_PYTHON, "-c", script], cwd=ROOT / "dev/gpu", capture_output=True, text=True, timeout=120)
        assert done.stdout == "same\n", done.stderr

    def test_library_keeps_what_it_has_when_time_is_up(tmp_path: Path, ours):
        out = tmp_path / "library.json"
        names = [f"matmul_forward/N=512/C=512/OC={8 * i}/bias=0" for i in range(100, 5000)]
        status, output = run(LIBRARY, "--ours", ours(*names), "--out", out, "--device", "cpu", "--seconds-limit", 8, python=TORCH_PYTHON)
        report = json.loads(out.read_text(encoding="utf-8"))
        assert status == 0 and 0 < len(report["results"]) < len(names) and "--seconds-limit 8" in report["ended_early"], output
