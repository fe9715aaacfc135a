#!/usr/bin/env python3
"""Trains preset tiny as the quickstart does and holds its validation loss against a bigram model's on the same split.

    python3 dev/test/tiny_beats_bigram.py [--trainer ./train_gpt] [--ranks 4] [--run FOLDER]

--run FOLDER judges a finished run (such as runs/quickstart) instead of training. Passes when the last validation loss is at least 0.1 nats a
byte below the bigram model's; prints both. Exit status 1 when it is not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev" / "data"))
import bigram  # noqa: E402

MARGIN_NATS = 0.1


def train(trainer: Path, ranks: int, data: Path, out: Path) -> None:
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks), str(trainer), "--preset", "tiny", "--zero-stage", "1",
               "--train-data", f"{data}/train_*.bin", "--val-data", f"{data}/val_*.bin", "--out", str(out)]
    print("$ " + " ".join(command), flush=True)
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def last_validation(run: Path) -> dict:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    validations = [record for record in records if record["kind"] == "val"]
    if not validations:
        raise SystemExit(f"{run}/metrics.jsonl holds no val record")
    return validations[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", type=Path, default=ROOT / "train_gpt")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--data", type=Path, default=ROOT / "data/python-stdlib", help="folder written by prepare.py with byte tokens")
    parser.add_argument("--run", type=Path, help="a finished run on that data")
    parser.add_argument("--seq-len", type=int, default=128, help="of the run: what lies beyond the last whole window is not evaluated")
    arguments = parser.parse_args()
    if arguments.run:
        result = last_validation(arguments.run)
    else:
        with tempfile.TemporaryDirectory() as out:
            train(arguments.trainer, arguments.ranks, arguments.data, Path(out) / "run")
            result = last_validation(Path(out) / "run")
    wanted, targets = bigram.bigram_of_folder(arguments.data, arguments.seq_len)
    loss = float(result["val_loss"])
    print(f"bigram model {wanted:.4f}, trained model {loss:.4f} nats a byte (over {targets} and {result['val_tokens']} validation tokens); "
          f"{wanted - loss:+.4f} better, at least {MARGIN_NATS} wanted")
    if targets != result["val_tokens"]:
        print(f"the two were not measured on the same tokens: {targets} against {result['val_tokens']}")
        return 1
    return 0 if loss <= wanted - MARGIN_NATS else 1


if __name__ == "__main__":
    sys.exit(main())
