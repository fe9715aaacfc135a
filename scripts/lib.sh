# shellcheck shell=bash
# What quickstart.sh and test.sh share: system packages, an MPI launch line that works anywhere, messages.
# Sourced, never run. DRY_RUN=1 makes install_packages print its command instead of running it.

say() { printf '\n== %s\n' "$*"; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# ----------------------------------------------------------------------------------------------------------------------
# System packages. What counts is whether the thing works (a program, a header), not whether dpkg knows it: a cluster's own
# MPI or compiler is used as it is.

has_program() { command -v "$1" >/dev/null 2>&1; }

# has_header NAME [COMPILER FLAGS...]: the C++ compiler finds it.
has_header() {
    local name=$1
    shift
    has_program "${CXX:-g++}" || return 1
    printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$name" | "${CXX:-g++}" "$@" -x c++ -fsyntax-only - 2>/dev/null
}

missing_packages=()
missing_lines=()

# need PACKAGE REASON PROBE...: remembers PACKAGE unless the probe succeeds.
need() {
    local package=$1 reason=$2
    shift 2
    "$@" && return 0
    missing_packages+=("$package")
    missing_lines+=("$(printf '  %-22s %s' "$package" "$reason")")
}

# Installs what need() found missing, as root or through sudo; says what and why first.
install_packages() {
    if [ ${#missing_packages[@]} -eq 0 ]; then
        echo "system packages: all there"
        return 0
    fi
    echo "system packages to install:"
    printf '%s\n' "${missing_lines[@]}"
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        has_program sudo || die "not root and no sudo; have an administrator run: apt-get install ${missing_packages[*]}"
        as_root=(sudo)
    fi
    if [ -n "${DRY_RUN:-}" ]; then
        echo "would run: ${as_root[*]:+${as_root[*]} }apt-get update && ${as_root[*]:+${as_root[*]} }apt-get install -y --no-install-recommends ${missing_packages[*]}"
    else
        has_program apt-get || die "no apt-get here; install with this system's own tools what is listed above (names are Debian's)"
        local log
        log=$(mktemp)
        # noninteractive: tzdata and others must not ask questions nobody can answer.
        if ! "${as_root[@]}" apt-get update -q </dev/null >"$log" 2>&1; then
            cat "$log" >&2
            die "apt-get update failed (see above); is there a network?"
        fi
        if ! "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing_packages[@]}" </dev/null >"$log" 2>&1; then
            cat "$log" >&2
            die "apt-get could not install: ${missing_packages[*]} (see above)"
        fi
        rm -f "$log"
        echo "installed"
    fi
    missing_packages=()
    missing_lines=()
}

has_oneapi_dnnl() { has_header dnnl.hpp || has_header oneapi/dnnl/dnnl.hpp; }
has_nccl() { has_header nccl.h "-I$(cuda_home)/include"; }
cuda_home() {
    local nvcc
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    dirname "$(dirname "$(readlink -f "$nvcc")")"
}

# True where `make` will choose the CUDA build by itself: nvcc and a GPU.
has_gpu_build() { { has_program nvcc || [ -x /usr/local/cuda/bin/nvcc ]; } && nvidia-smi -L >/dev/null 2>&1; }

need_build_packages() {
    need g++ "compiles everything" has_program g++
    need make "runs the build" has_program make
    need libopenmpi-dev "MPI headers: ranks find each other through it" has_program mpicc
    need openmpi-bin "mpirun, which starts the ranks" has_program mpirun
    need nlohmann-json3-dev "reads config.json and safetensors headers" has_header nlohmann/json.hpp
    need libcli11-dev "command-line options" has_header CLI/CLI.hpp
    need libxxhash-dev "checksums" has_header xxhash.h
    need python3 "prepares data" has_program python3
    need libdnnl-dev "oneDNN: matrix products on the CPU" has_oneapi_dnnl
    if [ "$(uname -m)" != x86_64 ]; then
        need libboost-context-dev "fibers on processors other than x86-64" has_header boost/context/detail/fcontext.hpp
    fi
    if has_gpu_build; then
        need libnccl-dev "NCCL: collectives between GPUs (from NVIDIA's package repository)" has_nccl
    fi
}

# Every header above is looked for with the compiler, so a machine without one is asked twice: once for the compiler, once for
# what it then does not find.
install_build_packages() {
    if ! has_program g++ && [ -z "${DRY_RUN:-}" ]; then
        need g++ "compiles everything" has_program g++
        install_packages
    fi
    need_build_packages
    install_packages
}

# ----------------------------------------------------------------------------------------------------------------------
# mpirun_flags: what OpenMPI wants said before it starts N ranks on a machine with fewer than N cores, or for root. With
# --bind-to none a rank may use all its threads; by default OpenMPI ties each of two ranks to one core.
mpirun_flags() {
    local flags=(--oversubscribe --bind-to none)
    if [ "$(id -u)" -eq 0 ]; then flags=(--allow-run-as-root "${flags[@]}"); fi
    echo "${flags[@]}"
}
