"""scripts/supervise.sh: when it starts the trainer again, with how many ranks, and when it gives up.

`mpirun` and the trainer are small shell scripts here: mpirun records its words and becomes the trainer, whose n-th run does what the test says. The last test has the
real mpirun. Every wait has a hard time-out.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Optional

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/supervise.sh"
BASH = shutil.which("bash")
TIMEOUT_SECONDS = 60
# All that the script may need: whatever else the machine has (nvidia-smi, ssh) is hidden.
PROGRAMS = ("bash", "cat", "cp", "date", "dirname", "grep", "id", "mkdir", "mktemp", "mv", "readlink", "rm", "sed", "sleep", "stat", "timeout", "uname")

# The words, one a line; a copy of the hostfile as it is now; then the trainer itself, in mpirun's place.
MPIRUN = """
n=1
while [ -e "$STAGE/words.$n" ]; do n=$((n + 1)); done
printf '%s\\n' "$@" >"$STAGE/words.$n"
while [ "$1" != -np ]; do
    [ "$1" != --hostfile ] || cp "$2" "$STAGE/hostfile.$n"
    shift
done
shift 2
RUN=$n exec "$@"
"""
# `steps K` adds K train lines to the metrics; `forever` runs until a signal ends it (or a minute is over).
TRAINER = """
steps() { for ((i = 0; i < $1; i++)); do echo '{"kind": "train", "step": 0}' >>"$STAGE/out/metrics.jsonl"; done; echo '{"kind": "val"}' >>"$STAGE/out/metrics.jsonl"; }
forever() { : >"$STAGE/running"; for ((i = 0; i < 600; i++)); do sleep 0.1; done; exit 99; }
if [ -e "$STAGE/run.$RUN" ]; then . "$STAGE/run.$RUN"; else . "$STAGE/run.any"; fi
"""


class Stage:
    """A folder with the two stubs, and what they wrote there."""

    def __init__(self, folder: Path, trainer: str = "train_gpt") -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        (folder / "out").mkdir()
        for program in PROGRAMS:
            (self.bin / program).symlink_to(shutil.which(program))
        self.program("mpirun", MPIRUN)
        self.file = folder / trainer
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.write_program(self.file, TRAINER)
        if trainer != "train_gpt":
            (folder / "train_gpt").symlink_to(trainer)

    @staticmethod
    def write_program(path: Path, body: str) -> None:
        path.unlink(missing_ok=True)
        path.write_text(f"#!{BASH}\n{body}\n")
        path.chmod(0o755)

    def program(self, name: str, body: str) -> None:
        self.write_program(self.bin / name, body)

    def runs(self, *bodies: str, then: str = "echo 'one run too many' >&2; exit 98") -> None:
        """What the trainer does in its first runs, and in any later one."""
        for n, body in enumerate(bodies, 1):
            (self.folder / f"run.{n}").write_text(body)
        (self.folder / "run.any").write_text(then)

    def start(self, *words: str, **environment: str) -> subprocess.Popen:
        inherited = {"PATH": str(self.bin), "HOME": "/nonexistent", "STAGE": str(self.folder)}
        return subprocess.Popen([BASH, str(SCRIPT), *words], cwd=self.folder, env={**inherited, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, start_new_session=True)

    def finish(self, process: subprocess.Popen) -> int:
        try:
            self.stdout, self.stderr = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # it takes its child down
            process.communicate(timeout=TIMEOUT_SECONDS)
            pytest.fail(f"no end after {TIMEOUT_SECONDS} s")
        return process.returncode

    def supervise(self, *words: str, options: tuple[str, ...] = ("--out", "out"), **environment: str) -> int:
        return self.finish(self.start(*words, "--pause", "0", "--", "./train_gpt", *options, **environment))

    def words(self) -> list[list[str]]:
        """mpirun's words in each run."""
        runs = []
        while (path := self.folder / f"words.{len(runs) + 1}").exists():
            runs.append(path.read_text().splitlines())
        return runs

    def ranks(self) -> list[int]:
        return [int(words[words.index("-np") + 1]) for words in self.words()]

    def log(self, path: str = "out/supervise.log") -> list[str]:
        """Its lines without their times, which all must have."""
        lines = (self.folder / path).read_text().splitlines()
        assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in lines), lines
        return [line.split(" ", 1)[1] for line in lines]

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not list(self.folder.glob(name)):
            assert time.monotonic() < deadline, f"{name} never came"
            time.sleep(0.02)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# Start, restart, end

def test_a_run_that_is_done_is_not_started_again(stage: Stage) -> None:
    stage.runs("steps 3; echo words of the trainer; exit 0")
    assert stage.supervise("--ranks", "4", options=("--steps", "7", "--out", "out")) == 0
    (words,) = stage.words()
    at = words.index("-np")
    assert words[at:] == ["-np", "4", "./train_gpt", "--steps", "7", "--out", "out", "--resume", "auto"]
    assert words[:at] == [*(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--oversubscribe", "--bind-to", "none"]  # mpirun_flags of lib.sh
    start, end, stop = stage.log()
    assert start.startswith("start: 4 of 4 ranks: mpirun ") and start.endswith(" --resume auto")
    assert re.fullmatch(r"end: status 0 after \d+ s, 3 steps", end) and stop == "stop: done"
    assert stage.stdout == "words of the trainer\n"
    assert stage.stderr == (stage.folder / "out/supervise.log").read_text()  # the same lines


def test_a_run_that_fails_is_started_again_in_the_same_way(stage: Stage) -> None:
    stage.runs("steps 3; kill -KILL $$", "steps 1; exit 1", "steps 2; exit 0")
    assert stage.supervise("--ranks", "2") == 0
    assert len(stage.words()) == 3 and len(set(map(tuple, stage.words()))) == 1
    log = stage.log()
    assert re.fullmatch(r"end: status 137 \(SIGKILL\) after \d+ s, 3 steps", log[1]) and re.fullmatch(r"end: status 1 after \d+ s, 1 steps", log[4])
    assert log[2] == "restart 1 of 10 in 0 s" and log[5] == "restart 2 of 10 in 0 s" and log[-1] == "stop: done"


@pytest.mark.parametrize("words, starts", [(("--restarts", "0"), 1), (("--restarts", "2"), 3), ((), 11)])
def test_restarts_are_used_up(stage: Stage, words: tuple[str, ...], starts: int) -> None:
    stage.runs(then="steps 1; exit 3")
    assert stage.supervise("--ranks", "2", *words) == 3  # the run's own status
    assert stage.ranks() == [2] * starts
    assert stage.log()[-1] == f"stop: {starts - 1} restarts were made, as many as --restarts allows"


def test_there_is_a_pause_before_each_restart(stage: Stage) -> None:
    stage.program("sleep", 'echo "$*" >>"$STAGE/pauses"')
    stage.runs("steps 1; exit 1", "steps 1; exit 1", "exit 0")
    for words, expected in ((("--pause", "77"), "77\n77\n"), ((), "10\n10\n")):
        (stage.folder / "pauses").unlink(missing_ok=True)
        assert stage.finish(stage.start("--ranks", "1", *words, "--", "./train_gpt", "--out", "out")) == 0
        assert (stage.folder / "pauses").read_text() == expected
        for path in stage.folder.glob("words.*"):
            path.unlink()


def test_options_that_the_trainer_refuses_are_not_tried_again(stage: Stage) -> None:
    stage.runs("exit 2")
    assert stage.supervise("--ranks", "4", "--min-ranks", "1") == 2
    assert stage.ranks() == [4] and "refused its options" in stage.log()[-1]


def test_options_refused_with_all_ranks_after_a_restart_are_not_tried_again_either(stage: Stage) -> None:
    stage.runs("steps 1; exit 1", "exit 2")
    assert stage.supervise("--ranks", "4", "--min-ranks", "1") == 2
    assert stage.ranks() == [4, 4]


# ----------------------------------------------------------------------------------------------------------------------
# Runs that make no step

def test_two_failures_before_the_first_step_end_it(stage: Stage) -> None:
    (stage.folder / "out/metrics.jsonl").write_text('{"kind": "train", "step": 0}\n' * 5)
    stage.runs(then="""echo '{"kind": "event"}' >>out/metrics.jsonl; exit 5""")
    assert stage.supervise("--ranks", "1") == 5
    assert len(stage.words()) == 2
    assert stage.log()[-1] == "stop: failed twice before its first step: restarting does not help"


def test_only_failures_in_a_row_count(stage: Stage) -> None:
    stage.runs("exit 1", "steps 1; exit 1", "exit 1", "steps 1; exit 1", "exit 1", "exit 6")
    assert stage.supervise("--ranks", "1", options=("--out=out",)) == 6
    assert len(stage.words()) == 6 and "failed twice" in stage.log()[-1]


def test_a_run_that_begins_a_new_metrics_file_made_the_steps_in_it(stage: Stage) -> None:
    """Without a checkpoint the earlier file is renamed, and the new one may be shorter."""
    stage.runs("steps 9; exit 1", "mv out/metrics.jsonl out/metrics.1.jsonl; steps 2; exit 1", "mv out/metrics.jsonl out/metrics.2.jsonl; steps 2; exit 1", "exit 0")
    assert stage.supervise("--ranks", "1") == 0
    assert [line.rsplit(" ", 2)[1] for line in stage.log() if line.startswith("end:")] == ["9", "2", "2", "0"]


def test_without_out_steps_are_not_known(stage: Stage) -> None:
    stage.runs(then="exit 5")
    assert stage.supervise("--ranks", "1", "--restarts", "3", options=()) == 5
    assert len(stage.words()) == 4
    assert all(re.fullmatch(r"end: status 5 after \d+ s", line) for line in stage.log("supervise.log") if line.startswith("end:"))


# ----------------------------------------------------------------------------------------------------------------------
# How many ranks

def possible(stage: Stage, *numbers: str) -> tuple[str, str]:
    """--probe that prints these in turn, and the last one from then on."""
    (stage.folder / "numbers").write_text("".join(number + "\n" for number in numbers))
    stage.program("probe", 'read -r now <"$STAGE/numbers"; [ "$(grep -c . "$STAGE/numbers")" = 1 ] || sed -i 1d "$STAGE/numbers"; echo "$now"')
    return "--probe", "probe"


def test_fewer_ranks_while_a_host_is_gone_and_all_when_it_is_back(stage: Stage) -> None:
    stage.runs("steps 1; exit 1", "steps 1; exit 1", "steps 1; exit 1", "exit 0")
    assert stage.supervise("--ranks", "4", "--min-ranks", "2", *possible(stage, "9", "3", "2", "9")) == 0
    assert stage.ranks() == [4, 3, 2, 4]
    assert any(line.startswith("start: 3 of 4 ranks: ") for line in stage.log())


def test_a_number_that_does_not_fit_the_batch_gives_way_to_the_next_lower(stage: Stage) -> None:
    """The tries are no restarts, and what does not fit is not tried twice."""
    stage.runs("steps 1; exit 1", "exit 2", "exit 2", "steps 1; exit 1", "steps 1; exit 1", "exit 0")
    assert stage.supervise("--ranks", "6", "--min-ranks", "2", "--restarts", "3", *possible(stage, "6", "5", "5", "5", "5", "6")) == 0
    assert stage.ranks() == [6, 5, 4, 3, 3, 6]
    assert [line for line in stage.log() if line.startswith("restart ")] == [f"restart {n} of 3 in 0 s" for n in (1, 2, 3)]


def test_no_number_fits(stage: Stage) -> None:
    stage.runs("steps 1; exit 1", "exit 2", "exit 2")
    assert stage.supervise("--ranks", "4", "--min-ranks", "2", *possible(stage, "4", "3")) == 2
    assert stage.ranks() == [4, 3, 2] and "no number of ranks from --min-ranks 2" in stage.log()[-1]


def test_never_fewer_than_min_ranks_which_is_all_by_default(stage: Stage) -> None:
    stage.runs("steps 1; exit 7")
    assert stage.supervise("--ranks", "4", "--restarts", "3", *possible(stage, "4", "3")) == 7
    assert stage.ranks() == [4]
    assert stage.log().count("not started: 3 ranks are possible, fewer than --min-ranks 4") == 3


def test_a_host_that_comes_back_in_time(stage: Stage) -> None:
    stage.runs("steps 1; exit 7", "exit 0")
    assert stage.supervise("--ranks", "4", "--restarts", "3", *possible(stage, "4", "3", "0", "4")) == 0
    assert stage.ranks() == [4, 4]


def test_the_first_start_with_too_few_is_no_start(stage: Stage) -> None:
    stage.runs()
    assert stage.supervise("--ranks", "4", "--min-ranks", "3", *possible(stage, "2")) == 1
    assert stage.ranks() == [] and stage.log() == ["stop: 2 ranks are possible, fewer than --min-ranks 3"]


def test_the_first_start_with_enough(stage: Stage) -> None:
    stage.runs("exit 2", "exit 0")
    assert stage.supervise("--ranks", "4", "--min-ranks", "2", *possible(stage, "3")) == 0
    assert stage.ranks() == [3, 2]


@pytest.mark.parametrize("probe", ["echo 4; exit 1", "echo four", "echo -4", ":", "no-such-program", "echo 4 5", "printf '3\\n4\\n'"])
def test_a_probe_that_fails_counts_as_none(stage: Stage, probe: str) -> None:
    stage.runs()
    assert stage.supervise("--ranks", "4", "--min-ranks", "1", "--probe", probe) == 1
    assert stage.ranks() == [] and stage.log()[-1] == "stop: 0 ranks are possible, fewer than --min-ranks 1"
    assert "0 ranks are possible" in stage.log()[0]


def test_without_ranks_all_that_are_possible(stage: Stage) -> None:
    stage.runs(then="exit 0")
    assert stage.supervise(*possible(stage, "5")) == 0 and stage.supervise() == 0
    assert stage.ranks() == [5, 1]


def hosts(stage: Stage, text: str) -> tuple[str, str]:
    """--hostfile, and an ssh that answers unless a file down.HOST is there."""
    stage.program("ssh", 'echo "$*" >>"$STAGE/ssh"; [ "${*: -1}" = true ] && host=${*: -2:1} && [ ! -e "$STAGE/down.$host" ]')
    (stage.folder / "hosts").write_text(text)
    return "--hostfile", "hosts"


def test_hosts_that_do_not_answer_are_left_out(stage: Stage) -> None:
    stage.runs(f": >{stage.folder}/down.b; : >{stage.folder}/down.d; steps 1; exit 1", f"rm {stage.folder}/down.*; steps 1; exit 1", "exit 0")
    text = "# our machines\na slots=2 max_slots=8\n\n  b max_slots=16 slots = 3  # old\nme@c\nd slots=1"
    assert stage.supervise("--min-ranks", "2", *hosts(stage, text)) == 0
    assert stage.ranks() == [7, 3, 7]
    handed = [(stage.folder / f"hostfile.{n}").read_text().splitlines() for n in (1, 2, 3)]
    assert [[line.split()[0] for line in lines] for lines in handed] == [["a", "b", "me@c", "d"], ["a", "me@c"], ["a", "b", "me@c", "d"]]
    assert handed[1] == ["a slots=2 max_slots=8", "me@c slots=1"]
    assert [line for line in stage.log() if line.startswith("host ")] == [f"host {host} does not answer: left out" for host in "bd"]
    asked = (stage.folder / "ssh").read_text().splitlines()
    assert sorted(asked) == sorted(f"-o BatchMode=yes -o ConnectTimeout=10 {host} true" for host in ("a", "b", "me@c", "d") * 3)


def test_this_host_is_not_asked(stage: Stage) -> None:
    stage.runs("exit 0")
    stage.program("uname", "echo here.lan")
    stage.program("hostname", 'echo "10.1.2.3 fe80::1"')
    for host in ("localhost", "here.lan", "here", "me@here", "10.1.2.3"):
        (stage.folder / f"down.{host}").touch()
    assert stage.supervise(*hosts(stage, "localhost\nhere.lan\nhere\nme@here\n10.1.2.3\nhere.wan\n10.1.2.4\n")) == 0
    assert stage.ranks() == [7]
    assert sorted(line.split()[-2] for line in (stage.folder / "ssh").read_text().splitlines()) == ["10.1.2.4", "here.wan"]


def test_a_probe_goes_before_the_hosts(stage: Stage) -> None:
    stage.runs("exit 0")
    assert stage.supervise(*hosts(stage, "a slots=2\n"), *possible(stage, "3")) == 0
    assert stage.ranks() == [3] and not (stage.folder / "ssh").exists()
    assert (stage.folder / "hostfile.1").read_text() == "a slots=2\n" and "hosts" in stage.words()[0]


GPUS = "GPU 0: NVIDIA A100 (UUID: GPU-aaaa-1)\nGPU 1: NVIDIA A100 (UUID: GPU-bbbb-2)\n  MIG 1g.5gb Device 0: (UUID: MIG-cccc)\nGPU 2: NVIDIA A100 (UUID: GPU-dddd-3)\n"


def test_a_gpu_that_is_gone(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "build/cuda-BF16/train_gpt")
    stage.program("nvidia-smi", '[ "$*" = -L ] && cat "$STAGE/gpus"; [ ! -e "$STAGE/broken" ]')
    (tmp_path / "gpus").write_text(GPUS)
    # nvidia-smi ends with an error where a GPU fell off the bus, and still lists the others.
    stage.runs(f"""sed -i '/aaaa/s/.*/Unable to determine the device handle for GPU/' {tmp_path}/gpus; : >{tmp_path}/broken; steps 1; exit 1""", "exit 0")
    assert stage.supervise("--min-ranks", "1") == 0
    assert stage.ranks() == [3, 2]


@pytest.mark.parametrize("visible, ranks", [("", 0), ("0", 1), ("2,0", 2), ("0,3,1", 1), ("GPU-bbbb,GPU-aaaa-1", 2), ("MIG-cccc", 1), ("GPU-eeee", 0)])
def test_gpus_that_the_trainer_does_not_see(tmp_path: Path, visible: str, ranks: int) -> None:
    stage = Stage(tmp_path, "build/cuda-BF16/train_gpt")
    stage.program("nvidia-smi", 'cat "$STAGE/gpus"')
    (tmp_path / "gpus").write_text(GPUS)
    stage.runs("exit 0")
    assert stage.supervise("--ranks", "8", "--min-ranks", "1", CUDA_VISIBLE_DEVICES=visible) == (0 if ranks else 1)
    assert stage.ranks() == ([ranks] if ranks else [])


@pytest.mark.parametrize("built", ["build/cpu-BF16/train_gpt", "build/cuda-BF16-mpi/train_gpt", "build/cuda-BF16/train_gpt"])
def test_where_gpus_do_not_limit_the_ranks(tmp_path: Path, built: str) -> None:
    """A CPU build, a GPU build whose ranks may share one, and a machine without nvidia-smi."""
    stage = Stage(tmp_path, built)
    if built != "build/cuda-BF16/train_gpt":
        stage.program("nvidia-smi", "echo 'GPU 0: NVIDIA A100 (UUID: GPU-1)'")
    stage.runs("exit 0")
    assert stage.supervise("--ranks", "4") == 0
    assert stage.ranks() == [4]


# ----------------------------------------------------------------------------------------------------------------------
# The log

def test_the_log_is_continued_wherever_it_is(stage: Stage) -> None:
    stage.runs(then="exit 0")
    for _ in range(2):
        assert stage.supervise("--ranks", "1", options=("--out", "new/run")) == 0  # a folder that is not there yet
        assert stage.supervise("--ranks", "1", "--log", "own.log") == 0
        assert stage.supervise("--ranks", "1", options=("--prompt", "two\nlines")) == 0
    for path in ("new/run/supervise.log", "own.log", "supervise.log"):
        assert [line.split(":")[0] for line in stage.log(path)] == ["start", "end", "stop"] * 2
    assert not (stage.folder / "out/supervise.log").exists()


def test_a_log_that_cannot_be_written_is_refused(stage: Stage) -> None:
    stage.runs()
    assert stage.supervise("--ranks", "1", "--log", "missing/own.log") == 1 and "--log missing/own.log" in stage.stderr
    (stage.folder / "plain").touch()
    assert stage.supervise("--ranks", "1", options=("--out", "plain/run")) == 1 and "--out plain/run" in stage.stderr
    assert stage.words() == []


# ----------------------------------------------------------------------------------------------------------------------
# Signals

TRAP = "trap 'echo {0} >>\"$STAGE/signals\"; exit {1}' {0}; "


@pytest.mark.parametrize("sent, handed", [("TERM", "TERM"), ("INT", "INT"), ("HUP", "TERM")])
@pytest.mark.parametrize("status", [0, 1])
def test_a_signal_to_end_is_handed_on_and_there_is_no_restart(stage: Stage, sent: str, handed: str, status: int) -> None:
    stage.runs(TRAP.format(handed, f"{status}") .replace("exit", "sleep 0.3; : >\"$STAGE/ended\"; exit") + "forever")
    process = stage.start("--ranks", "1", "--pause", "0", "--", "./train_gpt", "--out", "out")
    stage.wait_for("running")
    number = getattr(signal, f"SIG{sent}")
    process.send_signal(number)
    assert stage.finish(process) == 128 + number
    assert (stage.folder / "ended").exists()  # it waited for the run
    assert (stage.folder / "signals").read_text() == handed + "\n"  # once
    assert len(stage.words()) == 1
    assert re.fullmatch(rf"end: status {status} after \d+ s, 0 steps", stage.log()[-2]) and stage.log()[-1] == f"stop: SIG{sent}"


@pytest.mark.parametrize("status", [0, 4])
def test_the_signal_to_save_is_handed_on_and_there_is_no_restart(stage: Stage, status: int) -> None:
    stage.runs(TRAP.format("USR1", status) + "forever")
    process = stage.start("--ranks", "1", "--pause", "0", "--", "./train_gpt", "--out", "out")
    stage.wait_for("running")
    process.send_signal(signal.SIGUSR1)
    assert stage.finish(process) == status
    assert (stage.folder / "signals").read_text() == "USR1\n" and len(stage.words()) == 1
    assert stage.log()[-1] == ("stop: done, asked by SIGUSR1" if status == 0 else "stop: the run failed after SIGUSR1 had asked it to end")


def test_a_run_that_goes_on_after_signals_is_waited_for(stage: Stage) -> None:
    stage.runs("""count=0; trap 'count=$((count + 1)); : >"$STAGE/saw.$count"; [ $count -lt 4 ] || exit 0' USR1; forever""")
    process = stage.start("--ranks", "1", "--pause", "0", "--", "./train_gpt", "--out", "out")
    stage.wait_for("running")
    for count in range(1, 5):
        process.send_signal(signal.SIGUSR1)
        stage.wait_for(f"saw.{count}")
    assert stage.finish(process) == 0
    assert stage.log()[-1] == "stop: done, asked by SIGUSR1"


def test_a_run_that_was_asked_to_save_can_be_ended(stage: Stage) -> None:
    stage.runs("""trap ': >"$STAGE/saw.USR1"' USR1; """ + TRAP.format("TERM", 0) + "forever")
    process = stage.start("--ranks", "1", "--pause", "0", "--", "./train_gpt", "--out", "out")
    stage.wait_for("running")
    process.send_signal(signal.SIGUSR1)
    stage.wait_for("saw.USR1")
    process.send_signal(signal.SIGTERM)
    assert stage.finish(process) == 143
    assert (stage.folder / "signals").read_text() == "TERM\n"


def test_a_run_that_is_ending_is_sent_no_second_signal(stage: Stage) -> None:
    """mpirun would leave its ranks behind."""
    stage.runs("""for name in TERM INT USR1; do trap "echo $name >>$STAGE/signals" $name; done
: >"$STAGE/running"
until [ -e "$STAGE/go" ]; do sleep 0.1; done
sleep 0.3
exit 0""")
    process = stage.start("--ranks", "1", "--pause", "0", "--", "./train_gpt", "--out", "out")
    stage.wait_for("running")
    process.send_signal(signal.SIGTERM)
    stage.wait_for("signals")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        process.send_signal(number)
    (stage.folder / "go").touch()
    assert stage.finish(process) == 143
    assert (stage.folder / "signals").read_text() == "TERM\n"


@pytest.mark.parametrize("sent, status", [("TERM", 143), ("USR1", 0)])
def test_a_signal_just_before_a_start_prevents_it(stage: Stage, sent: str, status: int) -> None:
    """It comes with the line of the log that tells of the start."""
    stage.program("date", f"kill -{sent} $PPID; exec {shutil.which('date')} \"$@\"")
    stage.runs(then="forever")
    assert stage.supervise("--ranks", "1") == status
    assert stage.words() == []


@pytest.mark.parametrize("sent, status", [("TERM", 143), ("INT", 130), ("USR1", 0)])
def test_a_signal_in_the_pause_or_while_looking_for_ranks_ends_it(stage: Stage, sent: str, status: int) -> None:
    stage.program("sleep", f""": >"$STAGE/pausing"; exec {shutil.which('sleep')} "$@" """)
    stage.runs(f"{shutil.which('sleep')} 0; steps 1; exit 1")
    for words in (("--ranks", "1", "--pause", "600"), ("--ranks", "1", "--probe", "sleep 50; echo 1")):
        (stage.folder / "pausing").unlink(missing_ok=True)
        process = stage.start(*words, "--", "./train_gpt", "--out", "out")
        stage.wait_for("pausing")
        process.send_signal(getattr(signal, f"SIG{sent}"))
        assert stage.finish(process) == status
        assert "SIG" + sent in stage.log()[-1]
    assert len(stage.words()) == 1


# ----------------------------------------------------------------------------------------------------------------------
# The command line

@pytest.mark.parametrize("words, said", [
    ("--ranks 2", "-- ./train_gpt"),
    ("--ranks 2 --", "-- ./train_gpt"),
    ("./train_gpt", "unknown argument './train_gpt'"),
    ("--rank 2 -- ./train_gpt", "unknown argument '--rank'"),
    ("--ranks -- ./train_gpt", "--ranks needs a value"),
    ("--log", "--log needs a value"),
    ("--ranks 0 -- ./train_gpt", "--ranks '0' is not"),
    ("--ranks 2x -- ./train_gpt", "--ranks '2x' is not"),
    ("--ranks 010 -- ./train_gpt", "--ranks '010' is not"),
    ("--min-ranks 0 -- ./train_gpt", "--min-ranks '0' is not"),
    ("--restarts -1 -- ./train_gpt", "--restarts '-1' is not"),
    ("--pause 1.5 -- ./train_gpt", "--pause '1.5' is not"),
    ("--pause 99999999999999999999 -- ./train_gpt", "--pause '99999999999999999999' is not"),
    ("--ranks 2 --min-ranks 3 -- ./train_gpt", "--min-ranks 3 is more than --ranks 2"),
    ("--hostfile missing -- ./train_gpt", "--hostfile missing: no such file"),
    ("--hostfile out -- ./train_gpt", "--hostfile out: no such file"),
    ("--ranks 2 -- ./train_gpt --out out --resume auto", "--resume among the trainer's options"),
    ("--ranks 2 -- ./train_gpt --resume=step_1", "must go on from the newest checkpoint"),
])
def test_nonsense_is_refused(stage: Stage, words: str, said: str) -> None:
    stage.runs()
    assert stage.finish(stage.start(*words.split())) == 2
    assert said in stage.stderr and stage.stderr.count("\n") == 1, stage.stderr
    assert stage.words() == [] and not list(stage.folder.rglob("supervise.log"))


def test_programs_that_are_missing(stage: Stage) -> None:
    assert stage.finish(stage.start("--", "./no_trainer")) == 1 and "no program ./no_trainer" in stage.stderr
    (stage.bin / "mpirun").unlink()
    assert stage.finish(stage.start("--", "./train_gpt")) == 1 and "no mpirun" in stage.stderr


def test_help_names_every_option(stage: Stage) -> None:
    known = set(re.findall(r"--[a-z-]+", re.search(r"\n    (--ranks \|.*)\)\n", SCRIPT.read_text()).group(1)))
    assert len(known) == 7
    for word in ("--help", "-h"):
        assert stage.finish(stage.start(word)) == 0
        assert all(re.search(rf"^  {option} ", stage.stdout, re.MULTILINE) for option in known) and "set -e" not in stage.stdout


# ----------------------------------------------------------------------------------------------------------------------
# The real mpirun

@pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed")
def test_mpirun_tells_how_a_rank_ended_and_forwards_the_signal_to_save(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.runs()
    Stage.write_program(stage.file, r"""
rank=$OMPI_COMM_WORLD_RANK
saved() { : >"$STAGE/saved.$rank"; exit 0; }
trap saved USR1
if [ "$rank" = 1 ] && [ ! -e "$STAGE/killed" ]; then
    echo '{"kind": "train"}' >>"$STAGE/out/metrics.jsonl"
    : >"$STAGE/killed"
    kill -KILL $$
fi
: >"$STAGE/ready.$rank.$PPID"  # mpirun's number tells the second run from the first
for ((i = 0; i < 600; i++)); do sleep 0.1; done
exit 99""")
    process = stage.start("--ranks", "2", "--pause", "0", "--", "./train_gpt", "--out", "out", PATH=os.environ["PATH"], HOME=os.environ.get("HOME", "/"),
                          OMPI_MCA_odls_base_sigkill_timeout="0")
    stage.wait_for("killed")
    stage.wait_for("ready.1.*")
    (second,) = {path.suffix for path in tmp_path.glob("ready.1.*")}
    stage.wait_for(f"ready.0{second}")
    process.send_signal(signal.SIGUSR1)
    assert stage.finish(process) == 0, stage.stderr
    assert (tmp_path / "saved.0").exists() and (tmp_path / "saved.1").exists()
    assert "end: status 137 (SIGKILL)" in "\n".join(stage.log()) and stage.log()[-1] == "stop: done, asked by SIGUSR1"
