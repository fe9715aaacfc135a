#!/bin/sh
# launch COMMAND [ARGUMENTS...]    runs COMMAND in the pack's environment: PACK/bin/COMMAND where that exists, else COMMAND from the path
# launch --libraries               prints `NAME PATH` for each CUDA library the programs need, or says what is missing (exit 1)
#
#   ./launch train_gpt --steps 3
#   ./launch mpirun -np 4 PACK/bin/mpi/train_gpt
#   ./launch compute-sanitizer --tool memcheck PACK/bin/kernel_tests
#
# The copy of this file in a pack is called `launch` and finds everything relative to its own place. It installs nothing: it
# looks for the CUDA libraries of this machine (toolkit, system, or the nvidia packages of python3), and tells the pack's
# OpenMPI, which was compiled for another place, where it lies. Only the shell itself is needed, and python3 only where
# a library is in none of the usual folders.
set -u

libraries="libcudart.so.13 libcublasLt.so.13 libnccl.so.2"
newline='
'

fail() {
    printf 'launch: %s\n' "$1" >&2
    exit "${2:-1}"
}

case $0 in
*/*) pack=${0%/*} ;;
*) pack=. ;;
esac
pack=$(CDPATH='' cd -- "$pack" && pwd) || fail "cannot enter the folder of $0"
[ -f "$pack/pack.json" ] || fail "$pack is no pack (it has no pack.json); make one with dev/gpu/pack.sh"

case "$(while IFS= read -r line; do printf '%s' "$line"; done <"$pack/pack.json")" in
*'"device": "cpu"'*) device=cpu ;;
*'"device": "cuda"'*) device=cuda ;;
*) fail "$pack/pack.json does not say whether the pack is for cpu or cuda" ;;
esac

# ----------------------------------------------------------------------------------------------------------------------
# The CUDA libraries. A list of folders is one folder a line.

# add LIST FOLDER...: the folders that exist, appended to the variable LIST.
add() {
    list=$1
    shift
    for folder; do
        if [ -d "$folder" ]; then eval "$list=\$$list\$folder\$newline"; fi
    done
}

# lines VARIABLE COMMAND...: runs COMMAND with each line of the variable's value, until one succeeds.
lines() {
    eval "rest=\$$1"
    shift
    while [ -n "$rest" ]; do
        line=${rest%%"$newline"*}
        rest=${rest#*"$newline"}
        if "$@" "$line"; then return 0; fi
    done
    return 1
}

has_all() {
    for library in $libraries; do
        [ -e "$1/$library" ] || return 1
    done
}
has_any() {
    for library in $libraries; do
        if [ -e "$1/$library" ]; then return 0; fi
    done
    return 1
}
# A folder with a C or C++ library of its own (conda's lib, say) must not come before the system's.
is_foreign_system() { [ -e "$1/libc.so.6" ] || [ -e "$1/libstdc++.so.6" ]; }

# Reads the caller's LD_LIBRARY_PATH into `given`, without the pack's own folder (a launch within a launch).
read_given() {
    caller=${LD_LIBRARY_PATH:-}
    case $caller in
    "$pack/lib") caller='' ;;
    "$pack/lib":*) caller=${caller#"$pack/lib:"} ;;
    esac
    given=''
    rest=$caller:
    while [ -n "$rest" ]; do
        folder=${rest%%:*}
        rest=${rest#*:}
        if [ -n "$folder" ]; then add given "$folder"; fi
    done
}

# Usual places of a toolkit; globs that match nothing stay as they are and do not exist.
read_usual() {
    usual=''
    if [ -n "${CUDA_HOME:-}" ]; then add usual "$CUDA_HOME/lib64"; fi
    add usual /usr/local/cuda/lib64 /usr/local/cuda-*/lib64 /usr/local/cuda/targets/*-linux/lib
}

# The nvidia packages of python3, which bring the libraries for PyTorch (nvidia/cu13/lib, nvidia/nccl/lib).
read_python() {
    python=''
    command -v "${PYTHON:-python3}" >/dev/null 2>&1 || return 0
    rest=$("${PYTHON:-python3}" -c 'import importlib.util as u; s = u.find_spec("nvidia"); print(*(s.submodule_search_locations if s else []), sep="\n")' 2>/dev/null)$newline
    while [ -n "$rest" ]; do
        line=${rest%%"$newline"*}
        rest=${rest#*"$newline"}
        if [ -n "$line" ]; then add python "$line"/*/lib; fi
    done
}

take_if_complete() {
    has_all "$1" && ! is_foreign_system "$1" && whole=$1
}
first_with() {
    [ -e "$2/$1" ] || return 1
    case $newline$own in
    *"$newline$2$newline"*) ;;
    *) if is_foreign_system "$2"; then return 1; fi ;;
    esac
    place=$2
}

# Sets `found` (NAME PATH lines), `missing` (names) and `folders` (those LD_LIBRARY_PATH must gain, in the order they were
# looked through, so that the loader takes the very files listed). What the caller's LD_LIBRARY_PATH holds comes first,
# because the loader will take it first; then, rather, one folder that has everything, so that versions fit together.
look() {
    own=$given$system
    whole=''
    # shellcheck disable=SC2034 # lines reads places by its name
    if ! lines given has_any && lines usual take_if_complete; then
        places=$whole$newline
    else
        places=$given$usual$python$system
    fi
    found='' missing='' folders='' used=''
    for library in $libraries; do
        if lines places first_with "$library"; then
            found="$found$library $place/$library$newline"
            used="$used$place$newline"
        else
            missing="$missing${missing:+ }$library"
        fi
    done
    lines places keep_used
}
keep_used() {
    case $newline$own$folders in *"$newline$1$newline"*) return 1 ;; esac
    case $newline$used in *"$newline$1$newline"*) folders=$folders$1$newline ;; esac
    return 1
}

find_libraries() {
    read_given
    read_usual
    system='' python=''
    add system /lib/*-linux-gnu /usr/lib/*-linux-gnu /lib64 /usr/lib64 /lib /usr/lib
    look
    if [ -n "$missing" ]; then
        read_python
        if [ -n "$python" ]; then look; fi
    fi
}

say_missing() {
    printf 'launch: no %s on this machine; looked in:\n' "$1" >&2
    lines places show_place || :
    if [ -z "$python" ]; then printf '  (%s has no nvidia packages)\n' "${PYTHON:-python3}" >&2; fi
    printf 'launch: set CUDA_HOME to the toolkit, or LD_LIBRARY_PATH to the folder that has it\n' >&2
}
show_place() {
    printf '  %s\n' "$1" >&2
    return 1
}

if [ "$device" = cuda ]; then
    find_libraries
    if [ "${1:-}" = --libraries ]; then
        printf '%s' "$found"
        [ -z "$missing" ] || { say_missing "$missing"; exit 1; }
        exit 0
    fi
elif [ "${1:-}" = --libraries ]; then
    echo "this pack is for the CPU and needs no CUDA library"
    exit 0
fi

case ${1:-} in
'' | -*) fail "usage: launch COMMAND [ARGUMENTS...], or launch --libraries" 2 ;;
esac

if [ "$device" = cuda ]; then
    # The programs in bin/mpi talk through MPI alone.
    case $1 in
    mpirun | mpi/* | "$pack/bin/mpi/"*) [ "$missing" = libnccl.so.2 ] && missing='' ;;
    esac
    if [ -n "$missing" ]; then
        say_missing "$missing"
        exit 1
    fi
    path=$pack/lib
    append() {
        path=$path:$1
        return 1
    }
    lines folders append || :
    LD_LIBRARY_PATH=$path${caller:+:$caller}
    export LD_LIBRARY_PATH
fi

# ----------------------------------------------------------------------------------------------------------------------
# OpenMPI. What the caller has set stays.

# default NAME VALUE
default() {
    eval ": \"\${$1:=\$2}\""
    # shellcheck disable=SC2163 # the variable named by $1
    export "$1"
}

# PMIx ends in a fault where neither HOME nor the user's entry in passwd says where home is.
default HOME "${TMPDIR:-/tmp}"
if [ "$device" = cuda ]; then
    # The prefixes compiled into OpenMPI and PMIx are those of the machine the pack was made on.
    OPAL_PREFIX=$pack/openmpi
    OPAL_BINDIR=$pack/openmpi/bin
    OPAL_LIBDIR=$pack/lib
    OPAL_PKGLIBDIR=$pack/openmpi/components
    OPAL_DATADIR=$pack/openmpi/share
    OPAL_PKGDATADIR=$pack/openmpi/share/openmpi
    OPAL_SYSCONFDIR=$pack/openmpi/etc
    PMIX_PREFIX=$pack/openmpi
    PMIX_LIBDIR=$pack/lib
    PMIX_PKGLIBDIR=$pack/openmpi/pmix
    PMIX_DATADIR=$pack/openmpi/share
    PMIX_PKGDATADIR=$pack/openmpi/share/pmix
    PMIX_SYSCONFDIR=$pack/openmpi/etc
    export OPAL_PREFIX OPAL_BINDIR OPAL_LIBDIR OPAL_PKGLIBDIR OPAL_DATADIR OPAL_PKGDATADIR OPAL_SYSCONFDIR
    export PMIX_PREFIX PMIX_LIBDIR PMIX_PKGLIBDIR PMIX_DATADIR PMIX_PKGDATADIR PMIX_SYSCONFDIR
    # Plugins of the machine's own hwloc are of another version, and one looks for GPUs.
    HWLOC_PLUGINS_PATH=$pack/openmpi/etc
    export HWLOC_PLUGINS_PATH
    PATH=$pack/openmpi/bin${PATH:+:$PATH}
    export PATH
    # All ranks are on this machine; there is no ssh to look for, and containers often forbid reading another process's memory.
    # A container made for another OpenMPI may have set these to components that are not here.
    OMPI_MCA_plm=isolated OMPI_MCA_btl=self,vader,tcp OMPI_MCA_pml=ob1 OMPI_MCA_btl_vader_single_copy_mechanism=none
    export OMPI_MCA_plm OMPI_MCA_btl OMPI_MCA_pml OMPI_MCA_btl_vader_single_copy_mechanism
fi
# More ranks than cores, each free to use all its threads; and containers where everyone is root.
default OMPI_MCA_rmaps_base_oversubscribe 1
default OMPI_MCA_hwloc_base_binding_policy none
default OMPI_ALLOW_RUN_AS_ROOT 1
default OMPI_ALLOW_RUN_AS_ROOT_CONFIRM 1
# A program started without mpirun is a rank alone: it must not start a daemon to be its mpirun.
default OMPI_MCA_ess_singleton_isolated 1

command=$1
shift
case $command in
*/../* | ../*) ;;
*) if [ -f "$pack/bin/$command" ] && [ -x "$pack/bin/$command" ]; then command=$pack/bin/$command; fi ;;
esac
command -v "$command" >/dev/null 2>&1 || fail "no program $command in $pack/bin or on the path" 127
exec "$command" "$@"
