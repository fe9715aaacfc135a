"""Rules of the source tree that keep one source running on two devices, checked as text."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = sorted([*ROOT.glob("*.cu"), *(ROOT / "llmc").glob("*"), *(ROOT / "dev/cuda").glob("*.cu*"), *(ROOT / "dev/test").glob("*.cu*")])


def code_of(path: Path) -> str:
    """The file without comments; strings stay."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def holders(pattern: str, files: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in files if re.search(pattern, code_of(path))]


def test_the_lists_are_not_empty():
    assert len(PRODUCT) > 60 and ROOT / "llmc/device.cuh" in PRODUCT


def test_only_device_and_ptx_look_at_the_device():
    assert set(holders(r"__CUDACC__|__CUDA_ARCH__", PRODUCT)) <= {"llmc/device.cuh", "llmc/ptx.cuh"}


def test_kernels_start_through_launch():
    assert holders(r"<<<", PRODUCT) == []


def test_shared_arrays_go_through_the_macro():
    assert set(holders(r"__shared__", PRODUCT)) <= {"llmc/device.cuh"}


def test_no_third_party_header_reaches_nvcc():
    seen_by_nvcc = [path for path in PRODUCT if path.suffix in (".cu", ".cuh", ".h") and "host_test" not in path.name and path.parent.name != "test"]
    assert holders(r"#include <(CLI|nlohmann|xxhash|fmt|gtest)", seen_by_nvcc) == []
    assert holders(r"#include <benchmark/", seen_by_nvcc) == ["dev/cuda/bench.cuh"]  # small enough for nvcc, and no part of the trainer


def test_every_kernel_header_is_included_by_a_benchmark():
    benchmarks = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "dev/cuda").glob("*.cu"))]
    for header in holders(r"__global__", sorted((ROOT / "llmc").glob("*.cuh"))):
        assert any(f'#include "{header}"' in text for text in benchmarks), f"{header} holds kernels; add dev/cuda/{Path(header).stem}.cu, or a benchmark that includes it"


def test_hostcuda_knows_nothing_of_the_trainer():
    assert holders(r"llmc|train_gpt", sorted((ROOT / "hostcuda").rglob("*.[hc]*"))) == []


def test_every_header_of_the_trainer_is_found_from_train_gpt():
    text = (ROOT / "train_gpt.cu").read_text(encoding="utf-8")
    internal = {"mapped_file.h", "token_shard.h", "permutation.h", "safetensors.h", "random.cuh", "reduce.cuh", "span_timer.cuh", "hash.h", "order_event.cuh",
                "attention_args.cuh", "attention_plain.cuh", "attention_mma.cuh", "ptx.cuh", "memory_bill.h", "units.h", "text_table.h", "durable_file.h"}
    headers = {path.name for path in (ROOT / "llmc").glob("*.*h")}
    missing = {name for name in headers - internal if f'#include "llmc/{name}"' not in text}
    assert missing == set()
    assert internal <= headers  # a header that went away leaves this list too
