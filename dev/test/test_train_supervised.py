"""scripts/supervise.sh around the real trainer: a rank is killed in mid-run, once with as many ranks afterwards, once with fewer."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from train_testing import ROOT, SMALL, TRAINER, mpirun, needs_trainer

pytestmark = needs_trainer

STEPS = 150  # two seconds or so: time enough to find the rank and kill it
OPTIONS = ["--steps", str(STEPS), "--total-batch", "128", "--save-every", "5"]


def weights(out: Path) -> str:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    train = {record["step"]: record for record in records if record["kind"] == "train"}
    assert sorted(train) == list(range(STEPS))
    return records[-1]["weights"]


@pytest.mark.parametrize("ranks_after", [2, 1])
def test_a_run_goes_on_after_a_killed_rank(data, tmp_path, ranks_after):
    out, printed = tmp_path / "run", tmp_path / "printed"
    common = ["--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin", *SMALL, *OPTIONS]
    probe = f"if [ -e {tmp_path}/killed ]; then echo {ranks_after}; else echo 2; fi"
    command = ["bash", str(ROOT / "scripts/supervise.sh"), "--ranks", "2", "--min-ranks", "1", "--restarts", "3", "--pause", "0", "--probe", probe, "--", str(TRAINER), *common, "--out", str(out)]
    with printed.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                                   env={**os.environ, "OMPI_MCA_odls_base_sigkill_timeout": "0"})
    try:
        deadline = time.monotonic() + 60
        while "step 20/" not in printed.read_text(errors="replace") and time.monotonic() < deadline:
            time.sleep(0.01)
        pid = int(re.search(r"rank 1 .*? pid (\d+)", printed.read_text(errors="replace")).group(1))
        (tmp_path / "killed").touch()
        os.kill(pid, signal.SIGKILL)
        status = process.wait(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    log = (out / "supervise.log").read_text(encoding="utf-8")
    assert status == 0, printed.read_text(errors="replace")[-3000:] + log
    starts = re.findall(r"start: (\d) of 2 ranks", log)
    assert starts == ["2", str(ranks_after)], log
    assert "restart 1 of 3" in log and "SIGKILL" in log, log
    assert "resumed  " in printed.read_text(errors="replace")
    if ranks_after == 2:  # as if nothing had happened
        status, output = mpirun(2, [str(TRAINER), *common, "--out", str(tmp_path / "whole")])
        assert status == 0, output
        assert weights(out) == weights(tmp_path / "whole")
    else:
        weights(out)
