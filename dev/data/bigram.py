#!/usr/bin/env python3
"""The validation loss of a bigram model: what a trained model must beat by a clear margin.

    python3 dev/data/bigram.py data/python-stdlib [--seq-len 256]

Counts pairs of tokens in the train shards and prints the mean cross-entropy of the val shards' tokens, in nats a token
(with the byte tokenizer: nats a byte). Witten-Bell smoothing: with n(a) pairs that start with a, d(a) of them different,

    p(b | a) = (n(a b) + d(a) p(b)) / (n(a) + d(a)),      p(b) = (n(b) + 1) / (n + V)

`--seq-len T` leaves out what the trainer does not evaluate: the part of each shard beyond its last whole window of T + 1.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
from array import array
from collections import Counter
from pathlib import Path
from typing import Optional

HEADER_BYTES = 1024
TYPES = {(20240520, 1): "H", (20240801, 7): "I"}


def read_shard(path: Path) -> array:
    """The token ids of one shard."""
    content = path.read_bytes()
    if len(content) < HEADER_BYTES:
        raise SystemExit(f"{path}: {len(content)} bytes, shorter than a shard's header of {HEADER_BYTES}")
    magic, version, tokens = struct.unpack_from("<3i", content)
    if (magic, version) not in TYPES:
        raise SystemExit(f"{path}: magic {magic} version {version} is not a token shard")
    ids = array(TYPES[magic, version])
    ids.frombytes(content[HEADER_BYTES:])
    if sys.byteorder == "big":
        ids.byteswap()
    if len(ids) != tokens:
        raise SystemExit(f"{path}: header says {tokens} tokens, file holds {len(ids)}")
    return ids


def bigram_loss(train: list[Path], val: list[Path], vocab_size: int, seq_len: Optional[int] = None) -> tuple[float, int]:
    """Mean loss in nats over the val shards' targets, and their number. Pairs never cross a shard's end."""
    pairs: Counter = Counter()
    for path in train:
        ids = read_shard(path)
        pairs.update(zip(ids, memoryview(ids)[1:]))
    if not pairs:
        raise SystemExit(f"no pair of tokens in {len(train)} train shards")
    starts: Counter = Counter()   # n(a)
    follows: Counter = Counter()  # n(b)
    different: Counter = Counter()  # d(a)
    for (a, b), number in pairs.items():
        starts[a] += number
        follows[b] += number
        different[a] += 1
    total = sum(starts.values())

    val_pairs: Counter = Counter()
    for path in val:
        ids = read_shard(path)
        targets = max(0, len(ids) - 1)
        if seq_len:
            targets = targets // seq_len * seq_len
        val_pairs.update(zip(ids[:targets], memoryview(ids)[1:targets + 1]))
    targets = sum(val_pairs.values())
    if not targets:
        raise SystemExit(f"no target in {len(val)} val shards" + (f" at --seq-len {seq_len}" if seq_len else ""))
    loss = 0.0
    for (a, b), number in val_pairs.items():
        unigram = (follows[b] + 1) / (total + vocab_size)
        seen = starts[a] + different[a]
        p = (pairs[a, b] + different[a] * unigram) / seen if seen else unigram
        loss -= number * math.log(p)
    return loss / targets, targets


def bigram_of_folder(folder: Path, seq_len: Optional[int] = None) -> tuple[float, int]:
    """bigram_loss of a folder written by prepare.py."""
    vocab_size = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["vocab_size"]
    train, val = sorted(folder.glob("train_*.bin")), sorted(folder.glob("val_*.bin"))
    if not train or not val:
        raise SystemExit(f"{folder}: no train_*.bin and val_*.bin; make them with dev/data/prepare.py")
    return bigram_loss(train, val, vocab_size, seq_len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder written by prepare.py")
    parser.add_argument("--seq-len", type=int, metavar="T", help="leave out what the trainer does not evaluate")
    arguments = parser.parse_args()
    loss, targets = bigram_of_folder(arguments.folder, arguments.seq_len)
    print(f"bigram model: {loss:.4f} nats a token over {targets} validation tokens")


if __name__ == "__main__":
    main()
