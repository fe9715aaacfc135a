"""dev/data/prepare.py and bigram.py: formats, splits, masks, refusals."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev" / "data"))
import bigram  # noqa: E402
import prepare  # noqa: E402


def run(*arguments: object, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess:
    """The script as a user runs it."""
    result = subprocess.run([sys.executable, str(ROOT / "dev/data/prepare.py"), *map(str, arguments)], cwd=cwd,
                            capture_output=True, text=True, timeout=120)
    assert not check or result.returncode == 0, result.stderr
    return result


def refused(*arguments: object, says: list[str], code: int = 1) -> None:
    """The run ends with `code` and one error line that holds every string of `says`, without a traceback."""
    result = run(*arguments, check=False)
    assert result.returncode == code, (result.returncode, result.stderr)
    assert "Traceback" not in result.stderr
    for part in says:
        assert part in result.stderr, result.stderr


def tokens(path: Path) -> list[int]:
    return list(bigram.read_shard(path))


def documents_of(ids: list[int], end_of_text: int = 256) -> list[bytes]:
    """The documents of a byte-token stream, which must begin with end-of-text."""
    assert ids[0] == end_of_text
    out: list[list[int]] = []
    for token in ids:
        if token == end_of_text:
            out.append([])
        else:
            out[-1].append(token)
    return [bytes(document) for document in out]


def folder_with(tmp_path: Path, number: int) -> tuple[Path, list[bytes]]:
    folder = tmp_path / "in"
    folder.mkdir()
    contents = [f"document {i}: {'x' * (7 * i % 50)}\u00e9\n".encode() for i in range(number)]
    for i, content in enumerate(contents):
        (folder / f"{i:03d}.txt").write_bytes(content)
    return folder, contents


def test_every_document_once_with_one_end_of_text(tmp_path: Path) -> None:
    folder, contents = folder_with(tmp_path, 60)
    out = tmp_path / "out"
    run(folder, "--out", out, "--val-fraction", 0.2)
    train, val = documents_of(tokens(out / "train_000.bin")), documents_of(tokens(out / "val_000.bin"))
    assert sorted(train + val) == sorted(contents)
    assert 3 <= len(val) <= 24  # 12 expected; outside this a hash is not uniform (5 sigma)
    meta = json.loads((out / "meta.json").read_text())
    assert (meta["train_documents"], meta["val_documents"]) == (len(train), len(val))
    assert meta["train_tokens"] == len(tokens(out / "train_000.bin"))
    assert (meta["tokenizer"], meta["vocab_size"], meta["end_of_text"]) == ("bytes", 257, 256)
    assert not list(out.glob("*.mask"))


def test_header_is_llm_c(tmp_path: Path) -> None:
    folder, _ = folder_with(tmp_path, 20)
    run(folder, "--out", tmp_path / "out")
    content = (tmp_path / "out/train_000.bin").read_bytes()
    header = struct.unpack("<256i", content[:1024])
    assert header[:3] == (20240520, 1, (len(content) - 1024) // 2)
    assert set(header[3:]) == {0}
    run(folder, "--out", tmp_path / "wide", "--dtype", "uint32")
    content = (tmp_path / "wide/train_000.bin").read_bytes()
    assert struct.unpack_from("<3i", content) == (20240801, 7, (len(content) - 1024) // 4)
    assert tokens(tmp_path / "wide/train_000.bin") == tokens(tmp_path / "out/train_000.bin")


def test_same_bytes_from_every_run(tmp_path: Path) -> None:
    folder, _ = folder_with(tmp_path, 30)
    for out in ("a", "b"):
        run(folder, "--out", tmp_path / out, "--val-fraction", 0.1)
    for name in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_split_follows_content_not_name(tmp_path: Path) -> None:
    """A copy of a training document never lands in validation, whatever its name."""
    folder, contents = folder_with(tmp_path, 40)
    for i, content in enumerate(contents):
        (folder / f"copy{i}.txt").write_bytes(content)
    run(folder, "--out", tmp_path / "out", "--val-fraction", 0.3)
    train, val = (documents_of(tokens(tmp_path / f"out/{split}_000.bin")) for split in ("train", "val"))
    assert not set(train) & set(val)


def test_shards_are_exact_and_join_to_the_stream(tmp_path: Path) -> None:
    folder, _ = folder_with(tmp_path, 50)
    run(folder, "--out", tmp_path / "one", "--val-fraction", 0.1)
    run(folder, "--out", tmp_path / "many", "--val-fraction", 0.1, "--shard-tokens", 97)
    shards = sorted((tmp_path / "many").glob("train_*.bin"))
    lengths = [len(tokens(path)) for path in shards]
    assert len(shards) > 5 and set(lengths[:-1]) == {97} and 0 < lengths[-1] <= 97
    assert sum((tokens(path) for path in shards), []) == tokens(tmp_path / "one/train_000.bin")


def test_one_document_gives_its_tail_to_validation(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(1000)).encode()
    (tmp_path / "book.txt").write_bytes(text)
    run(tmp_path / "book.txt", "--out", tmp_path / "out", "--val-fraction", 0.1)
    train, val = (documents_of(tokens(tmp_path / f"out/{split}_000.bin")) for split in ("train", "val"))
    assert len(train) == len(val) == 1 and train[0] + val[0] == text
    assert train[0].endswith(b"\n") and abs(len(val[0]) / len(text) - 0.1) < 0.01


def test_a_small_data_set_still_validates(tmp_path: Path) -> None:
    """With 2% of four documents no hash is low enough; one document is kept for validation all the same, and its copy."""
    folder, contents = folder_with(tmp_path, 4)
    for i, content in enumerate(contents):
        (folder / f"copy{i}.txt").write_bytes(content)
    run(folder, "--out", tmp_path / "out", "--val-fraction", 1e-9)
    train, val = (documents_of(tokens(tmp_path / f"out/{split}_000.bin")) for split in ("train", "val"))
    assert len(val) == 2 and val[0] == val[1] and sorted(train + val) == sorted(2 * contents)


def test_no_validation_when_asked_for_none(tmp_path: Path) -> None:
    folder, contents = folder_with(tmp_path, 5)
    run(folder, "--out", tmp_path / "out", "--val-fraction", 0)
    assert not list((tmp_path / "out").glob("val_*"))
    assert sorted(documents_of(tokens(tmp_path / "out/train_000.bin"))) == sorted(contents)


@pytest.mark.parametrize("shard_tokens", [10 ** 8, 13])
def test_prompts_are_masked(tmp_path: Path, shard_tokens: int) -> None:
    records = [{"prompt": f"Q{i}? ", "answer": f"answer {i}"} for i in range(9)] + [{"text": "plain text"}]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    run(tmp_path / "chat.jsonl", "--out", tmp_path / "out", "--val-fraction", 0, "--shard-tokens", shard_tokens)
    wanted: list[tuple[int, int]] = []  # (token, counts as target)
    for record in records:
        wanted.append((256, 1))
        wanted += [(byte, 0) for byte in record.get("prompt", "").encode()]
        wanted += [(byte, 1) for byte in (record.get("answer") or record["text"]).encode()]
    got: list[tuple[int, int]] = []
    for shard in sorted((tmp_path / "out").glob("train_*.bin")):
        ids, mask = tokens(shard), Path(f"{shard}.mask")
        bits = mask.read_bytes() if mask.exists() else b"\xff" * len(ids)
        assert not mask.exists() or len(bits) == (len(ids) + 7) // 8
        assert not mask.exists() or 0 in [bits[i // 8] >> i % 8 & 1 for i in range(len(ids))]
        got += [(token, bits[i // 8] >> i % 8 & 1) for i, token in enumerate(ids)]
    assert got == wanted


def test_decode_table(tmp_path: Path) -> None:
    folder, _ = folder_with(tmp_path, 3)
    run(folder, "--out", tmp_path / "out", "--val-fraction", 0)
    content = (tmp_path / "out/decode.bin").read_bytes()
    assert content[:8] == b"LLMZDEC1"
    vocab, end_of_text = struct.unpack_from("<II", content, 8)
    assert (vocab, end_of_text) == (257, 256)
    offset, table = 16, []
    for _ in range(vocab):
        (length,) = struct.unpack_from("<I", content, offset)
        table.append(content[offset + 4: offset + 4 + length])
        offset += 4 + length
    assert offset == len(content)
    assert table[:256] == [bytes([i]) for i in range(256)]


def test_default_data_set(tmp_path: Path) -> None:
    out = tmp_path / "std"
    run("--out", out, "--max-bytes", "1M")
    meta = json.loads((out / "meta.json").read_text())
    assert 500_000 < meta["bytes"] <= 1_000_000 and meta["val_documents"] >= 1
    assert b"def " in bytes(token for token in tokens(out / "train_000.bin") if token < 256)


def test_an_id_above_65535_is_refused_not_wrapped(tmp_path: Path) -> None:
    writer = prepare.ShardWriter(tmp_path, "train", 100, wide=False)
    with pytest.raises(prepare.PrepareError, match="70000 does not fit in uint16.*--dtype uint32"):
        writer.add([5, 70000], True)
    wide = prepare.ShardWriter(tmp_path, "wide", 100, wide=True)
    wide.add([5, 70000], True)
    wide.close()
    assert tokens(tmp_path / "wide_000.bin") == [5, 70000]


class ManyIds:
    """A tokenizer whose vocabulary needs uint32: the first character's code point times 1000."""
    name, vocab_size, end_of_text = "many", 130_000, 129_999

    def encode(self, text: bytes) -> list[int]:
        return [1000 * byte for byte in text]

    def decode_table(self) -> list[bytes]:
        return [b""] * self.vocab_size


def test_large_vocabulary_takes_uint32(tmp_path: Path) -> None:
    documents = [prepare.Document(b"Fd"), prepare.Document(b"x")]
    meta = prepare.prepare(iter(documents), ManyIds(), tmp_path / "out", val_fraction=0, shard_tokens=100)
    assert meta["dtype"] == "uint32"
    assert tokens(tmp_path / "out/train_000.bin") == [129_999, 70_000, 100_000, 129_999, 120_000]
    with pytest.raises(prepare.PrepareError, match="130000 ids; use --dtype uint32"):
        prepare.prepare(iter(documents), ManyIds(), tmp_path / "no", val_fraction=0, shard_tokens=100, dtype="uint16")
    assert not (tmp_path / "no").exists()


def test_a_failure_keeps_the_old_data(tmp_path: Path) -> None:
    folder, _ = folder_with(tmp_path, 10)
    out = tmp_path / "out"
    run(folder, "--out", out, "--val-fraction", 0)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (folder / "zz.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    refused(folder, "--out", out, "--val-fraction", 0, says=["zz.jsonl:2", "'text'"])
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]  # no temporary folder left
    (folder / "zz.jsonl").unlink()
    (folder / "new.txt").write_text("new")
    run(folder, "--out", out, "--val-fraction", 0)  # its own folder it replaces
    assert {path.name: path.read_bytes() for path in out.iterdir()} != before


def test_a_foreign_folder_is_never_replaced(tmp_path: Path) -> None:
    folder, _ = folder_with(tmp_path, 10)
    refused(folder, "--out", folder, says=[str(folder), "not written by prepare.py"])
    out = tmp_path / "out"
    run(folder, "--out", out, "--val-fraction", 0)
    (out / "notes.txt").write_text("mine")
    refused(folder, "--out", out, says=["notes.txt", "did not write"])
    assert (out / "notes.txt").read_text() == "mine"


def test_binary_and_hidden_files_of_a_folder_are_left_out(tmp_path: Path) -> None:
    folder, contents = folder_with(tmp_path, 10)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\1\2")
    (folder / ".hidden").write_text("hidden")
    (folder / "blank.txt").write_text(" \n")
    result = run(folder, "--out", tmp_path / "out", "--val-fraction", 0)
    assert "1 binary left out" in result.stdout and "1 empty left out" in result.stdout
    assert sorted(documents_of(tokens(tmp_path / "out/train_000.bin"))) == sorted(contents)


@pytest.mark.parametrize("line, says", [
    ("not json", ":1: not a JSON object"), ("[1]", ":1: a list"), ('{"body": "x"}', "['body']"), ('{"prompt": "x"}', "'answer'"),
    ('{"text": null}', "'text'"),
])
def test_bad_jsonl(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "bad.jsonl").write_text(line + "\n")
    refused(tmp_path / "bad.jsonl", "--out", tmp_path / "out", says=["bad.jsonl", says])
    assert not (tmp_path / "out").exists()


def test_refusals(tmp_path: Path) -> None:
    folder, _ = folder_with(tmp_path, 3)
    out = tmp_path / "out"
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "blob").write_bytes(b"a\0b")
    (tmp_path / "blank.txt").write_text("\n \n")
    refused(tmp_path / "nowhere", "--out", out, says=["nowhere does not exist"])
    refused(empty, "--out", out, says=["no file in folder", "empty"])
    refused(folder, "--out", out, "--include", "*.md", says=["--include *.md"])
    refused(tmp_path / "blob", "--out", out, says=["blob", "binary"])
    refused(tmp_path / "blank.txt", "--out", out, says=["no text in"])
    refused(folder, "--out", tmp_path / "blob", says=["blob is a file"])
    refused(folder, "--out", out, "--tokenizer", tmp_path / "none.json", says=["none.json"])
    refused(folder, "--out", out, "--val-fraction", "1.5", says=["1.5"], code=2)
    refused(folder, "--out", out, "--shard-tokens", "0", says=["'0' is not a positive number"], code=2)
    refused(folder, "--out", out, "--shard-tokens", "3G", says=["int32"], code=2)
    refused(folder, says=["--out FOLDER is needed"], code=2)
    refused(folder, "--dataset", "python-stdlib", says=["not both"], code=2)
    refused(folder, "--out", out, "--val-fraction", "0.9999999", says=["no document of 3", "train", "0.9999999"])
    assert not out.exists()


def test_no_network_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "TINYSHAKESPEARE_URL", "http://127.0.0.1:9/input.txt")
    assert prepare.main(["--dataset", "tinyshakespeare"]) == 1
    assert "cannot download http://127.0.0.1:9" in capsys.readouterr().err
    (tmp_path / "data/downloads").mkdir(parents=True)
    (tmp_path / "data/downloads/tinyshakespeare.txt").write_text("To be,\nor not to be.\n" * 50)
    assert prepare.main(["--dataset", "tinyshakespeare"]) == 0  # once downloaded, no network is needed
    assert (tmp_path / "data/tinyshakespeare/val_000.bin").exists()


def test_tokenizer_json(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"],
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    text = "the cat sat on the mat \u00e9\u4e2d\n" * 40
    model.train_from_iterator([text], trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    # The end-of-text token written out in a document is text: it must not become the token.
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": text + "<|endoftext|>"}) + "\n")
    run(tmp_path / "in.jsonl", "--out", tmp_path / "out", "--val-fraction", 0, "--tokenizer", tmp_path / "tokenizer.json")
    ids = tokens(tmp_path / "out/train_000.bin")
    assert ids[0] == 0 and ids.count(0) == 1 and len(ids) < len(text) / 2
    table = prepare.HuggingFaceTokenizer(tmp_path / "tokenizer.json", None).decode_table()
    assert b"".join(table[i] for i in ids[1:]).decode() == text + "<|endoftext|>"
    refused(tmp_path / "in.jsonl", "--out", tmp_path / "out2", "--tokenizer", tmp_path / "tokenizer.json", "--end-of-text", "<none>",
            says=["<none>", "--end-of-text"])


def test_pack_bits() -> None:
    for length in (0, 1, 7, 8, 9, 64, 65, 1000):
        flags = bytearray((i * 7 % 3 == 0) for i in range(length))
        packed = prepare.pack_bits(flags)
        assert len(packed) == (length + 7) // 8
        assert [packed[i // 8] >> i % 8 & 1 for i in range(length)] == list(flags)


def test_bigram_against_a_plain_loop(tmp_path: Path) -> None:
    def shard(name: str, ids: list[int]) -> Path:
        (tmp_path / name).write_bytes(struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253) + array("H", ids).tobytes())
        return tmp_path / name

    train, val = shard("train", [0, 1, 0, 1, 2, 0, 1]), shard("val", [0, 1, 2, 3, 3, 0])
    loss, targets = bigram.bigram_loss([train], [val], vocab_size=4)
    # pairs: 01 x3, 10, 12, 20. n(b): 1 x3, 0 x2, 2 x1, of 6.  n(0)=3 d=1, n(1)=2 d=2, n(2)=1 d=1, n(3)=0.
    unigram = {b: (n + 1) / 10 for b, n in {0: 2, 1: 3, 2: 1, 3: 0}.items()}
    wanted = [(3 + 1 * unigram[1]) / 4, (1 + 2 * unigram[2]) / 4, (0 + 1 * unigram[3]) / 2, unigram[3], unigram[0]]
    assert targets == 5 and math.isclose(loss, -sum(map(math.log, wanted)) / 5, rel_tol=1e-12)
    loss, targets = bigram.bigram_loss([train], [val], vocab_size=4, seq_len=2)
    assert targets == 4 and math.isclose(loss, -sum(map(math.log, wanted[:4])) / 4, rel_tol=1e-12)
    for a in range(4):  # probabilities of every context add up to one
        losses = [bigram.bigram_loss([train], [shard("one", [a, b])], vocab_size=4)[0] for b in range(4)]
        assert math.isclose(sum(math.exp(-x) for x in losses), 1.0, rel_tol=1e-12)
