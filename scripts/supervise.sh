#!/usr/bin/env bash
# Keeps a training run going: starts it with --resume auto and, when it fails, starts it again from its newest checkpoint, with fewer ranks
# while a host or a GPU is gone.
#
#   scripts/supervise.sh [options] -- ./train_gpt OPTIONS...
#
#   --ranks N          ranks to run with (default: as many as are possible at the start; 1 where that cannot be known)
#   --min-ranks M      never fewer than these (default: N). Below it nothing is started; each look, a pause apart, takes one of the restarts
#   --restarts R       how often a failed run is started again (default 10)
#   --pause SECONDS    before each restart (default 10): a host that died takes time to be noticed, or to come back
#   --hostfile FILE    mpirun's; the hosts in it that do not answer over ssh are left out. slots=K is how many ranks a host takes (default 1)
#   --probe COMMAND    prints how many ranks are possible now; a failure, other words or more than a minute count as 0. Without it that is: the
#                      slots of the hosts that answer; without --hostfile the GPUs of this machine, for a GPU build; else N
#   --log FILE         a line for each start, end and decision (default: supervise.log in the trainer's --out, else in this folder)
#
# Ends with 0 when the trainer does. With 2, at once, when the trainer refuses its options (status 2) with all N ranks; with fewer ranks that means the
# batch does not divide over them, and the next lower number is tried. With the run's last status when the restarts are used up, or after two
# failures in a row before the first step (seen only where --out is among the trainer's options). SIGTERM, SIGINT and SIGHUP end the run and
# this script with 128 + the signal's number; SIGUSR1 is handed on to the ranks, which save and end.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
usage_error() {
    printf 'error: %s; see scripts/supervise.sh --help\n' "$*" >&2
    exit 2
}

# ----------------------------------------------------------------------------------------------------------------------
# Arguments
all_ranks=''
min_ranks=''
most_restarts=10
pause=10
hostfile=''
probe=''
log=''

# number NAME VALUE LEAST
number() {
    [[ $2 =~ ^(0|[1-9][0-9]{0,5})$ && $2 -ge $3 ]] || usage_error "$1 '$2' is not a whole number from $3 to 999999"
}

while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
    -h | --help)
        usage
        exit 0
        ;;
    --ranks | --min-ranks | --restarts | --pause | --hostfile | --probe | --log)
        { [ $# -ge 2 ] && [ "$2" != -- ] && [ -n "$2" ]; } || usage_error "$1 needs a value"
        case $1 in
        --ranks) number "$1" "$2" 1 && all_ranks=$2 ;;
        --min-ranks) number "$1" "$2" 1 && min_ranks=$2 ;;
        --restarts) number "$1" "$2" 0 && most_restarts=$2 ;;
        --pause) number "$1" "$2" 0 && pause=$2 ;;
        --hostfile) hostfile=$2 ;;
        --probe) probe=$2 ;;
        --log) log=$2 ;;
        esac
        shift
        ;;
    *) usage_error "unknown argument '$1' (the trainer and its options come after --)" ;;
    esac
    shift
done
[ $# -ge 2 ] || usage_error "nothing to run; end the line with -- ./train_gpt and its options"
shift
trainer=("$@")

out=
previous=
for word in "${trainer[@]}"; do
    case $word in
    --resume | --resume=*) usage_error "--resume among the trainer's options: this script itself adds --resume auto, since a restart must go on from the newest checkpoint; leave it out" ;;
    --out=*) out=${word#--out=} ;;
    esac
    [ "$previous" != --out ] || out=$word
    previous=$word
done
if [ -n "$all_ranks" ] && [ -n "$min_ranks" ] && [ "$min_ranks" -gt "$all_ranks" ]; then usage_error "--min-ranks $min_ranks is more than --ranks $all_ranks"; fi
[ -z "$hostfile" ] || { [ -f "$hostfile" ] && [ -r "$hostfile" ]; } || usage_error "--hostfile $hostfile: no such file, or it cannot be read"
has_program "${trainer[0]}" || die "no program ${trainer[0]}; run make train_gpt, or name another after --"
has_program mpirun || die "no mpirun; bash scripts/quickstart.sh installs what is missing"
read -ra flags <<<"$(mpirun_flags)"

if [ -z "$log" ] && [ -n "$out" ]; then
    mkdir -p -- "$out" || die "--out $out: the folder cannot be made; give one that can be written"
fi
log=${log:-${out:+$out/}supervise.log}
: >>"$log" || die "--log $log: cannot be written; name another file"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# note WORDS...: a line of the log, also on stderr. A full disk must not end the run.
note() {
    local line
    line="$(date -u +%FT%TZ) ${*//[[:cntrl:]]/ }"
    printf '%s\n' "$line" >&2
    printf '%s\n' "$line" 2>/dev/null >>"$log" || true
}

# ----------------------------------------------------------------------------------------------------------------------
# Processes and signals. Everything that takes time runs in the background, as bash holds a signal back until a command in the foreground has
# ended; and in a process group of its own, so that Ctrl-C reaches mpirun only through here, and once: at a second signal to end mpirun leaves its ranks behind.
asked=      # the signal that this script was sent
handed=     # it was handed on
receiver=   # whom it is handed to: mpirun itself, or a whole group (negative)

hand_on() {
    local name=$asked
    [ -n "$receiver" ] || return 0
    handed=yes
    [ "$name" != HUP ] || name=TERM  # mpirun takes its ranks down at TERM and INT
    kill -s "$name" -- "$receiver" 2>/dev/null || true
}
on_signal() {
    case $asked in TERM | INT | HUP) return 0 ;; esac
    asked=$1
    hand_on
}
for name in TERM INT HUP USR1; do
    # shellcheck disable=SC2064  # the name of now
    trap "on_signal $name" "$name"
done

# run_child group|process COMMAND...: runs it to its end and sets `status`
run_child() {
    local whom=$1 child
    shift
    set -m
    "$@" </dev/null &
    child=$!
    set +m
    if [ "$whom" = group ]; then receiver=-$child; else receiver=$child; fi
    [ -z "$asked" ] || [ -n "$handed" ] || hand_on  # it came before `receiver` was known
    # wait also ends when a signal was handled; of a process that has ended it gives the status again.
    while kill -0 "$child" 2>/dev/null; do wait "$child" 2>/dev/null || true; done
    status=0
    wait "$child" 2>/dev/null || status=$?
    receiver=
}

# finish STATUS WORDS...
finish() {
    local end=$1
    shift
    note "stop: $*"
    exit "$end"
}

finish_if_asked() {
    case $asked in
    '') ;;
    USR1) finish 0 "SIGUSR1 while no run was going: there is nothing to save" ;;
    *) finish $((128 + $(kill -l "$asked"))) "SIG$asked" ;;
    esac
}

# ----------------------------------------------------------------------------------------------------------------------
# How many ranks are possible now

is_this_host() {
    local host=${1##*@} name
    name=$(uname -n)
    case $host in localhost | 127.0.0.1 | ::1 | "$name") return 0 ;; esac
    # With and without a domain is one host; two domains are two.
    if [[ $host != *.* || $name != *.* ]] && [ "${host%%.*}" = "${name%%.*}" ]; then return 0; fi
    [[ " $(hostname -I 2>/dev/null || true) " == *" $host "* ]]
}

# Prints the slots of the hosts that answer. Writes $folder/hosts for mpirun, and the others' names to $folder/silent.
probe_hosts() {
    local lines=() hosts=() line host i sum=0
    while read -r line || [ -n "$line" ]; do
        line=${line%%#*}
        read -r host _ <<<"$line"
        [ -n "$host" ] || continue
        lines+=("$line")
        hosts+=("$host")
    done <"$hostfile"
    rm -f "$folder"/answer.*
    for i in "${!hosts[@]}"; do  # all at once: each may take its time-out
        # ssh's own time-out ends when it is connected; a host may also hang after that.
        { is_this_host "${hosts[$i]}" || timeout --foreground 30 ssh -o BatchMode=yes -o ConnectTimeout=10 "${hosts[$i]}" true </dev/null >/dev/null 2>&1; } && : >"$folder/answer.$i" &
    done
    wait
    : >"$folder/hosts"
    : >"$folder/silent"
    for i in "${!hosts[@]}"; do
        if [ ! -e "$folder/answer.$i" ]; then
            echo "${hosts[$i]}" >>"$folder/silent"
        elif [[ ${lines[$i]} =~ (^|[[:space:]])slots[[:space:]]*=[[:space:]]*([0-9]{1,6})($|[[:space:]]) ]]; then
            echo "${lines[$i]}" >>"$folder/hosts"
            sum=$((sum + 10#${BASH_REMATCH[2]}))
        else
            echo "${lines[$i]} slots=1" >>"$folder/hosts"  # mpirun's own default is the host's cores
            sum=$((sum + 1))
        fi
    done
    echo "$sum"
}

# Prints how many GPUs the trainer sees: nvidia-smi lists also those that CUDA_VISIBLE_DEVICES hides. One that has failed is missing from the list, or stands there as an error.
probe_gpus() {
    local list count entry seen=0
    list=$(nvidia-smi -L 2>/dev/null || true)
    count=$(grep -c '^GPU [0-9]' <<<"$list" || true)
    if [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then
        echo "$count"
        return
    fi
    for entry in ${CUDA_VISIBLE_DEVICES//,/ }; do  # as CUDA does: up to the first that is not there
        if [[ $entry =~ ^[0-9]{1,4}$ ]]; then
            [ "$((10#$entry))" -lt "$count" ] || break
        else
            [[ $list == *"UUID: $entry"* ]] || break
        fi
        seen=$((seen + 1))
    done
    echo "$seen"
}

# Ranks of a GPU build take one GPU each, except where their collectives go over MPI (make NCCL=mpi).
counts_gpus() {
    local built
    built=$(readlink -f -- "$(command -v "${trainer[0]}")")
    [[ $built == */build/cuda-* && $built != */build/cuda-*-mpi*/* ]] && has_program nvidia-smi
}

# Sets `possible`.
find_possible() {
    local look=()
    if [ -n "$probe" ]; then
        look=(timeout --kill-after=5 60 bash -c "$probe")
    elif [ -n "$hostfile" ]; then
        look=(probe_hosts)
    elif counts_gpus; then
        look=(probe_gpus)
    else
        possible=${all_ranks:-1}
        return
    fi
    run_child group "${look[@]}" >"$folder/possible"
    possible=$(<"$folder/possible")
    if [ "$status" -ne 0 ] || [[ ! $possible =~ ^[0-9]{1,6}$ ]]; then
        [ -n "$asked" ] || note "the look for ranks ended with status $status and printed '${possible:0:80}', no number: 0 ranks are possible"
        possible=0
    fi
    possible=$((10#$possible))
    if [ -z "$probe" ] && [ -n "$hostfile" ]; then
        while read -r host; do note "host $host does not answer: left out"; done <"$folder/silent"
    fi
}

# ----------------------------------------------------------------------------------------------------------------------
# One run

# Sets metrics_file (which file metrics.jsonl is now) and metrics_steps (steps told in it).
read_metrics() {
    metrics_file=none
    metrics_steps=0
    if [ -n "$out" ] && [ -f "$out/metrics.jsonl" ]; then
        metrics_file=$(stat -c %d:%i -- "$out/metrics.jsonl" 2>/dev/null || echo none)
        metrics_steps=$(grep -cF '"kind": "train"' -- "$out/metrics.jsonl" || true)
    fi
}

# run_ranks N: sets `status` and `steps`, the steps made ("" where there is no --out)
run_ranks() {
    local command=(mpirun "${flags[@]}") file_before steps_before began name=
    if [ -n "$hostfile" ]; then
        if [ -n "$probe" ]; then command+=(--hostfile "$hostfile"); else command+=(--hostfile "$folder/hosts"); fi
    fi
    command+=(-np "$1" "${trainer[@]}" --resume auto)
    read_metrics
    file_before=$metrics_file
    steps_before=$metrics_steps
    began=$SECONDS
    note "start: $1 of $all_ranks ranks: ${command[*]}"
    finish_if_asked  # a signal that comes now must not be lost in a process that is just being made
    run_child process "${command[@]}"
    read_metrics
    # A run that finds no checkpoint begins a new file; what stood in the old one is not its own.
    [ "$metrics_file" = "$file_before" ] || steps_before=0
    steps=
    [ -z "$out" ] || steps=$((metrics_steps - steps_before))
    [ "$status" -le 128 ] || name=$(kill -l $((status - 128)) 2>/dev/null || true)
    note "end: status $status${name:+ (SIG$name)} after $((SECONDS - began)) s${steps:+, $steps steps}"
}

# ----------------------------------------------------------------------------------------------------------------------
# Until it is done
restarts=0
before_step=0      # failures in a row before the first step
last_status=1      # what this script ends with when it gives up
declare -A misfit  # numbers of ranks that the trainer refused

# Waits before the next start, or gives up.
next_start() {
    [ "$restarts" -lt "$most_restarts" ] || finish "$last_status" "$restarts restarts were made, as many as --restarts allows"
    restarts=$((restarts + 1))
    note "restart $restarts of $most_restarts in $pause s"
    run_child group sleep "$pause"
    finish_if_asked
}

while :; do
    find_possible
    finish_if_asked
    all_ranks=${all_ranks:-$possible}
    [ "$all_ranks" -gt 0 ] || finish 1 "no rank is possible here"
    min_ranks=${min_ranks:-$all_ranks}
    ranks=$((possible < all_ranks ? possible : all_ranks))
    if [ "$ranks" -lt "$min_ranks" ]; then
        few="$ranks ranks are possible, fewer than --min-ranks $min_ranks"
        [ "$restarts" -gt 0 ] || finish 1 "$few"
        note "not started: $few"
        next_start
        continue
    fi
    while [ "$ranks" -ge "$min_ranks" ] && [ -n "${misfit[$ranks]:-}" ]; do ranks=$((ranks - 1)); done
    [ "$ranks" -ge "$min_ranks" ] || finish 2 "no number of ranks from --min-ranks $min_ranks to the $possible that are possible fits the trainer's options"

    run_ranks "$ranks"
    case $asked in
    '') ;;
    USR1) [ "$status" -eq 0 ] || finish "$status" "the run failed after SIGUSR1 had asked it to end" ;;
    *) finish_if_asked ;;
    esac
    if [ "$status" -eq 0 ]; then finish 0 "done${asked:+, asked by SIG$asked}"; fi
    if [ "$status" -eq 2 ]; then
        [ "$ranks" -lt "$all_ranks" ] || finish 2 "the trainer refused its options; a restart does not change them"
        note "the options do not fit $ranks ranks: the next lower number is tried"
        misfit[$ranks]=yes
        continue
    fi
    last_status=$status
    if [ -n "$steps" ] && [ "$steps" -le 0 ]; then before_step=$((before_step + 1)); else before_step=0; fi
    [ "$before_step" -lt 2 ] || finish "$last_status" "failed twice before its first step: restarting does not help"
    next_start
done
