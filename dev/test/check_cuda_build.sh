#!/usr/bin/env bash
# Compiles and links the trainer with nvcc for the cards that a build without a GPU is for, and checks what can be checked without one:
#   - it holds machine code for sm_80, sm_89 and sm_90a, and PTX for newer cards;
#   - its kernels are as recorded in dev/gpu/kernels.md, and none spills (make check-kernel-table);
#   - it plans what the CPU build plans, byte for byte: memory, bytes sent, times, advice;
#   - without a GPU it says so in one clear line and exits with 1 (skipped where a GPU is).
# All other GPU programs, FP32 and collectives over MPI included, are built by dev/gpu/pack.sh, for one card. The last line is `N passed, N failed[, N skipped]`; the exit status is 1 when anything failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

passed=0 failed=0 skipped=0
pass() {
    echo "ok    $1"
    passed=$((passed + 1))
}
fail() {
    echo "FAIL  $1"
    failed=$((failed + 1))
}

if nvidia-smi -L >/dev/null 2>&1; then gpu=1; else gpu=; fi
# Python for the disassembler's packages and the table: the tests' own where it is.
python=python3
[ ! -x .venv/bin/python ] || python=$PWD/.venv/bin/python

variant=build/cuda-BF16
program=train_gpt
make DEVICE=cuda "$variant/$program"
pass "$program compiles and links"
make DEVICE=cpu "build/cpu-BF16/$program"

# --plan needs no device. The free disk space may change between the two.
plan_of() {
    "$@" --plan --plan-json 2>&1 </dev/null | grep -v '"free_disk_bytes"'
}
for options in '--preset 4B --ranks 4 --zero-stage 3 --device-memory 80GB' '--preset qwen2.5-3B --ranks 16 --recompute block --micro-batch 4 --device-memory 24GB'; do
    read -ra words <<<"$options"
    if on_cuda=$(plan_of "$variant/$program" "${words[@]}") && on_cpu=$(plan_of "build/cpu-BF16/$program" "${words[@]}") && [ "$on_cuda" = "$on_cpu" ]; then
        pass "the plan of $options is the CPU build's"
    else
        fail "the plan of $options differs from the CPU build's, or one of them fails:"
        diff <(printf '%s\n' "${on_cuda:-}") <(printf '%s\n' "${on_cpu:-}") | head -n 20 | sed 's/^/    /' || true
    fi
done

table_log=build/kernel-table.log
if make check-kernel-table PYTHON="$python" >"$table_log" 2>&1; then
    pass "kernels as recorded in dev/gpu/kernels.md: $(grep ' passed, ' "$table_log" | tail -n 1)"
else
    fail "the kernels are not as recorded in dev/gpu/kernels.md, or the table could not be made:"
    grep -v -e '/nvcc ' -e 'ptxas.txt ||' "$table_log" | sed 's/^/    /'
fi

# A toolkit that has only the compiler got its disassembler for the table.
PATH="$PWD/build/gpu-tools/nvidia/cu13/bin:$PATH"
if [ -n "$gpu" ]; then
    echo "a GPU is here, so the build is for that one: its list of cards and the message without a GPU were not checked"
    skipped=$((skipped + 2))
else
    cards=$(cuobjdump --list-elf "$variant/$program" | grep -o 'sm_[0-9a-z]*' | sort -u | paste -sd ' ' || true)
    ptx=$(cuobjdump --list-ptx "$variant/$program" 2>&1 | grep -o 'sm_[0-9a-z]*\.ptx' | sort -u | paste -sd ' ' || true)
    if [ "$cards" = "sm_80 sm_89 sm_90a" ] && [ "$ptx" = "sm_90.ptx" ]; then
        pass "$program holds machine code for $cards, and PTX for sm_90 and newer"
    else
        fail "$program must hold machine code for sm_80 sm_89 sm_90a and PTX for sm_90; it holds ${cards:-none} and PTX ${ptx:-none}"
    fi
    status=0
    output=$("$variant/$program" 2>&1 </dev/null) || status=$?
    if [ "$status" -eq 1 ] && [ "$(wc -l <<<"$output")" -eq 1 ] && [[ $output == *"no CUDA device was found"* ]]; then
        pass "$program without a GPU: $output"
    else
        fail "without a GPU $program must print one clear line and exit with 1; it exited with $status and printed:"
        printf '%s\n' "$output" | sed 's/^/    /'
    fi
fi

echo "$passed passed, $failed failed$([ "$skipped" -eq 0 ] || echo ", $skipped skipped")"
[ "$failed" -eq 0 ]
