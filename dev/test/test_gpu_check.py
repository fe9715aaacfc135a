"""The GPU check's runner and record: what it does with stages that fail, hang or break, and what becomes of its numbers.

Packs of stand-in programs drive the runner; the real programs run through it in `dev/gpu/check.sh --host`, which is a suite of its own.
The last test plants a fault in a real kernel.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev/gpu"))
import check_stages  # noqa: E402
import check_table  # noqa: E402
import performance  # noqa: E402

GTEST = """#!/usr/bin/env python3
import json, sys
path = next(a.split(":", 1)[1] for a in sys.argv if a.startswith("--gtest_output="))
cases = [{"classname": "Rope", "name": "Turns", "time": "0.01s"}, {"classname": "Swiglu", "name": "Forward", "time": "0.02s", **FAILURES}]
json.dump({"testsuites": [{"testsuite": cases}]}, open(path, "w"))
sys.exit(1 if "failures" in cases[1] else 0)
"""
TEST_GPT = "#!/bin/sh\necho '3 passed, 0 failed'\n"
TRAINER = """#!/usr/bin/env python3
import json, os, sys
folder = sys.argv[sys.argv.index("--out") + 1]
os.makedirs(folder)
with open(folder + "/metrics.jsonl", "w") as file:
    for step in range(20):
        file.write(json.dumps({"kind": "train", "step": step, "loss": (5.0 - step / 10) * FACTOR, "grad_norm": 2.0}) + "\\n")
    file.write(json.dumps({"kind": "event", "event": "done", "weights": "abc"}) + "\\n")
"""
LAUNCH = """#!/bin/sh
[ ! -x "{0}/bin/$1" ] || {{ program={0}/bin/$1; shift; set -- "$program" "$@"; }}
PATH={0}/bin:$PATH exec "$@"
"""
SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) echo "NVIDIA H200, 580.159.04, 143771 MiB, 512 MiB, 1980 MHz, 3201 MHz, 1980 MHz, 700.00 W, 40, Enabled" ;;
*) echo "4711, 512 MiB" ;;
esac
"""
BENCH = """#!/usr/bin/env python3
import json, sys
path = next(a.split("=", 1)[1] for a in sys.argv if a.startswith("--benchmark_out="))
row = {"us": 10.0, "bytes": 1e6, "flops": 1e3, "share": 0.5, "label": "copy"}
rows = [{"run_name": "rope_forward/N=16384", **row}, {"run_name": "swiglu_forward/N=16384", **row, **ERROR}]
context = {"device": "NVIDIA H200", "copy_bytes_per_second": "4.3e12", "product_flops_per_second": "7.88e14"}
json.dump({"context": context, "benchmarks": [] if "--ceilings" in sys.argv else rows}, open(path, "w"))
"""
# Stands for python3 on the GPU machine: a PyTorch run ends with 100 tokens/s, a compiled one runs out of memory.
PYTHON = """#!/bin/sh
case "$*" in
*library_bench.py*) echo '{"torch": "2.11.0", "results": {"rope_forward/N=16384": {"library": "torch eager", "us": 20.0}}}' > "$5" ;;
*"--mode compile"*) for out; do :; done; echo '{"error": "out of memory"}' > "$out"; exit 1 ;;
*peer_torch.py*) for out; do :; done; echo '{"tokens_per_s": 100.0}' > "$out" ;;
esac
"""
# A run on random tokens: the loss stays at ln 151936.
SPEED = """#!/usr/bin/env python3
import json, os, sys
if "--plan" in sys.argv:
    print(json.dumps({"chosen_stage": 1, "reserve_bytes": RESERVE, "stages": [{"total_bytes": 31e9}, {"total_bytes": PLANNED}]}))
    sys.exit(0)
folder = sys.argv[sys.argv.index("--out") + 1]
os.makedirs(folder, exist_ok=True)
step = {"kind": "train", "loss": 11.95, "grad_norm": 1.0, "tokens": 16384, "mfu": 0.4, "mfu_measured": 0.5, "mem_bytes": 30e9, "tokens_per_s": 150.0,
        **{key: 1.0 for key in ("step_ms", "forward_ms", "head_ms", "backward_ms", "update_ms", "data_ms", "exposed_comm_ms")}}
with open(folder + "/metrics.jsonl", "w") as file:
    for number in range(12):
        file.write(json.dumps({"step": number, **step}) + "\\n")
    file.write(json.dumps({"kind": "event", "event": "done", "weights": "abc", "device_used_bytes": 32e9}) + "\\n")
"""
def speed(planned: float = 30e9, reserve: float = 2e9) -> str:
    return SPEED.replace("PLANNED", repr(planned)).replace("RESERVE", repr(reserve))


MPIRUN = "#!/bin/sh\nshift 2\nexec \"$@\"\n"
SANITIZER = """#!/bin/sh
case "$*" in
*racecheck*train_gpt*) echo "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"; exit 99 ;;
*) echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""
FAILING = "{'failures': [{'failure': 'out[3] is 0.5, expected 1.5'}]}"


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def pack(tmp_path):
    """A pack whose programs are stand-ins for which every stage they serve passes."""
    folder = tmp_path / "pack"
    write_program(folder / "launch", LAUNCH.format(folder))
    for name in ("kernel_tests", "kernel_tests_fp32"):
        write_program(folder / "bin" / name, GTEST.replace("FAILURES", "{}"))
    for name in ("test_gpt", "test_gpt_fp32"):
        write_program(folder / "bin" / name, TEST_GPT)
    for name in ("train_gpt", "train_gpt_fp32"):
        write_program(folder / "bin" / name, TRAINER.replace("FACTOR", "1.0"))
    (folder / "pack.json").write_text(json.dumps({"device": "cpu", "commit": "0" * 40, "same_run": {"options": ["--seed", "1"]}}), encoding="utf-8")
    (folder / "host").mkdir()
    for name, factor in (("bf16", 1.0), ("bf16.control1", 1.001), ("fp32", 1.0), ("fp32.control1", 1.0000001)):
        lines = [json.dumps({"kind": "train", "step": step, "loss": (5.0 - step / 10) * factor, "grad_norm": 2.0 * factor}) for step in range(20)]
        (folder / "host" / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def check(pack: Path, *arguments: str, timeout: float = 60) -> tuple[int, str, dict[str, Any]]:
    out = pack.parent / "out"
    done = subprocess.run(["bash", str(ROOT / "dev/gpu/check.sh"), "--host", "--pack", str(pack), "--out", str(out), *arguments], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
    report = out / "report.json"
    return done.returncode, done.stdout, json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}


def test_passing_stages(pack):
    status, output, report = check(pack, "--only", "tests,same-run,peer,sanitizer")
    assert status == 0, output
    assert {name: stage["status"] for name, stage in report["stages"].items()} == {"tests": "passed", "same-run": "passed", "peer": "skipped", "sanitizer": "skipped"}
    assert "no GPU" in report["stages"]["peer"]["reason"] and "no GPU" in report["stages"]["sanitizer"]["reason"]
    assert report["stages"]["tests"]["results"]["kernel_tests"]["passed"] == 2
    assert output.splitlines()[-1].startswith("2 passed, 0 failed, 2 skipped")
    log = (pack.parent / "out/log.txt").read_text(encoding="utf-8")
    assert "==== tests" in log and "3 passed, 0 failed" in log
    assert sorted(path.name for path in (pack.parent / "out").iterdir()) == ["log.txt", "report.json"]


def test_a_failed_test_is_named_and_the_next_stage_runs(pack):
    write_program(pack / "bin/kernel_tests", GTEST.replace("FAILURES", FAILING))
    status, output, report = check(pack, "--only", "tests,same-run")
    assert status == 1
    assert report["stages"]["tests"]["problems"] == ["kernel_tests: Swiglu.Forward: out[3] is 0.5, expected 1.5"]
    assert report["stages"]["same-run"]["status"] == "passed"
    assert "FAILED  tests" in output and "Swiglu.Forward" in output


@pytest.mark.parametrize("program", ["kernel_tests", "test_gpt"])
@pytest.mark.parametrize("text, found", [("#!/bin/sh\nkill -SEGV $$\n", "SIGSEGV"), ("#!/bin/sh\necho no CUDA device was found\nexit 1\n", "no CUDA device was found"),
                                         ("#!/bin/sh\nexit 0\n", "no test ran"), (None, "not found")])
def test_a_program_that_breaks_fails_its_stage(pack, program, text, found):
    (pack / "bin" / program).unlink()
    if text:
        write_program(pack / "bin" / program, text)
    status, output, report = check(pack, "--only", "tests")
    assert status == 1 and any(program in problem and found in problem for problem in report["stages"]["tests"]["problems"]), output


def test_a_hang_ends_at_the_limit_and_leaves_no_process(pack):
    write_program(pack / "bin/test_gpt", f"#!/bin/sh\necho $$ > {pack}/pid\nsleep 1000 & sleep 1000\n")
    status, output, report = check(pack, "--only", "tests,same-run", "--limit", "7")
    assert status == 1 and any("test_gpt: no end after" in problem for problem in report["stages"]["tests"]["problems"]), output
    assert report["stages"]["same-run"]["status"] == "skipped" and "time" in report["stages"]["same-run"]["reason"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((pack / "pid").read_text()), 0)


def test_a_stage_that_throws_does_not_end_the_check(pack):
    (pack / "host/bf16.jsonl").write_text("not json\n", encoding="utf-8")
    status, output, report = check(pack, "--only", "same-run,peer")
    assert status == 1 and "JSONDecodeError" in report["stages"]["same-run"]["problems"][0]
    assert report["stages"]["peer"]["status"] == "skipped"


@pytest.mark.parametrize("program, factor, fails", [("train_gpt", "1.0019", False), ("train_gpt", "1.0021", True), ("train_gpt", "(1.0 if step != 7 else 1.009)", False),
                                                    ("train_gpt", "(1.0 if step != 7 else 1.011)", True), ("train_gpt", "(1.0 if step != 7 else float('nan'))", True), ("train_gpt_fp32", "1.000009", False),
                                                    ("train_gpt_fp32", "1.000011", True), ("train_gpt_fp32", "(1.0 if step == 0 else 1.00009)", False),
                                                    ("train_gpt_fp32", "(1.0 if step == 0 else 1.00012)", True), ("train_gpt", "float('nan')", True)])
def test_losses_are_held_to_their_bounds(pack, program, factor, fails):
    write_program(pack / "bin" / program, TRAINER.replace("FACTOR", factor))
    status, output, report = check(pack, "--only", "same-run")
    assert status == fails, output
    assert any("loss" in problem for problem in report["stages"]["same-run"]["problems"]) == fails


@pytest.fixture
def gpu_machine(pack, tmp_path, monkeypatch):
    """Stand-ins for all that only a GPU machine has, so that every path of the stages is walked before one is rented."""
    (pack / "pack.json").write_text(json.dumps({"device": "cuda", "commit": "0" * 40, "same_run": {"options": []}}), encoding="utf-8")
    write_program(pack / "launch", f"""#!/bin/sh
if [ "$1" = --libraries ]; then echo "libnccl.so.2 {tmp_path}/libnccl.so.2.28.3"; exit; fi
""" + LAUNCH.format(pack))
    for name, text in (("bench", BENCH.replace("ERROR", "{}")), ("mpirun", MPIRUN), ("train_gpt", speed()), ("mpi/train_gpt", speed()), ("mpi/mpi_test_zero", TEST_GPT)):
        write_program(pack / "bin" / name, text)
    # The stand-ins are Python programs: not through the stand-in of python3.
    for path in (pack / "bin").rglob("*"):
        if path.is_file() and path.read_text(encoding="utf-8").startswith("#!/usr/bin/env python3"):
            path.write_text(path.read_text(encoding="utf-8").replace("/usr/bin/env python3", sys.executable, 1), encoding="utf-8")
    for name, text in (("compute-sanitizer", SANITIZER), ("nvidia-smi", SMI), ("python3", PYTHON)):
        write_program(tmp_path / "path" / name, text)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    return pack


def gpu_check(pack: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    out = pack.parent / "out"
    # Not through check.sh, whose python3 is now another.
    done = subprocess.run([sys.executable, str(ROOT / "dev/gpu/check.py"), "--pack", str(pack), "--out", str(out), *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=120)
    return done.returncode, done.stdout, json.loads((out / "report.json").read_text(encoding="utf-8"))


STAGES_WITHOUT_SAME_RUN = "machine,tests,ranks,benchmarks,training,peer,sanitizer"  # its stand-in of the trainer is another


@pytest.mark.parametrize("program, words", [(speed(planned=30e9 + 1), "planned were 30000000001"), (speed(reserve=1.4e9), "1.46 GB lie beside ours, more than the plan's reserve of 1.40 GB")])
def test_memory_that_is_not_as_planned_fails_the_check(gpu_machine, program, words):
    write_program(gpu_machine / "bin" / "train_gpt", program.replace("/usr/bin/env python3", sys.executable, 1))
    status, output, report = gpu_check(gpu_machine, "--only", "training")
    assert status == 1 and any(words in problem for problem in report["stages"]["training"]["problems"]), output


def test_every_stage_of_a_gpu_machine(gpu_machine):
    status, output, report = gpu_check(gpu_machine, "--only", STAGES_WITHOUT_SAME_RUN)
    stages = report["stages"]
    assert {name: stage["status"] for name, stage in stages.items()} == {"machine": "passed", "tests": "passed", "ranks": "passed", "benchmarks": "passed", "training": "passed",
                                                                         "peer": "passed", "sanitizer": "failed"}, output
    assert status == 1 and stages["sanitizer"]["problems"] == ["racecheck run: RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"]
    machine = stages["machine"]["results"]
    assert machine["gpu"]["name"] == "NVIDIA H200" and machine["other_processes"] == 1 and machine["libraries"] == {"libnccl.so.2": "libnccl.so.2.28.3"}
    assert stages["benchmarks"]["results"]["kernels"]["rope_forward/N=16384"]["library_us"] == 20.0
    assert set(stages["training"]["results"]) == {"0.5B", "1.5B", "3B"}
    assert stages["training"]["results"]["3B"]["used_bytes"] == 32e9 - 512 * 2**20
    assert stages["peer"]["results"]["1.5B eager bf16"]["tokens_per_s"] == 100.0 and "out of memory" in stages["peer"]["results"]["0.5B compile bf16"]["error"]
    assert "ours is 1.50 times that" in output and len(output.splitlines()) <= check_table_limit() + len(stages)
    page = performance.document(report)
    assert "NVIDIA H200" in page and "1.50" in page and "`rope_forward/N=16384`" in page


def test_quick_leaves_out_peer_and_sanitizer(gpu_machine):
    status, output, report = gpu_check(gpu_machine, "--only", STAGES_WITHOUT_SAME_RUN, "--quick")
    assert status == 0, output
    assert set(report["stages"]["training"]["results"]) == {"0.5B"}
    assert report["stages"]["peer"]["status"] == report["stages"]["sanitizer"]["status"] == "skipped"


def test_a_wrong_kernel_and_a_wrong_loss_fail(gpu_machine):
    bench, trainer = gpu_machine / "bin/bench", gpu_machine / "bin/train_gpt"
    bench.write_text(bench.read_text(encoding="utf-8").replace("**{}", "'error_occurred': True, 'error_message': 'out[3] is 0.5'"), encoding="utf-8")
    trainer.write_text(trainer.read_text(encoding="utf-8").replace("11.95", "13.1"), encoding="utf-8")
    status, output, report = gpu_check(gpu_machine, "--only", "benchmarks,training,ranks")
    assert status == 1
    assert report["stages"]["benchmarks"]["problems"] == ["swiglu_forward/N=16384: out[3] is 0.5"]
    assert len(report["stages"]["training"]["problems"]) == 3 and "13.100" in report["stages"]["training"]["problems"][0]
    assert any("not the same bits" in problem for problem in report["stages"]["ranks"]["problems"])


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 9\n", ""])
def test_a_missing_driver_fails_the_machine_stage(gpu_machine, text):
    (gpu_machine.parent / "path/nvidia-smi").unlink()
    if text:
        write_program(gpu_machine.parent / "path/nvidia-smi", text)
    status, output, report = gpu_check(gpu_machine, "--only", "machine")
    assert status == 1 and "nvidia-smi does not answer" in report["stages"]["machine"]["problems"][0], output
    assert report["stages"]["machine"]["results"]["copy_bytes_per_second"] == 4.3e12  # the rest of the stage goes on


@pytest.mark.parametrize("model", check_stages.MODELS.values())
def test_the_trainer_takes_the_options_of_the_speed_runs(tmp_path, model):
    """Real trainer, real config file, real random shard; --show-batch stops before anything of that size is allocated."""
    check = SimpleNamespace(host=False, work=tmp_path)
    options, vocab_size = check_stages.training_options(check, model)
    assert vocab_size == 151936
    done = subprocess.run([str(ROOT / "build/cpu-BF16/train_gpt"), *map(str, options), "--out", str(tmp_path / "run"), "--show-batch", "0"], cwd=ROOT, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == check_stages.MICRO_BATCH, done.stdout


def test_the_trainer_takes_the_options_of_the_sanitized_run(tmp_path):
    data = ["--train-data", str(ROOT / "data/python-stdlib/train_*.bin"), "--val-data", str(ROOT / "data/python-stdlib/val_*.bin")]
    done = subprocess.run([str(ROOT / "build/cpu-BF16/train_gpt"), *map(str, check_stages.SANITIZED_RUN), *data, "--out", str(tmp_path / "run")], cwd=ROOT, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert done.returncode == 0 and "done: 2 steps" in done.stdout, done.stdout


def test_usage(pack, tmp_path):
    status, output, _ = check(pack, "--only", "test")
    assert status == 2 and "there is no such stage" in output
    status, output, _ = check(tmp_path / "nowhere")
    assert status == 2 and "pack.sh" in output
    (pack / "pack.json").write_text(json.dumps({"device": "cuda"}), encoding="utf-8")
    status, output, _ = check(pack)
    assert status == 2 and "a pack for device cuda" in output


# ----------------------------------------------------------------------------------------------------------------------
# The record and doc/performance.md

def gpu_report() -> dict[str, Any]:
    training = {key: 1.0 for key in ("forward_ms", "head_ms", "backward_ms", "update_ms", "exposed_comm_ms", "data_ms", "step_ms")}
    training.update(tokens_per_s=123456.0, mfu=0.423, mfu_measured=0.531, own_bytes=34_560_000_000, used_bytes=36_000_000_000)
    stage = {"status": "passed", "problems": [], "seconds": 1.0}
    kernels = {f"op{i}/N={n}": {"us": 10.0 * n, "bytes": n, "flops": n, "share": 0.5, "of": "copy", "library": "torch.mm", "library_us": 15.0 * n} for i in range(40) for n in (1, 2)}
    return {"format": 1, "date": "2031-02-03T04:05:06Z", "mode": "gpu", "quick": False, "seconds": 400.0, "pack": {"commit": "deadbeefcafe0000"}, "stages": {
        "machine": {**stage, "results": {"gpu": {"name": "NVIDIA H200", "driver_version": "580", "memory.total": "143771 MiB", "clocks.max.sm": "1980 MHz", "power.limit": "700 W"},
                                         "gpu_after_load": {}, "libraries": {"libnccl.so.2": "libnccl.so.2.28"}, "device": "NVIDIA H200",
                                         "copy_bytes_per_second": 4.3e12, "product_flops_per_second": 7.88e14}},
        "benchmarks": {**stage, "results": {"kernels": kernels}},
        "training": {**stage, "results": {"0.5B": training}},
        "peer": {**stage, "results": {"0.5B eager bf16": {"tokens_per_s": 100000.0}, "0.5B compile bf16": {"tokens_per_s": 61728.0}, "0.5B eager fp32": {"error": "out of memory"}}}}}


def test_the_table_has_at_most_60_lines_and_the_ratio(pack):
    lines = check_table.table(gpu_report())
    assert any("PyTorch 0.5B compile bf16: 61728 tokens/s, ours is 2.00 times that" in line for line in lines)
    status, output, _ = check(pack, "--only", "peer")
    assert status == 0 and len(output.splitlines()) < check_table_limit()


def check_table_limit() -> int:
    import check as runner
    return runner.TABLE_LINES


def test_performance_is_written_from_the_newest_record(tmp_path):
    old, new = gpu_report(), gpu_report()
    old["date"], old["stages"]["training"]["results"]["0.5B"]["tokens_per_s"] = "2031-02-02T00:00:00Z", 77.0
    results, document, report = tmp_path / "results", tmp_path / "performance.md", tmp_path / "report.json"
    arguments = ["--results", str(results), "--document", str(document)]
    assert performance.main(arguments) == 0 and "no record of a GPU yet" in document.read_text(encoding="utf-8")
    for record in (new, old):
        report.write_text(json.dumps(record), encoding="utf-8")
        assert performance.main([*arguments, "--add", str(report)]) == 0
    assert performance.main([*arguments, "--add", str(report)]) == 0
    assert sorted(path.name for path in results.iterdir()) == ["2031-02-02-NVIDIA-H200-2.json", "2031-02-02-NVIDIA-H200.json", "2031-02-03-NVIDIA-H200.json"]
    text = document.read_text(encoding="utf-8")
    for expected in ("NVIDIA H200", "deadbeefcafe", "123456", "42.3 %", "34.56 GB", "1.44 GB", "100000 (eager)", "1.23", "| - | - |", "4.30 TB/s", "788 TFLOP/s", "`op3/N=2`", "1.50"):
        assert expected in text, expected
    assert "no record" not in text
    assert performance.main([*arguments, "--check"]) == 0
    document.write_text(text.replace("123456", "133456"), encoding="utf-8")
    assert performance.main([*arguments, "--check"]) == 1


def test_a_record_of_a_cpu_is_not_kept(tmp_path):
    report = tmp_path / "report.json"
    report.write_text(json.dumps({**gpu_report(), "mode": "host"}), encoding="utf-8")
    with pytest.raises(SystemExit, match="only one of a GPU"):
        performance.main(["--results", str(tmp_path / "results"), "--document", str(tmp_path / "d.md"), "--add", str(report)])


def test_the_committed_page_is_what_the_newest_record_gives():
    assert performance.main(["--check"]) == 0


# ----------------------------------------------------------------------------------------------------------------------
# A planted kernel fault

def test_a_planted_kernel_fault_fails_the_check(pack, tmp_path):
    """SwiGLU's forward adds `up` instead of multiplying by it, in a copy of the sources built beside the real ones."""
    tree = tmp_path / "tree"
    for folder in ("llmc", "hostcuda", "dev/test"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "Makefile", tree)
    shutil.copytree(ROOT / "build/host", tree / "build/host", copy_function=os.link)  # objects as they are; make replaces, never rewrites them
    header = tree / "llmc/swiglu.cuh"
    text = header.read_text(encoding="utf-8")
    assert text.count("exp8(-gate)) * up)") == 1
    program = "build/cpu-BF16/dev/test/test_swiglu"
    for source, fails in ((text, False), (text.replace("exp8(-gate)) * up)", "exp8(-gate)) + up)"), True)):
        header.write_text(source, encoding="utf-8")
        subprocess.run(["make", "DEVICE=cpu", program], cwd=tree, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True, timeout=300)
        shutil.copy2(tree / program, pack / "bin/kernel_tests")
        status, output, report = check(pack, "--only", "tests")
        assert status == fails, output
        assert any("Swiglu" in problem for problem in report["stages"]["tests"]["problems"]) == fails
