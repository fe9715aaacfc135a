"""The stages of the GPU check, in the order they run. Each fills its results and returns what went wrong, one line a problem."""

from __future__ import annotations

import array
import json
import math
import random
import re
import shutil
import statistics
import struct
from pathlib import Path
from typing import Any

from check_context import ROOT, Check, Finished, Skip, Stage

MODELS = {"0.5B": "dev/gpu/models/qwen2.5-0.5b.json", "1.5B": "dev/gpu/models/qwen2.5-1.5b.json", "3B": "dev/gpu/models/qwen2.5-3b.json"}
PEER_MODELS = ("0.5B", "1.5B")
MICRO_BATCH, SEQ_LEN = 16, 1024  # 3B then takes 108 GB of an H200's 151
STEPS, DROPPED = 12, 4           # the first steps warm up: library handles, clocks
COUNTED = re.compile(r"^(\d+) passed, (\d+) failed", re.MULTILINE)


def models(check: Check) -> dict[str, str]:
    """Name and what --preset (a name) or --from-config (a file) takes."""
    if check.host:
        return {"tiny": "tiny"}
    return {"0.5B": MODELS["0.5B"]} if check.quick else MODELS


def without_blank(problems: list[str]) -> list[str]:
    return [problem for problem in problems if problem]


# ----------------------------------------------------------------------------------------------------------------------
# 1. the machine and its two ceilings

SMI_FIELDS = ("name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu", "ecc.mode.current")


def nvidia_smi(check: Check, name: str) -> dict[str, str]:
    done = check.run_outside(["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"], name, 20)
    if done.status != 0:
        return {}
    return dict(zip(SMI_FIELDS, (field.strip() for field in done.output.splitlines()[0].split(","))))


def machine(check: Check, results: dict[str, Any]) -> list[str]:
    problems = []
    if not check.host:
        results["gpu"] = nvidia_smi(check, "nvidia-smi")
        if not results["gpu"]:
            problems.append("nvidia-smi does not answer: is this a machine with an NVIDIA GPU and its driver?")
        users = check.run_outside(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"], "gpu-users", 20)
        results["other_processes"] = len(users.output.split("\n")) - 1 if users.status == 0 else None
        libraries = check.run(["--libraries"], "libraries", 20)
        # The place alone says too much of a machine and too little of a library: the file behind the name has its version.
        results["libraries"] = {line.split()[0]: Path(line.split()[1]).resolve().name for line in libraries.output.splitlines() if len(line.split()) == 2}
        problems.append(libraries.problem("libraries"))
    ceilings = check.work / "ceilings.json"
    done = check.run(["bench", "--ceilings", f"--benchmark_out={ceilings}", "--benchmark_out_format=json"], "ceilings", 60)
    problems.append(done.problem("ceilings"))
    if ceilings.exists():
        context = json.loads(ceilings.read_text(encoding="utf-8"))["context"]
        results["device"] = context["device"]
        results["copy_bytes_per_second"] = float(context["copy_bytes_per_second"])
        results["product_flops_per_second"] = float(context["product_flops_per_second"])
    if not check.host:
        results["gpu_after_load"] = nvidia_smi(check, "nvidia-smi-loaded")
    return without_blank(problems)


# ----------------------------------------------------------------------------------------------------------------------
# 2. unit tests of the kernels, and the whole model against PyTorch's dumps

TEST_PROGRAMS = ("kernel_tests", "kernel_tests_fp32", "test_gpt", "test_gpt_fp32")


def judge_tests(check: Check, name: str, done: Finished, results: dict[str, Any]) -> list[str]:
    report = check.work / f"{name}.json"
    if report.exists():
        cases = [case for suite in json.loads(report.read_text(encoding="utf-8"))["testsuites"] for case in suite["testsuite"]]
        failed = [f"{case['classname']}.{case['name']}: {case['failures'][0]['failure'].splitlines()[-1]}" for case in cases if case.get("failures")]
        # Their times choose what the sanitizer runs later.
        results[name] = {"passed": len(cases) - len(failed), "failed": len(failed), "seconds": round(done.seconds, 1),
                         "times": {f"{case['classname']}.{case['name']}": float(case["time"].rstrip("s")) for case in cases}}
        problems = [f"{name}: {line[:300]}" for line in failed]
    else:
        counted = COUNTED.findall(done.output)
        passed, count = (int(counted[-1][0]), int(counted[-1][1])) if counted else (0, 0)
        results[name] = {"passed": passed, "failed": count, "seconds": round(done.seconds, 1),
                         "summary": [line for line in done.output.splitlines() if "of the bound" in line]}
        problems = [f"{name}: {line.strip()[:300]}" for line in done.output.splitlines() if "FAILED" in line]
    if not problems and (done.status != 0 or results[name]["passed"] == 0):
        problems = [done.problem(name) or f"{name}: no test ran"]
    return problems


def tests(check: Check, results: dict[str, Any]) -> list[str]:
    references = [check.pack / "reference" / family for family in ("llama", "qwen2", "qwen3", "llama64")]

    def start(name: str) -> Any:
        arguments = references if name.startswith("test_gpt") else [f"--gtest_output=json:{check.work / name}.json", "--gtest_brief=1"]
        return check.start([name, *arguments], name)

    # On a GPU side by side: nothing here is timed, and much of it is the host's reference loops.
    running = [(name, start(name)) for name in TEST_PROGRAMS] if not check.host else None
    problems = []
    for name in TEST_PROGRAMS:
        done = dict(running)[name].wait() if running else start(name).wait()
        problems += judge_tests(check, name, done, results)
    return problems


# ----------------------------------------------------------------------------------------------------------------------
# Runs of the trainer

class Run:
    """A finished run of train_gpt: its metrics, or the problem it ended with."""

    def __init__(self, done: Finished, folder: Path, what: str) -> None:
        self.problem = done.problem(what)
        metrics = folder / "metrics.jsonl"
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.exists() else []
        self.steps = list({record["step"]: record for record in records if record["kind"] == "train"}.values())  # after a resume the last line of a step wins
        self.end: dict[str, Any] = next((record for record in reversed(records) if record.get("event") == "done"), {})
        if not self.problem and not (self.steps and self.end):
            self.problem = f"{what}: it ended without its metrics"

    def bits(self) -> tuple[Any, ...]:
        return tuple((step["loss"], step["grad_norm"]) for step in self.steps), self.end.get("weights")


def train(check: Check, name: str, options: list[Any], program: str = "train_gpt", ranks: int = 0, limit: float = float("inf"), saves: bool = False) -> Run:
    folder = check.work / name
    options = options if saves else [*options, "--no-save"]
    command = [program] if ranks == 0 else ["mpirun", "-np", ranks, check.program(program)]
    done = check.run([*command, *options, "--out", folder], name, limit)
    return Run(done, folder, name)


def pack_data(check: Check) -> list[str]:
    return ["--train-data", f"{check.pack}/data/train_*.bin", "--val-data", f"{check.pack}/data/val_*.bin"]


# ----------------------------------------------------------------------------------------------------------------------
# 3. the same training run here and on the CPU the pack was made on

ORDER_OF_MAGNITUDE = 10


def differences(a: list[float], b: list[float]) -> list[float]:
    """Relative, step by step."""
    return [abs(x / y - 1) for x, y in zip(a, b)]


def pack_curve(check: Check, name: str, field: str) -> list[float]:
    records = map(json.loads, (check.pack / "host" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines())
    return [float(record[field]) for record in records if record["kind"] == "train"]


def same_run(check: Check, results: dict[str, Any]) -> list[str]:
    """FP32: every loss and norm within test_gpt's bounds (1e-5 for the first loss, which comes before any update, else 1e-4).
    BF16: rounding differs between machines and training amplifies it, so the yardstick is a control: the same windows on the packing CPU in
    micro-batches of other sizes and with products summed in another order, which changes the roundings and nothing else. The typical difference
    of a step (the median) may be twice the farthest control's. The largest is decided by the one step that amplifies most, so it only has
    to be of the controls' order of magnitude."""
    problems = []
    for precision, program in (("bf16", "train_gpt"), ("fp32", "train_gpt_fp32")):
        run = train(check, f"same-{precision}", [*check.info["same_run"]["options"], *pack_data(check)], program)
        if run.problem:
            problems.append(run.problem)
            continue
        controls = sorted(path.stem for path in (check.pack / "host").glob(f"{precision}.control*.jsonl"))
        results[precision] = {}
        for field in ("loss", "grad_norm"):
            ours, reference = [float(step[field]) for step in run.steps], pack_curve(check, precision, field)
            if len(ours) != len(reference):
                problems.append(f"{precision}: {len(ours)} steps here, {len(reference)} in the pack")
                continue
            found = differences(ours, reference)
            of_controls = [differences(pack_curve(check, name, field), reference) for name in controls]
            control, largest_control = max(map(statistics.median, of_controls)), max(map(max, of_controls))
            bounds = (1e-4, 1e-4) if precision == "fp32" else (2 * control, ORDER_OF_MAGNITUDE * largest_control)
            typical, largest = statistics.median(found), max(found)
            results[precision][field] = {"here": ours, "host": reference, "typical": typical, "typical_bound": bounds[0], "largest": largest, "largest_bound": bounds[1],
                                         "control": control, "largest_control": largest_control}
            # A NaN is within no bound, wherever max and median put it.
            if not typical <= bounds[0] or not all(difference <= bounds[1] for difference in found):
                problems.append(f"{precision}: {field} differs from the CPU's by typically {typical:.1e} (bound {bounds[0]:.1e}), at most {largest:.1e} (bound {bounds[1]:.1e})")
            if (precision, field) == ("fp32", "loss") and not found[0] <= 1e-5:
                problems.append(f"fp32: the first loss differs by {found[0]:.1e} from the CPU's, the bound is 1e-5")
    return problems


# ----------------------------------------------------------------------------------------------------------------------
# 4. several ranks on one device, and one rank through the real NCCL

SHORT_RUN = ["--preset", "tiny", "--steps", 8, "--warmup", 2, "--seq-len", 64, "--micro-batch", 2, "--total-batch", 0, "--val-batches", 1, "--sample-every", 0]


def ranks(check: Check, results: dict[str, Any]) -> list[str]:
    problems = []

    def same(what: str, runs: dict[str, Run]) -> None:
        broken = [run.problem for run in runs.values() if run.problem]
        equal = not broken and len({run.bits() for run in runs.values()}) == 1
        results[what] = "equal to the bit" if equal else "failed"
        problems.extend(broken)
        if not broken and not equal:
            problems.append(f"{what}: not the same bits: " + ", ".join(f"{name} weights {run.end['weights']} loss {run.steps[-1]['loss']}" for name, run in runs.items()))

    data = pack_data(check)
    same("one rank: real NCCL with and without overlap, MPI collectives", {
        "overlap": train(check, "one", [*SHORT_RUN, *data]),
        "no overlap": train(check, "one-no-overlap", [*SHORT_RUN, *data, "--no-overlap"]),
        "MPI": train(check, "one-mpi", [*SHORT_RUN, *data], "mpi/train_gpt")})
    # What a run that went on from its middle leaves is what the whole run left.
    saved = [*SHORT_RUN, *data, "--save-every", 4]
    whole = train(check, "stopped", saved, saves=True)
    shutil.rmtree(check.work / "stopped" / "step_00000008", ignore_errors=True)
    same("one rank: whole, and resumed from the checkpoint of its middle", {"whole": whole, "resumed": train(check, "stopped", [*saved, "--resume", "auto"], saves=True)})
    four = {f"stage {stage}": train(check, f"four-{stage}", [*SHORT_RUN, *data, "--zero-stage", stage], "mpi/train_gpt", 4) for stage in (0, 1, 2, 3)}
    four["stage 3, recompute block"] = train(check, "four-recompute", [*SHORT_RUN, *data, "--zero-stage", 3, "--recompute", "block"], "mpi/train_gpt", 4)
    same("four ranks: ZeRO stages 0 to 3, recomputation", four)
    done = check.run(["mpirun", "-np", 4, check.program("mpi/mpi_test_zero"), "--quick"], "mpi_test_zero")
    counted = COUNTED.findall(done.output)
    results["ZeRO engine on four ranks"] = f"{counted[-1][0]} passed, {counted[-1][1]} failed" if counted else "no end"
    failed = [f"mpi_test_zero: {line.strip()[:300]}" for line in done.output.splitlines() if line.startswith("FAILED")]
    return [*problems, *failed] if failed else without_blank([*problems, done.problem("mpi_test_zero")])


# ----------------------------------------------------------------------------------------------------------------------
# 5. kernels against the two ceilings and the best library

def kernel_rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the record keeps of bench's report, by the benchmark's name."""
    return {row["run_name"]: {**{key: row[key] for key in ("us", "bytes", "flops", "share")}, "of": row.get("label", "")} for row in report["benchmarks"] if not row.get("error_occurred")}


def add_library(rows: dict[str, dict[str, Any]], found: dict[str, Any]) -> None:
    """Of library_bench.py's report: the best of PyTorch's, and all that was tried."""
    for name, row in found["results"].items():
        rows.get(name, {}).update(library=row["library"], library_us=row["us"], library_tried=row.get("tried", {}))


def benchmarks(check: Check, results: dict[str, Any]) -> list[str]:
    ours = check.work / "bench.json"
    done = check.run(["bench", f"--models={','.join(models(check).values())}", f"--benchmark_out={ours}", "--benchmark_out_format=json"], "bench",
                     check.seconds_left() - (0 if check.host else 40))
    results["kernels"] = {}
    try:
        report = json.loads(ours.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return [done.problem("bench") or "bench: it wrote no report"]
    rows = results["kernels"] = kernel_rows(report)
    problems = [f"{row['run_name']}: {row['error_message'][:300]}" for row in report["benchmarks"] if row.get("error_occurred")]
    if not problems:
        problems = without_blank([done.problem("bench")]) or ([] if rows else ["bench: no benchmark ran"])
    if not check.host:
        library = check.work / "library.json"
        beside = check.run_outside(["python3", "dev/gpu/library_bench.py", "--ours", ours, "--out", library, "--seconds-limit", f"{max(5.0, check.seconds_left() - 10):.0f}"], "library_bench")
        if library.exists():
            found = json.loads(library.read_text(encoding="utf-8"))
            results["torch"] = found.get("torch")
            add_library(rows, found)
        results["library_problem"] = beside.problem("library_bench")  # what there is to compare with is the machine's business
    return problems


# ----------------------------------------------------------------------------------------------------------------------
# 6. training speed

def write_random_shard(path: Path, vocab_size: int, windows: int, seq_len: int) -> None:
    """llm.c's uint32 format: 256 int32 of header (magic, version, tokens), then the ids."""
    count = windows * seq_len + 1
    generator = random.Random(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240801, 7, count, *[0] * 253))
        array.array("I", (generator.randrange(vocab_size) for _ in range(count))).tofile(file)


def training_options(check: Check, model: str) -> tuple[list[Any], int]:
    """Options of a run with random tokens, and the vocabulary's size."""
    if check.host:
        vocab_size, options = 257, ["--preset", model, "--micro-batch", 4, "--seq-len", 128]
    else:
        vocab_size = json.loads((ROOT / model).read_text(encoding="utf-8"))["vocab_size"]
        options = ["--from-config", model, "--micro-batch", MICRO_BATCH, "--seq-len", SEQ_LEN]
    shard = check.work / f"random-{vocab_size}" / "train_000.bin"
    if not shard.exists():
        write_random_shard(shard, vocab_size, STEPS * MICRO_BATCH, 128 if check.host else SEQ_LEN)
    return [*options, "--train-data", shard, "--val-data", shard, "--val-batches", 1, "--total-batch", 0, "--steps", STEPS, "--warmup", 4, "--lr", "1e-4", "--sample-every", 0, "--val-every", 0], vocab_size


def gpu_memory_used(check: Check, name: str) -> float:
    used = "" if check.host else nvidia_smi(check, name).get("memory.used", "")
    return float(used.split()[0]) * 2**20 if used else 0.0


def memory_problems(check: Check, name: str, options: list[Any], row: dict[str, Any]) -> list[str]:
    """What the run took against its plan: our own bytes are equal, and what lies beside them is within the plan's reserve."""
    done = check.run(["train_gpt", *options, "--plan", "--plan-json"], f"plan-{name}")
    if done.status != 0:
        return [done.problem(f"plan-{name}")]
    plan = json.loads(done.output)
    row["planned_bytes"], row["reserve_bytes"] = plan["stages"][plan["chosen_stage"]]["total_bytes"], plan["reserve_bytes"]
    problems = []
    if row["own_bytes"] != row["planned_bytes"]:
        problems.append(f"{name}: took {row['own_bytes']:.0f} bytes of device memory, planned were {row['planned_bytes']:.0f}")
    if row["used_bytes"] - row["own_bytes"] > row["reserve_bytes"]:
        problems.append(f"{name}: {(row['used_bytes'] - row['own_bytes']) / 1e9:.2f} GB lie beside ours, more than the plan's reserve of {row['reserve_bytes'] / 1e9:.2f} GB (--memory-reserve)")
    return problems


def training(check: Check, results: dict[str, Any]) -> list[str]:
    problems = []
    for name, model in models(check).items():
        options, vocab_size = training_options(check, model)
        before = gpu_memory_used(check, f"memory-before-{name}")
        run = train(check, f"speed-{name}", options)
        if run.problem:
            problems.append(run.problem)
            continue
        counted = run.steps[DROPPED:]
        row = results[name] = {key: statistics.median(step[key] for step in counted)
                               for key in ("tokens_per_s", "step_ms", "forward_ms", "head_ms", "backward_ms", "update_ms", "data_ms", "exposed_comm_ms", "mfu_measured")}
        row["mfu"] = None if check.host else statistics.median(float(step["mfu"]) for step in counted)
        row["tokens_a_step"] = run.steps[0]["tokens"]
        row["own_bytes"] = run.steps[-1]["mem_bytes"]
        row["used_bytes"] = run.end["device_used_bytes"] - before
        problems += memory_problems(check, name, options, row)
        row["losses"] = [run.steps[0]["loss"], run.steps[-1]["loss"]]
        # Random tokens cannot be predicted: the loss begins near ln V (a little above, for the untrained logits' spread) and stays there.
        if not all(abs(loss - math.log(vocab_size)) < 1.0 for loss in row["losses"]) or len(run.steps) != STEPS:
            problems.append(f"{name}: {len(run.steps)} steps, losses {row['losses'][0]:.3f} to {row['losses'][1]:.3f}; random tokens of {vocab_size} kinds have {math.log(vocab_size):.3f}")
    return problems


# ----------------------------------------------------------------------------------------------------------------------
# 7. the same models in PyTorch

def peer(check: Check, results: dict[str, Any]) -> list[str]:
    if check.host:
        raise Skip("no GPU: --host has nothing to compare PyTorch's speed with")
    if check.quick:
        raise Skip("--quick")
    if check.run_outside(["python3", "-c", "import torch, transformers; assert torch.cuda.is_available()"], "torch").status != 0:
        raise Skip("python3 has no PyTorch with CUDA and transformers")
    problems = []
    # Eager first; a compilation takes a minute. bf16 weights and moments are the fastest a user of PyTorch may choose, fp32 ones are as exact as ours.
    kinds = (("eager", "fp32", 60), ("eager", "bf16", 60), ("compile", "fp32", 150), ("compile", "bf16", 150))
    wanted = [(name, mode, weights, least) for mode, weights, least in kinds for name in PEER_MODELS]
    for name, mode, weights, least in wanted:
        key = f"{name} {mode} {weights}"
        if check.seconds_left_in_all() < least or check.seconds_left() < 20:
            results[key] = {"skipped": f"less than {least} s were left in all, or 20 s for this stage"}
            continue
        out = check.work / f"{key.replace(' ', '-')}.json"
        done = check.run_outside(["python3", "dev/gpu/peer_torch.py", "--config", MODELS[name], "--micro-batch", MICRO_BATCH, "--seq-len", SEQ_LEN, "--steps", STEPS, "--drop", DROPPED,
                          "--mode", mode, "--weights", weights, "--device", "cuda", "--seconds-limit", f"{max(5.0, check.seconds_left() - 10):.0f}", "--out", out], key.replace(" ", "-"))
        found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        results[key] = found if "tokens_per_s" in found else {"error": found.get("error") or done.problem(key) or "no result"}
    # What PyTorch cannot do on this machine is no fault of ours, unless it could do nothing.
    if not any("tokens_per_s" in row for row in results.values()):
        problems.append("no PyTorch run ended: " + "; ".join(f"{key}: {row.get('error') or row.get('skipped')}" for key, row in results.items()))
    return problems


# ----------------------------------------------------------------------------------------------------------------------
# 8. compute-sanitizer, in what time is left

SANITIZED_NATIVE_SECONDS = 1.0  # of kernel tests that run this long on their own: the tools slow them down ten to a hundred times
SANITIZED_RUN = ["--preset", "tiny", "--num-layers", 1, "--steps", 2, "--warmup", 1, "--seq-len", 32, "--micro-batch", 2, "--total-batch", 128, "--val-batches", 1, "--sample-every", 0]


def shortest_tests(check: Check) -> str:
    """A filter for the quickest kernel tests of stage 2, at least one of each suite."""
    times: dict[str, float] = check.results.get("tests", {}).get("results", {}).get("kernel_tests", {}).get("times", {})
    ordered = sorted(times, key=lambda name: times[name])
    first_of_suite = {name.split(".")[0]: name for name in reversed(ordered)}
    chosen, total = list(first_of_suite.values()), sum(times[name] for name in first_of_suite.values())
    for name in ordered:
        total += times[name]
        if total > SANITIZED_NATIVE_SECONDS:
            break
        if name not in chosen:
            chosen.append(name)
    return ":".join(chosen) or "Rmsnorm*:Swiglu*"


def sanitizer(check: Check, results: dict[str, Any]) -> list[str]:
    if check.host:
        raise Skip("no GPU: hostcuda's own checking modes, ASan and TSan run in `make test`")
    if check.quick:
        raise Skip("--quick")
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if not tool:
        raise Skip("compute-sanitizer is not on the path, nor in /usr/local/cuda/bin")
    kernel_tests = [check.program("kernel_tests"), "--gtest_brief=1", f"--gtest_filter={shortest_tests(check)}"]
    problems = []
    for name, kind in (("tests", "memcheck"), ("run", "memcheck"), ("tests", "racecheck"), ("run", "racecheck"), ("run", "initcheck"), ("tests", "initcheck")):
        key = f"{kind} {name}"
        if check.seconds_left() < 10:
            results[key] = "no time was left"
            continue
        program = kernel_tests if name == "tests" else [check.program("train_gpt"), *SANITIZED_RUN, *pack_data(check), "--no-save", "--out", check.work / key.replace(" ", "-")]
        done = check.run([tool, "--tool", kind, "--error-exitcode", 99, *program], key.replace(" ", "-"))
        summary = [line.strip("= ") for line in done.output.splitlines() if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
        results[key] = summary[-1] if summary else f"no end after {done.seconds:.0f} s" if done.timed_out else "no summary"
        if done.status != 0 and not done.timed_out:
            problems.append(done.problem(key) if not summary else f"{key}: {summary[-1]}")
    return problems


# Each stage's own limit on a GPU, in seconds; together more than the whole may take, since a stage as a rule ends long before its own.
STAGES = [Stage("machine", 45, machine), Stage("tests", 100, tests), Stage("same-run", 60, same_run), Stage("ranks", 80, ranks), Stage("benchmarks", 130, benchmarks),
          Stage("training", 100, training), Stage("peer", 200, peer), Stage("sanitizer", 300, sanitizer)]
