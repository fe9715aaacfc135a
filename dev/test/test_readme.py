"""Runs every command of README.md and doc/*.md, in order, in a copy of the tree made of links.

A block marked ```bash runs unless an HTML comment `<!-- not run in tests: reason -->` stands right before it. Commands run as written; only two
programs are replaced by shims, so that the whole takes a minute: ./train_gpt runs at most three steps on short evaluations, and mpirun is told what
`mpirun_flags` in scripts/lib.sh says (as root, or with few cores, OpenMPI would refuse).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "doc").glob("*.md"))]
TRAINER = ROOT / "train_gpt"

pytestmark = pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt is not built; run make train_gpt first")


class Block(NamedTuple):
    document: str
    line: int
    text: str
    reason_not_run: str


def blocks(document: Path) -> list[Block]:
    found, lines = [], document.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        if lines[number].strip() == "```bash":
            end = next(i for i in range(number + 1, len(lines)) if lines[i].strip() == "```")
            before = re.match(r"<!-- not run in tests: (.+) -->$", lines[number - 1].strip())
            found.append(Block(document.name, number + 1, "\n".join(lines[number + 1:end]), before.group(1) if before else ""))
            number = end
        number += 1
    return found


ALL_BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree by links, without what runs leave behind, and with the two shims."""
    folder = tmp_path_factory.mktemp("readme")
    for entry in ROOT.iterdir():
        if entry.name not in {"train_gpt", "data", "runs", ".git", ".venv"}:
            (folder / entry.name).symlink_to(entry)
    shims = folder / "shims"
    shims.mkdir()
    real_mpirun = shutil.which("mpirun")
    (shims / "mpirun").write_text(f"""#!/usr/bin/env bash
. {ROOT}/scripts/lib.sh
read -ra flags <<<"$(mpirun_flags)"
exec {real_mpirun} "${{flags[@]}}" "$@"
""")
    (folder / "train_gpt.shim").write_text(f"""#!/usr/bin/env bash
# The last of several values wins in train_gpt; --help and --show-batch are left as they are.
case " $* " in *" --help "* | *" --show-batch "*) exec {TRAINER.resolve()} "$@" ;; esac
exec {TRAINER.resolve()} "$@" --steps 3 --warmup 1 --val-every 0 --val-batches 2 --sample-tokens 4
""")
    # `make train_gpt` would put its link where the shim is; it must still build and prepare data, so it runs and the shim comes back.
    real_make = shutil.which("make")
    (shims / "make").write_text(f"""#!/usr/bin/env bash
{real_make} "$@" || exit $?
cp --remove-destination train_gpt.shim train_gpt
""")
    for shim in (shims / "mpirun", shims / "make", folder / "train_gpt.shim"):
        shim.chmod(0o755)
    return folder


def run(block: Block, folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PATH": f"{folder}/shims:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, errors="replace", timeout=400)


@pytest.mark.parametrize("block", [block for block in ALL_BLOCKS if not block.reason_not_run], ids=lambda block: f"{block.document}:{block.line}")
def test_block(block: Block, copy: Path) -> None:
    result = run(block, copy)
    assert result.returncode == 0, f"$ {block.text}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"


def test_the_blocks_did_what_the_text_says(copy: Path) -> None:
    for path in ("runs/quickstart/metrics.jsonl", "runs/mine/metrics.jsonl", "runs/stage3/log.rank2", "data/sums/decode.bin"):
        assert (copy / path).exists(), path
    assert list((copy / "data/sums").glob("*.mask"))
    # doc/memory.md: every one of 16 micro-steps synchronised sends 16 times as much; 24 bytes are the count of targets and the norm, once a step.
    sent = [json.loads((copy / f"runs/{name}/metrics.jsonl").read_text().splitlines()[0])["comm_bytes"] - 24 for name in ("every", "deferred")]
    assert sent[0] == 16 * sent[1] > 0


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            assert "://" in target or (document.parent / target).exists(), f"{document.name} links to {target}"
    for name in re.findall(r"`((?:llmc|dev|scripts|hostcuda)/[\w./-]+)`", "".join(d.read_text(encoding="utf-8") for d in DOCUMENTS)):
        assert (ROOT / name).exists(), f"{name} is named in the documents but is not there"
