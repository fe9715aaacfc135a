"""The kernel benchmarks as a program: every kernel is there, its figures make sense, its checks fail where they must, and what it refuses.

LLMZERO_BENCH names another binary (default build/cpu-BF16/bench).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = Path(os.environ.get("LLMZERO_BENCH", ROOT / "build/cpu-BF16/bench")).resolve()
TIMEOUT_SECONDS = 120

pytestmark = pytest.mark.skipif(not BENCH.exists(), reason="bench is not built; run make DEVICE=cpu bench first")


def bench(*options: str, program: Path = BENCH) -> tuple[int, str, str]:
    done = subprocess.run([program, *options], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    return done.returncode, done.stdout, done.stderr


def report_of(out: Path, *options: str) -> tuple[int, str, dict]:
    status, output, _ = bench(f"--benchmark_out={out}", "--benchmark_out_format=json", *options)
    return status, output, json.loads(out.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, dict]:
    return report_of(tmp_path_factory.mktemp("bench") / "bench.json")


def launchers() -> set[str]:
    """Functions of the kernel headers that put work on a stream."""
    names = set()
    for header in (ROOT / "llmc").glob("*.cuh"):
        text = header.read_text(encoding="utf-8")
        if "__global__" in text:
            names |= set(re.findall(r"^inline void (\w+)\([^{;]*cudaStream_t stream\) \{", text, re.MULTILINE))
    return names


def test_every_launcher_has_a_benchmark(whole):
    ops = {row["name"].split("/")[0] for row in whole[2]["benchmarks"]}
    assert len(launchers()) >= 25
    # rope, cross_entropy and matmul are templates, or what their namesakes call: a longer name will do. One in _mma is what its namesake takes where it can.
    assert {name for name in launchers() if not any(op.startswith(name.removesuffix("_mma")) for op in ops)} == set()


def test_figures(whole):
    status, output, report = whole
    assert status == 0, output
    context = report["context"]
    ceilings = {"copy": float(context["copy_bytes_per_second"]), "product": float(context["product_flops_per_second"])}
    assert context["device"].startswith("hostcuda") and min(ceilings.values()) > 1e8
    names = [row["name"] for row in report["benchmarks"]]
    assert len(set(names)) == len(names)
    for row in report["benchmarks"]:
        assert re.fullmatch(r"\w+(/\w+=\d+)*", row["name"])
        assert "error_occurred" not in row, row
        assert row["us"] > 0 and row["bytes"] > 0 and row["flops"] >= 0 and row["samples"] >= 5, row
        rates = {"copy": row["bytes"] / row["us"] * 1e6, "product": row["flops"] / row["us"] * 1e6}
        assert row["share"] == pytest.approx(max(rates[of] / ceilings[of] for of in rates), rel=1e-4), row
        assert row["share"] == pytest.approx(rates[row["label"]] / ceilings[row["label"]], rel=1e-4), row
        assert row["share"] > 0, row  # no upper bound: what fits a cache is faster than the copy ceiling
    assert output.splitlines()[-1].endswith(f"; {len(names)} benchmarks, 0 failed checks")


def test_fewest_bytes_and_useful_operations(whole):
    """Counted by hand for the tiny preset: one layer's 196,864 parameters, 256 tokens in sequences of 128, bf16 and fp32 values of 2 and 4 bytes.
    And for the one shape of attention that is no model's: 12 heads of 64, T = 1024."""
    rows = {row["name"]: row for row in whole[2]["benchmarks"]}
    n, tokens = 196864, 256
    bytes_of = {
        f"accumulate_gradient/n={n}": 6 * n,              # sum read and written, addend read
        f"accumulate_gradient_fp32/n={n}": 10 * n,
        f"accumulate_gradient_fp32_addend/n={n}": 12 * n,
        f"fill/n={n}": 2 * n,
        f"copy_to_float/n={n}": 6 * n,
        "attention_forward/B=2/T=128/NH=4/NKV=2/HD=32": 2 * tokens * 32 * (4 + 2 + 2 + 4) + 4 * tokens * 4,  # q, k, v, out; log-sum-exp in fp32
        "attention_forward/B=1/T=1024/NH=12/NKV=12/HD=64": 2 * 1024 * 768 * 4 + 4 * 1024 * 12,
        "attention_backward/B=1/T=1024/NH=12/NKV=12/HD=64": 2 * 1024 * 768 * 8 + 4 * 1024 * 12,  # the same, dout and three gradients
        f"swiglu_forward/N={tokens}/F=384": 2 * tokens * 384 * 3,
        f"swiglu_backward/N={tokens}/F=384": 2 * tokens * 384 * 5,
        f"matmul_forward/N={tokens}/C=128/OC=256/bias=0": 2 * (tokens * 128 + 128 * 256 + tokens * 256),
    }
    flops_of = {
        f"accumulate_gradient/n={n}": n,
        "attention_forward/B=2/T=128/NH=4/NKV=2/HD=32": 4 * 32 * tokens * 4 * 128 // 2,  # two products of 2 flops; causal counts half
        "attention_backward/B=2/T=128/NH=4/NKV=2/HD=32": 10 * 32 * tokens * 4 * 128 // 2,
        "attention_forward/B=1/T=1024/NH=12/NKV=12/HD=64": 4 * 64 * 1024 * 12 * 1024 // 2,
        "attention_backward/B=1/T=1024/NH=12/NKV=12/HD=64": 10 * 64 * 1024 * 12 * 1024 // 2,
        f"matmul_forward/N={tokens}/C=128/OC=256/bias=0": 2 * tokens * 128 * 256,
    }
    assert {name: rows[name]["bytes"] for name in bytes_of} == pytest.approx(bytes_of, rel=1e-3)  # a kernel's step state is some bytes more
    assert {name: rows[name]["flops"] for name in flops_of} == flops_of


def test_shapes_come_from_the_models(tmp_path: Path):
    # The tiny preset twice and a config.json beside it: each shape once.
    config = ROOT / "dev/reference/qwen3/config.json"
    width = json.loads(config.read_text(encoding="utf-8"))["hidden_size"]
    status, output, report = report_of(tmp_path / "bench.json", f"--models=tiny,tiny,{config}", "--tokens=64", "--benchmark_filter=^rmsnorm_forward/")
    assert status == 0, output
    assert [row["name"] for row in report["benchmarks"]] == ["rmsnorm_forward/N=64/C=128", f"rmsnorm_forward/N=64/C={width}"]


def test_only_the_ceilings(tmp_path: Path):
    status, output, report = report_of(tmp_path / "bench.json", "--ceilings")
    assert status == 0, output
    assert float(report["context"]["copy_bytes_per_second"]) > 0 and float(report["context"]["product_flops_per_second"]) > 0
    assert {row["name"].split("/")[0] for row in report["benchmarks"]} == {"ceiling_copy", "ceiling_product"}


@pytest.mark.parametrize("options, words", [
    (["--models=no-such-model"], ["no-such-model", "tiny", "qwen2.5-0.5B", "config.json"]),
    (["--models=no/such/config.json"], ["no/such/config.json"]),
    (["--models="], ["--models", "tiny"]),
    (["--tokens=100"], ["--tokens=100", "multiple"]),
    (["--tokens=many"], ["--tokens=many"]),
    (["--tokens=256", "--seq-len=0"], ["--seq-len=0"]),
    (["--no-such-option"], ["--no-such-option"]),
    (["--benchmark_filter=^no_such_kernel"], ["no_such_kernel"]),
], ids=str)
def test_refusals(options, words):
    status, _, errors = bench(*options)
    assert status in (1, 2)
    assert all(word in errors for word in words) and "terminate" not in errors, errors


def test_help_names_the_options():
    status, output, _ = bench("--help")
    assert status == 0 and all(option in output for option in ("--models", "--tokens", "--seq-len", "--ceilings", "--benchmark_out"))


def test_a_wrong_kernel_fails(tmp_path: Path):
    """One benchmark compiled with a kernel that forgets its last row and one that is off by a factor."""
    if not (ROOT / "build/host/libhostcuda.a").exists():
        pytest.skip("the CPU libraries are not built")
    for folder in ("llmc", "dev/cuda"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    header = tmp_path / "llmc/swiglu.cuh"
    text = header.read_text(encoding="utf-8")
    for right, wrong in (("const Float8 sigmoid = 1.0f /", "const Float8 sigmoid = 1.01f /"),
                         ("swiglu_forward_kernel, N, kSwigluThreads", "swiglu_forward_kernel, N - 1, kSwigluThreads")):
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    header.write_text(text, encoding="utf-8")
    program = tmp_path / "swiglu"
    subprocess.run(["g++", "-std=c++20", "-O0", "-w", "-I.", f"-I{ROOT}", f"-I{ROOT}/hostcuda/include", "-x", "c++", "dev/cuda/swiglu.cu", "-x", "none", "-rdynamic", "-o", str(program),
                    f"{ROOT}/build/host/libllmc.a", f"{ROOT}/build/host/libhostcuda.a", "-lbenchmark", "-ldnnl", "-lgomp", "-lmpi", "-lpthread", "-ldl"],
                   cwd=tmp_path, check=True, timeout=TIMEOUT_SECONDS)
    out = tmp_path / "bench.json"
    status, output, _ = bench("--tokens=16", f"--benchmark_out={out}", "--benchmark_out_format=json", program=program)
    assert status == 1 and output.splitlines()[-1].endswith("; 2 benchmarks, 2 failed checks"), output
    errors = {row["name"].split("/")[0]: row["error_message"] for row in json.loads(out.read_text(encoding="utf-8"))["benchmarks"]}
    assert errors["swiglu_forward"] == "out: 384 of 6144 elements were not written"
    assert re.match(r"d(gate|up)\[\d+\] is \S+, expected", errors["swiglu_backward"])
