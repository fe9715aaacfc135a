"""dev/gpu/kernel_table.py: what it reads from ptxas, cuobjdump and the attention header, the table, and that spills, changes and what is not as planned are
refused. Needs no nvcc; one test takes a header of the toolkit where there is one."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev/gpu"))
import kernel_table  # noqa: E402

NVCC = """nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Built on Wed_Aug_20_01:58:59_PM_PDT_2025
Cuda compilation tools, release 13.0, V13.0.88
Build cuda_13.0.r13.0/compiler.36424714_0
"""
FILL = "_Z11fill_kernelI13__nv_bfloat16EvPT_mf"
SUM = "_Z10sum_kernelPfS_"
NAMES = {FILL: "void fill_kernel<__nv_bfloat16>(__nv_bfloat16*, unsigned long, float)", SUM: "sum_kernel(float*, float*)"}

# In the words of nvcc 13.0 -Xptxas -v; the second kernel calls a function that is not inlined.
REPORT = f"""ptxas info    : 24 bytes gmem
ptxas info    : Compiling entry function '{FILL}' for 'sm_90a'
ptxas info    : Function properties for {FILL}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
ptxas info    : Compile time = 3.170 ms
ptxas info    : Compiling entry function '{SUM}' for 'sm_90a'
ptxas info    : Function properties for {SUM}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for __internal_accurate_pow
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 256 bytes smem
ptxas info    : Compile time = 9.170 ms
"""
# The same of a kernel with too few registers.
SPILLING_REPORT = REPORT.replace("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 10",
                                 "16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads\nptxas info    : Used 10")

# In the form of cuobjdump -sass, with one instruction of each kind that is counted.
SASS = f"""
	code for sm_90a
	.target	sm_90a

		Function : {FILL}
	.headerflags	@"EF_CUDA_ACCELERATORS EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                                            /* 0x00000a00ff017b82 */
                                                                                                     /* 0x000ff00000000800 */
        /*0070*/              @P0  EXIT ;                                                            /* 0x000000000000094d */
        /*0080*/             @!UPT STG.E.128 desc[UR4][R2.64], R4 ;                                  /* 0x0000000402007986 */
        /*0090*/                   EXIT ;                                                            /* 0x000000000000794d */
        /*00a0*/                   BRA 0xa0 ;                                                        /* 0xfffffffc00fc7947 */
        /*00b0*/                   NOP ;                                                             /* 0x0000000000007918 */
		..........

		Function : {SUM}
        /*0000*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;                         /* 0x0000000402047981 */
        /*0010*/             @!P1  LDG.E.LTC128B.64 R8, desc[UR4][R2.64+0x10] ;                      /* 0x0000100402087981 */
        /*0020*/                   LDG.E R9, desc[UR4][R2.64+0x18] ;                                 /* 0x0000180402097981 */
        /*0030*/                   LDGSTS.E.BYPASS.128 [R7], desc[UR4][R2.64] ;                      /* 0x0000000002077fae */
        /*0040*/                   HMMA.16816.F32.BF16 R12, R4, R8, R12 ;                            /* 0x00000008040c723c */
        /*0050*/                   LDSM.16.MT88.4 R24, [R8+UR4+0x80] ;                               /* 0x008000000818783b */
        /*0060*/                   LDS.128 R4, [R2] ;                                                /* 0x0000000002047984 */
        /*0070*/                   STG.E.U16 desc[UR4][R2.64], R4 ;                                  /* 0x0000000402007986 */
        /*0080*/                   REDG.E.ADD.64.STRONG.GPU desc[UR4][R2.64], R4 ;                   /* 0x000000040200798e */
       /*10090*/                   EXIT ;                                                            /* 0x000000000000794d */
		..........
"""
SPILLING_SASS = SASS.replace("/*0090*/                   EXIT", "/*0090*/                   LDL.LU R4, [R1+0x8] ;\n"
                             "        /*0094*/                   STL.64 [R1+0x8], R4 ;\n        /*0098*/                   EXIT")


# A kernel of tensor-core attention that is as PLANNED says.
MMA = "_Z28attention_forward_mma_kernelI19AttentionForwardMmaILi64ELb0EEEvPf"
MMA_NAME = "attention_forward_mma_kernel<AttentionForwardMma<64, false>>"
NAMES[MMA] = "void attention_forward_mma_kernel<AttentionForwardMma<64, false> >(float*)"
MMA_FAT = MMA.replace("Lb0E", "Lb1E")
NAMES[MMA_FAT] = NAMES[MMA].replace("false", "true")
MMA_REPORT = REPORT.replace(FILL, MMA).replace("Used 10", "Used 240")
LDGSTS_LINE = "        /*0080*/                   LDGSTS.E.BYPASS.128 [R7], desc[UR4][R2.64] ;\n"
LDSM_LINE = "        /*0084*/                   LDSM.16.M88.4 R24, [R8] ;\n"
HMMA_LINE = "        /*0088*/                   HMMA.16816.F32.BF16 R12, R4, R8, R12 ;\n"
RED_LINE = "        /*008c*/                   REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R4 ;\n"
FIRST_LINE = SASS[SASS.index("        /*0070*/"):SASS.index("        /*0080*/")]
MMA_SASS = SASS.replace(FILL, MMA).replace(FIRST_LINE, FIRST_LINE + LDGSTS_LINE + LDSM_LINE + HMMA_LINE, 1)
PLAN, PLANNED = kernel_table.PLAN, {MMA_NAME: {"sm_80": 2, "sm_90a": 2}}
TILES = {MMA_NAME: kernel_table.Tile(128, 66000)}


@pytest.fixture(autouse=True)
def nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_table, "PLAN", {})


def rows(report: str = REPORT, sass: str = SASS) -> dict[str, kernel_table.Row]:
    return kernel_table.rows_of(report, sass, lambda names: [NAMES[name] for name in names])


def refusal(report: str, sass: str) -> str:
    with pytest.raises(kernel_table.TableError) as caught:
        rows(report, sass)
    return str(caught.value)


def test_rows() -> None:
    assert rows() == {
        "fill_kernel<bf16>": kernel_table.Row(10, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 5),
        "sum_kernel": kernel_table.Row(32, 256, 0, 0, 0, wide_loads=2, narrow_loads=2, wide_stores=0, narrow_stores=1, atomics=1, hmma=1, ldsm=1, ldgsts=1,
                                       instructions=10),
    }
    assert set(kernel_table.COLUMNS) == set(kernel_table.Row._fields)


@pytest.mark.parametrize("demangled, short", [
    ("void f_kernel<false, 32>(float*, int const*)", "f_kernel<false, 32>"),
    ("void f_kernel<AttentionTile<64, 32, 1> >(__nv_bfloat16*, AttentionArgs)", "f_kernel<AttentionTile<64, 32, 1>>"),
    ("f_kernel(void (*)(int), float*)", "f_kernel"),
    ("void f_kernel<__nv_bfloat16, float (*)(int)>(float*)", "f_kernel<bf16, float (*)(int)>"),
])
def test_short_names(demangled: str, short: str) -> None:
    assert kernel_table.short_name(demangled) == short


def test_what_cannot_be_whole_is_refused() -> None:
    assert "names no kernel" in refusal("", SASS)
    assert "cut off" in refusal(REPORT[:REPORT.index("ptxas info    : Used 32")], SASS)
    assert "different kernels" in refusal(REPORT, SASS[:SASS.index("\t\tFunction : " + SUM)])
    assert "no instruction" in refusal(REPORT, SASS.replace("/*", "<").replace("*/", ">"))


def test_two_kernels_of_one_name_are_refused() -> None:
    with pytest.raises(kernel_table.TableError, match="two kernels are called f"):
        kernel_table.rows_of(REPORT, SASS, lambda names: ["f(int)", "f(float)"])


def test_table_has_one_row_a_kernel_and_one_number_where_all_agree() -> None:
    there = rows()
    wider = {**there, "fill_kernel<bf16>": there["fill_kernel<bf16>"]._replace(registers=12)}
    text = kernel_table.table_of({"sm_80": wider, "sm_90a": there}, "13.0.88", {})
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    assert lines == ["| `fill_kernel<bf16>` | 12/10 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 0 | 0 | 0 | 0 | 0 | 5 |",
                     "| `sum_kernel` | 32 | 256 | 0 | 0 | 0 | 2 | 2 | 0 | 1 | 1 | 1 | 1 | 1 | 10 |"]
    assert kernel_table.version_of(text) == kernel_table.version_of(NVCC) == kernel_table.version_of("13.0.88") == "13.0.88"
    only_hopper = kernel_table.table_of({"sm_80": {"sum_kernel": there["sum_kernel"]}, "sm_90a": there}, "13.0.88", {})
    assert "| `fill_kernel<bf16>` (sm_90a) | 10 |" in only_hopper


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.md"
    path.write_text(kernel_table.table_of({"sm_90a": rows()}, "13.0.88", {}), encoding="utf-8")
    return path


def test_same_table_passes(table: Path) -> None:
    assert kernel_table.check({"sm_90a": rows()}, "13.0.88", table, {}) == (3, 0, 0)


def test_a_change_fails_and_shows_only_what_changed(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel_table.check({"sm_90a": rows(REPORT.replace("Used 32", "Used 40"))}, "13.0.88", table, {}) == (2, 1, 0)
    out = capsys.readouterr().out
    assert "make kernel-table" in out and "-| `sum_kernel` | 32 |" in out and "+| `sum_kernel` | 40 |" in out and "fill_kernel" not in out


def test_other_nvcc_is_not_compared_but_spills_are_seen(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = rows(REPORT.replace("Used 32", "Used 40"))
    assert kernel_table.check({"sm_90a": changed}, "13.1.2", table, {}) == (2, 0, 1)
    assert "made with nvcc 13.0.88 and this is 13.1.2" in capsys.readouterr().out
    assert kernel_table.check({"sm_90a": rows(SPILLING_REPORT, SPILLING_SASS)}, "13.1.2", table, {}) == (1, 1, 1)


def test_missing_table_fails(tmp_path: Path) -> None:
    assert kernel_table.check({"sm_90a": rows()}, "13.0.88", tmp_path / "kernels.md", {}) == (2, 1, 0)


@pytest.mark.parametrize("report, sass", [(SPILLING_REPORT, SASS), (REPORT, SPILLING_SASS), (SPILLING_REPORT, SPILLING_SASS)])
def test_a_spilling_kernel_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], report: str, sass: str) -> None:
    spilling = {"sm_90a": rows(report, sass)}
    path = tmp_path / "kernels.md"
    path.write_text(kernel_table.table_of(spilling, "13.0.88", {}), encoding="utf-8")  # also when the table says so
    assert kernel_table.check(spilling, "13.0.88", path, {}) == (2, 1, 0)
    out = capsys.readouterr().out
    assert "FAIL  fill_kernel<bf16> on sm_90a uses local memory: " in out
    assert ("64 bytes of spills, 16 bytes of stack" in out) == (report is SPILLING_REPORT) and ("2 local accesses" in out) == (sass is SPILLING_SASS)


def test_an_explained_kernel_may_use_its_stack_but_not_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_table, "EXPLAINED", {"fill_kernel<bf16>": "for the test"})
    row = rows()["fill_kernel<bf16>"]
    assert kernel_table.spills("fill_kernel<bf16>", row._replace(stack=32, local=8)) == ""
    assert "8 bytes of spills" in kernel_table.spills("fill_kernel<bf16>", row._replace(stack=32, local=8, spilled=8))
    assert "take it out of EXPLAINED" in kernel_table.spills("fill_kernel<bf16>", row)


def test_a_kernel_as_planned_passes_and_has_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_table, "PLAN", PLANNED)
    built, path = {"sm_80": rows(MMA_REPORT, MMA_SASS), "sm_89": rows(MMA_REPORT, MMA_SASS)}, tmp_path / "kernels.md"
    path.write_text(kernel_table.table_of(built, "13.0.88", TILES), encoding="utf-8")
    assert kernel_table.check(built, "13.0.88", path, TILES) == (7, 0, 0)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith(f"| `{MMA_NAME}` | sm_")] == [
        f"| `{MMA_NAME}` | sm_80 | 128 | 240 | 66000 | 2 | 8 | 12.5 % | registers and shared memory |"]  # it does not run on an sm_89 card


@pytest.mark.parametrize("report, sass, words", [
    (MMA_REPORT, MMA_SASS.replace(LDSM_LINE, ""), "on sm_90a has no LDSM"),
    (MMA_REPORT, MMA_SASS.replace(LDGSTS_LINE, ""), "on sm_90a has no LDGSTS"),
    (MMA_REPORT, MMA_SASS.replace(HMMA_LINE, ""), "on sm_90a has no HMMA"),
    (MMA_REPORT, MMA_SASS.replace(HMMA_LINE, HMMA_LINE + RED_LINE), "on sm_90a has atomics on global memory (1)"),
    (MMA_REPORT.replace("used 0 barriers", "used 1 barriers, 50000 bytes smem"), MMA_SASS,
     "on sm_90a is to have 2 at once on a multiprocessor and has 1, no more for lack of shared memory: 240 registers, 128 threads, 116000 shared bytes"),
    (MMA_REPORT.replace("Used 240", "Used 160"), MMA_SASS, "is to have 2 at once on a multiprocessor and has 3, no more for lack of registers and "),
    (REPORT, SASS, "on sm_90a is planned and not in the program"),
    (MMA_REPORT.replace(MMA, MMA_FAT), MMA_SASS.replace(MMA, MMA_FAT), "AttentionForwardMma<64, true>> on sm_90a has no plan"),
])
def test_what_is_not_as_planned_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], report: str, sass: str,
                                           words: str) -> None:
    monkeypatch.setattr(kernel_table, "PLAN", {MMA_NAME: {"sm_90a": 2}})
    built, path = {"sm_90a": rows(report, sass)}, tmp_path / "kernels.md"
    path.write_text(kernel_table.table_of(built, "13.0.88", TILES), encoding="utf-8")
    unplanned = "no plan" in words  # then the planned one is missing, too
    assert kernel_table.check(built, "13.0.88", path, TILES) == (3, 1 + unplanned, 0)
    assert words in capsys.readouterr().out


def test_too_many_registers_for_the_planned_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two blocks of 256 threads may have 128 registers a thread.
    monkeypatch.setattr(kernel_table, "PLAN", PLANNED)
    kernel, tile = rows(MMA_REPORT, MMA_SASS)[MMA_NAME], kernel_table.Tile(256, 1000)
    problems = [kernel_table.off_plan(MMA_NAME, "sm_80", {MMA_NAME: kernel._replace(registers=registers)}, {MMA_NAME: tile}) for registers in (128, 129)]
    assert problems[0] == "" and "has 1, no more for lack of registers: 129 registers, 256 threads" in problems[1]
    with pytest.raises(kernel_table.TableError, match="add it to CARDS"):
        kernel_table.blocks_of("sm_100", kernel, tile)


def test_tiles_are_read_from_a_header(tmp_path: Path) -> None:
    header = tmp_path / "tiles.cuh"
    header.write_text("#include <cstddef>\nenum class Shape { kA, kB };\ntemplate <int HD, Shape kShape> struct Tile {\n"
                      "    static constexpr int kThreads = kShape == Shape::kA ? 256 : 128;\n    static constexpr std::size_t kBytes = 1024 * HD;\n};\n")
    names = ["attention_a_mma_kernel<Tile<64, (Shape)0>>", "attention_a_mma_kernel<Tile<96, (Shape)1>>"]
    assert kernel_table.read_tiles([*names, "sum_kernel"], header) == {names[0]: kernel_table.Tile(256, 65536), names[1]: kernel_table.Tile(128, 98304)}
    assert kernel_table.read_tiles(["sum_kernel"], tmp_path / "nowhere.cuh") == {}
    with pytest.raises(kernel_table.TableError, match="Other"):
        kernel_table.read_tiles(["attention_a_mma_kernel<Other>"], header)


def test_planned_blocks_fit_the_shared_memory_that_the_header_asks_for() -> None:
    tiles = kernel_table.read_tiles(PLAN)
    assert set(tiles) == set(PLAN) and all(tile.threads % 32 == 0 for tile in tiles.values())
    for name, cards in PLAN.items():
        for architecture, blocks in cards.items():
            fit = kernel_table.most_blocks(kernel_table.CARDS[architecture], 32, tiles[name].threads, tiles[name].shared)
            assert min(fit.values()) >= blocks >= 1, f"{name} on {architecture}"
    # What the plan's names mean.
    backward = "attention_backward_mma_kernel<AttentionBackwardMma<128, {}>>"
    large, small = (kernel_table.read_tiles([backward.format(f"BackwardShape::{shape}")]).popitem()[1] for shape in ("kLarge", "kSmall"))
    assert large == tiles[backward.format("(BackwardShape)0")] != small == tiles[backward.format("(BackwardShape)1")]


def test_every_card_runs_one_shape_for_each_head_dim() -> None:
    for architecture in kernel_table.CARDS:
        runs = [re.sub(r".*_kernel<|, .*", "", name) for name, cards in PLAN.items() if architecture in cards]
        assert sorted(runs) == sorted(f"Attention{way}Mma<{hd}" for way in ("Forward", "Backward") for hd in (64, 80, 96, 128))


def test_the_launcher_chooses_the_planned_shapes() -> None:
    block_kib = {"sm_80": 163, "sm_89": 99, "sm_90a": 227}  # shared memory a card gives one block
    asserts = []
    for name, cards in PLAN.items():
        if found := re.search(r"Backward\w*Mma<(\d+), \(BackwardShape\)(\d)>", name):
            asserts += [f"static_assert(attention_backward_shape({found[1]}, {block_kib[card]} * 1024 >= kAttentionLargeShared, false) == BackwardShape({found[2]}));" for card in cards]
    assert len(asserts) == 4 * len(block_kib)

    def compiles(source: str) -> bool:
        command = [os.environ.get("CXX", "g++"), "-std=c++20", "-w", "-fsyntax-only", f"-I{ROOT}", f"-I{ROOT / 'hostcuda/include'}", "-x", "c++", "-"]
        return subprocess.run(command, input='#include "llmc/attention_mma.cuh"\n' + source, capture_output=True, text=True).returncode == 0
    assert compiles("\n".join(asserts))
    assert not compiles(asserts[0].replace("==", "!="))


def test_blocks_are_those_of_nvidias_calculator(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    include = Path(nvcc).resolve().parents[1] / "include"
    if not (include / "cuda_occupancy.h").is_file():
        pytest.skip("no CUDA toolkit")
    program = """#include <cstdio>
#include <cuda_occupancy.h>
int main() {
    int major, minor, warps, registers, threads, shared_kb, bytes;
    while (std::scanf("%d %d %d %d %d %d %d", &major, &minor, &warps, &shared_kb, &registers, &threads, &bytes) == 7) {
        cudaOccDeviceProp card;
        card.computeMajor = major, card.computeMinor = minor, card.maxThreadsPerBlock = 1024, card.maxThreadsPerMultiprocessor = 32 * warps;
        card.regsPerBlock = card.regsPerMultiprocessor = 65536, card.warpSize = 32, card.numSms = 1, card.sharedMemPerBlock = 48 * 1024;
        card.sharedMemPerMultiprocessor = shared_kb * 1024, card.sharedMemPerBlockOptin = (shared_kb - 1) * 1024, card.reservedSharedMemPerBlock = 1024;
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = 1024, kernel.numRegs = registers, kernel.sharedSizeBytes = 0, kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, kernel.maxDynamicSharedSizeBytes = bytes, kernel.numBlockBarriers = 1;
        cudaOccDeviceState state;
        cudaOccResult result;
        if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &card, &kernel, &state, threads, bytes) != CUDA_OCC_SUCCESS) return 1;
        std::printf("%d\\n", result.activeBlocksPerMultiprocessor);
    }
}
"""
    compiler = [os.environ.get("CXX", "g++"), "-x", "c++", "-", "-o", str(tmp_path / "occupancy"), f"-I{include}"]
    subprocess.run(compiler, input=program, text=True, check=True, timeout=60)
    cases = list(itertools.product(kernel_table.CARDS.items(), (1, 32, 65, 104, 128, 129, 168, 169, 208, 255), (32, 96, 128, 160, 256, 1024),
                                   (0, 1, 900, 20000, 33109, 49152, 50176, 50177, 66048, 82944, 82945, 101376, 101377, 115712, 158720, 166912, 232448)))
    questions = [(name[3], name[4], card.warps, card.shared // 1024, *kernel) for (name, card), *kernel in cases]
    lines = "".join(" ".join(map(str, question)) + "\n" for question in questions)
    result = subprocess.run([str(tmp_path / "occupancy")], input=lines, text=True, capture_output=True, check=True, timeout=60)
    theirs, ours = [*map(int, result.stdout.split())], [min(kernel_table.most_blocks(card, *kernel).values()) for (_, card), *kernel in cases]
    assert len(theirs) == len(cases) and [both for both in zip(cases, theirs, ours) if both[1] != both[2]] == []


def test_program_says_what_is_missing(tmp_path: Path) -> None:
    def start(*arguments: object) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, str(ROOT / "dev/gpu/kernel_table.py"), "--nvcc", NVCC, "--table", str(tmp_path / "kernels.md"), *map(str, arguments)],
                              capture_output=True, text=True, timeout=60)
    result = start(tmp_path / "train_gpt.sm_80.cubin")
    assert result.returncode == 1 and "ptxas's report, is missing" in result.stderr and result.stdout == "0 passed, 1 failed\n"
    result = start(tmp_path / "train_gpt.cubin")
    assert result.returncode == 1 and "not named PROGRAM.sm_ARCH.cubin" in result.stderr


def test_committed_table_is_of_all_three_architectures_and_nothing_spills() -> None:
    text = (ROOT / "dev/gpu/kernels.md").read_text(encoding="utf-8")
    assert "; sm_80, sm_89, sm_90a." in text
    lines, planned = ([[each.strip() for each in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")]
                      for section in text.split("\n## "))
    assert len(lines) > 30 and [line[0] for line in lines] == sorted(line[0] for line in lines)
    spilled = 1 + list(kernel_table.COLUMNS).index("spilled")
    assert {line[spilled] for line in lines} == {"0"}
    assert [(line[0].strip("`"), line[1], int(line[5])) for line in planned] == [(name, *card) for name, cards in PLAN.items() for card in cards.items()]
