#!/usr/bin/env python3
"""The best PyTorch time for each of our kernel benchmarks, on the same shapes and types.

    library_bench.py --ours bench.json --out library.json [--device cuda|cpu] [--seconds-limit S]

Reads the names our `bench` program wrote (`op/KEY=value/...`) and times what PyTorch has for the same work: its own fused functions, its products
through both of its BLAS libraries, flash and cuDNN attention, and what torch.compile makes of the plain formula. The fastest is the answer, and all that
was tried stands beside it: {"results": {NAME: {"library": WHAT, "us": MEDIAN, "tried": {WHAT: MEDIAN or an error}}}, "skipped": {NAME: why}, ...}.
A variant that computes less exactly than ours is tried for the record and never the answer; its name ends in "(inexact)". Attention's two fast kernels,
"SDPA flash" and "SDPA cuDNN", both stand in `tried`, so that either can be set beside ours.

Measured as bench.cuh measures: CUDA events around each run, the L2 cache overwritten before it, the median counts. Python is slower to launch than C++, so
the device first waits until the host has queued all runs.

Important operations come first, everything without the compiler before anything with it; when --seconds-limit is over, what is there is written.

Needs PyTorch only (written for 2.11), which this repository's tests do without; dev/test/test_peer.py says how to run it on a CPU too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, ContextManager, Iterator, Optional

from peer_torch import describe, write_json

START = time.monotonic()
WATCHDOG_GRACE_SECONDS = 5.0
LEAST_SAMPLES, MOST_SAMPLES, SAMPLE_SECONDS = 5, 30, 0.1
FIRST_COMPILE_SECONDS = 20.0  # the compiler's own start included; later ones are expected to take what the longest took
EPS = 1e-6

Sizes = dict[str, int]
Work = Callable[[], Any]


@dataclass
class Candidate:
    """make() prepares inputs and returns the work to time; both happen inside `context`."""

    label: str
    make: Callable[[], Work]
    compiled: bool = False
    exact: bool = True
    instead_of: str = ""  # only tried where the candidate of this name, which comes before it, failed
    context: Callable[[], ContextManager[Any]] = contextlib.nullcontext

    def name(self) -> str:
        return self.label + ("" if self.exact else " (inexact)")


class Library:
    """PyTorch on one device, with what the operations below need."""

    def __init__(self, device: str, precision: str) -> None:
        import torch
        import torch.nn.attention
        import torch.nn.functional

        self.torch, self.F, self.device, self.cuda = torch, torch.nn.functional, device, device == "cuda"
        if self.cuda and not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no CUDA device; --device cpu runs small shapes on the CPU")
        if not self.cuda:
            torch.set_num_threads(1)  # only the program is tested there, and it must not wait for busy cores
        self.dtype = torch.float32 if precision == "FP32" else torch.bfloat16
        self.generator = torch.Generator(device=device).manual_seed(1)
        self.flush = None
        if self.cuda:
            self.flush = torch.empty(2 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.uint8, device=device)

    # ---- inputs ----
    def normal(self, *shape: int, dtype: Any = None) -> Any:
        return self.torch.randn(*shape, device=self.device, dtype=dtype or self.dtype, generator=self.generator)

    def leaf(self, *shape: int) -> Any:
        return self.normal(*shape).requires_grad_()

    def tokens(self, count: int, below: int) -> Any:
        return self.torch.randint(0, below, (count,), device=self.device, generator=self.generator)

    # ---- work ----
    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # One function serves many shapes; without the reset they would share one cache and fall back to eager after eight.
        self.torch._dynamo.reset()
        self.torch._functorch.config.donated_buffer = False  # backward runs many times over one forward
        return self.torch.compile(function, dynamic=False)

    def gradient(self, function: Callable[..., Any], inputs: list[Any], others: tuple[Any, ...] = (), wanted: Optional[int] = None) -> Work:
        """The backward of function(*inputs, *others) alone, for all inputs or the first `wanted`."""
        outputs = function(*inputs, *others)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = tuple(self.torch.randn_like(output) for output in outputs)
        return lambda: self.torch.autograd.grad(outputs, inputs[:wanted], gradients, retain_graph=True)

    @contextlib.contextmanager
    def blas(self, name: str) -> Iterator[None]:
        before = self.torch.backends.cuda.preferred_blas_library()
        self.torch.backends.cuda.preferred_blas_library(name)
        try:
            yield
        finally:
            self.torch.backends.cuda.preferred_blas_library(before)

    # ---- time ----
    def microseconds(self, candidate: Candidate) -> float:
        with candidate.context():
            work = candidate.make()
            return self._sample_cuda(work) if self.cuda else self._sample_cpu(work)

    def _sample_cpu(self, work: Work) -> float:
        work()
        samples = []
        for _ in range(LEAST_SAMPLES):
            begin = time.perf_counter()
            work()
            samples.append(time.perf_counter() - begin)
        return statistics.median(samples) * 1e6

    def _sample_cuda(self, work: Work) -> float:
        cuda = self.torch.cuda
        for _ in range(2):
            work()
        cuda.synchronize()
        begin = time.perf_counter()
        work()
        queued = time.perf_counter() - begin
        cuda.synchronize()
        whole = time.perf_counter() - begin
        count = int(min(max(SAMPLE_SECONDS / whole, LEAST_SAMPLES), MOST_SAMPLES))
        # The device idles until the host is done queueing: 2 cycles a nanosecond is a clock no GPU exceeds by much.
        cuda._sleep(int(min(1e-3 + 1.5 * count * (queued + 30e-6), 0.2) * 2e9))
        events = []
        for _ in range(count):
            self.flush.zero_()
            first, second = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            first.record()
            work()
            second.record()
            events.append((first, second))
        cuda.synchronize()
        return statistics.median(first.elapsed_time(second) for first, second in events) * 1e3


# ---- operations: sizes as in the benchmark's name, what PyTorch has for them ---------------------------------------------------------

def attention_inputs(lib: Library, p: Sizes) -> list[Any]:
    """q, k, v as leaves that lie in one packed buffer as ours do, (B, heads, T, HD)."""
    heads = (p["NH"], p["NKV"], p["NKV"])
    packed = lib.normal(p["B"], p["T"], sum(heads), p["HD"])
    return [part.transpose(1, 2).detach().requires_grad_() for part in packed.split(heads, dim=2)]


def attention(lib: Library, p: Sizes, backward: bool) -> list[Candidate]:
    """Each of PyTorch's fast kernels by its name, so that none stands for another. One that takes no grouped heads gets keys and values repeated beforehand, and
    a name that says so: it reads more of them, and leaves the sum over a group's gradients out."""
    torch, group = lib.torch, p["NH"] // p["NKV"]

    def maker(repeated: bool) -> Callable[[], Work]:
        def forward(q: Any, k: Any, v: Any) -> Any:
            return lib.F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1 and not repeated)

        def make() -> Work:
            inputs = attention_inputs(lib, p)
            if repeated:
                inputs[1:] = [x.detach().repeat_interleave(group, dim=1).requires_grad_() for x in inputs[1:]]
            if not backward:
                return lambda: forward(*inputs)  # inputs want gradients, so the log-sum-exp is written as ours is
            out = forward(*inputs)
            d_out = lib.normal(p["B"], p["T"], p["NH"], p["HD"]).transpose(1, 2)
            return lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True)
        return make

    backend, candidates = torch.nn.attention.SDPBackend, []
    for label, which in (("SDPA flash", backend.FLASH_ATTENTION), ("SDPA cuDNN", backend.CUDNN_ATTENTION)):
        def context(which: Any = which) -> ContextManager[Any]:
            return torch.nn.attention.sdpa_kernel(which)
        candidates.append(Candidate(label, maker(False), context=context))
        if group > 1:
            candidates.append(Candidate(f"{label}, k and v repeated", maker(True), instead_of=label, context=context))
    return candidates


def product(lib: Library, label: str, make: Callable[[], Work]) -> list[Candidate]:
    if not lib.cuda:
        return [Candidate(label, make)]
    return [Candidate(f"{label} {name}", make, context=lambda name=name: lib.blas(name)) for name in ("cublas", "cublaslt")]


def matmul_forward(lib: Library, p: Sizes) -> list[Candidate]:
    N, C, OC = p["N"], p["C"], p["OC"]
    if p.get("bias", 0):
        def make_linear() -> Work:
            inp, weight, bias = lib.normal(N, C), lib.normal(OC, C), lib.normal(OC)
            return lambda: lib.F.linear(inp, weight, bias)
        return product(lib, "F.linear", make_linear)

    def make() -> Work:
        inp, weight, out = lib.normal(N, C), lib.normal(OC, C), lib.normal(N, OC)
        return lambda: lib.torch.mm(inp, weight.t(), out=out)
    return product(lib, "torch.mm", make)


def matmul_backward_input(lib: Library, p: Sizes) -> list[Candidate]:
    def make() -> Work:
        dout, weight, dinp = lib.normal(p["N"], p["OC"]), lib.normal(p["OC"], p["C"]), lib.normal(p["N"], p["C"])
        return lambda: lib.torch.mm(dout, weight, out=dinp)
    return product(lib, "torch.mm", make)


def matmul_backward_weight(lib: Library, p: Sizes) -> list[Candidate]:
    def make() -> Work:
        dout, inp, dweight = lib.normal(p["N"], p["OC"]), lib.normal(p["N"], p["C"]), lib.normal(p["OC"], p["C"])
        return lambda: lib.torch.mm(dout.t(), inp, out=dweight)
    return product(lib, "torch.mm", make)


def bias_backward(lib: Library, p: Sizes) -> list[Candidate]:
    def make() -> Work:
        dout = lib.normal(p["N"], p["OC"])
        return lambda: dout.sum(0)
    return [Candidate("sum(0)", make)]


def cross_entropy(lib: Library, p: Sizes, backward: bool) -> list[Candidate]:
    """Ours computes in fp32 from bf16 logits; so do .float() and the compiler. On bf16 itself the log-softmax rounds to bf16."""
    N, V, Vp = p["N"], p["V"], p.get("Vp", p["V"])

    def loss_of(logits: Any, targets: Any) -> Any:
        return lib.F.cross_entropy(logits[:, :V].float(), targets, reduction="mean" if backward else "none")

    def loss_in_bf16(logits: Any, targets: Any) -> Any:
        return lib.F.cross_entropy(logits[:, :V], targets, reduction="mean" if backward else "none")

    def maker(function: Callable[..., Any], compiled: bool) -> Callable[[], Work]:
        def make() -> Work:
            logits, targets = lib.normal(N, Vp), lib.tokens(N, V)
            call = lib.compile(function) if compiled else function
            if not backward:
                return lambda: call(logits, targets)
            logits.requires_grad_()
            # Forward and backward together: ours leaves the gradient where the logits were in one go.
            return lambda: lib.torch.autograd.grad(call(logits, targets), logits)
        return make

    return [Candidate("F.cross_entropy(float)", maker(loss_of, False)), Candidate("F.cross_entropy", maker(loss_in_bf16, False), exact=lib.dtype == lib.torch.float32),
            Candidate("compiled F.cross_entropy(float)", maker(loss_of, True), compiled=True)]


def both(label: str, make: Callable[[bool], Work]) -> list[Candidate]:
    """One formula, eager and compiled."""
    return [Candidate(label, lambda: make(False)), Candidate(f"compiled {label}", lambda: make(True), compiled=True)]


def rmsnorm_forward(lib: Library, p: Sizes, residual: bool) -> list[Candidate]:
    N, C = p["N"], p["C"]

    def alone(x: Any, weight: Any) -> Any:
        return lib.F.rms_norm(x, (C,), weight, EPS)

    def added(a: Any, b: Any, weight: Any) -> Any:
        total = a + b
        return total, lib.F.rms_norm(total, (C,), weight, EPS)

    def make(compiled: bool) -> Work:
        function = added if residual else alone
        inputs = [lib.normal(N, C) for _ in range(1 + residual)] + [lib.normal(C)]
        call = lib.compile(function) if compiled else function
        return lambda: call(*inputs)
    return both("add + F.rms_norm" if residual else "F.rms_norm", make)


def rmsnorm_backward(lib: Library, p: Sizes) -> list[Candidate]:
    N, C, accumulate = p["N"], p["C"], bool(p.get("accumulate", 0))

    def alone(x: Any, weight: Any) -> Any:
        return lib.F.rms_norm(x, (C,), weight, EPS)

    def joined(x: Any, weight: Any, branch: Any) -> Any:
        total = x + branch
        return lib.F.rms_norm(total, (C,), weight, EPS), total  # total's own gradient is what the norm's is added to

    def make(compiled: bool) -> Work:
        function = joined if accumulate else alone
        others = (lib.normal(N, C),) if accumulate else ()
        return lib.gradient(lib.compile(function) if compiled else function, [lib.leaf(N, C), lib.leaf(C)], others)
    return both("F.rms_norm backward + add" if accumulate else "F.rms_norm backward", make)


def qk_norm(lib: Library, p: Sizes, backward: bool) -> list[Candidate]:
    N, HD, heads = p["N"], p["HD"], (p["NH"], p["NKV"], p["NKV"])

    def norm(q: Any, k: Any, q_weight: Any, k_weight: Any) -> Any:
        return lib.F.rms_norm(q, (HD,), q_weight, EPS), lib.F.rms_norm(k, (HD,), k_weight, EPS)

    def make(compiled: bool) -> Work:
        q, k, _ = (part.detach() for part in lib.normal(N, sum(heads), HD).split(heads, dim=1))
        inputs = [q, k, lib.normal(HD), lib.normal(HD)]
        call = lib.compile(norm) if compiled else norm
        if not backward:
            return lambda: call(*inputs)
        return lib.gradient(call, [tensor.requires_grad_() for tensor in inputs])
    return both("F.rms_norm of q and k" + (" backward" if backward else ""), make)


def swiglu(lib: Library, p: Sizes, backward: bool) -> list[Candidate]:
    N, F = p["N"], p["F"]

    def gated(gate_up: Any) -> Any:
        gate, up = gate_up.chunk(2, dim=-1)
        return lib.F.silu(gate) * up

    def gated_parts(gate: Any, up: Any) -> Any:
        return lib.F.silu(gate) * up

    def make(compiled: bool) -> Work:
        gate_up = lib.normal(N, 2 * F)
        if not backward:
            call = lib.compile(gated) if compiled else gated
            return lambda: call(gate_up)
        if compiled:
            return lib.gradient(lib.compile(gated), [gate_up.requires_grad_()])
        # Eager: gradients of the halves, as two projections would want them; through chunk() they would be joined by another copy.
        return lib.gradient(gated_parts, [part.detach().requires_grad_() for part in gate_up.chunk(2, dim=-1)])
    return both("F.silu * up" + (" backward" if backward else ""), make)


def rope(lib: Library, p: Sizes) -> list[Candidate]:
    """Forward and backward are the same work, turned the other way."""
    B, T, heads, HD, row = p["B"], p["T"], p["heads"], p["HD"], p["row"]

    def turn(x: Any, cos: Any, sin: Any) -> Any:
        low, high = x[..., : heads * HD].unflatten(-1, (heads, HD)).chunk(2, dim=-1)
        return lib.torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def turn_in_fp32(x: Any, cos: Any, sin: Any) -> Any:
        return turn(x.float(), cos, sin).to(x.dtype)

    def maker(function: Callable[..., Any], compiled: bool) -> Callable[[], Work]:
        def make() -> Work:
            x, angles = lib.normal(B, T, row), lib.normal(T, 1, HD // 2, dtype=lib.torch.float32)
            cos, sin = angles.cos(), angles.sin()
            if function is turn:
                cos, sin = cos.to(lib.dtype), sin.to(lib.dtype)
            call = lib.compile(function) if compiled else function
            return lambda: call(x, cos, sin)
        return make
    return [Candidate("formula", maker(turn, False), exact=lib.dtype == lib.torch.float32), Candidate("formula in fp32", maker(turn_in_fp32, False)),
            Candidate("compiled formula in fp32", maker(turn_in_fp32, True), compiled=True)]


def embedding_forward(lib: Library, p: Sizes) -> list[Candidate]:
    def make() -> Work:
        tokens, weight = lib.tokens(p["N"], p["V"]), lib.normal(p["V"], p["C"])
        return lambda: lib.F.embedding(tokens, weight)
    return [Candidate("F.embedding", make)]


def embedding_backward(lib: Library, p: Sizes) -> list[Candidate]:
    """embedding_dense_backward also writes the zeros of all other rows, which ours leaves to whoever owns the buffer. index_add_ does not, but rounds after each
    addition, in any order."""
    def make_dense() -> Work:
        tokens, dout = lib.tokens(p["N"], p["V"]), lib.normal(p["N"], p["C"])
        return lambda: lib.torch.ops.aten.embedding_dense_backward(dout, tokens, p["V"], -1, False)

    def make_add() -> Work:
        tokens, dout, dweight = lib.tokens(p["N"], p["V"]), lib.normal(p["N"], p["C"]), lib.normal(p["V"], p["C"])
        return lambda: dweight.index_add_(0, tokens, dout)
    return [Candidate("embedding_dense_backward", make_dense), Candidate("index_add_", make_add, exact=False)]


def adamw_update(lib: Library, p: Sizes) -> list[Candidate]:
    """fp32 parameters, gradients and moments: 28 bytes an element, as ours with bf16 gradients and a bf16 copy."""
    def maker(dtype: Any) -> Callable[[], Work]:
        def make() -> Work:
            parameter = lib.torch.nn.Parameter(lib.normal(p["n"], dtype=dtype))
            parameter.grad = lib.normal(p["n"], dtype=dtype)
            optimizer = lib.torch.optim.AdamW([parameter], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
            return optimizer.step
        return make
    candidates = [Candidate("AdamW(fused) fp32", maker(lib.torch.float32))]
    if lib.dtype == lib.torch.bfloat16:
        candidates.append(Candidate("AdamW(fused) bf16", maker(lib.torch.bfloat16), exact=False))
    return candidates


def flat(lib: Library, p: Sizes, work: Callable[[Any, Any], Any], label: str, dtype: Any, other: Any = None) -> list[Candidate]:
    """work(x, y) over n elements each."""
    def make() -> Work:
        x, y = lib.normal(p["n"], dtype=dtype), lib.normal(p["n"], dtype=other or lib.dtype)
        return lambda: work(x, y)
    return [Candidate(label, make)]


def sum_of_squares(lib: Library, p: Sizes, dtype: Any) -> list[Candidate]:
    norm = lib.torch.linalg.vector_norm
    candidates = flat(lib, p, lambda x, _: norm(x, dtype=lib.torch.float32), "vector_norm", dtype)
    # Sums in fp32 inside, but the norm of a bf16 tensor comes out as bf16.
    candidates += flat(lib, p, lambda x, _: lib.torch._foreach_norm([x]), "_foreach_norm", dtype)
    return candidates


Operation = Callable[[Library, Sizes], list[Candidate]]

# In order of importance.
OPERATIONS: dict[str, Operation] = {
    "attention_forward": lambda lib, p: attention(lib, p, False),
    "attention_backward": lambda lib, p: attention(lib, p, True),
    "matmul_forward": matmul_forward,
    "matmul_backward_input": matmul_backward_input,
    "matmul_backward_weight": matmul_backward_weight,
    "cross_entropy_forward_backward": lambda lib, p: cross_entropy(lib, p, True),
    "fused_residual_rmsnorm_forward": lambda lib, p: rmsnorm_forward(lib, p, True),
    "rmsnorm_backward": rmsnorm_backward,
    "swiglu_forward": lambda lib, p: swiglu(lib, p, False),
    "swiglu_backward": lambda lib, p: swiglu(lib, p, True),
    "adamw_update": adamw_update,
    "rmsnorm_forward": lambda lib, p: rmsnorm_forward(lib, p, False),
    "rope_forward": rope,
    "rope_backward": rope,
    "bias_backward": bias_backward,
    "embedding_backward": embedding_backward,
    "embedding_forward": embedding_forward,
    "sum_of_squares": lambda lib, p: sum_of_squares(lib, p, lib.dtype),
    "sum_of_squares_fp32": lambda lib, p: sum_of_squares(lib, p, lib.torch.float32),
    "accumulate_gradient": lambda lib, p: flat(lib, p, lambda x, y: x.add_(y), "add_ (rounds to nearest)", lib.dtype),
    "accumulate_gradient_fp32": lambda lib, p: flat(lib, p, lambda x, y: x.add_(y), "add_", lib.torch.float32),
    "accumulate_gradient_fp32_addend": lambda lib, p: flat(lib, p, lambda x, y: x.add_(y), "add_", lib.torch.float32, lib.torch.float32),
    "cross_entropy_forward": lambda lib, p: cross_entropy(lib, p, False),
    "qk_norm_forward": lambda lib, p: qk_norm(lib, p, False),
    "qk_norm_backward": lambda lib, p: qk_norm(lib, p, True),
    "copy_to_float": lambda lib, p: flat(lib, p, lambda x, y: x.copy_(y), "copy_", lib.torch.float32),
    "init_normal": lambda lib, p: flat(lib, p, lambda x, _: x.normal_(), "normal_", lib.dtype),
    "fill": lambda lib, p: flat(lib, p, lambda x, _: x.fill_(1.0), "fill_", lib.dtype),
    "sum_rows": lambda lib, p: flat(lib, {"n": p["P"] * p["C"]}, lambda x, _: x.view(p["P"], p["C"]).sum(0), "sum(0)", lib.torch.float32),
    "sum_to_double": lambda lib, p: flat(lib, p, lambda x, _: x.sum(dtype=lib.torch.float64), "sum(float64)", lib.torch.float32),
    "sum_partials": lambda lib, p: flat(lib, p, lambda x, _: x.sum(), "sum", lib.torch.float64),
}


# ---- the program ---------------------------------------------------------------------------------------------------------------------

def parse_name(name: str) -> tuple[str, Sizes]:
    op, *parts = name.split("/")
    return op, {key: int(value) for key, _, value in (part.partition("=") for part in parts) if value.isdigit()}


def names_of(ours: dict[str, Any]) -> list[str]:
    """Each benchmark once, also one whose own check failed, without what Google Benchmark may append (`/iterations:1/manual_time`)."""
    names = (entry.get("run_name", entry["name"]).split("/iterations:")[0].removesuffix("/manual_time") for entry in ours["benchmarks"])
    return list(dict.fromkeys(names))


@dataclass
class Measurement:
    arguments: argparse.Namespace
    report: dict[str, Any] = field(default_factory=lambda: {"results": {}, "skipped": {}})
    phase: str = "import"
    tried: dict[str, dict[str, Any]] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)  # a signal may come while the main thread holds it

    def seconds_left(self) -> float:
        return self.arguments.seconds_limit - (time.monotonic() - START)

    def write(self) -> None:
        with self.lock:
            self.report["seconds"] = round(time.monotonic() - START, 2)
            write_json(self.arguments.out, self.report)

    def leave(self, why: str) -> None:
        """From a thread, or out of a call that may never return."""
        self.report["ended_early"] = f"{why}, in {self.phase}"
        os._exit(self.finish())

    def finish(self) -> int:
        self.write()
        results = self.report["results"]
        ended = f"; {self.report['ended_early']}" if "ended_early" in self.report else ""
        print(f"library: {len(results)} benchmarks measured, {len(self.report['skipped'])} skipped, {self.report['seconds']:.0f} s{ended}", flush=True)
        return 0 if results else 1

    def record(self, name: str, candidate: Candidate, outcome: Any) -> None:
        tried = self.tried.setdefault(name, {})
        tried[candidate.name()] = outcome
        exact = {label: us for label, us in tried.items() if isinstance(us, float) and not label.endswith("(inexact)")}
        if exact:
            best = min(exact, key=lambda label: exact[label])
            self.report["results"][name] = {"library": best, "us": exact[best], "tried": tried}
            self.report["skipped"].pop(name, None)
        else:
            self.report["skipped"][name] = "; ".join(f"{label}: {outcome}" for label, outcome in tried.items())


def measure(measurement: Measurement, names: list[str], precision: str) -> None:
    arguments, report = measurement.arguments, measurement.report
    lib = Library(arguments.device, precision)
    report.update(torch=lib.torch.__version__, device=lib.torch.cuda.get_device_name() if lib.cuda else "cpu", precision=precision)
    planned: list[tuple[int, str, Candidate]] = []
    order = list(OPERATIONS)
    for name in names:
        op, sizes = parse_name(name)
        if op not in OPERATIONS:
            report["skipped"][name] = "PyTorch has no counterpart"
            continue
        try:
            planned += [(order.index(op), name, candidate) for candidate in OPERATIONS[op](lib, sizes)]
        except KeyError as error:
            report["skipped"][name] = f"the name has no {error}"
    planned.sort(key=lambda item: (item[2].compiled, item[0]))

    longest_compile = FIRST_COMPILE_SECONDS
    written = time.monotonic()
    for number, (_, name, candidate) in enumerate(planned):
        if candidate.compiled and not arguments.compile:
            break
        if measurement.seconds_left() < (longest_compile if candidate.compiled else 0):
            report["ended_early"] = (f"--seconds-limit {arguments.seconds_limit:g}: {len(planned) - number} of {len(planned)} candidates not tried, "
                                     f"from {candidate.name()} of {name} on")
            break
        if isinstance(measurement.tried.get(name, {}).get(candidate.instead_of), float):
            continue
        measurement.phase = f"{candidate.name()} of {name}"
        begin = time.monotonic()
        try:
            outcome: Any = round(lib.microseconds(candidate), 3)
        except Exception as error:  # one candidate that fails must not take the others with it
            outcome = describe(error)
        with measurement.lock:
            measurement.record(name, candidate, outcome)
        if candidate.compiled:
            took = time.monotonic() - begin
            longest_compile = took if longest_compile == FIRST_COMPILE_SECONDS else max(longest_compile, took)
        if time.monotonic() - written > 2:
            measurement.write()
            written = time.monotonic()


def parse_arguments(argv: Optional[list[str]] = None) -> tuple[argparse.Namespace, list[str], str]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], epilog=__doc__.split("\n", 1)[1], formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", type=Path, required=True, help="what bench --benchmark_out=FILE --benchmark_out_format=json wrote")
    parser.add_argument("--out", type=Path, required=True, help="the JSON goes here")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds-limit", type=float, default=120.0, help="write what is there after this long (default 120)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="also time what torch.compile makes of it (default: on a GPU)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only benchmarks whose name starts so")
    arguments = parser.parse_args(argv)
    if arguments.compile is None:
        arguments.compile = arguments.device == "cuda"
    try:
        ours = json.loads(arguments.ours.read_text(encoding="utf-8"))
        names = [name for name in names_of(ours) if name.startswith(arguments.only)]
    except OSError as error:
        parser.error(f"--ours {arguments.ours}: {error.strerror}")
    except (ValueError, KeyError, TypeError) as error:
        parser.error(f"--ours {arguments.ours}: is not what bench writes with --benchmark_out_format=json ({describe(error)})")
    if not names:
        parser.error(f"--ours {arguments.ours}: holds no benchmark" + (f" that starts with {arguments.only}" if arguments.only else ""))
    return arguments, names, ours.get("context", {}).get("precision", "BF16")


def main() -> int:
    arguments, names, precision = parse_arguments()
    measurement = Measurement(arguments)
    watchdog = threading.Timer(arguments.seconds_limit + WATCHDOG_GRACE_SECONDS, lambda: measurement.leave(f"--seconds-limit {arguments.seconds_limit:g}"))
    watchdog.daemon = True
    watchdog.start()
    signal.signal(signal.SIGTERM, lambda *_: measurement.leave("SIGTERM"))
    try:
        measure(measurement, names, precision)
    except BaseException as error:  # whatever it is, the file says so and keeps what is there
        measurement.report["error"] = f"in {measurement.phase}: {describe(error)}"
        print(f"library: error: {measurement.report['error']}", flush=True)
        measurement.finish()
        return 1
    finally:
        watchdog.cancel()
    return measurement.finish()


if __name__ == "__main__":
    sys.exit(main())
