"""--plan as a user meets it: no device and no MPI, what it says against real runs and against arithmetic, and what it does with nonsense.

The arithmetic of a plan on bills of memory that are easy to check by hand is test_plan.cpp's, that of --params is test_params_plan.cpp's.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Optional

import pytest

from train_testing import ROOT, SMALL, TRAINER, UNITS, mpirun, needs_trainer, write_shard

pytestmark = needs_trainer

CHECKED_TRAINER = ROOT / "build/cpu-BF16-asan/train_gpt"  # with the address and undefined-behaviour sanitizers
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "staging", "workspace", "other")
LARGE = {"model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
         "vocab_size": 128256, "head_dim": 128, "max_position_embeddings": 8192, "rope_theta": 5e5, "tie_word_embeddings": False}


def environment_without_launchers(**more: str) -> dict[str, str]:
    """No launcher's variables and none of the simulator's; whoever starts MPI all the same fails at once."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_", "HOSTCUDA_", "SLURM_"))}
    return {**kept, "OMPI_MCA_pml": "none_of_that_name", **more}


def run_plan(*options: str, cwd: Path = ROOT, trainer: Path = TRAINER, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([str(trainer), "--plan", *options], cwd=cwd, env=environment_without_launchers(ASAN_OPTIONS="detect_leaks=0", **environment),
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=120)


def plan_text(*options: str, cwd: Path = ROOT) -> str:
    done = run_plan(*options, cwd=cwd)
    assert done.returncode == 0 and done.stderr == "", (done.returncode, done.stderr)
    return done.stdout


def plan_json(*options: str, cwd: Path = ROOT) -> dict:
    return json.loads(plan_text("--plan-json", *options, cwd=cwd))


# ---- the text's tables ----------------------------------------------------------------------------------------------------------------

def shows(cell: str, value: float, unit: float = 1.0) -> bool:
    """The cell is the value in that unit, rounded to the digits it has."""
    number, decimals, exponent, suffix = re.fullmatch(r"([+-]?\d+(?:\.(\d+))?)(?:e([+-]\d+))?([kMB]?)", cell).groups()
    scale = unit * {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}[suffix] * 10.0 ** int(exponent or 0)
    return abs(float(number) * scale - value) <= 0.5000001 * 10.0 ** -len(decimals or "") * scale + 1e-12 * abs(value)


def rows(text: str, heading: str) -> dict[str, list[str]]:
    """Cells by label of the indented lines after the line that begins with `heading`."""
    lines = text[re.search(rf"^{re.escape(heading)}.*\n", text, re.MULTILINE).end():].splitlines()
    end = next((i for i, line in enumerate(lines) if not line.startswith("  ")), len(lines))
    split = [re.split(r" {2,}", line.strip()) for line in lines[:end]]
    return {label: cells for label, *cells in split}


def test_cells_are_compared_to_their_last_digit():
    assert shows("1.50", 1.504) and not shows("1.50", 1.506) and shows("8.1e-05", 8.14e-05) and not shows("8.1e-05", 8.16e-05)
    assert shows("17.3k", 17348) and not shows("17.3k", 17352) and shows("3.26e+07", 32.64e6) and not shows("3.26e+07", 32.66e6)


def expect_run_line(text: str, stage: int, ranks: int, steps: int, tokens_per_step: float, hours: float) -> None:
    line = r"^run:  stage (\d) on (\d+) ranks?(?: as recommended)?, (\d+) steps, (\S+) tokens: (\S+) (minutes|hours), (\S+) device-hours(?:, cost|;)"
    found = re.search(line, text, re.MULTILINE)
    assert found, text
    assert [int(number) for number in found.groups()[:3]] == [stage, ranks, steps]
    assert shows(found.group(4), steps * tokens_per_step) and shows(found.group(5), hours, 1 / 60 if found.group(6) == "minutes" else 1)
    assert (found.group(6) == "minutes") == (hours < 1) and shows(found.group(7), hours * ranks)


CASES = {
    "small": ["--ranks", "4", "--total-batch", "32768"],
    "one rank": ["--preset", "124M"],
    "many ranks": ["--preset", "qwen2.5-7B", "--ranks", "48", "--grad-accum", "20", "--zero-stage", "3", "--link", "nvlink=450:3,ib=50:5", "--bucket-mb", "0"],
    "does not fit": ["--preset", "4B", "--ranks", "4", "--device-memory", "24GB", "--zero-stage", "2", "--grad-accum", "3", "--micro-batch", "4"],
    "never fits": ["--preset", "4B", "--ranks", "4", "--device-memory", "2.5GB"],
    "one link": ["--preset", "1.5B", "--ranks", "16", "--link", "ethernet=3:20", "--no-overlap", "--recompute", "block", "--lmhead-chunks", "4", "--zero-stage", "0",
                 "--grad-dtype", "fp32"],
}


@pytest.mark.parametrize("name", CASES)
def test_text_and_json_say_the_same(name):
    text, plan = plan_text(*CASES[name], "--steps", "500"), plan_json(*CASES[name], "--steps", "500")
    stages, asked = plan["stages"], plan["chosen_stage"]
    unit_name = re.search(r"^memory of a rank, (GB|MB)", text, re.MULTILINE).group(1)
    unit = UNITS[unit_name]
    heading = next(line for line in text.splitlines() if line.startswith("memory of a rank"))
    assert re.findall(r"\*?stage \d", heading) == [("*" if stage == asked else "") + f"stage {stage}" for stage in range(4)]

    memory = rows(text, "memory of a rank")
    for i, stage in enumerate(stages):
        assert set(stage["memory_bytes"]) <= set(CATEGORIES) and sum(stage["memory_bytes"].values()) == stage["total_bytes"]
        for category in CATEGORIES:
            assert shows(memory.get(category, ["0.00"] * 4)[i], stage["memory_bytes"].get(category, 0), unit), (category, i)
        assert shows(memory["allocated"][i], stage["total_bytes"], unit) and shows(memory["reserve"][i], plan["reserve_bytes"], unit)
        (left,) = [cells[i] for label, cells in memory.items() if label.startswith("left of ")]
        assert shows(left, plan["device_memory_bytes"] - plan["reserve_bytes"] - stage["total_bytes"], unit)
        assert stage["fits"] == (stage["total_bytes"] + plan["reserve_bytes"] <= plan["device_memory_bytes"])
        assert memory["fits"][i] == ("yes" if stage["fits"] else "NO")

    sent, time = rows(text, "sent by each rank in a step"), rows(text, "a step, predicted")
    for i, stage in enumerate(stages):
        assert shows(sent[unit_name][i], stage["sent_bytes_per_step"], unit)
        for link in stage["links"]:
            assert link["seconds"] == pytest.approx(stage["sent_bytes_per_step"] / link["bytes_per_s"])
            (cell,) = [cells[i] for label, cells in sent.items() if label.startswith(f"at least, over {link['name']} at ")]
            assert shows(cell, link["seconds"], 1e-3)
        assert len(sent) == 1 + len(stage["links"])
        for label, field in (("computation, ms", "compute_seconds"), ("communication, ms", "comm_seconds"), ("of it not hidden, ms", "exposed_comm_seconds"),
                             ("step, ms", "step_seconds")):
            assert shows(time[label][i], stage[field], 1e-3), (label, i)
        assert stage["step_seconds"] == pytest.approx(stage["compute_seconds"] + stage["exposed_comm_seconds"])
        assert stage["tokens_per_s"] == pytest.approx(plan["tokens_per_step"] / stage["step_seconds"]) and shows(time["tokens/s"][i], stage["tokens_per_s"])

    fitting = [stage["stage"] for stage in stages if stage["fits"]]
    assert plan["recommended_stage"] in (fitting or [None])
    asked_rate = stages[asked]["tokens_per_s"] / plan["ranks"]
    if stages[asked]["fits"]:
        assert plan["advice"] == [] and plan["why_not"] == ""
        assert re.search(rf"^recommended: --zero-stage {plan['recommended_stage']}\b", text, re.MULTILINE)
    else:
        table = rows(text, "what makes it fit, and its price") if plan["advice"] else {"(as asked)": None}
        assert set(table) == {"(as asked)", *(advice["options"] for advice in plan["advice"])} and len(table) == 1 + len(plan["advice"])
        for advice in plan["advice"]:
            result, cells = advice["result"], table[advice["options"]]
            assert result["fits"] and shows(cells[0], result["total_bytes"], unit)
            assert shows(cells[1], result["sent_bytes_per_step"], unit) and shows(cells[3], result["tokens_per_s"])
            change = 100 * (result["tokens_per_s"] / advice["ranks"] / asked_rate - 1)
            assert cells[2] == "the same" if abs(change) < 0.05 else shows(cells[2].removesuffix(" %"), change)
        assert plan["why_not"] in text
        recommended = re.search(r"^recommended: (.*)$", text, re.MULTILINE)
        assert recommended.group(1) == plan["recommended_options"] if plan["advice"] else recommended is None and plan["recommended_options"] is None

    # Scaling, hours and price are of what is recommended.
    chosen, ranks = stages[asked if plan["recommended_stage"] is None else plan["recommended_stage"]], plan["ranks"]
    for advice in plan["advice"]:
        if advice["options"] == plan["recommended_options"]:
            chosen, ranks = advice["result"], advice["ranks"]
    scaling = rows(text, "(8 ranks a node, joined by ")
    assert list(scaling) == ["ranks", *(str(row["ranks"]) for row in plan["scaling"])]
    alone = plan["scaling"][0]["tokens_per_s"]
    for row in plan["scaling"]:
        cells = scaling[str(row["ranks"])]
        assert shows(cells[0].removesuffix(" (too much)"), row["total_bytes"], unit) and cells[0].endswith(" (too much)") == (not row["fits"])
        for label, cell in zip(scaling["ranks"][1:5], cells[1:5]):
            assert shows(cell, row["step_seconds"][label.removesuffix(", ms")], 1e-3)
        assert shows(cells[5], row["tokens_per_s"]) and shows(cells[6].removesuffix(" %"), 100 * row["tokens_per_s"] / row["ranks"] / alone)
    assert [row["total_bytes"] for row in plan["scaling"] if row["ranks"] == ranks] == [chosen["total_bytes"]]
    assert text[:text.index("(8 ranks a node")].splitlines()[-1].startswith(f"a step on more ranks: stage {chosen['stage']}")

    if chosen["fits"]:
        assert plan["hours"] == pytest.approx(500 * chosen["step_seconds"] / 3600)
        expect_run_line(text, chosen["stage"], ranks, 500, plan["tokens_per_step"] / plan["ranks"] * ranks, plan["hours"])
    else:
        assert plan["hours"] is None and "\nrun:  it does not fit\n" in text
    for word in ("nan", "inf "):
        assert word not in text.lower()


# ---- neither a device nor MPI ---------------------------------------------------------------------------------------------------------

MEASURE = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(status, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_a_hundred_thousand_ranks_are_planned_in_little_memory():
    environment = environment_without_launchers(HOSTCUDA_MEMORY="1MB")
    options = ["--preset", "4B", "--ranks", "100000"]
    # A process's peak counts what it was before it became the program, so the one that starts it is small.
    measured = subprocess.run([sys.executable, "-c", MEASURE, str(TRAINER), "--plan", *options], env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    status, peak_kb = map(int, measured.stdout.split())
    assert status == 0 and peak_kb < 200_000
    text = plan_text(*options)
    assert run_plan(*options, HOSTCUDA_MEMORY="1MB").stdout == text
    assert "4.01B parameters in bf16; 100000 ranks" in text and rows(text, "(8 ranks a node")["100000"][6].endswith(" %")


def test_anything_but_a_plan_fails_in_that_environment(data, tmp_path):
    """So that the test above can fail: MPI does not start, and the device is too small."""
    command = [str(TRAINER), *SMALL, "--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin", "--out", str(tmp_path / "run"), "--allocate-only"]
    statuses = []
    for environment in (dict(os.environ), environment_without_launchers(), {**os.environ, "HOSTCUDA_MEMORY": "1MB"}):
        done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=60)
        statuses.append(done.returncode)
    assert statuses[0] == 0 and statuses[1] != 0 and statuses[2] == 1 and "does not fit 1.00 MB of device memory" in done.stderr


def test_under_mpirun_it_is_printed_once():
    text = plan_text("--preset", "124M", "--ranks", "4", "--steps", "7")
    for ranks, options in ((2, ["--ranks", "4"]), (4, [])):  # the ranks to plan for are given, or those that were started
        status, output = mpirun(ranks, [str(TRAINER), "--plan", "--preset", "124M", "--steps", "7", *options])
        assert status == 0
        assert [line for line in output.splitlines() if " are free in " not in line] == [line for line in text.splitlines() if " are free in " not in line]


# ---- against a run --------------------------------------------------------------------------------------------------------------------

ALL_LEVERS = ["--total-batch", "512", "--bucket-mb", "0", "--recompute", "ffn", "--lmhead-chunks", "2", "--tied", "--num-layers", "3"]  # 4 micro-steps of two ranks


def expect_planned_memory(run, stage: dict) -> None:
    for category in CATEGORIES:
        planned = stage["memory_bytes"].get(category, 0)
        if planned == 0:
            assert f"\n  {category} " not in run.output[run.output.index("\ndevice memory of a rank\n"):]
            continue
        shown, error = run.row("device memory of a rank", category)
        assert abs(planned - shown) <= error, (category, planned, shown)


@pytest.mark.parametrize("grad_dtype", ["bf16", "fp32"])
def test_planned_memory_and_bytes_are_those_of_a_run(reused, grad_dtype):
    options = [*ALL_LEVERS, "--grad-dtype", grad_dtype, "--steps", "3", "--warmup", "1"]
    plan = plan_json("--ranks", "2", *SMALL, *options)
    assert plan["micro_steps"] == 4
    for stage in plan["stages"][(1 if grad_dtype == "fp32" else 0)::(2 if grad_dtype == "fp32" else 1)]:
        run = reused(2, *options, "--zero-stage", str(stage["stage"]))
        expect_planned_memory(run, stage)
        assert {record["mem_bytes"] for record in run.records("train")} == {stage["total_bytes"]}
        assert run.sent() == stage["sent_bytes_per_step"]
    totals = [stage["total_bytes"] for stage in plan["stages"]]
    assert len(set(totals)) == 4 and len({stage["sent_bytes_per_step"] for stage in plan["stages"]}) >= 3


def test_planned_memory_is_what_allocate_only_takes(reused):
    plan = plan_json("--ranks", "2", *SMALL)
    for stage in plan["stages"]:
        run = reused(2, "--allocate-only", "--zero-stage", str(stage["stage"]))
        expect_planned_memory(run, stage)
        shown, unit = re.search(r"^allocated (\S+) (kB|MB|GB) of device memory", run.output, re.MULTILINE).groups()
        assert shows(shown, stage["total_bytes"], UNITS[unit])


@pytest.mark.parametrize("ranks", [1, 2])
def test_just_enough_memory_is_enough_and_a_byte_less_is_refused(train, ranks):
    """On a CPU nothing lies outside the program's own allocations: the reserve is 0 where none is given."""
    needed = plan_json("--ranks", str(ranks), *SMALL, "--zero-stage", "2")["stages"][2]["total_bytes"]
    assert train(ranks, "--zero-stage", "2", "--device-memory", str(needed), "--steps", "1", "--warmup", "0").records("train")[0]["mem_bytes"] == needed
    for options in (["--device-memory", str(needed - 1)], ["--device-memory", str(needed + 999_999), "--memory-reserve", "1MB"]):
        run = train(ranks, "--zero-stage", "2", *options, ok=False)
        assert run.status == 1, run.output
        assert run.output.count("this run does not fit") == 1 and len(re.findall(r"\berror\b", run.output)) == 1, run.output  # one message, not one a rank
        assert rows(run.output, "memory of a rank")["fits"][2] == "NO" and "what makes it fit" in run.output and "--ignore-plan" in run.output
        assert not run.out.exists()
    train(ranks, "--zero-stage", "2", "--device-memory", str(needed + 1_000_000), "--memory-reserve", "1MB", "--allocate-only")


@pytest.mark.parametrize("ranks", [1, 2])
def test_ignoring_the_plan_ends_in_an_account_of_what_was_taken(train, ranks):
    stage = plan_json("--ranks", str(ranks), *SMALL)["stages"][1]
    limit = stage["total_bytes"] - stage["memory_bytes"]["activations"] // 2  # ends in the middle of the activations
    run = train(ranks, "--device-memory", str(limit), "--ignore-plan", ok=False)
    assert run.status == 1, run.output
    assert run.output.count("out of device memory") == 1, run.output
    table = rows(run.output, "memory of a rank")
    for category in CATEGORIES:
        planned = stage["memory_bytes"].get(category, 0)
        assert category in table if planned else category not in table
        if planned:
            assert shows(table[category][0], planned, 1e6) and float(table[category][1]) <= float(table[category][0])
    planned, taken = map(float, table["allocated"])
    assert shows(table["allocated"][0], stage["total_bytes"], 1e6) and 0 < taken < planned and taken * 1e6 <= limit + 5001
    assert 0 < float(table["activations"][1]) < float(table["activations"][0])
    assert taken == pytest.approx(sum(float(table[category][1]) for category in CATEGORIES if category in table), abs=0.005 * len(CATEGORIES))
    assert "stage 1 does not fit" in run.output and "what makes it fit" in run.output


# ---- a model that is too large ---------------------------------------------------------------------------------------------------------

def options_for_plan(options: str, ranks: Optional[int] = None) -> list[str]:
    """An advice's options as --plan takes them: -np is --ranks there. Other ranks do the same work each."""
    words = options.split()
    if "-np" in words:
        at = words.index("-np")
        if ranks is not None:
            total = words.index("--total-batch") + 1
            words[total] = str(int(words[total]) // int(words[at + 1]) * ranks)
            words[at + 1] = str(ranks)
        words[at] = "--ranks"
    return words


def expect_advice_to_hold(asked: list[str], plan: dict) -> None:
    """Each advice, given to the program on top of what was asked: fits as it says; and on one rank fewer does not."""
    for advice in plan["advice"]:
        words = options_for_plan(advice["options"])
        again = plan_json(*asked, *words)
        result = again["stages"][again["chosen_stage"]]
        assert result["fits"] and result == advice["result"] and again["ranks"] == advice["ranks"], advice["options"]
        assert again["advice"] == [] and again["recommended_stage"] is not None
        if advice["ranks"] > plan["ranks"] and advice["options"] != plan["recommended_options"]:  # that is for as many ranks as one can rent
            fewer = plan_json(*asked, *options_for_plan(advice["options"], advice["ranks"] - 1))
            assert not fewer["stages"][fewer["chosen_stage"]]["fits"], advice["options"]


def test_a_model_of_70_billion_parameters_on_eight_cards(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    asked = ["--from-config", str(tmp_path / "config.json"), "--device-memory", "80GB"]
    text, plan = plan_text(*asked, "--ranks", "8"), plan_json(*asked, "--ranks", "8")
    parameters = 2 * 128256 * 8192 + 80 * (8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672 + 2 * 8192) + 8192
    assert plan["parameters"] == parameters and plan["recommended_stage"] is None
    assert rows(text, "memory of a rank")["fits"] == ["NO"] * 4
    assert f"{parameters * 16 / 8 / 1e9:.2f} GB of state (70.55B parameters x 16 bytes over 8 ranks)" in plan["why_not"] and plan["why_not"] in text
    state = sum(plan["stages"][3]["memory_bytes"][category] for category in ("parameters", "gradients", "optimizer"))
    assert state == pytest.approx(141.1e9, rel=1e-3) and state == pytest.approx(2 * parameters, rel=1e-4)
    # Stage 3 alone on more ranks, everything on the fewest, and the fastest on as many whole nodes.
    assert len(plan["advice"]) == 3
    alone, fewest, recommended = plan["advice"]
    assert alone["ranks"] > recommended["ranks"] >= fewest["ranks"] > 8 and recommended["ranks"] == (fewest["ranks"] + 7) // 8 * 8
    assert recommended["result"]["tokens_per_s"] / recommended["ranks"] > fewest["result"]["tokens_per_s"] / fewest["ranks"]
    assert plan["recommended_options"] == recommended["options"] and f"\nrecommended: {recommended['options']}\n" in text
    expect_advice_to_hold([*asked, "--ranks", "8"], plan)


@pytest.mark.parametrize("asked", [["--preset", "4B", "--ranks", "4", "--device-memory", "24GB", "--grad-accum", "3", "--micro-batch", "4", "--zero-stage", "1"],
                                   ["--preset", "1.5B", "--ranks", "2", "--device-memory", "24GB", "--memory-reserve", "1GB", "--zero-stage", "0"],
                                   ["--ranks", "3", "--device-memory", "45MB", "--memory-reserve", "0", "--seq-len", "96", "--micro-batch", "6"],
                                   ["--preset", "qwen2.5-7B", "--ranks", "8", "--device-memory", "30GB", "--zero-stage", "3", "--sync-every-micro-step", "--grad-dtype", "fp32"]],
                         ids=" ".join)
def test_advice_holds(asked):
    plan = plan_json(*asked)
    assert plan["advice"]
    if "--grad-accum" in asked:  # which an advice's --total-batch replaces
        at = asked.index("--grad-accum")
        asked = [*asked[:at], *asked[at + 2:], "--total-batch", str(int(plan["tokens_per_step"]))]
    expect_advice_to_hold(asked, plan)


# ---- hours, cost, disk -----------------------------------------------------------------------------------------------------------------

def test_hours_and_cost():
    asked = ["--preset", "0.5B", "--ranks", "16", "--grad-accum", "4", "--steps", "20000", "--price", "2.5"]
    text, plan = plan_text(*asked), plan_json(*asked)
    step_seconds = plan["stages"][plan["recommended_stage"]]["step_seconds"]
    hours = 20000 * step_seconds / 3600
    assert plan["tokens_per_step"] == 4 * 2048 * 4 * 16 and plan["steps"] == 20000 and plan["hours"] == pytest.approx(hours)
    expect_run_line(text, plan["recommended_stage"], 16, 20000, plan["tokens_per_step"], hours)
    (cost,) = re.findall(r"^run:  .*, cost (\S+) at 2.5 each$", text, re.MULTILINE)
    assert shows(cost, hours * 16 * 2.5)
    assert "; --price gives their cost\n" in plan_text(*asked[:-2])


def test_advice_has_a_price():
    asked = ["--preset", "4B", "--ranks", "2", "--device-memory", "24GB", "--grad-accum", "2", "--steps", "1000", "--price", "3"]
    text, plan = plan_text(*asked), plan_json(*asked)
    assert len(plan["advice"]) >= 3 and {advice["ranks"] for advice in plan["advice"]} != {2}
    for advice in plan["advice"]:
        (cost,) = re.findall(rf"^  {re.escape(advice['options'])} .* (\S+)$", text, re.MULTILINE)
        assert shows(cost, 1000 * plan["tokens_per_step"] / advice["result"]["tokens_per_s"] / 3600 * advice["ranks"] * 3)
    assert "cost of as many tokens" in text and "cost of as many tokens" not in plan_text(*asked[:-2])


def test_a_measured_step_takes_the_place_of_the_datasheet():
    plan = plan_json("--preset", "124M", "--ranks", "2", "--grad-accum", "5", "--step-seconds", "1.75")
    for stage in plan["stages"]:
        assert stage["compute_seconds"] == pytest.approx(1.75) and stage["step_seconds"] >= 1.75
    faster = plan_json("--preset", "124M", "--ranks", "2", "--grad-accum", "5", "--device-tflops", "100", "--mfu", "0.5")
    assert faster["flops_per_s"] == pytest.approx(50e12)
    assert faster["stages"][0]["compute_seconds"] == pytest.approx(1.75 * plan["flops_per_s"] / 50e12)


def test_epochs_need_data(tmp_path):
    write_shard(tmp_path / "train_000.bin", [1] * 2001)  # 62 windows of 32 tokens and the one that follows
    data = ["--train-data", f"{tmp_path}/train_*.bin"]
    asked = [*SMALL[:SMALL.index("--steps")], "--ranks", "2"]  # 4 windows a step
    plan = plan_json(*asked, *data, "--epochs", "2.5", cwd=tmp_path)
    assert plan["steps"] == math.floor(2.5 * 62 / 4)
    assert plan_json("--preset", "124M", "--seq-len", "32", "--micro-batch", "2", "--ranks", "2", *data, cwd=tmp_path)["steps"] == 62 // 4  # its default is one epoch
    for options in (["--epochs", "1"], ["--train-data", "missing_*.bin", "--preset", "124M"]):
        done = run_plan("--preset", "124M", *options, cwd=tmp_path)
        assert done.returncode == 1 and done.stdout == "" and "train_*.bin" in done.stderr or "missing_*.bin" in done.stderr, done
    # Nobody asked for the default data: a plan does without.
    nothing = plan_json("--preset", "124M", cwd=tmp_path)
    assert nothing["steps"] is None and nothing["hours"] is None
    assert "run:  --steps, or --epochs and data that is there, give hours and price\n" in plan_text("--preset", "124M", cwd=tmp_path)


@pytest.mark.parametrize("keep", [1, 3, 2 ** 30])
def test_checkpoints_and_the_disk(keep, tmp_path):
    asked = ["--preset", "124M", "--keep", str(keep), "--out", str(tmp_path / "not" / "there" / "yet")]
    text, plan = plan_text(*asked), plan_json(*asked)
    assert plan["checkpoint_bytes"] == 14 * plan["parameters"]
    line = r"^disk: (\S+ \w?B) a checkpoint .*, (\S+ \w?B) with --keep \d+ while the next one is written; \S+ \w?B are free in ([^:\n]*)(.*)$"
    one, together, folder, verdict = re.search(line, text, re.MULTILINE).groups()
    for shown, value in ((one, plan["checkpoint_bytes"]), (together, plan["checkpoint_bytes"] * (keep + 1))):
        number, unit = shown.split()
        assert shows(number, value, UNITS[unit])
    assert folder == str(tmp_path) and plan["free_disk_bytes"] > 0
    assert verdict == (": NOT ENOUGH" if plan["checkpoint_bytes"] * (keep + 1) > plan["free_disk_bytes"] else "")
    assert (verdict != "") == (keep == 2 ** 30)  # 1.9 EB; and nobody runs these tests on a disk that holds less than 7 GB


@pytest.mark.parametrize("ranks, bucket_mb", [(1, 25), (3, 0), (5, 0.1)])
def test_host_memory_of_an_async_save(train, ranks, bucket_mb):
    asked = ["--save-mode", "async", "--bucket-mb", str(bucket_mb)]
    text, plan = plan_text(*SMALL, *asked, "--ranks", str(ranks)), plan_json(*SMALL, *asked, "--ranks", str(ranks))
    planned = plan["async_save_host_bytes"]
    # Fp32 master weights and two moments of a slice, padding of the buckets included, and on one rank all weights in bf16.
    assert 12 * plan["parameters"] / ranks + 2 * plan["parameters"] <= planned < 1.5 * (12 * plan["parameters"] / ranks) + 2 * plan["parameters"]
    number, unit = re.search(r"^host memory: up to (\S+) (\w?B) of a rank", text, re.MULTILINE).groups()
    assert shows(number, planned, UNITS[unit])
    number, unit = re.search(r"\n  host memory +(\S+) (\w?B) of a rank \(--save-mode async\)", train(ranks, *asked).output).groups()
    assert shows(number, planned, UNITS[unit])


# ---- a number of parameters ------------------------------------------------------------------------------------------------------------

def test_the_arithmetic_for_a_number_of_parameters():
    text = plan_text("--params", "502.2M", "--ranks", "4", "--grad-accum", "16", "--step-seconds", "6.42", "--link", "nvlink=600,pcie=25")
    assert "plan for 502.20 M parameters on 4 ranks, 16 micro-steps a step" in text
    found = {label: cells for label, *cells in (re.split(r" {2,}", line.strip()) for line in text.splitlines())}
    assert found["memory, GB"][0] == "8.04" and found["sent, GB"][4] == "24.11"
    assert found["on 40 GB"][0] == "1.75 B" and found["on 80 GB"][0] == "3.50 B"
    assert "22.53" in re.findall(r"[\d.]+", text)


# ---- nonsense --------------------------------------------------------------------------------------------------------------------------

ABSURD = ["--num-layers", "4096", "--channels", "262144", "--num-heads", "1024", "--num-kv-heads", "1024", "--head-dim", "256", "--ffn-dim", "1048576", "--vocab-size", "16777216"]
NONSENSE = [
    (["--link", "fast"], 2, ["--link", "fast", "name=GB/s"]),
    (["--link", "nvlink=0"], 2, ["--link", "nvlink", "`0`", "GB/s"]),
    (["--link", "nvlink=nan"], 2, ["--link", "nan"]),
    (["--link", "a=1,a=2"], 2, ["--link", "twice"]),
    (["--ranks", "0"], 2, ["--ranks", "0", "between 1 and 1048576"]),
    (["--ranks", "-3"], 2, ["--ranks", "-3", "between 1 and 1048576"]),
    (["--ranks", "99999999999999999999"], 2, ["--ranks", "99999999999999999999", "between 1 and 1048576"]),
    (["--ranks-per-node", "0"], 2, ["--ranks-per-node", "0"]),
    (["--device-memory", "-5GB"], 2, ["--device-memory", "-5GB", "negative"]),
    (["--device-memory", "80"], 2, ["--device-memory", "80", "unit"]),
    (["--memory-reserve", "-1"], 2, ["--memory-reserve", "-1", "negative"]),
    (["--params", "-1"], 2, ["--params", "-1", "negative"]),
    (["--params", "1e400"], 2, ["--params", "1e400", "too large"]),
    (["--params", "0"], 2, ["--params", "0"]),
    (["--params", "7B", "--preset", "4B"], 2, ["--params", "--preset"]),
    (["--price", "-1"], 2, ["--price", "-1"]),
    (["--mfu", "2"], 2, ["--mfu", "2", "at most 1"]),
    (["--mfu", "nan"], 2, ["--mfu", "nan"]),
    (["--step-seconds", "0"], 2, ["--step-seconds", "0", "above 0"]),
    (["--step-seconds", "1e-299"], 1, ["--step-seconds", "inf operations a second"]),
    (["--device-tflops", "1e-299", "--mfu", "1e-299"], 1, ["--device-tflops", "--mfu", "0 operations a second"]),
    (["--device-tflops", "1e9", "--mfu", "1e-60"], 1, ["--device-tflops", "--mfu", "1e-39 operations a second"]),
    (["--keep", "0"], 2, ["--keep", "0"]),
    (["--grad-accum", "0"], 2, ["--grad-accum", "0"]),
    (["--grad-accum", "4", "--total-batch", "4096"], 2, ["--grad-accum", "--total-batch"]),
    (["--total-batch", "5000", "--ranks", "3"], 2, ["5000", "3072", "6144"]),
    (["--micro-batch", "1048576", "--seq-len", "4194304"], 2, ["--seq-len 4194304", "512", "--max-seq-len"]),
    (["--micro-batch", "1048576", "--seq-len", "4194304", "--max-seq-len", "4194304"], 2,
     ["--micro-batch 1048576", "--seq-len 4194304", "1073741824", "at most --micro-batch 256"]),
    (["--grad-accum", "1073741824"], 2, ["1073741824 micro-steps", "10^12 tokens", "--grad-accum"]),
    (["--from-config", "/nowhere/config.json"], 1, ["/nowhere/config.json"]),
    ([*ABSURD, "--ranks", "2", "--micro-batch", "1", "--seq-len", "1", "--grad-accum", "1073741824"], 1, ["64 bits", "fewer micro-steps"]),
    ([*ABSURD, "--micro-batch", "256", "--seq-len", "4194304", "--max-seq-len", "4194304"], 1, ["64 bits", "smaller model or batch"]),
]
# Those that reach the arithmetic, and the largest that are planned, under the sanitizers too.
CHECKED = [case for case in NONSENSE if case[1] == 1 or "--params" in case[0] or "-3" in case[0]]
LARGEST = [[*ABSURD, "--ranks", "1048576", "--micro-batch", "1", "--seq-len", "1", "--device-memory", "1000000TB"],
           [*ABSURD, "--num-layers", "500", "--ranks", "1048576", "--micro-batch", "1", "--seq-len", "1", "--memory-reserve", "1000000TB", "--bucket-mb", "1000000"],
           ["--ranks", "1048576", "--link", "slow=1e-6:1e6", "--steps", "1000000000000", "--price", "1e9", "--device-memory", "1MB", "--step-seconds", "1e9"],
           ["--micro-batch", "1048576", "--seq-len", "1000", "--max-seq-len", "4096", "--device-memory", "1GB", "--mfu", "1e-20"]]


def expect_refusal(done: subprocess.CompletedProcess, status: int, words: list[str]) -> None:
    assert done.returncode == status and done.stdout == "", done
    assert len(re.findall(r"\berror\b", done.stderr)) == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr, (word, done.stderr)


@pytest.mark.parametrize("options, status, words", NONSENSE, ids=lambda value: " ".join(value) if isinstance(value, list) else str(value))
def test_nonsense_is_refused(options, status, words):
    expect_refusal(run_plan(*options), status, words)


@pytest.mark.parametrize("options", LARGEST, ids=" ".join)
def test_the_largest_is_planned(options):
    for word in (" nan", "-nan", " inf", "-inf"):
        assert word not in plan_text(*options)
    plan = plan_json(*options)
    assert all(math.isfinite(stage["step_seconds"]) and stage["step_seconds"] > 0 and stage["tokens_per_s"] > 0 for stage in plan["stages"])


@pytest.mark.skipif(not CHECKED_TRAINER.exists(), reason="train_gpt with sanitizers is not built; run make DEVICE=cpu ASAN=1 build/cpu-BF16-asan/train_gpt first")
def test_sanitizers_find_nothing():
    for options, status, words in CHECKED:
        expect_refusal(run_plan(*options, trainer=CHECKED_TRAINER), status, words)
    for options in [*LARGEST[1:], [*LARGEST[-1], "--plan-json"], CASES["does not fit"], CASES["never fits"]]:  # the first takes seconds, and has the sizes of the second
        done = run_plan(*options, trainer=CHECKED_TRAINER)
        assert done.returncode == 0 and done.stderr == "", (options, done.stderr)
