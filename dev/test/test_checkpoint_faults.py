"""Checkpoints when things go wrong: kills in training and in a save, damaged files, full and read-only disks, folders that are none. checkpoint_faults.py does the work, and is
the program that does all of it; here are a few of its random moments, from a seed."""

from __future__ import annotations

from pathlib import Path

import pytest

import checkpoint_faults as faults
from train_testing import needs_trainer

pytestmark = needs_trainer
SEED = 4711


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared: what needs a finished run makes one in it, once."""
    return tmp_path_factory.mktemp("faults")


@pytest.mark.parametrize("stage, mode, kills", [(1, "async", 1), (3, "stream", 3)])
def test_a_run_that_is_killed_and_continued_is_the_run_that_was_not(data, tmp_path, stage, mode, kills):
    """One rank, the whole job, mpirun alone."""
    faults.killed_in_training(data, tmp_path / "killed", stage, mode, kills=kills, seed=SEED, steps=24)


@pytest.mark.parametrize("mode", ["stream", "async"])
def test_kills_while_saving(data, tmp_path, mode):
    faults.killed_while_saving(data, tmp_path / "killed", mode, kills=2, seed=SEED, model=faults.TINY, steps=120)


@pytest.mark.parametrize("mode", ["stream", "async"])
def test_at_every_moment_of_a_save_the_newest_checkpoint_is_whole(data, tmp_path, mode):
    faults.every_moment(data, tmp_path / "moments", mode, continued=2, seed=SEED)


@pytest.mark.parametrize("mode", ["stream", "async"])
def test_an_error_while_saving_is_said_and_leaves_nothing_half(data, tmp_path, mode):
    faults.error_at_every_call(data, tmp_path / "errors", mode, numbers=2, seed=SEED)


def test_an_error_on_one_rank_while_saving(data, tmp_path):
    faults.one_call_fails_on_rank_1(data, tmp_path / "errors", "async")


def test_damaged_files_are_named_and_never_read(data, folder):
    faults.damaged_files(data, folder, flips=25, seed=SEED, only_every=9)


def test_where_no_checkpoint_is_whole_auto_does_not_begin_anew(data, folder):
    faults.all_damaged(data, folder)


def test_a_full_disk(data, folder):
    faults.full_disk(data, folder, "async")


def test_a_disk_that_is_full_in_the_middle_of_a_save(data, folder):
    faults.disk_without_inodes(data, folder, "stream")


def test_a_read_only_disk(data, folder):
    faults.read_only_disk(data, folder)


COVERING = {"missing", "empty", "foreign-json", "half-written", "newer", "edited", "file-outside", "unknown-option", "other-vocabulary", "missing-tensor", "extra-state", "wrong-shape",
            "wrong-offset", "other-weights", "a-folder-for-a-file", "a-dangling-link", "a-pipe-for-trainer-json"}


@pytest.mark.parametrize("bad", [bad for bad in faults.BAD if bad.name in COVERING], ids=lambda bad: bad.name)
def test_what_is_no_checkpoint_of_this_run_is_refused(data, folder, bad):
    faults.bad_checkpoint(data, folder, bad)


def test_an_unfinished_checkpoint_and_a_run_folder_are_refused(data, folder):
    faults.unfinished_by_name(data, folder)


def test_ranks_that_see_other_folders_are_refused(data, tmp_path):
    faults.ranks_see_other_folders(data, tmp_path / "others")
