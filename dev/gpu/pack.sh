#!/usr/bin/env bash
# Packs what a GPU machine with no network, no packages and no MPI needs for dev/gpu/check.sh into one folder:
#
#   dev/gpu/pack.sh [--out DIR]          CUDA programs for sm_90a, into build/gpu-pack
#   dev/gpu/pack.sh --host [--out DIR]   the same folder with the CPU programs, into build/host-pack (for check.sh --host)
#
#   launch       finds the CUDA libraries of the machine it is started on, then starts a program (dev/gpu/launch.sh)
#   bin/         train_gpt, test_gpt, kernel_tests (and each _fp32), bench; mpi/ has the NCCL=mpi build for several ranks on one GPU
#   lib/         shared libraries that are neither the C and C++ libraries nor CUDA's
#   openmpi/     mpirun and the components that ranks on one machine use
#   data/        byte tokens of this project's own sources;  reference/  the dumps test_gpt compares with
#   host/        metrics of the same short training run on the CPU build, BF16 and FP32; and of controls: other micro-batches and
#                products summed in another order, which is the same run rounded differently (how far two right answers may lie apart)
#   pack.json    what it is, and the options of that run (their paths are relative to the pack)
#
# The host part is for x86-64-v2, any x86-64 of the last 12 years. Doing it again is quick: the host's runs are kept while their inputs stay.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

readonly LIMIT_BYTES=$((60 * 1024 * 1024))
readonly GPU_ARCH=90a
readonly HOST_ARCH=x86-64-v2
# Enough for the steps below without a second epoch, many times over.
readonly DATA_BYTES=500000
readonly DATA_SOURCES=(llmc hostcuda README.md)

# The run that is compared between devices. A learning rate at which it is stable: at the preset's 3e-3 the gradient norm
# jumps at step 8, and two roundings of one run part there.
readonly STEPS=20
readonly MICRO_BATCH=8
readonly CONTROLS_BF16=(1 2 4 16)
readonly CONTROLS_FP32=(2)
# Vector instructions of oneDNN's products in a control: other ones than a machine with AVX-512 takes, so that they sum in another order.
readonly CONTROL_ISA=AVX2
SAME_RUN=(--preset tiny --steps "$STEPS" --warmup 5 --lr 1e-3 --seq-len 128 --total-batch 2048 --seed 1
    --val-every 0 --val-batches 1 --sample-every 0 --train-data 'data/train_*.bin' --val-data 'data/val_*.bin')
readonly SAME_RUN

device=cuda
out=
while [ $# -gt 0 ]; do
    case $1 in
    --host) device=cpu ;;
    --out)
        [ $# -ge 2 ] || die "--out needs a folder"
        out=$2
        shift
        ;;
    *) die "unknown argument $1; usage: pack.sh [--host] [--out DIR]" ;;
    esac
    shift
done
if [ -z "$out" ]; then
    out=build/gpu-pack
    if [ "$device" = cpu ]; then out=build/host-pack; fi
fi
# The folder is replaced as a whole at the end, so it must be ours.
if [ -e "$out" ] && [ ! -f "$out/pack.json" ] && [ -n "$(ls -A "$out")" ]; then die "$out exists and is no pack; give another --out"; fi
mkdir -p "$(dirname "$out")"
new=$(mktemp -d "$(dirname "$out")/.pack.XXXXXX")
trap 'rm -rf "$new"' EXIT
chmod 755 "$new"

# ----------------------------------------------------------------------------------------------------------------------
# Programs. The variant folders are the Makefile's.

# programs PRECISION TARGET...: builds the CPU variant's targets.
build_cpu() {
    local precision=$1
    shift
    make DEVICE=cpu CXX=g++ PRECISION="$precision" ASAN= TSAN= DEBUG= "${@/#/build/cpu-$precision/}"
}
# build_cuda PRECISION NCCL TARGET...: with machine code compressed as far as it goes (to a sixth) where nvcc can. What it writes needs a driver of 580 or newer,
# as all that nvcc 13 makes does; for nvcc 12 of 550.
build_cuda() {
    local precision=$1 nccl=$2 help
    shift 2
    help=$("$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)" --help)
    if [[ $help == *--compress-mode* ]]; then export NVCC_APPEND_FLAGS=--compress-mode=size; fi
    make DEVICE=cuda CXX=g++ GPU_ARCHS="$GPU_ARCH" GPU_PTX= MARCH="$HOST_ARCH" PRECISION="$precision" NCCL="$nccl" ASAN= TSAN= DEBUG= \
        "${@/#/build/cuda-$precision${nccl:+-$nccl}-$HOST_ARCH/}"
}

# put PROGRAM NAME: a program without its symbols.
put() {
    mkdir -p "$(dirname "$new/bin/$2")"
    strip -o "$new/bin/$2" "$1"
}
put_programs() {
    local bf16 fp32 mpi program
    if [ "$device" = cpu ]; then
        bf16=build/cpu-BF16 fp32=build/cpu-FP32 mpi=build/cpu-BF16
    else
        bf16=build/cuda-BF16-$HOST_ARCH fp32=build/cuda-FP32-$HOST_ARCH mpi=build/cuda-BF16-mpi-$HOST_ARCH
    fi
    for program in train_gpt test_gpt kernel_tests; do
        put "$bf16/$program" "$program"
        put "$fp32/$program" "${program}_fp32"
    done
    put "$bf16/bench" bench
    put "$mpi/train_gpt" mpi/train_gpt
    put "$mpi/dev/test/mpi_test_zero" mpi/mpi_test_zero
}

say "building"
build_cpu BF16 train_gpt
build_cpu FP32 train_gpt
if [ "$device" = cpu ]; then
    build_cpu BF16 test_gpt kernel_tests bench dev/test/mpi_test_zero
    build_cpu FP32 test_gpt kernel_tests
else
    build_cuda BF16 "" train_gpt test_gpt kernel_tests bench
    build_cuda FP32 "" train_gpt test_gpt kernel_tests
    build_cuda BF16 mpi train_gpt dev/test/mpi_test_zero
fi

say "copying"
put_programs
install -m 755 dev/gpu/launch.sh "$new/launch"

# The Makefile compiles again what is for other cards; where there is a disassembler, that is looked at.
PATH="$PATH:$PWD/build/gpu-tools/nvidia/cu13/bin"
if [ "$device" = cuda ] && has_program cuobjdump; then
    for program in "$new"/bin/* "$new"/bin/mpi/*; do
        [ -f "$program" ] || continue
        archs=$(cuobjdump --list-elf "$program" | grep -oE 'sm_[0-9]+[a-z]?' | sort -u || true)
        [ "$archs" = "sm_$GPU_ARCH" ] || die "${program#"$new/"} has code for '$archs', not for sm_$GPU_ARCH alone; remove build/cuda-*-$HOST_ARCH and start again"
    done
fi

# ----------------------------------------------------------------------------------------------------------------------
# Shared libraries and OpenMPI. A CPU pack runs where it was made and uses the system's.

# What every Linux machine with g++ programs has, and what the launcher finds.
readonly TARGET_LIBRARIES='^(linux-vdso|ld-linux|libc|libm|libpthread|libdl|librt|libresolv|libutil|libstdc\+\+|libgcc_s|libcudart|libcublasLt|libnccl|libcuda)[.-]'

put_libraries() {
    local name arrow path
    mkdir -p "$new/lib"
    find "$new/bin" "$new/openmpi" -type f \( -perm -u+x -o -name '*.so' \) -exec ldd {} + | grep -v ':$' | sort -u >"$new/libraries"
    while read -r name arrow path _; do
        name=${name##*/}
        if [[ $name =~ $TARGET_LIBRARIES ]] || [ -f "$new/lib/$name" ]; then continue; fi
        if [ "$arrow" != "=>" ] || [ ! -f "$path" ]; then die "a program needs $name, which this machine does not have"; fi
        strip --strip-unneeded -o "$new/lib/$name" "$path"
    done <"$new/libraries"
    rm "$new/libraries"
}

# The components that ranks on one machine can use: no launchers, no networks but the loopback, no file I/O, no shared-memory
# library of another standard. A name without its component means all of the framework.
readonly COMPONENTS=(allocator bml_r2 btl_self btl_tcp btl_vader coll_basic coll_inter coll_libnbc coll_self coll_tuned
    errmgr ess_env ess_hnp ess_pmi ess_singleton filem_raw grpcomm_direct iof mpool odls_default oob_tcp op osc_rdma osc_sm
    patcher plm_isolated pmix_ext3x pmix_isolated pml_ob1 pstat rcache reachable_weighted regx rmaps_ppr rmaps_round_robin rml routed
    rtc schizo_ompi schizo_orte shmem state topo_basic)

# openmpi_path NAME: one of the folders OpenMPI was compiled with.
openmpi_path() { ompi_info --path "$1" --parsable | sed -n "s/^path:$1://p"; }

put_openmpi() {
    local version components component pmix
    version=$(mpirun --version | head -n 1)
    [[ $version == *"Open MPI) 4."* ]] || die "only OpenMPI 4 can be packed (later ones are laid out differently); here is: $version"
    mkdir -p "$new"/openmpi/{bin,components,pmix,etc,share/openmpi,share/pmix}
    cp -L "$(command -v mpirun)" "$new/openmpi/bin/mpirun"
    cp -L "$(command -v orted)" "$new/openmpi/bin/orted"
    components=$(openmpi_path pkglibdir)
    for component in "${COMPONENTS[@]}"; do
        # Without a match the pattern itself is copied, which fails.
        if [[ $component == *_* ]]; then
            cp -L "$components/mca_$component.so" "$new/openmpi/components/"
        else
            cp -L "$components/mca_${component}_"*.so "$new/openmpi/components/"
        fi
    done
    # PMIx is a library of its own, beside its components.
    pmix=$(ldd "$components/mca_pmix_ext3x.so" | sed -n 's/.*libpmix[^ ]* => \([^ ]*\) .*/\1/p')
    pmix=$(dirname "$(readlink -f "$pmix")")
    cp -L "$pmix"/pmix/pmix_mca_{pcompress_zlib,prm_default}.so "$new/openmpi/pmix/"
    strip --strip-unneeded "$new"/openmpi/{bin,components,pmix}/*
    # The words of their error messages, and an empty host list and settings, so that none of the machine's are looked for.
    cp -L "$(openmpi_path pkgdatadir)"/help-*.txt "$new/openmpi/share/openmpi/"
    cp -L "$pmix"/../share/pmix/help-*.txt "$new/openmpi/share/pmix/"
    : >"$new/openmpi/etc/openmpi-default-hostfile"
    : >"$new/openmpi/etc/openmpi-mca-params.conf"
    : >"$new/openmpi/etc/pmix-mca-params.conf"
}

if [ "$device" = cuda ]; then
    put_openmpi
    put_libraries
fi

# ----------------------------------------------------------------------------------------------------------------------
# Data, references, the host's runs
say "data and the host's runs"
python3 dev/data/prepare.py "${DATA_SOURCES[@]}" --include '*.c*' --include '*.h' --include '*.md' --max-bytes "$DATA_BYTES" --val-fraction 0.1 --out "$new/data"
for model in llama qwen2 qwen3 llama64; do
    mkdir -p "$new/reference/$model"
    cp dev/reference/$model/* "$new/reference/$model/"
done

# host_run NAME PRECISION MICRO_BATCH [VARIABLE=VALUE]: host/NAME.jsonl, or nothing to do when it is there already.
repository=$PWD
host_run() {
    local name=$1 precision=$2 micro_batch=$3 seconds=$SECONDS
    shift 3
    if [ -f "$new/host/$name.jsonl" ]; then return 0; fi
    (cd "$new" && env "$@" "$repository/build/cpu-$precision/train_gpt" "${SAME_RUN[@]}" --micro-batch "$micro_batch" --no-save --out run >run.log 2>&1) || {
        cat "$new/run.log" >&2
        die "the host's run $name failed (see above)"
    }
    # Without the times of a step and of validation, which no one compares.
    grep -E '"kind": "train"|"event": "done"' "$new/run/metrics.jsonl" >"$new/host/$name.jsonl"
    [ "$(grep -c '"kind": "train"' "$new/host/$name.jsonl")" -eq "$STEPS" ] || die "the host's run $name has not $STEPS steps in its metrics"
    rm -r "$new/run" "$new/run.log"
    echo "$name: micro-batch $micro_batch, $STEPS steps in $((SECONDS - seconds)) s, $(tail -n 1 "$new/host/$name.jsonl")"
}

mkdir "$new/host"
inputs=$( (cat build/cpu-{BF16,FP32}/train_gpt "$new"/data/*.bin; echo "${SAME_RUN[@]}" / "$MICRO_BATCH" / "${CONTROLS_BF16[@]}" / "${CONTROLS_FP32[@]}" / "$CONTROL_ISA") | sha256sum | cut -d ' ' -f 1)
# Both kinds of pack hold the same runs.
for earlier in "$out" build/gpu-pack build/host-pack; do
    if [ "$(cat "$earlier/host/inputs" 2>/dev/null)" = "$inputs" ]; then
        cp "$earlier"/host/*.jsonl "$new/host/"
        echo "the host's runs are kept from $earlier: their programs, data and options are the same"
        break
    fi
done
echo "$inputs" >"$new/host/inputs"
controls=()
run_with_controls() {
    local precision=$1 name=$2 number=0 micro_batch
    shift 2
    host_run "$name" "$precision" "$MICRO_BATCH"
    for micro_batch; do
        number=$((number + 1))
        host_run "$name.control$number" "$precision" "$micro_batch" "ONEDNN_MAX_CPU_ISA=$CONTROL_ISA"
        controls+=("$name.control$number=$micro_batch")
    done
}
run_with_controls BF16 bf16 "${CONTROLS_BF16[@]}"
run_with_controls FP32 fp32 "${CONTROLS_FP32[@]}"

# ----------------------------------------------------------------------------------------------------------------------
# pack.json, and the size
commit=$(git rev-parse HEAD 2>/dev/null || echo unknown)
if [ -n "$(git status --porcelain 2>/dev/null)" ]; then commit+=-dirty; fi
nvcc='' archs=''
if [ "$device" = cuda ]; then
    nvcc=$("$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)" --version | sed -n 's/.*release .*, V//p')
    archs=sm_$GPU_ARCH
fi
# newest_version PREFIX: of the C or C++ library's symbols that the files here ask for.
newest_version() {
    find "$new/bin" "$new/lib" "$new/openmpi" -type f \( -perm -u+x -o -name '*.so*' \) -exec objdump -T {} + 2>/dev/null | grep -oE "\($1_[0-9.]+\)" | tr -d '()' | sort -Vu | tail -n 1
}
bytes=$(find "$new" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum }')

python3 - "$new/pack.json" "$device" "$commit" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$nvcc" "$archs" "$bytes" "$STEPS" "$(newest_version GLIBC) $(newest_version GLIBCXX)" \
    "${SAME_RUN[*]} --micro-batch $MICRO_BATCH" "${controls[*]}" "$CONTROL_ISA" <<'PYTHON'
import json, sys

path, device, commit, date, nvcc, archs, total, steps, needs, options, controls, isa = sys.argv[1:]
runs = [control.split("=") for control in controls.split(" ")]
record = {
    "device": device, "commit": commit, "date": date, "nvcc": nvcc or None, "archs": archs or None, "bytes": int(total), "needs": needs.split(),
    "same_run": {
        "options": options.split(" "), "steps": int(steps),
        "controls": [{"file": f"host/{name}.jsonl", "micro_batch": int(size), "environment": {"ONEDNN_MAX_CPU_ISA": isa}} for name, size in runs],
    },
}
with open(path, "w", encoding="utf-8") as file:
    json.dump(record, file, indent=1)
    file.write("\n")
PYTHON

[ "$bytes" -le "$LIMIT_BYTES" ] || die "the pack has $bytes bytes, more than $LIMIT_BYTES: $(du -sb "$new"/* | tr '\n' ' ')"
rm -rf "$out"
mv "$new" "$out"
trap - EXIT
say "$out"
for part in bin lib openmpi data reference host; do
    if [ -d "$out/$part" ]; then printf '%-10s %6.2f MB in %d files\n' "$part" "$(find "$out/$part" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum / 1e6 }')" "$(find "$out/$part" -type f | wc -l)"; fi
done
printf '%-10s %6.2f MB of %.2f\n' together "$(awk "BEGIN { print $bytes / 1e6 }")" "$(awk "BEGIN { print $LIMIT_BYTES / 1e6 }")"
