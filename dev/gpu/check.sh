#!/usr/bin/env bash
# The prepared check of llm.zero on a machine with a GPU: verifies, measures, writes the record.
#
#   dev/gpu/check.sh                 on the GPU machine, with the pack that dev/gpu/pack.sh made (build/gpu-pack): under 8 minutes
#   dev/gpu/check.sh --quick         under 3 minutes: no peer, no sanitizer, one model
#   dev/gpu/check.sh --host          the same stages on this machine's CPU with tiny sizes (packs first): under 4 minutes
#
# Writes report.json and log.txt to $OUT (default ./gpu-report). Exit status 0: no stage failed. All options: dev/gpu/check.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [[ " $* " == *" --host "* && " $* " != *" --pack "* && " $* " != *" --help "* ]]; then
    bash dev/gpu/pack.sh --host
fi
exec python3 dev/gpu/check.py "$@"
