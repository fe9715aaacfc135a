#!/usr/bin/env bash
# A model of 4 billion parameters on cards of 80 GB: plain data parallelism (ZeRO stage 0) runs out of memory, on 1 rank and on 4;
# stages 1, 2 and 3 on 4 ranks fit. Every run is compared with what is expected of it; the table at the end says so, and so does
# the exit status: 0 only if all was as expected.
#
#   bash scripts/scale_4b.sh                    the 4B model, then (on a CPU) its twin
#   bash scripts/scale_4b.sh --quick            only the twin: the 4B model 32 times narrower, on a card as much smaller
#   bash scripts/scale_4b.sh --twin-memory 120MB    a card of another size for the twin
#
# With 4 GPUs of 80 GB or more the 4B model trains a few steps. On a CPU nobody has the memory: its runs allocate everything at
# full size on a card of 80 GB that hostcuda plays (HOSTCUDA_MEMORY), which takes no memory as long as nothing is written, and the
# twin trains: under a minute on two cores, in less than a GB. LLMZERO_TRAINER names another binary than ./train_gpt.
set -euo pipefail
export LC_ALL=C
trainer=${LLMZERO_TRAINER:+$(realpath -ms "$LLMZERO_TRAINER")}
trainer=${trainer:-./train_gpt}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

full_model=(--preset 4B --seq-len 2048 --micro-batch 4 --recompute none)
card=80000000000
# Width and tokens are divided by 32, so that weights and activations shrink alike, by 1024; the layers stay. The bytes of the
# default data need no larger vocabulary. --bucket-mb 0: a layer at a time, as the layers of the 4B model are too large to merge.
twin_model=(--preset 4B --channels 96 --num-heads 3 --num-kv-heads 1 --head-dim 32 --ffn-dim 256 --vocab-size 257
    --seq-len 64 --micro-batch 4 --recompute none --bucket-mb 0 --memory-reserve 0)
steps=4
most_seconds=120   # of any run; then it is ended and counts as not as expected

usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
usage_error() {
    printf 'error: %s; see bash scripts/scale_4b.sh --help\n' "$*" >&2
    exit 2
}

# ----------------------------------------------------------------------------------------------------------------------
# Arguments
quick=
twin_card=
while [ $# -gt 0 ]; do
    case $1 in
    --quick) quick=1 ;;
    --twin-memory)
        [ $# -ge 2 ] || usage_error "--twin-memory needs a size such as 120MB"
        [[ $2 =~ ^([1-9][0-9]{0,11})(B|kB|MB|GB)?$ ]] || usage_error "--twin-memory $2 is not a size; write for example 120MB"
        case ${BASH_REMATCH[2]} in kB) unit=1000 ;; MB) unit=1000000 ;; GB) unit=1000000000 ;; *) unit=1 ;; esac
        twin_card=$((BASH_REMATCH[1] * unit))
        shift
        ;;
    -h | --help)
        usage
        exit 0
        ;;
    *) usage_error "unknown argument '$1'" ;;
    esac
    shift
done

{ [ -f "$trainer" ] && [ -x "$trainer" ]; } || die "no program $trainer; run make train_gpt, or name another in LLMZERO_TRAINER"
has_program mpirun || die "no mpirun; bash scripts/quickstart.sh installs what is missing"
has_program python3 || die "no python3, which reads the plan; bash scripts/quickstart.sh installs what is missing"
compgen -G 'data/python-stdlib/train_*.bin' >/dev/null || make data
read -ra flags <<<"$(mpirun_flags)"
# After a rank that failed mpirun waits a second after each signal to the others, also when all are gone.
export OMPI_MCA_odls_base_sigkill_timeout=0

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# mpirun takes its ranks down when it is asked to end; this script must not go before.
child=
end_run() {
    if [ -n "$child" ]; then
        kill "$child" || true
        wait "$child" || true
    fi
    exit "$1"
}
trap 'end_run 130' INT
trap 'end_run 143' TERM
log=$folder/output

# ----------------------------------------------------------------------------------------------------------------------
# What there is to run on
gpus=0
gpu_bytes=0
if [[ $(ldd "$trainer" 2>/dev/null) == *libcudart* ]]; then
    while read -r mib; do
        gpus=$((gpus + 1))
        if [ "$gpu_bytes" -eq 0 ] || [ $((mib << 20)) -lt "$gpu_bytes" ]; then gpu_bytes=$((mib << 20)); fi
    done < <(nvidia-smi ${CUDA_VISIBLE_DEVICES:+-i "$CUDA_VISIBLE_DEVICES"} --query-gpu=memory.total --format=csv,noheader,nounits)
    [ "$gpus" -gt 0 ] || die "$trainer is a GPU build and nvidia-smi shows no GPU; build with make DEVICE=cpu train_gpt"
fi

# ----------------------------------------------------------------------------------------------------------------------
# One run, and its row of the table

gb() { awk -v bytes="$1" 'BEGIN { printf bytes < 1e9 ? "%.4f" : "%.2f", bytes / 1e9 }'; }
percent() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.1f %%", 100 * a / b }'; }
ranks_text() { if [ "$1" -eq 1 ]; then echo "1 rank"; else echo "$1 ranks"; fi; }

# planned_bytes RANKS OPTIONS...: bytes of a rank by --plan, of stages 0 to 3
planned_bytes() {
    local ranks=$1
    shift
    "$trainer" "$@" --ranks "$ranks" --plan --plan-json |
        python3 -c 'import json, sys; print(*(stage["total_bytes"] for stage in json.load(sys.stdin)["stages"]))'
}

rows=()
faults=0
skipped=0
table_line() { printf '%-20s  %5s  %5s  %10s  %-13s  %-40s  %s' "$@"; }
row() { rows+=("$(table_line "$@")"); }

# happened STATUS SECONDS: what a run did, from exit status and words together: words alone could be a warning, a status alone any error.
happened() {
    if [ "$2" -ge $most_seconds ]; then
        echo "no end after $most_seconds s"
    elif [ "$1" -eq 0 ] && grep -q "^done: $steps steps" "$log"; then
        echo trained
    elif [ "$1" -eq 0 ] && grep -q '^allocated .* of device memory' "$log"; then
        echo allocated
    elif [ "$1" -eq 1 ] && grep -q '^error: .*out of device memory' "$log"; then
        if grep -q '^  allocated ' "$log" && grep -q '^  --recompute ' "$log"; then echo "out of memory"; else echo "out of memory, no table or advice"; fi
    elif [ "$1" -eq 1 ] && grep -q '^error: .*this run does not fit' "$log"; then
        echo refused
    else
        echo "exit status $1"
    fi
}

# Numbers that belong to it.
details_of() {
    case $1 in
    trained) sed -n 's/^step .* loss \([0-9.]*\) .* tok\/s .*/\1/p' "$log" | sed -n '1p; $p' | paste -sd ' ' | sed "s/\(.*\) \(.*\)/ ($steps steps, loss \1 to \2)/" ;;
    allocated) sed -n 's/^allocated \([0-9.]* [kMG]*B\) of device memory.*/ (\1 a rank)/p' "$log" ;;
    "out of memory") sed -n 's/.* has taken \([0-9.]* [kMG]*B\) already.*/ (\1 taken)/p; s/.*, but \([0-9.]* [kMG]*B\) of the .* are taken$/ (\1 taken)/p' "$log" | sed -n 1p ;;
    esac
}

# try MODEL STAGE RANKS PLANNED_BYTES EXPECTED OPTIONS...: runs the trainer, shows those of its words that matter, and adds a row. EXPECTED is
# one of happened()'s; refused means by the plan, before anything was allocated.
try() {
    local model=$1 stage=$2 ranks=$3 planned=$4 expected=$5
    shift 5
    local command=(mpirun "${flags[@]}" -np "$ranks" "$trainer" "$@" --zero-stage "$stage")
    say "$model, stage $stage on $(ranks_text "$ranks"): expected is '$expected'"
    printf '%s%s\n' "${HOSTCUDA_MEMORY:+HOSTCUDA_MEMORY=$HOSTCUDA_MEMORY }" "${command[*]}"
    local status=0 start=$SECONDS what verdict=yes
    timeout --kill-after=20 "$most_seconds" "${command[@]}" --out "$folder/run" </dev/null >"$log" 2>&1 &
    child=$!
    wait "$child" || status=$?
    child=
    what=$(happened "$status" $((SECONDS - start)))
    if [ "$what" != "$expected" ]; then
        verdict=NO
        faults=$((faults + 1))
        cat "$log"
        printf "== NOT AS EXPECTED: '%s', where '%s' was expected\n" "$what" "$expected"
    elif [ "$status" -ne 0 ]; then
        sed -n '/^error: /,/^--------/{/^--------/d; /^$/d; p}' "$log"   # what follows is mpirun's, on ranks that have ended
        echo "exit status $status"
    else
        sed -n '/^device memory of a rank/,/^  together/p; /^step .* tok\/s /p; /^allocated /p; /^done: /p' "$log"
    fi
    row "$model" "$stage" "$ranks" "$(gb "$planned")" "$expected" "$what$(details_of "$what")" "$verdict"
}

# skip MODEL STAGE RANKS PLANNED_BYTES EXPECTED WHY
skip() {
    row "$1" "$2" "$3" "$(gb "$4")" "$5" "not run: $6" "-"
    skipped=$((skipped + 1))
}

# ----------------------------------------------------------------------------------------------------------------------
# The 4B model
full() {
    local planned_1 planned_4 planned_block stage
    say "the plan of 4B on 4 ranks, each with a card of $(gb $card) GB"
    "$trainer" "${full_model[@]}" --device-memory $card --ranks 4 --plan
    planned_1=$(planned_bytes 1 "${full_model[@]}" --device-memory $card) || die "the plan on 1 rank cannot be read"
    planned_4=$(planned_bytes 4 "${full_model[@]}" --device-memory $card) || die "the plan on 4 ranks cannot be read"
    planned_block=$(planned_bytes 1 "${full_model[@]}" --recompute block --device-memory $card) || die "the plan with --recompute block cannot be read"
    read -ra planned_1 <<<"$planned_1"
    read -ra planned_4 <<<"$planned_4"
    read -ra planned_block <<<"$planned_block"

    local model=("${full_model[@]}") fits=trained one_why="" four_why=""
    if [ "$gpus" -gt 0 ]; then
        model+=(--device-memory "$card" --steps "$steps" --val-every 0 --val-batches 1 --sample-every 0 --no-save)
        if [ "$gpu_bytes" -lt $card ]; then
            one_why="a GPU has $(gb "$gpu_bytes") GB"
            four_why=$one_why
        elif [ "$gpus" -lt 4 ]; then
            four_why="4 GPUs, here $gpus"
        fi
        say "GPUs here: $gpus, the smallest with $(gb "$gpu_bytes") GB"
        [ -z "$four_why" ] || echo "4 of $(gb $card) GB or more are needed for all of it; what cannot be run is 'not run' in the table"
    else
        # The card itself says no, so --device-memory is left out. Nothing is computed, whatever happens.
        say "no GPU build: hostcuda plays a card of $(gb $card) GB for every rank, and the runs allocate only"
        export HOSTCUDA_MEMORY=$card
        model+=(--allocate-only)
        fits=allocated
    fi

    # attempt NAME STAGE RANKS PLANNED_BYTES EXPECTED OPTIONS...: try(), where the machine can
    attempt() {
        local why=$one_why
        [ "$3" -eq 1 ] || why=$four_why
        if [ -n "$why" ]; then skip "${@:1:5}" "$why"; else try "${@:1:5}" "${model[@]}" "${@:6}"; fi
    }
    attempt 4B 0 1 "${planned_1[0]}" refused
    attempt 4B 0 1 "${planned_1[0]}" "out of memory" --ignore-plan
    attempt 4B 0 4 "${planned_4[0]}" refused
    attempt 4B 0 4 "${planned_4[0]}" "out of memory" --ignore-plan
    for stage in 1 2 3; do attempt 4B $stage 4 "${planned_4[$stage]}" $fits; done
    # A way out without more cards, of those that the runs above name.
    attempt "4B --recompute block" 0 1 "${planned_block[0]}" $fits --recompute block
    unset HOSTCUDA_MEMORY
}

# ----------------------------------------------------------------------------------------------------------------------
# The twin
twin() {
    local planned stage full_stage_0 largest=0
    say "the twin: the 4B model 32 times narrower, trained on text by 4 ranks"
    # The card is smaller as stage 0 is: it lacks the same share.
    full_stage_0=$(planned_bytes 4 "${full_model[@]}") || die "the plan of 4B cannot be read"
    planned=$(planned_bytes 4 "${twin_model[@]}") || die "the plan of the twin cannot be read"
    read -ra planned <<<"$planned"
    [ -n "$twin_card" ] || twin_card=$(awk -v card=$card -v full="${full_stage_0%% *}" -v twin="${planned[0]}" 'BEGIN { printf "%.0f", card / full * twin }')
    for stage in 1 2 3; do if [ "${planned[$stage]}" -gt "$largest" ]; then largest=${planned[$stage]}; fi; done
    echo "a rank's card has $(gb "$twin_card") GB; stage 0 needs $(gb "${planned[0]}") GB, $(percent "${planned[0]}" "$twin_card") of it," \
        "the others at most $(gb "$largest") GB, $(percent "$largest" "$twin_card") of it"
    "$trainer" "${twin_model[@]}" --device-memory "$twin_card" --ranks 4 --plan | sed -n '1,/^  fits/p'

    local model=("${twin_model[@]}" --device-memory "$twin_card" --steps "$steps" --val-every 0 --val-batches 1 --sample-every 0 --no-save)
    if [ "$gpus" -eq 0 ]; then
        export HOSTCUDA_MEMORY=$twin_card
    elif [ "$gpus" -lt 4 ]; then
        die "the twin needs 4 GPUs and $gpus is here; a build with make DEVICE=cpu train_gpt needs none"
    fi
    try twin 0 4 "${planned[0]}" refused "${model[@]}"
    try twin 0 4 "${planned[0]}" "out of memory" "${model[@]}" --ignore-plan
    for stage in 1 2 3; do try twin $stage 4 "${planned[$stage]}" trained "${model[@]}"; done
}

[ -n "$quick" ] || full
if [ -n "$quick" ] || [ "$gpus" -eq 0 ]; then twin; fi

say "summary"
table_line model stage ranks "planned GB" expected "what happened" "as expected"
echo
printf '%s\n' "${rows[@]}"
if [ "$faults" -gt 0 ]; then
    echo "not as expected: $faults of ${#rows[@]} runs"
    exit 1
fi
if [ "$skipped" -gt 0 ]; then echo "not run: $skipped of ${#rows[@]} runs; the others as expected"; else echo "all as expected"; fi
