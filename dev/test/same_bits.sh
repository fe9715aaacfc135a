#!/usr/bin/env bash
# Runs mpi_test_zero under the checking modes of hostcuda, with `all` under several seeds of each, and compares the hashes of state it prints ("bits ..." lines) with those of a
# plain run: a missing event, a host access of device memory or a race between warps would change or stop one of them.
#
#   dev/test/same_bits.sh build/cpu-BF16/dev/test/mpi_test_zero [all]        prints `N passed, N failed`
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"
program=$1
read -ra flags <<<"$(mpirun_flags)"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

bits() { # NAME [VARIABLE=value ...]
    local name=$1
    shift
    env "$@" timeout 300 mpirun "${flags[@]}" -np 2 "$program" --quick >"$folder/$name.log" 2>&1 || {
        tail -n 20 "$folder/$name.log"
        return 1
    }
    grep '^bits' "$folder/$name.log" >"$folder/$name.bits"
}

modes=(HOSTCUDA_ASYNC=1+HOSTCUDA_ASYNC_SEED=1 HOSTCUDA_PROTECT=1+HOSTCUDA_THREADS=3 HOSTCUDA_SCHEDULE=1)
[ "${2:-}" != all ] || modes=(HOSTCUDA_ASYNC=1+HOSTCUDA_ASYNC_SEED={1,2,3} HOSTCUDA_PROTECT=1 HOSTCUDA_SCHEDULE={1,2,3,4,5} HOSTCUDA_THREADS=3)
# Three at a time: delayed streams sleep more than they compute.
for mode in plain=plain "${modes[@]}"; do
    [ "$(jobs -rp | wc -l)" -lt 3 ] || wait -n || true
    IFS=+ read -ra variables <<<"$mode"
    bits "$mode" "${variables[@]}" &
done
wait
passed=0 failed=0
for mode in "${modes[@]}"; do
    if [ -s "$folder/plain=plain.bits" ] && cmp -s "$folder/plain=plain.bits" "$folder/$mode.bits"; then
        echo "ok     $mode"
        passed=$((passed + 1))
    else
        echo "FAILED $mode: it failed, or its bits differ from a plain run's"
        diff "$folder/plain=plain.bits" "$folder/$mode.bits" | head -n 10 || true
        failed=$((failed + 1))
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
