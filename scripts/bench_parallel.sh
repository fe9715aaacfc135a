#!/usr/bin/env bash
# Compares ZeRO stages side by side on this machine: how fast, how much memory, how much is sent. All of it is in bench_parallel.py.
#
#   bash scripts/bench_parallel.sh [--ranks 4] [--stages 0,1,2,3] [--steps 20] [--rounds 5] [-- options for train_gpt]
set -euo pipefail
exec python3 "$(dirname "${BASH_SOURCE[0]}")/bench_parallel.py" "$@"
