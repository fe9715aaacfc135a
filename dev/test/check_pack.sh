#!/usr/bin/env bash
# Starts every program of a GPU pack (dev/gpu/pack.sh) where there is nothing but the C and C++ libraries, a shell and the CUDA
# run-time libraries, and checks that each says clearly that there is no GPU; that the launcher finds the libraries where they
# may be, and says what is missing; and that the pack's MPI works away from the machine it was compiled on.
#
#   dev/test/check_pack.sh [PACK]        default build/gpu-pack
#
# The empty machine is a folder and a mount namespace of its own, entered by chroot: needs root or user namespaces. Everything
# mounted there goes with the namespace. The last line is `N passed, N failed, N skipped`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

pack=$(readlink -f "${1:-build/gpu-pack}")
[ -f "$pack/pack.json" ] || die "$pack is no pack; make it with dev/gpu/pack.sh"
grep -q '"device": "cuda"' "$pack/pack.json" || die "$pack is for the CPU and uses this machine's libraries; there is nothing to prove about it here"

readonly LIBRARIES=(libcudart.so.13 libcublasLt.so.13 libnccl.so.2)
readonly NO_GPU="no CUDA device was found"
# What Ubuntu 24.04 has.
readonly NEWEST_GLIBC=2.39 NEWEST_GLIBCXX=3.4.33

passed=0 failed=0
verdict() { # verdict NAME PROBLEM: an empty problem is a pass
    if [ -z "$2" ]; then
        passed=$((passed + 1))
        echo "ok    $1"
    else
        failed=$((failed + 1))
        echo "FAIL  $1: $2"
        if [ -n "${output:-}" ]; then printf '%s\n' "$output" | head -n 40 | sed 's/^/      | /'; fi
    fi
}
skip_all() {
    echo "skipped: $1"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
}

# ----------------------------------------------------------------------------------------------------------------------
# The empty machine
cuda_libraries=$("$pack/launch" --libraries) || skip_all "this machine has not all CUDA libraries itself"
space=(unshare --mount --pid --fork --kill-child)
if [ "$(id -u)" -ne 0 ]; then space+=(--map-root-user); fi
"${space[@]}" true 2>/dev/null || skip_all "neither root nor user namespaces here, so there is no way to enter an empty root folder"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root"/{bin,dev,proc,sys,tmp,lib64,opt/pack}
chmod 1777 "$root/tmp"
# The C library's files, from where the shell's own come; the C++ library's from where g++ links them.
ldd /bin/sh >"$work/libraries"
cp -L "$(sed -n 's/^[[:space:]]*\(\/[^ ]*ld-linux[^ ]*\).*/\1/p' "$work/libraries")" "$root/lib64/"
c_library=$(sed -n 's/.*libc\.so\.6 => \([^ ]*\) .*/\1/p' "$work/libraries")
system=$root$(dirname "$c_library")
mkdir -p "$system"
for name in libc.so.6 libm.so.6 libpthread.so.0 libdl.so.2 librt.so.1 libresolv.so.2 libutil.so.1 libmvec.so.1; do
    cp -L "$(dirname "$c_library")/$name" "$system/"
done
for name in libstdc++.so.6 libgcc_s.so.1; do cp -L "$(g++ -print-file-name="$name")" "$system/"; done
cp -L /bin/sh "$root/bin/sh"

# on_empty_machine SECONDS PLACES COMMAND...: sets output and status. PLACES is LIBRARY=FOLDER words: where the CUDA libraries
# shall be; none for one that shall be missing. They are bind mounts, as half a gigabyte is not copied.
# shellcheck disable=SC2016 # expands in the inner shell
readonly ENTER='
set -e
root=$1 pack=$2
shift 2
# Nothing mounted here may show outside.
mount --make-rprivate /
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc" 2>/dev/null || mount --rbind /proc "$root/proc"
mount --bind "$pack" "$root/opt/pack"
while [ "$1" != -- ]; do
    mkdir -p "$(dirname "$root$2")"
    : >"$root$2"
    mount --bind "$1" "$root$2"
    shift 2
done
shift
exec env -i PATH=/usr/bin:/bin "$@"
'
on_empty_machine() {
    local seconds=$1 places=$2 mounts=() place
    shift 2
    rm -rf "${root:?}/usr/local" "$root/opt/other"
    find "$system" \( -name 'libcu*' -o -name 'libnccl*' \) -delete
    for place in $places; do
        mounts+=("$(awk -v name="${place%%=*}" '$1 == name { print $2 }' <<<"$cuda_libraries")" "${place#*=}/${place%%=*}")
    done
    status=0
    output=$(timeout --kill-after=5 "$seconds" "${space[@]}" bash -c "$ENTER" enter "$root" "$pack" "${mounts[@]}" -- "${environment[@]}" "$(command -v chroot)" "$root" "$@" 2>&1 </dev/null) || status=$?
}
environment=()
launch=/opt/pack/launch
toolkit=/usr/local/cuda/lib64
everything=${LIBRARIES[*]/%/=$toolkit}
count() { grep -c -- "$1" <<<"$output" || :; }

# ----------------------------------------------------------------------------------------------------------------------
# What the launcher finds
found_in() { # found_in NAME FOLDER...: the folders of cudart, cuBLASLt, NCCL
    local name=$1 problem='' number
    shift
    [ "$status" -eq 0 ] || problem="exit status $status"
    for number in 0 1 2; do
        [ "$(sed -n "$((number + 1))p" <<<"$output")" = "${LIBRARIES[number]} ${*:number+1:1}/${LIBRARIES[number]}" ] || problem=${problem:-"line $((number + 1)) is not ${LIBRARIES[number]} in ${*:number+1:1}"}
    done
    verdict "$name" "$problem"
}
on_empty_machine 20 "$everything" "$launch" --libraries
found_in "libraries in the toolkit" "$toolkit" "$toolkit" "$toolkit"
environment=(CUDA_HOME=/opt/other)
on_empty_machine 20 "$everything ${LIBRARIES[*]/%/=/opt/other/lib64}" "$launch" --libraries
found_in "libraries in CUDA_HOME" /opt/other/lib64 /opt/other/lib64 /opt/other/lib64
environment=(LD_LIBRARY_PATH=/opt/other)
on_empty_machine 20 "$everything libcudart.so.13=/opt/other" "$launch" --libraries
found_in "the caller's LD_LIBRARY_PATH goes first, as it does for the loader" /opt/other "$toolkit" "$toolkit"
environment=()
on_empty_machine 20 "libcudart.so.13=$toolkit libcublasLt.so.13=$toolkit ${LIBRARIES[*]/%/=/usr/local/cuda-13.0/lib64}" "$launch" --libraries
found_in "rather one folder that has all" /usr/local/cuda-13.0/lib64 /usr/local/cuda-13.0/lib64 /usr/local/cuda-13.0/lib64
on_empty_machine 20 "libcudart.so.13=$toolkit libcublasLt.so.13=$toolkit libnccl.so.2=${system#"$root"}" "$launch" --libraries
found_in "NCCL among the system's libraries" "$toolkit" "$toolkit" "${system#"$root"}"
# A python3 that knows one folder of nvidia packages.
printf '#!/bin/sh\necho /opt/other/nvidia\n' >"$root/bin/python3"
chmod +x "$root/bin/python3"
split="libcudart.so.13=/opt/other/nvidia/cu13/lib libcublasLt.so.13=/opt/other/nvidia/cu13/lib libnccl.so.2=/opt/other/nvidia/nccl/lib"
on_empty_machine 20 "$split" "$launch" --libraries
found_in "libraries in python's packages" /opt/other/nvidia/cu13/lib /opt/other/nvidia/cu13/lib /opt/other/nvidia/nccl/lib
on_empty_machine 20 "$split" "$launch" train_gpt
verdict "train_gpt starts with python's packages" "$([ "$status" -eq 1 ] && [ "$(count "$NO_GPU")" -eq 1 ] || echo "exit status $status")"
rm "$root/bin/python3"
# A folder that has a C++ library of its own (an environment of another package manager).
on_empty_machine 20 "${LIBRARIES[*]/%/=/opt/other/lib64}" /bin/sh -c ": >/opt/other/lib64/libstdc++.so.6; CUDA_HOME=/opt/other $launch --libraries"
verdict "no folder that would hide the system's C++ library" "$([ "$status" -eq 1 ] || echo "exit status $status, not 1")"

for missing in "${LIBRARIES[@]}"; do
    places=
    for name in "${LIBRARIES[@]}"; do [ "$name" = "$missing" ] || places+=" $name=$toolkit"; done
    for command in --libraries train_gpt; do
        on_empty_machine 20 "$places" "$launch" "$command"
        problem=
        [ "$status" -eq 1 ] || problem="exit status $status, not 1"
        [ "$(count "launch: no $missing on this machine; looked in:")" -eq 1 ] || problem=${problem:-"does not say that $missing is missing"}
        [ "$(count "^  $toolkit\$")" -eq 1 ] || problem=${problem:-"does not say that it looked in $toolkit"}
        verdict "$command without $missing" "$problem"
    done
done

# ----------------------------------------------------------------------------------------------------------------------
# The programs
while read -r program; do
    on_empty_machine 60 "$everything" "$launch" "${program#"$pack/bin/"}"
    problem=
    if [ "$status" -eq 0 ] || [ "$status" -ge 124 ]; then problem="exit status $status"; fi
    [ "$(count "$NO_GPU")" -eq 1 ] || problem=${problem:-"does not say once: $NO_GPU"}
    # GoogleTest says hello first.
    case ${program##*/} in
    kernel_tests*) most=4 ;;
    *) most=1 ;;
    esac
    [ "$(wc -l <<<"$output")" -le "$most" ] || problem=${problem:-"more than $most line(s)"}
    verdict "${program#"$pack/"} without a GPU" "$problem"
done < <(find "$pack/bin" -type f -perm -u+x | sort)

on_empty_machine 30 "libcudart.so.13=$toolkit libcublasLt.so.13=$toolkit" "$launch" mpirun -np 2 /opt/pack/bin/mpi/train_gpt
problem=
if [ "$status" -eq 0 ] || [ "$status" -ge 124 ]; then problem="exit status $status"; fi
[ "$(count "$NO_GPU")" -eq 1 ] || problem=${problem:-"does not say once: $NO_GPU"}
[ "$(count "couldn't open the help file")" -eq 0 ] || problem=${problem:-"a help text is missing"}
verdict "mpirun -np 2 mpi/train_gpt without a GPU and without NCCL" "$problem"

# ----------------------------------------------------------------------------------------------------------------------
# MPI for real: threads, collectives of several sizes, messages, ranks that take turns, and a rank alone.
cat >"$work/ranks.c" <<'C'
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char** argv) {
    int provided, rank, ranks;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int bad = provided != MPI_THREAD_MULTIPLE;
    for (int count = 1; count <= 1 << 20; count *= 32) {
        double* values = malloc(count * sizeof(double));
        for (int i = 0; i < count; ++i) values[i] = i + rank;
        MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        for (int i = 0; i < count; ++i) bad |= values[i] != (double)ranks * i + ranks * (ranks - 1) / 2;
        for (int i = 0; i < count; ++i) values[i] = rank;
        MPI_Sendrecv_replace(values, count, MPI_DOUBLE, (rank + 1) % ranks, 0, (rank + ranks - 1) % ranks, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int i = 0; i < count; ++i) bad |= values[i] != (rank + ranks - 1) % ranks;
        free(values);
    }
    MPI_Comm local;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &local);
    MPI_Barrier(local);
    MPI_Allreduce(MPI_IN_PLACE, &bad, 1, MPI_INT, MPI_SUM, local);
    if (rank == 0) printf("%d ranks, %d bad\n", ranks, bad);
    MPI_Finalize();
    return bad;
}
C
mpicc -O1 -o "$root/opt/ranks" "$work/ranks.c"
for ranks in 1 3; do
    on_empty_machine 60 "$everything" "$launch" mpirun -np "$ranks" /opt/ranks
    verdict "MPI with $ranks rank(s)" "$([ "$status" -eq 0 ] && [ "$output" = "$ranks ranks, 0 bad" ] || echo "exit status $status")"
done
on_empty_machine 60 "$everything" "$launch" /opt/ranks
verdict "MPI without mpirun" "$([ "$status" -eq 0 ] && [ "$output" = "1 ranks, 0 bad" ] || echo "exit status $status")"
output=

# ----------------------------------------------------------------------------------------------------------------------
# Versions, size
not_newer() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | tail -n 1)" = "$2" ]; }
needs=$(sed -n 's/.*"GLIBC_\([0-9.]*\)".*/\1/p' "$pack/pack.json")
verdict "glibc $needs is enough" "$(not_newer "$needs" "$NEWEST_GLIBC" || echo "newer than $NEWEST_GLIBC")"
needs=$(sed -n 's/.*"GLIBCXX_\([0-9.]*\)".*/\1/p' "$pack/pack.json")
verdict "libstdc++ $needs is enough" "$(not_newer "$needs" "$NEWEST_GLIBCXX" || echo "newer than $NEWEST_GLIBCXX")"
verdict "nothing stays mounted" "$(grep -F "$work" /proc/self/mounts || :)"

echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
