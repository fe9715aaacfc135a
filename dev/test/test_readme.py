"""Runs every command of README.md and doc/*.md, in order, in a copy of the tree made of links, and holds the outputs that are shown against the real ones.

A block marked ```bash runs unless an HTML comment `<!-- not run in tests: reason -->` stands right before it. Commands run as written; only two
programs are replaced by shims, so that the whole takes a minute: ./train_gpt runs at most three steps on short evaluations, and mpirun is told what
`mpirun_flags` in scripts/lib.sh says (as root, or with few cores, OpenMPI would refuse).

A block marked ```text is what the ```bash block directly before it prints, on either stream, or an excerpt: its lines follow one another in the output, and a line
`...` stands for any number left out. `<!-- ends with status 1 -->` before the ```bash block says that the command is refused. Blocks without a mark are not
held; none of them may show a plan.
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
    mark: str                   # bash, text or another word behind the fence
    text: str
    reason_not_run: str = ""
    status: int = 0             # of the command
    shown: list[str] | None = None  # lines of the ```text block directly after it

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(name: str, text: str) -> list[Block]:
    found, lines = [], text.splitlines()
    number = last_end = 0
    while number < len(lines):
        fence = re.match(r"\s*```(\S*)", lines[number])
        if fence:
            end = next(i for i in range(number + 1, len(lines)) if lines[i].strip() == "```")
            block = Block(name, number + 1, fence.group(1), "\n".join(lines[number + 1:end]))
            if block.mark == "text" and found and found[-1].mark == "bash" and not any(line.strip() for line in lines[last_end + 1:number]):
                found[-1] = found[-1]._replace(shown=block.text.split("\n"))
            else:
                before = lines[number - 1].strip() if number else ""
                if reason := re.match(r"<!-- not run in tests: (.+) -->$", before):
                    block = block._replace(reason_not_run=reason.group(1))
                if status := re.match(r"<!-- ends with status (\d+) -->$", before):
                    block = block._replace(status=int(status.group(1)))
                found.append(block)
            number = last_end = end
        number += 1
    return found


def difference(shown: list[str], output: str) -> str:
    """Empty where the lines of `shown` follow one another in the output but for what `...` leaves out; else what is missing."""
    lines, parts, begin = [line.rstrip() for line in output.splitlines()], [[]], 0
    for line in shown:
        parts.append([]) if line.strip() == "..." else parts[-1].append(line.rstrip())
    for part in parts:
        at = next((i for i in range(begin, len(lines) - len(part) + 1) if lines[i:i + len(part)] == part), None)
        if at is None:
            strange = [line for line in part if line not in lines[begin:]]
            return f"not in the output{f' after its line {begin}' if begin else ''}: {strange[0]}" if strange else "not in the output as one piece (a line `...` stands for lines left out):\n" + "\n".join(part)
        begin = at + len(part)
    return ""


# What a plan prints, and of it what no document can hold: what is free on this machine's disk.
OF_A_PLAN = re.compile(r"^plan (of|for) |memory of a rank, [GM]B|bytes a parameter +[\d.]|sent by each rank in a step|a step, predicted|a step on more ranks,|what makes it fit, and its price", re.MULTILINE)
OF_THE_MACHINE = re.compile(r"are free in ")


def fault_of(block: Block) -> str:
    """Why an output that is shown is not held, or cannot be."""
    if block.shown is not None:
        if block.reason_not_run:
            return f"{block.place}: shows the output of a command that is not run in tests"
        if OF_THE_MACHINE.search("\n".join(block.shown)):
            return f"{block.place}: shows how much disk is free, which is different on every machine; put `...` in place of that line"
    if block.mark == "text":
        return f"{block.place}: a ```text block must stand directly after the ```bash block that prints it"
    if block.mark != "bash" and OF_A_PLAN.search(block.text):
        return f"{block.place}: lines of a plan are not held against its output; mark the block ```text and put it directly after the ```bash block that prints it"
    return ""


ALL_BLOCKS = [block for document in DOCUMENTS for block in blocks(document.name, document.read_text(encoding="utf-8"))]
COMMANDS = [block for block in ALL_BLOCKS if block.mark == "bash" and not block.reason_not_run]


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
# The last of several values wins in train_gpt; what trains nothing is left as it is.
case " $* " in *" --help "* | *" --show-batch "* | *" --plan "*) exec {TRAINER.resolve()} "$@" ;; esac
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


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Nothing but the trainer: a plan must not depend on data that happens to lie here."""
    if "FP32" in str(TRAINER.resolve()):
        pytest.skip("the documents show plans of the BF16 build; run make train_gpt first")
    (tmp_path / "train_gpt").symlink_to(TRAINER.resolve())
    return tmp_path


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.place)
def test_block(block: Block, request: pytest.FixtureRequest) -> None:
    result = run(block, request.getfixturevalue("bare" if "--plan" in block.text else "copy"))
    assert result.returncode == block.status, f"$ {block.text}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    if block.shown is not None:
        output = result.stdout + result.stderr
        assert not difference(block.shown, output), f"{block.place}: {difference(block.shown, output)}\n$ {block.text}\n{output[-6000:]}"


def test_what_is_shown_is_held() -> None:
    assert [fault for fault in map(fault_of, ALL_BLOCKS) if fault] == []
    assert sum(block.shown is not None and "--plan" in block.text for block in COMMANDS) >= 10


@pytest.mark.parametrize("shown, is_there", [
    ("b 1\n...\nd 3", True), ("b 1\nc 2", True), ("...\ne 4", True), ("d 3\n\ne 4", True), ("a  \n...", True),
    ("b 1\nc 3", False),          # a digit
    ("b 1\nd 3", False),          # a line left out in silence
    ("c 2\n...\nb 1", False),     # another order
    ("e 4\n...\ne 4", False),     # once there, twice shown
    ("b 1\n...\n c 2", False),    # another column
])
def test_a_difference_is_seen(shown: str, is_there: bool) -> None:
    assert (difference(shown.split("\n"), "a\nb 1\nc 2 \nd 3\n\ne 4\n") == "") == is_there


@pytest.mark.parametrize("document, fault", [
    ("```bash\n./train_gpt --plan\n```\n\n```text\nplan of tiny\n```", ""),
    ("```\nloss 3\n```", ""),
    ("```bash\n./train_gpt --plan\n```\nIt prints:\n```text\nplan of tiny\n```", "directly after"),
    ("```text\nplan of tiny\n```", "directly after"),
    ("```bash\n./train_gpt --plan\n```\n```\nmemory of a rank, GB  stage 0\n```", "not held"),
    ("<!-- not run in tests: slow -->\n```bash\n./train_gpt --plan\n```\n```text\nplan of tiny\n```", "not run"),
    ("```bash\n./train_gpt --plan\n```\n```text\ndisk: 1 GB; 84 GB are free in runs\n```", "disk is free"),
])
def test_an_output_that_is_not_held_is_seen(document: str, fault: str) -> None:
    faults = "".join(map(fault_of, blocks("document", document)))
    assert fault in faults and bool(faults) == bool(fault)


def test_the_blocks_did_what_the_text_says(copy: Path) -> None:
    for path in ("runs/quickstart/metrics.jsonl", "runs/mine/metrics.jsonl", "runs/stage3/log.rank2", "data/sums/decode.bin"):
        assert (copy / path).exists(), path
    assert list((copy / "data/sums").glob("*.mask"))
    # doc/parallel.md: every one of 16 micro-steps synchronised sends 16 times as much; 32 bytes are the count of targets and the numbers of the decision, once a step.
    def sent(name: str) -> int:
        records = [json.loads(line) for line in (copy / f"runs/{name}/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        return next(record for record in records if record["kind"] == "train")["comm_bytes"] - 32
    assert sent("every") == 16 * sent("deferred") > 0


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", document.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
            headings = re.findall(r"^#+ (.+)$", (document.parent / target).read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
            # As GitHub makes them.
            assert not anchor or anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], f"{document.name} links to {target}#{anchor}"
    for name in re.findall(r"`((?:llmc|dev|scripts|hostcuda)/[\w./-]+)`", "".join(d.read_text(encoding="utf-8") for d in DOCUMENTS)):
        assert (ROOT / name).exists(), f"{name} is named in the documents but is not there"
