#!/usr/bin/env bash
# Fills the table that a parallel setting is chosen by: one rank, data parallel, ZeRO stages; speed, memory, bytes sent, waiting, each beside what the
# trainer's plan says. All of it is in bench_parallel.py.
#
#   bash scripts/bench_parallel.sh [--ranks 2] [--stages 0,1,2,3] [--steps 50] [--rounds 1] [--out runs/bench_parallel] [-- options for train_gpt]
set -euo pipefail
exec python3 "$(dirname "${BASH_SOURCE[0]}")/bench_parallel.py" "$@"
