#!/usr/bin/env bash
# Fills the table that a parallel setting is chosen by: one rank, then N ranks in every ZeRO stage, each number beside what --plan says. All of it is in
# bench_parallel.py. It draws curves where the tests' Python (.venv) or the machine's has matplotlib.
#
#   bash scripts/bench_parallel.sh [--ranks 2] [--stages 0,1,2,3] [--steps 50] [--rounds 1] [--buckets 0,1,5,25,100] [-- options for train_gpt]
set -euo pipefail
folder=$(dirname "${BASH_SOURCE[0]}")
python=python3
[ ! -x "$folder/../.venv/bin/python" ] || python=$folder/../.venv/bin/python
exec "$python" "$folder/bench_parallel.py" "$@"
