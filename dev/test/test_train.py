"""The trainer as a user starts it: the same bits wherever they are promised, what a step means, and every refusal of bad input.

What goes wrong in a run is in test_train_faults.py; how runs are started in train_testing.py.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path

import pytest

from train_testing import ROOT, SHARD_HEADER_BYTES, SMALL, TRAINER, mpirun, needs_trainer, prepare, wait_for, write_shard

pytestmark = needs_trainer

# ---- the same bits, in the memory and with the bytes that are promised -------------------------------------------------------------------

# With three layers in buckets of their own, stage 3 has to forget one to gather another.
BUCKETS = {"merged": ["--bucket-mb", "25"], "unmerged": ["--bucket-mb", "0", "--num-layers", "3"]}
SMALL_ROWS, SMALL_CHANNELS, SMALL_FFN, SMALL_PADDED_VOCAB = 64, 64, 128, 384  # of SMALL's micro-batch and model
ACCUMULATE = ["--total-batch", str(16 * 64 * 2), "--steps", "2"]              # 16 micro-steps of two ranks
MODES = ["--zero-stage", "3", *BUCKETS["unmerged"], "--recompute", "block", "--total-batch", "256", "--steps", "3"]


def three_ranks(stage: int, buckets: str = "merged") -> tuple:
    """Options of a stage on three ranks. Stage 1 communicates beside the computation and the others do not, or the other way round where buckets are not merged."""
    beside = (stage == 1) == (buckets == "merged")
    return 3, "--zero-stage", str(stage), *BUCKETS[buckets], f"--no-overlap={'false' if beside else 'true'}"


def small_collectives(ranks: int) -> int:
    """Bytes a rank sends a step beside parameters and gradients: its count of targets, its sum of squares, its sum of losses and its requests."""
    return (ranks - 1) * (8 + 24)


@pytest.mark.parametrize("buckets", BUCKETS)
def test_stages_and_overlap_give_the_same_bits(reused, buckets):
    runs = [reused(*three_ranks(stage, buckets)) for stage in range(4)]
    losses = [step[0] for step in runs[1].bits()[0]]
    assert len(losses) == 6 and losses[-1] < losses[0]
    for stage, run in enumerate(runs):
        assert run.bits() == runs[1].bits(), stage
    assert reused(2).bits() != runs[1].bits()  # the comparison can fail
    # Bytes: gradients reduced and gathered; gradients reduced and parameters gathered, once or where they are forgotten between, up to twice.
    sent = [run.sent() - small_collectives(3) for run in runs]
    assert sent[0] == sent[1] == sent[2]
    assert sent[3] == sent[0] if buckets == "merged" else sent[0] < sent[3] < 3 * sent[0] // 2
    assert sent[0] / 2 == pytest.approx(runs[1].memory("parameters") * 2 / 3, rel=1e-3)
    for category, first_sharded in (("optimizer", 1), ("gradients", 2), ("parameters", 3)):
        for stage, run in enumerate(runs):
            assert run.memory(category) == pytest.approx(runs[0].memory(category) / (3 if stage >= first_sharded else 1), rel=4e-3), (category, stage)


def test_accumulation_gives_the_same_bits_in_two_pairs_of_stages(reused):
    every = "--sync-every-micro-step"
    late = [reused(2, *ACCUMULATE, "--zero-stage", stage) for stage in ("0", "1")]
    early = [reused(2, *ACCUMULATE, *options) for options in (["--zero-stage", "2"], ["--zero-stage", "3"], ["--zero-stage", "0", every], ["--zero-stage", "1", every])]
    for group in (late, early):
        for run in group:
            assert run.bits() == group[0].bits()
    # Between the pairs, and with 2 micro-steps: sums in another order, so in each a stochastic rounding of up to 2^-7 for every micro-step but the first, and one
    # of 2^-8 for the sum of two ranks.
    for micro_steps, one, other in ((16, late[0], early[0]), (2, reused(2, *MODES, "--zero-stage", "1"), reused(2, *MODES))):
        first, second = one.records("train")[0], other.records("train")[0]
        assert first["loss"] == second["loss"]
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=2 * ((micro_steps - 1) * 2.0 ** -7 + 2.0 ** -8)), micro_steps
    # Bytes: what all gradients are once, and how often.
    once = (late[0].sent() - small_collectives(2)) // 2
    assert once == pytest.approx(late[0].memory("parameters") / 2, rel=1e-3)
    times = [(run.sent() - small_collectives(2)) / once for run in late + early]
    assert times == [2, 2, 16 + 1, 16 + 1, 16 * 2, 16 + 1]  # all parameters are in one bucket: stage 3 gathers them once


# Modes go together where neither hides what the other finds.
@pytest.mark.parametrize("environment", [{"HOSTCUDA_ASYNC": "1", "HOSTCUDA_ASYNC_SEED": str(seed), "HOSTCUDA_SCHEDULE": str(seed)} for seed in (1, 2, 3)] +
                         [{"HOSTCUDA_PROTECT": "1", "HOSTCUDA_SCHEDULE": "4"}, {"HOSTCUDA_SCHEDULE": "5"}, {"HOSTCUDA_THREADS": "3"}], ids=str)
def test_checking_modes_give_the_same_bits(train, reused, environment):
    assert train(2, *MODES, environment=environment).bits() == reused(2, *MODES).bits()


def test_a_run_repeats_to_the_bit(train, reused):
    options = three_ranks(3, "unmerged")
    assert train(*options).bits() == reused(*options).bits()


def test_recomputing_gives_the_same_bits_in_less_memory(reused):
    runs = [reused(2, *options) for options in ([], ["--recompute", "norm"], ["--recompute", "ffn"], ["--recompute", "block"])]
    for run in runs:
        assert run.bits() == runs[0].bits()
    # One of two layers is computed again: two norms; gate, up and SwiGLU; everything that is left but its input, so at least attention's output.
    saved = [more.memory("activations") - less.memory("activations") for more, less in zip(runs, runs[1:])]
    assert saved[:2] == pytest.approx([2 * SMALL_ROWS * SMALL_CHANNELS * 2, 3 * SMALL_ROWS * SMALL_FFN * 2], abs=11)  # as shown: two roundings of 5 bytes
    assert saved[2] > SMALL_ROWS * SMALL_CHANNELS * 2
    kept = [option for option in MODES if option not in ("--recompute", "block")]
    assert reused(2, *MODES).bits() == reused(2, *kept).bits()


@pytest.mark.parametrize("ffn_dim", ["128", "1024"], ids=["in_its_own_memory", "in_borrowed_memory"])
def test_attention_on_tensor_cores_gives_the_same_bits(train, reused, ffn_dim):
    """Head dimension 64, more than one tile of keys. Its backward borrows the logits or the gradient of gate and up where they are large enough."""
    options = ["--head-dim", "64", "--num-heads", "2", "--num-kv-heads", "1", "--seq-len", "144", "--ffn-dim", ffn_dim, "--steps", "3"]
    first = reused(2, *options)
    assert len(first.bits()[0]) == 3
    assert reused(2, *options, "--zero-stage", "3", "--recompute", "block").bits() == first.bits()
    environment = {"HOSTCUDA_ASYNC": "1", "HOSTCUDA_SCHEDULE": "7"}
    assert train(2, *options, "--zero-stage", "3", "--recompute", "block", environment=environment).bits() == first.bits()
    assert reused(2, *options, "--seed", "3").bits() != first.bits()  # the comparison can fail


def test_a_head_in_chunks_gives_the_same_bits_in_every_stage(reused):
    runs = [reused(2, "--lmhead-chunks", "4", "--tied", "--bucket-mb", "0", "--steps", "3", "--zero-stage", str(stage)) for stage in range(4)]
    for run in runs:
        assert run.bits() == runs[0].bits()


def test_a_head_in_chunks_computes_the_same_in_less_memory(reused):
    """Few tokens, so that a target of another row would move the mean loss by more than is allowed."""
    rows = 32
    runs = {chunks: reused(1, "--micro-batch", "1", "--val-batches", "1", "--lr", "0", "--steps", "1", "--warmup", "0", "--lmhead-chunks", str(chunks)) for chunks in (1, 2, 4)}
    # A logit is the product of a row that a norm has given the length sqrt(C), times 1 + 2^-8 for its bf16, and C independent weights from N(0, 0.02): normal, and
    # six standard deviations hold for all of 2 * 32 * 257. Products of fewer rows may add in another order, so that a logit comes out as its neighbour in bf16.
    largest = 6 * 0.02 * math.sqrt(SMALL_CHANNELS) * (1 + 2.0 ** -8)
    step = 2.0 ** -7 * largest
    for chunks, run in runs.items():
        for kind, field in (("train", "loss"), ("val", "val_loss")):
            assert run.records(kind)[0][field] == pytest.approx(runs[1].records(kind)[0][field], abs=2 * step), (chunks, kind)
        # Every probability within exp(2 * step); in the head's weight a rounding of 2^-7 for every chunk that is added, and of 2^-8 where each of both was a product.
        assert run.records("train")[0]["grad_norm"] == pytest.approx(runs[1].records("train")[0]["grad_norm"], rel=2 * step + (chunks - 1) * 2.0 ** -7 + 2 * 2.0 ** -8), chunks
        saved = runs[1].memory("activations") - run.memory("activations")
        assert saved == pytest.approx((rows - rows // chunks) * SMALL_PADDED_VOCAB * 2, abs=11), chunks


def test_fp32_gradients_give_the_same_bits_in_every_stage(reused):
    bf16 = [reused(*three_ranks(stage)) for stage in range(4)]
    fp32 = [reused(*three_ranks(stage), "--grad-dtype", "fp32", "--steps", "3") for stage in range(4)]
    once = (bf16[0].sent() - small_collectives(3)) // 2  # all gradients in bf16
    for stage, run in enumerate(fp32):
        assert run.bits() == fp32[0].bits(), stage
        assert run.memory("gradients") == pytest.approx(2 * bf16[stage].memory("gradients"), rel=1e-3), stage
        assert run.sent() - bf16[stage].sent() == once * (2 if stage == 0 else 1), stage  # parameters stay bf16
    # Sums of three ranks in another type: two bf16 roundings of 2^-8, and that of the products is in both.
    assert fp32[0].records("train")[0]["loss"] == bf16[0].records("train")[0]["loss"]
    assert fp32[0].records("train")[0]["grad_norm"] == pytest.approx(bf16[0].records("train")[0]["grad_norm"], rel=2 * 2.0 ** -8)


# ---- semantics ----------------------------------------------------------------------------------------------------------------

ONE_STEP = ["--micro-batch", "1", "--total-batch", str(12 * 32), "--lr", "0", "--steps", "1", "--warmup", "0", "--val-batches", "7"]  # of 12 windows


def windows(output: str) -> list[tuple[str, str, str]]:
    return re.findall(r"position (\d+) .*: (\S+) token (\d+)", output)


def test_any_number_of_ranks_sees_the_same_windows(train):
    # 12 windows a step: 1 x 12, 2 x 6, 3 x 4 and 4 x 3 micro-batches of one.
    seen = {ranks: train(ranks, "--micro-batch", "1", "--total-batch", str(12 * 32), "--show-batch", "7").output for ranks in (1, 2, 3, 4)}
    expected = windows(seen[1])
    assert len(expected) == 12 and len(set(expected)) == 12
    for ranks, output in seen.items():
        assert windows(output) == expected, ranks
        for rank in range(ranks):
            assert len(re.findall(rf"rank {rank} micro-step", output)) == 12 // ranks


def test_first_loss_and_validation_do_not_depend_on_the_ranks(reused):
    runs = [reused(ranks, *ONE_STEP) for ranks in (1, 2, 3, 4)]
    for run in runs:
        # Sums of the same fp32 losses in double, in another order.
        assert run.records("train")[0]["loss"] == pytest.approx(runs[0].records("train")[0]["loss"], rel=1e-6)
        assert run.records("val")[0]["val_tokens"] == 7 * 32
        assert run.records("val")[0]["val_loss"] == pytest.approx(runs[0].records("val")[0]["val_loss"], rel=1e-12)


def test_metrics_count_tokens_of_all_ranks(reused):
    run = reused(2, "--total-batch", "256")
    steps = run.records("train")
    assert [record["step"] for record in steps] == list(range(6))
    assert [record["tokens"] for record in steps] == [256 * (step + 1) for step in range(6)]
    for record in steps:
        assert record["tokens_per_s"] == pytest.approx(256 / (record["step_ms"] * 1e-3), rel=1e-5)
        for field in ("epoch", "grad_norm", "mfu_measured", "mem_bytes", "data_ms", "exposed_comm_ms", "skipped"):
            assert field in record
        phases = [record[field] for field in ("forward_ms", "head_ms", "backward_ms", "update_ms")]
        assert min(phases) > 0 and sum(phases) <= record["step_ms"] + 1e-3
    assert steps[0]["lr"] == pytest.approx(steps[1]["lr"] / 2)
    assert (run.out / "log.rank1").read_text().count("step ") >= 6


def test_evaluations_and_samples_leave_training_alone_in_every_stage(train, reused):
    """Stage 0 samples on rank 0 alone; in stage 3 all ranks gather parameters for it."""
    options = ["--val-every", "2", "--sample-every", "3", "--sample-tokens", "5", "--prompt", "int "]
    runs = [train(*three_ranks(stage), *options) for stage in (0, 3)]
    texts = [re.findall(r"^step ([36])/6 \| sample: (int .*?)\n(?:step|done)", run.output, re.MULTILINE | re.DOTALL) for run in runs]
    assert texts[0] == texts[1] and [step for step, _ in texts[0]] == ["3", "6"]
    assert all(len(text) > len("int ") for _, text in texts[0])
    assert runs[0].bits() == runs[1].bits()
    for run in runs:
        assert [record["step"] for record in run.records("train")] == list(range(6))
        assert [record["step"] for record in run.records("val")] == [1, 3, 5]
        assert len(re.findall(r"^step \d+/6 \| loss", run.output, re.MULTILINE)) == 6
    undisturbed = reused(*three_ranks(1))
    assert runs[0].bits()[0] == undisturbed.bits()[0] and runs[0].bits()[2] == undisturbed.bits()[2]
    assert runs[0].sent() == undisturbed.sent()  # of a step alone


def test_clipping_changes_the_update_and_not_the_logged_norm(train):
    clipped, free = train(1, "--clip", "0.001"), train(1, "--clip", "0")
    assert clipped.records("train")[0]["grad_norm"] == free.records("train")[0]["grad_norm"] > 0.001
    assert clipped.bits()[2] != free.bits()[2]


def test_a_prompt_is_masked_and_a_rank_without_targets_is_no_harm(train, tmp_path):
    """Half of the windows hold prompts only: the loss is the mean over the answers, whoever holds them."""
    (tmp_path / "dialogue.jsonl").write_text("".join(json.dumps({"prompt": f"{i:04d}" + "q" * 296, "answer": "abcdefgh" * 3}) + "\n" for i in range(400)))
    folder = tmp_path / "dialogue"
    prepare(str(tmp_path / "dialogue.jsonl"), "--out", str(folder))
    runs = [train(ranks, "--train-data", f"{folder}/train_*.bin", "--val-data", f"{folder}/val_*.bin", "--micro-batch", "1", "--total-batch", str(12 * 32), "--lr", "0", "--steps", "4")
            for ranks in (1, 4)]
    for one, four in zip(runs[0].records("train"), runs[1].records("train")):
        assert four["loss"] == pytest.approx(one["loss"], rel=1e-6)
        # bf16 sums in another order: 12 roundings of 2^-7 each at most, far above what happens and far below a wrong scale.
        assert four["grad_norm"] == pytest.approx(one["grad_norm"], rel=12 * 2.0 ** -7)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_the_cores(reused, ranks):
    cores = len(os.sched_getaffinity(0))
    assert re.findall(r"rank \d+ .*, (\d+) multiprocessors", reused(ranks, *ONE_STEP).output) == [str(max(1, cores // ranks))] * ranks


def test_default_binding_does_not_throttle_threads(data, tmp_path):
    """mpirun without --bind-to ties each of two ranks to a core; one rank must still use all its threads."""
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    status, output = mpirun(0, ["mpirun", *as_root, "-np", "1", str(TRAINER), "--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin", "--out", str(tmp_path / "run"), *SMALL])
    assert status == 0, output
    assert f", {len(os.sched_getaffinity(0))} multiprocessors" in output


def test_help_names_every_option_and_its_default(data):
    status, output = mpirun(0, [str(TRAINER), "--help"])
    assert status == 0
    for option in ("--preset", "--zero-stage", "--bucket-mb", "--total-batch", "--clip", "--sync-every-micro-step", "--comm-timeout", "--out", "--plan", "--resume"):
        assert option in output


def test_an_earlier_runs_metrics_are_kept(data, tmp_path):
    command = [str(TRAINER), "--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin", "--out", str(tmp_path / "run"), *SMALL]
    for _ in range(2):
        status, output = mpirun(1, command)
        assert status == 0, output
    first, second = ((tmp_path / "run" / name).read_text().splitlines() for name in ("metrics.1.jsonl", "metrics.jsonl"))
    assert len(first) == len(second) == 10  # start, 6 steps, an evaluation, save, done


# ---- bad input: a clear error on all ranks, within seconds, nothing written --------------------------------------------------------

REFUSED_OPTIONS = [
    (["--train-data", "/nowhere/at_all_*.bin"], 1, ["/nowhere/at_all_*.bin"]),
    (["--val-data", "/nowhere/at_all_*.bin"], 1, ["/nowhere/at_all_*.bin"]),
    (["--total-batch", "200"], 2, ["200", "256"]),
    (["--num-heads", "4", "--num-kv-heads", "3"], 2, ["4", "3"]),
    (["--head-dim", "15"], 2, ["15", "head"]),
    (["--channels", "60"], 2, ["60", "8"]),
    (["--learning-rate", "1"], 2, ["--learning-rate"]),
    (["--zero-stagee", "1"], 2, ["--zero-stagee", "--zero-stage"]),
    (["--lr", "-1"], 2, ["--lr", "-1"]),
    (["--lr", "fast"], 2, ["--lr", "fast"]),
    (["--zero-stage", "4"], 2, ["--zero-stage", "4"]),
    (["--steps", "10", "--epochs", "1"], 2, ["--steps", "--epochs"]),
    (["--schedule", "cosin"], 2, ["cosin", "cosine"]),
    (["--recompute", "all"], 2, ["--recompute", "block"]),
    (["--lmhead-chunks", "3"], 2, ["--lmhead-chunks 3", "64 rows", "2 or 4"]),
    (["--grad-dtype", "fp16"], 2, ["--grad-dtype", "fp32"]),
    (["--plan", "--allocate-only"], 2, ["--plan", "--allocate-only"]),
    (["--price", "2.5"], 2, ["--price"]),
    (["--save-every", "5", "--no-save"], 2, ["--save-every", "--no-save"]),
    (["--save-mode", "later"], 2, ["--save-mode", "async"]),
    (["--allow-change", "lr"], 2, ["--allow-change", "--resume"]),
    (["--resume", "/nowhere/step_00000001"], 1, ["/nowhere"]),
    (["--generate"], 2, ["--generate"]),
    (["--profile"], 2, ["--profile"]),
    (["--check-collectives"], 2, ["--check-collectives"]),
    (["--config", "/nowhere/options.toml"], 2, ["/nowhere/options.toml"]),
    (["--from-config", "/nowhere/config.json"], 1, ["/nowhere/config.json"]),
    (["--device-memory", "1MB"], 1, ["does not fit 1.00 MB of device memory", "--device-memory", "More ranks do not help", "--ignore-plan"]),
    (["--total-batch", str(64 * 2 * 10 ** 5)], 1, ["windows"]),
    (["--total-batch", str(64 * 2 * 10 ** 9)], 1, ["does not fit", "device memory", "other"]),
]
# One rank alone takes the same way; it is tried where its number matters, and once where each kind of refusal comes from.
ALSO_ALONE = [case for case in REFUSED_OPTIONS if case[0][0] in ("--train-data", "--total-batch", "--lr", "--from-config", "--device-memory")]


@pytest.mark.parametrize("ranks, options, status, words", [(2, *case) for case in REFUSED_OPTIONS] + [(1, *case) for case in ALSO_ALONE],
                         ids=lambda value: " ".join(value) if isinstance(value, list) else str(value))
def test_refused_options(train, ranks, options, status, words):
    run = train(ranks, *options, ok=False, timeout=30)
    assert run.status == status, run.output
    for word in words:
        assert word in run.output, run.output
    assert run.output.count("error") <= 3, run.output  # one message, not one a rank
    assert not list(run.out.glob("*.jsonl"))


def bad_shard(name: str, path: Path) -> list[str]:
    """Writes a broken shard; returns words its error must hold."""
    tokens = [i % 250 for i in range(2000)]
    if name == "magic":
        write_shard(path, tokens, magic=20240521)
        return ["20240521"]
    if name == "version":
        write_shard(path, tokens, version=2)
        return ["version", "2"]
    if name == "width":
        write_shard(path, tokens, magic=20240801, version=7)
        return []
    if name == "count":
        write_shard(path, tokens, count=2001)
        return ["2001"]
    if name == "truncated":
        write_shard(path, tokens)
        path.write_bytes(path.read_bytes()[:-100])
        return ["2000"]
    if name == "short header":
        path.write_bytes(b"\0" * 100)
        return ["100"]
    if name == "folder":
        path.mkdir()
        return []
    if name == "few windows":
        write_shard(path, tokens[:40])
        return ["windows"]
    if name == "only empty":
        write_shard(path, [])
        return []
    if name == "mask size":
        write_shard(path, tokens)
        Path(f"{path}.mask").write_bytes(b"\xff" * 10)
        return ["mask", "10"]
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["magic", "version", "width", "count", "truncated", "short header", "folder", "few windows", "only empty", "mask size"])
def test_broken_shards_are_refused(train, tmp_path, name):
    words = bad_shard(name, tmp_path / "train_000.bin")
    run = train(2, "--train-data", f"{tmp_path}/train_*.bin", ok=False, timeout=30)
    assert run.status == 1, run.output
    for word in [*words, "train_000.bin"] if name not in ("few windows", "only empty") else words:
        assert word in run.output, run.output
    assert not list(run.out.glob("*.jsonl"))


def test_an_id_outside_the_vocabulary_names_file_and_offset(train, tmp_path):
    tokens = [i % 250 for i in range(2000)]
    tokens[1234] = 300
    write_shard(tmp_path / "train_000.bin", tokens)
    run = train(2, "--train-data", f"{tmp_path}/train_*.bin", "--steps", "20", ok=False, timeout=60)
    assert run.status != 0
    for word in ("train_000.bin", "300", "257", str(SHARD_HEADER_BYTES + 2 * 1234)):
        assert word in run.output, run.output


def test_an_empty_shard_is_skipped_with_a_warning(train, tmp_path):
    write_shard(tmp_path / "train_000.bin", [])
    write_shard(tmp_path / "train_001.bin", [i % 250 for i in range(2000)])
    output = train(2, "--train-data", f"{tmp_path}/train_*.bin").output
    assert re.search(r"warning: .*train_000\.bin", output)


def test_an_out_folder_that_cannot_be_written_is_refused(train, tmp_path):
    (tmp_path / "file").write_text("in the way")
    run = train(2, "--out", str(tmp_path / "file" / "run"), ok=False, timeout=30)
    assert run.status == 1 and str(tmp_path / "file") in run.output
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_checkpoint_that_is_not_there_makes_no_folder(tmp_path):
    status, output = mpirun(0, [str(TRAINER), "--resume", str(tmp_path / "not" / "step_00000001")])
    assert status == 1 and "trainer.json is missing" in output and not (tmp_path / "not").exists(), output


def test_two_runs_cannot_share_a_folder(data, tmp_path):
    command = [str(TRAINER), "--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin", "--out", str(tmp_path / "run"), *SMALL, "--steps", "100000"]
    first = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(tmp_path / "run" / "metrics.jsonl")
        status, output = mpirun(0, command, timeout=30)
        assert status == 1 and str(first.pid) in output, output
    finally:
        first.kill()
        first.wait()
