#!/usr/bin/env python3
"""Trains a Qwen2-type model in PyTorch for a few steps and measures it, beside llm.zero on the same GPU, shape and batch.

    peer_torch.py --config dev/gpu/models/qwen2.5-0.5b.json --micro-batch B --seq-len T --mode eager|compile --weights bf16|fp32 --out FILE

What runs is what a careful PyTorch user would run: transformers' Qwen2ForCausalLM with random weights, scaled dot product attention, no
checkpointing, labels for all T positions, clip_grad_norm_ at 1, fused AdamW that decays matrices only. One step is one micro-batch.

--weights bf16   parameters, gradients and moments in bf16: the fastest choice, less exact than ours (we keep fp32 masters and moments).
--weights fp32   fp32 parameters and moments under autocast to bf16: our exactness, or a little more (autocast keeps the residual stream in fp32).
--attention      best (on a GPU): times PyTorch's flash and cuDNN attention on this very shape, lets them check each other, takes the faster one.
                 PyTorch's own order of preference does not ask for speed; on Hopper cuDNN's is reported to be the faster one.

The mask is given as "none, causal": under torch.compile transformers would otherwise write out a (T, T) mask, which rules both fast kernels out.
The only fp32 product is that of positions and frequencies in the rotary embedding (TF32 would turn its angles wrong and save nothing), so
float32 matmul precision stays at "highest".

The answer is one JSON object in FILE, also after a failure (then with `error`, exit status 1), and one printed line. --seconds-limit counts from
the start of the program, imports and compilation included; a run that has three counted steps by then is a result, with fewer it is an error.
A step's time is from the end of the step before to its own end (CUDA events), so nothing between steps goes unseen; the median counts.

Needs PyTorch and transformers (written for 2.11 and 5.17), which this repository's tests do without; dev/test/test_peer.py says how to run it on a CPU too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

START = time.monotonic()
LEAST_COUNTED_STEPS = 3
WATCHDOG_GRACE_SECONDS = 5.0
# Two bf16 attentions of one input differ by rounding only: 2^-8 an element, in dq, dk and dv a few times that.
ATTENTION_AGREEMENT = 0.03

Report = dict[str, Any]


def write_json(path: Path, value: Any) -> None:
    """All or nothing: who reads the file while this runs sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def describe(error: BaseException) -> str:
    """One line. Messages of out-of-memory errors and of the compiler go on for pages."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


class Run:
    """What is known so far. finish() may be called from the main thread, the watchdog or a signal; the first call counts."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.step_ms: list[float] = []  # all steps, the dropped ones too
        self.report: Report = {"config": str(arguments.config), "mode": arguments.mode, "weights": arguments.weights, "device": arguments.device,
                               "micro_batch": arguments.micro_batch, "seq_len": arguments.seq_len, "drop": arguments.drop}
        self.phase = "start"
        self._lock = threading.RLock()  # a signal may come while the main thread holds it
        self._finished = False

    def seconds_left(self) -> float:
        return self.arguments.seconds_limit - (time.monotonic() - START)

    def counted(self) -> list[float]:
        return self.step_ms[self.arguments.drop:]

    def finish(self, error: str = "") -> int:
        with self._lock:
            if self._finished:
                return 0
            self._finished = True
        report, counted = self.report, self.counted()
        report["seconds"] = round(time.monotonic() - START, 2)
        report["steps_ms"] = [round(ms, 3) for ms in self.step_ms]
        if not error and len(counted) < LEAST_COUNTED_STEPS:
            error = (f"only {len(counted)} steps counted in {report['seconds']:.0f} s, {LEAST_COUNTED_STEPS} are needed (phase: {self.phase}; first {self.arguments.drop} "
                     f"steps dropped); raise --seconds-limit {self.arguments.seconds_limit:g}")
        if error:
            report["error"] = error
            line = f"peer: {self.arguments.mode} {self.arguments.weights}: error: {error}"
        else:
            median = statistics.median(counted)
            report["step_ms"] = median
            report["tokens_per_s"] = self.arguments.micro_batch * self.arguments.seq_len / median * 1e3
            line = (f"peer: {self.arguments.mode} {self.arguments.weights}: {report['tokens_per_s']:.0f} tokens/s, {median:.2f} ms a step (median of {len(counted)}), "
                    f"peak {report.get('peak_bytes', 0) / 2**30:.2f} GiB, loss {report.get('loss_first', math.nan):.4f} -> {report.get('loss_last', math.nan):.4f}, "
                    f"attention {report.get('attention', '?')}")
        write_json(self.arguments.out, report)
        print(line, flush=True)
        return 1 if error else 0

    def finish_and_leave(self, error: str) -> None:
        """From a thread, or out of a call that may never return."""
        enough = len(self.counted()) >= LEAST_COUNTED_STEPS
        if enough:
            self.report["ended_early"] = error
        os._exit(self.finish("" if enough else error))


class Clock:
    """Marks in time on the device: CUDA events, on a CPU the clock itself."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch, self._cuda = torch, device == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, first: Any, second: Any) -> float:
        """Waits for the second mark."""
        if not self._cuda:
            return (second - first) * 1e3
        second.synchronize()
        return first.elapsed_time(second)


def attention_backends(torch: Any) -> dict[str, Any]:
    backend = torch.nn.attention.SDPBackend
    return {"flash": backend.FLASH_ATTENTION, "cudnn": backend.CUDNN_ATTENTION}


def choose_attention(torch: Any, config: Any, B: int, T: int, device: str) -> tuple[str, Report]:
    """The faster of PyTorch's flash and cuDNN attention on this shape, forward and backward, as transformers lays q, k and v out.

    A backend that fails is left out; when the two disagree, flash is taken, being PyTorch's own choice.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    clock = Clock(torch, device)
    generator = torch.Generator(device=device).manual_seed(1)

    def tensor(count: int) -> Any:
        return torch.randn(B, T, count, head_dim, device=device, dtype=torch.bfloat16, generator=generator).transpose(1, 2)

    inputs = [tensor(count).requires_grad_() for count in (heads, kv_heads, kv_heads)]
    d_out = tensor(heads)
    found: Report = {}
    outputs: dict[str, list[Any]] = {}
    for name, backend in attention_backends(torch).items():
        try:
            with torch.nn.attention.sdpa_kernel(backend):
                times = []
                for _ in range(6):
                    first = clock.mark()
                    out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=heads != kv_heads)
                    results = [out, *torch.autograd.grad(out, inputs, d_out)]
                    times.append(clock.milliseconds(first, clock.mark()))
            outputs[name] = [result.detach() for result in results]
            found[name] = {"ms": round(statistics.median(times[2:]), 4)}
        except RuntimeError as error:
            found[name] = {"error": describe(error)}
    if len(outputs) == 2:
        distances = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(outputs["cudnn"], outputs["flash"])]
        found["distance"] = max(distances)
        if not max(distances) < ATTENTION_AGREEMENT:
            return "flash", found
    if not outputs:
        return "default", found
    return min(outputs, key=lambda name: found[name]["ms"]), found


@contextlib.contextmanager
def attention_context(torch: Any, attention: str) -> Iterator[None]:
    """PyTorch's choice with `attention` moved to the front; `default` leaves PyTorch alone."""
    if attention == "default":
        yield
        return
    backend = torch.nn.attention.SDPBackend
    order = [attention_backends(torch)[attention], backend.FLASH_ATTENTION, backend.EFFICIENT_ATTENTION, backend.MATH]
    with torch.nn.attention.sdpa_kernel(order, set_priority=True):
        yield


def build_model(torch: Any, transformers: Any, config: Any, arguments: argparse.Namespace) -> Any:
    """Random weights made on the device: on the host, 3 B parameters would take minutes."""
    dtype = torch.bfloat16 if arguments.weights == "bf16" else torch.float32
    torch.manual_seed(1)
    with torch.device(arguments.device):
        model = transformers.Qwen2ForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.train()
    return model


def build_optimizer(torch: Any, model: Any) -> Any:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)


def train(torch: Any, model: Any, config: Any, run: Run) -> None:
    arguments, report = run.arguments, run.report
    device, B, T = arguments.device, arguments.micro_batch, arguments.seq_len
    optimizer = build_optimizer(torch, model)
    parameters = list(model.parameters())
    forward = torch.compile(model) if arguments.mode == "compile" else model
    tokens = torch.randint(0, config.vocab_size, (B, T + 1), device=device, generator=torch.Generator(device=device).manual_seed(1))
    input_ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    autocast: Callable[[], Any] = contextlib.nullcontext
    if arguments.weights == "fp32":
        autocast = lambda: torch.autocast(device, dtype=torch.bfloat16)  # noqa: E731

    clock = Clock(torch, device)
    losses: list[Any] = []
    marks: list[Any] = []

    def collect(up_to: int) -> None:
        while len(run.step_ms) < up_to:
            i = len(run.step_ms)
            run.step_ms.append(clock.milliseconds(marks[i], marks[i + 1]))
            if i == 0:
                report["first_step_s"] = round(run.step_ms[0] / 1e3, 3)
            report["loss_last"] = float(losses[i])
            report.setdefault("loss_first", report["loss_last"])

    marks.append(clock.mark())
    for step in range(arguments.steps):
        run.phase = f"step {step}"
        with autocast():
            # shift_labels: the targets as they are, so that all T positions count; labels alone would drop one.
            loss = forward(input_ids=input_ids, attention_mask={"full_attention": None}, labels=targets, shift_labels=targets, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        marks.append(clock.mark())
        collect(step)  # all but this step: the GPU always has one step to work on while the host looks at the clock
        if len(run.counted()) >= LEAST_COUNTED_STEPS and run.seconds_left() < 0:
            report["ended_early"] = f"--seconds-limit {arguments.seconds_limit:g}"
            break
        if run.seconds_left() < 0:
            break
    collect(len(marks) - 1)


def measure(run: Run) -> None:
    arguments, report = run.arguments, run.report
    run.phase = "import"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    import torch.nn.attention
    import transformers

    report.update(torch=torch.__version__, transformers=transformers.__version__)
    cuda = arguments.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no CUDA device; --device cpu runs small shapes on the CPU")
    if not cuda:
        torch.set_num_threads(1)  # only the program is tested there, and it must not wait for busy cores
    report["device_name"] = torch.cuda.get_device_name() if cuda else "cpu"

    config = transformers.Qwen2Config.from_json_file(str(arguments.config))
    if config.model_type != "qwen2":
        raise ValueError(f"{arguments.config}: model_type is {config.model_type}; only qwen2 is built here")
    config.use_cache = False

    run.phase = "attention"
    attention = arguments.attention
    if not cuda:
        attention = "default"
    elif attention == "best":
        attention, report["attention_choice"] = choose_attention(torch, config, arguments.micro_batch, arguments.seq_len, "cuda")
        torch.cuda.empty_cache()

    done = False
    while not done:
        report["attention"] = attention
        run.step_ms.clear()
        for key in ("loss_first", "loss_last", "first_step_s"):
            report.pop(key, None)
        model = None
        try:
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            run.phase = "model"
            model = build_model(torch, transformers, config, arguments)
            report["params"] = sum(parameter.numel() for parameter in model.parameters())
            with attention_context(torch, attention):
                train(torch, model, config, run)
            done = True
        except RuntimeError as error:
            # cuDNN may refuse inside the model, or in the compiler, what it took alone. Memory is another matter.
            if isinstance(error, torch.OutOfMemoryError) or attention != "cudnn" or arguments.attention != "best" or run.seconds_left() < 0:
                raise
            report["attention_failed"] = f"cudnn: {describe(error)}"
            attention = "flash"
        finally:
            if cuda:
                free, total = torch.cuda.mem_get_info()
                report.update(peak_bytes=torch.cuda.max_memory_allocated(), reserved_bytes=torch.cuda.max_memory_reserved(), device_used_bytes=total - free)
            else:
                import resource
                report["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        del model
        if not done:
            torch._dynamo.reset()
            torch.cuda.empty_cache()

    if not all(math.isfinite(report.get(key, math.nan)) for key in ("loss_first", "loss_last")):
        losses = f"{report.pop('loss_first', None)} -> {report.pop('loss_last', None)}"  # NaN is no JSON
        raise RuntimeError(f"the loss is not finite ({losses})")


def parse_arguments(argv: Optional[list[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], epilog=__doc__.split("\n", 1)[1], formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="Hugging Face config.json of a qwen2 model")
    parser.add_argument("--micro-batch", type=int, default=16, metavar="B", help="sequences a step (default 16)")
    parser.add_argument("--seq-len", type=int, default=1024, metavar="T", help="tokens a sequence (default 1024)")
    parser.add_argument("--steps", type=int, default=12, help="all steps, the dropped ones too (default 12)")
    parser.add_argument("--drop", type=int, default=4, help="first steps that do not count (default 4)")
    parser.add_argument("--mode", choices=("eager", "compile"), default="eager")
    parser.add_argument("--weights", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--attention", choices=("best", "flash", "cudnn", "default"), default="best", help="ignored on a CPU (default best)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds-limit", type=float, default=600.0, help="end early with what is there (default 600)")
    parser.add_argument("--out", type=Path, required=True, help="the JSON goes here")
    arguments = parser.parse_args(argv)
    for name in ("micro_batch", "seq_len"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be at least 1")
    if arguments.drop < 0 or arguments.steps < arguments.drop + LEAST_COUNTED_STEPS:
        parser.error(f"--steps {arguments.steps} --drop {arguments.drop} counts {arguments.steps - arguments.drop} steps; at least {LEAST_COUNTED_STEPS} must count, "
                     f"try --steps {max(arguments.drop, 0) + LEAST_COUNTED_STEPS}")
    if not arguments.config.is_file():
        parser.error(f"--config {arguments.config}: there is no such file; dev/gpu/models holds some")
    return arguments


def main() -> int:
    run = Run(parse_arguments())
    watchdog = threading.Timer(run.arguments.seconds_limit + WATCHDOG_GRACE_SECONDS,
                               lambda: run.finish_and_leave(f"still in phase `{run.phase}` after --seconds-limit {run.arguments.seconds_limit:g}"))
    watchdog.daemon = True
    watchdog.start()
    signal.signal(signal.SIGTERM, lambda *_: run.finish_and_leave(f"ended by SIGTERM in phase `{run.phase}`"))
    try:
        measure(run)
    except BaseException as error:  # whatever it is, the file says so
        return run.finish(f"in phase `{run.phase}`: {describe(error)}")
    finally:
        watchdog.cancel()
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
