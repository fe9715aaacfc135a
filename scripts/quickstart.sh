#!/usr/bin/env bash
# From a bare Debian 12 or Ubuntu 22.04+ machine to a trained model, in a few minutes on two cores and without a GPU:
# installs the system packages it lacks, builds, makes the default data, trains preset `tiny` on 4 ranks with ZeRO-1,
# evaluates, prints a sample, draws the loss curve.
#
#   bash scripts/quickstart.sh [options for train_gpt]        e.g. --steps 100
#
# DRY_RUN=1 prints which packages it would install, and stops.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

ranks=4
out=runs/quickstart

say "1/4 system packages"
install_build_packages
[ -z "${DRY_RUN:-}" ] || exit 0

say "2/4 build and data (make train_gpt)"
make train_gpt

read -ra flags <<<"$(mpirun_flags)"
command=(mpirun "${flags[@]}" -np "$ranks" ./train_gpt --preset tiny --zero-stage 1 --out "$out" "$@")
say "3/4 train on $ranks ranks: ${command[*]}"
"${command[@]}" </dev/null

say "4/4 loss curve (python3 scripts/plot.py $out)"
python3 scripts/plot.py "$out"

cat <<END

Done. The run folder is $out (metrics.jsonl, log.rankN). Next:
  ./train_gpt --help
  python3 dev/data/prepare.py FILES_OR_FOLDERS --out data/mine
  mpirun ${flags[*]} -np $ranks ./train_gpt --train-data 'data/mine/train_*.bin' --val-data 'data/mine/val_*.bin'
END
