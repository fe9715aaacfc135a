#!/usr/bin/env bash
# Compiles and links the GPU programs for sm_80 and sm_90a with nvcc, and checks what they say on a machine without a GPU: one clear line, exit 1.
# (On a machine with a GPU the second half is skipped.)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
make DEVICE=cuda GPU_ARCHS="80 90a" programs
if nvidia-smi -L >/dev/null 2>&1; then
    echo "a GPU is here: the message without one was not checked"
    exit 0
fi
for program in train_gpt test_gpt; do
    status=0
    output=$("build/cuda-BF16/$program" 2>&1 </dev/null) || status=$?
    if [ "$status" -ne 1 ] || [ "$(wc -l <<<"$output")" -ne 1 ] || [[ $output != *"no CUDA device was found"* ]]; then
        echo "error: without a GPU $program must print one clear line and exit with 1; it exited with $status and printed:" >&2
        echo "$output" >&2
        exit 1
    fi
    echo "$program without a GPU: $output"
done
