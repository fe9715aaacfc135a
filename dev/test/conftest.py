"""Fixtures of the tests that start the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import train_testing


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of this repository's own sources, bytes as tokens."""
    folder = tmp_path_factory.mktemp("data")
    train_testing.prepare(str(train_testing.ROOT / "llmc"), str(train_testing.ROOT / "train_gpt.cu"), "--out", str(folder))
    return folder


@pytest.fixture
def train(data: Path, tmp_path: Path):
    """train(ranks, *options): one run in a folder of its own. ranks 0 = without mpirun."""
    count = 0

    def start(ranks: int, *options: str, **how: Any) -> train_testing.Run:
        nonlocal count
        count += 1
        return train_testing.start(data, tmp_path / f"train{count}", ranks, *options, **how)

    return start


@pytest.fixture(scope="session")
def reused(data: Path, tmp_path_factory: pytest.TempPathFactory):
    """reused(ranks, *options): a run that all tests share which ask for the same. Starting a run takes longer than its steps."""
    runs: dict[tuple, train_testing.Run] = {}

    def start(ranks: int, *options: str) -> train_testing.Run:
        if (ranks, options) not in runs:
            runs[ranks, options] = train_testing.start(data, tmp_path_factory.mktemp("reused"), ranks, *options)
        return runs[ranks, options]

    return start
