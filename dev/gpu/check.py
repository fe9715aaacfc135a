#!/usr/bin/env python3
"""Runs the stages of the GPU check (check_stages.py) one after the other, each under a time limit, and writes the record.

A stage that fails does not stop the next. report.json is rewritten after every stage, so that a run cut short still leaves what it
has; log.txt holds the output of every command. Both go to $OUT (default ./gpu-report). A table of at most 60 lines comes last.
Exit status: 0 no stage failed, 1 a stage failed, 2 usage. Standard library only; runs from the repository root.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Optional

from check_context import ROOT, Check, Skip, Stage
from check_stages import STAGES
from check_table import table

FORMAT = 1
TABLE_LINES = 60
# Seconds for everything; the rest of a lease of ten minutes a command is for what goes wrong.
LIMITS = {"full": 470.0, "quick": 175.0, "host": 230.0}


def run_stage(check: Check, stage: Stage) -> dict[str, Any]:
    began = time.monotonic()
    check.stage_end = min(check.end, began + (stage.seconds if not check.host else check.end - began))
    results: dict[str, Any] = {}
    record: dict[str, Any] = {"status": "passed", "problems": [], "results": results}
    check.log.write(f"==== {stage.name}\n")
    try:
        if check.seconds_left_in_all() < 5:
            raise Skip("no time was left")
        record["problems"] = stage.function(check, results)
    except Skip as reason:
        record["status"] = "skipped"
        record["reason"] = str(reason)
    except Exception as error:  # a fault of the stage itself must not cost the stages after it
        record["problems"] = [f"{type(error).__name__}: {error}"]
    if record["problems"]:
        record["status"] = "failed"
    record["seconds"] = round(time.monotonic() - began, 1)
    return record


def write_report(check: Check, report: dict[str, Any]) -> None:
    path = check.out / "report.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def parse(arguments: Optional[list[str]]) -> argparse.Namespace:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(prog="dev/gpu/check.sh", description="Verifies and measures llm.zero on a GPU and writes the record.")
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: one model, no peer, no sanitizer")
    parser.add_argument("--host", action="store_true", help="the same stages on this machine's CPU, with tiny sizes")
    parser.add_argument("--pack", type=Path, metavar="DIR", help="what dev/gpu/pack.sh made [build/gpu-pack, with --host build/host-pack]")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path(os.environ.get("OUT") or "gpu-report"), help="for report.json and log.txt [$OUT, else gpu-report]")
    parser.add_argument("--only", metavar="STAGES", help=f"some of: {','.join(names)}")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=f"for everything [{LIMITS['full']:g}, quick {LIMITS['quick']:g}, host {LIMITS['host']:g}]")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",") if options.only else names
    for name in options.only:
        if name not in names:
            parser.error(f"--only {name}: there is no such stage; there are {', '.join(names)}")
    options.pack = options.pack or ROOT / ("build/host-pack" if options.host else "build/gpu-pack")
    options.limit = options.limit or LIMITS["host" if options.host else "quick" if options.quick else "full"]
    if not (options.pack / "pack.json").exists():
        parser.error(f"{options.pack} holds no pack.json: make the pack with dev/gpu/pack.sh{' --host' if options.host else ''} where the sources can be built, and bring it here")
    device = json.loads((options.pack / "pack.json").read_text(encoding="utf-8"))["device"]
    if (device == "cpu") != options.host:
        parser.error(f"{options.pack} is a pack for device {device}; {'leave --host out' if options.host else 'give --host, or another --pack'}")
    return options


def main(arguments: Optional[list[str]] = None) -> int:
    options = parse(arguments)
    began = time.monotonic()
    check = Check(options)
    report: dict[str, Any] = {"format": FORMAT, "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                              "mode": "host" if check.host else "gpu", "quick": check.quick, "pack": check.info, "stages": check.results}
    try:
        for stage in STAGES:
            if stage.name not in options.only:
                continue
            print(f"{stage.name} ...", flush=True)
            check.results[stage.name] = run_stage(check, stage)
            report["seconds"] = round(time.monotonic() - began, 1)
            write_report(check, report)
    finally:
        check.log.close()
        shutil.rmtree(check.work, ignore_errors=True)
    lines = table(report)
    print("\n".join(lines if len(lines) <= TABLE_LINES else [*lines[: TABLE_LINES - 2], "...", lines[-1]]))
    return 1 if any(record["status"] == "failed" for record in check.results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
