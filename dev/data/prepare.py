#!/usr/bin/env python3
"""Turn text into token shards for train_gpt.

    python3 dev/data/prepare.py                                      # this machine's Python standard library, as bytes
    python3 dev/data/prepare.py --dataset tinyshakespeare            # downloads 1 MB
    python3 dev/data/prepare.py notes/ book.txt --out data/mine      # any files and folders
    python3 dev/data/prepare.py chat.jsonl --out data/chat           # one JSON object a line: text, or prompt and answer
    python3 dev/data/prepare.py corpus/ --out data/c --tokenizer gpt2
    python3 dev/data/prepare.py corpus/ --out data/c --tokenizer path/to/tokenizer.json

What lands in --out (all integers little-endian):

  train_000.bin ..., val_000.bin ...   token shards in llm.c's format: 256 int32 of header (magic, version, number of
                tokens), then the ids: magic 20240520, version 1, uint16, or magic 20240801, version 7, uint32
  SHARD.mask    only where a prompt is masked: bit i (lowest bit of a byte first) is 1 when token i counts as a target
  decode.bin    "LLMZDEC1", uint32 vocabulary size, uint32 end-of-text id, then per id: uint32 length and that many
                bytes; the trainer prints samples with it
  meta.json     tokenizer, vocabulary size, counts, the list of files

Every document is one end-of-text token followed by its tokens. Whole documents go to either train or val, by a hash of
their content, so equal documents never end up on both sides. The default path needs nothing but Python itself.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import shutil
import struct
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from array import array
from pathlib import Path
from typing import Iterator, NamedTuple, Optional

MAGIC_UINT16, VERSION_UINT16 = 20240520, 1
MAGIC_UINT32, VERSION_UINT32 = 20240801, 7
HEADER_INTS = 256
DECODE_MAGIC = b"LLMZDEC1"
MADE_BY = "llm.zero dev/data/prepare.py"
TINYSHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"

# The sources a model of a few million parameters can see about once in the quickstart's minutes.
STDLIB_MAX_BYTES = 12_000_000

# Not prose or code a model should learn: tests (mostly fixtures), generated tables, other people's packages.
STDLIB_SKIP_FOLDERS = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "encodings",
                       "pydoc_data", "lib2to3", "_bundled", "turtledemo"}


class PrepareError(Exception):
    """A fault of the input; its text says what, the value, and the fix."""


class Document(NamedTuple):
    """One document. The prompt's tokens are not targets; most documents have none."""
    text: bytes
    prompt: bytes = b""


# ----------------------------------------------------------------------------------------------------------------------
# Where documents come from

def read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PrepareError(f"cannot read {path}: {error.strerror}") from error


def stdlib_documents() -> Iterator[Document]:
    """The .py sources of this interpreter's standard library, in the order of a hash of their paths: the same on every
    run, and no part of the alphabet is missing when --max-bytes cuts the list short."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIP_FOLDERS and not name.startswith("config-")]
        files += [Path(folder) / name for name in names if name.endswith(".py")]
    if not files:
        raise PrepareError(f"no Python sources under {root}; this Python ships without its library's sources, "
                           "give files or folders instead, or --dataset tinyshakespeare")
    files.sort(key=lambda path: hashlib.blake2b(path.relative_to(root).as_posix().encode()).digest())
    for path in files:
        yield Document(read_file(path))


def tinyshakespeare_documents(cache: Path) -> Iterator[Document]:
    """The 1.1 MB of char-rnn's tiny Shakespeare, one document; kept in `cache` once downloaded."""
    kept = cache / "tinyshakespeare.txt"
    if not kept.exists():
        print(f"downloading {TINYSHAKESPEARE_URL}", file=sys.stderr)
        try:
            with urllib.request.urlopen(TINYSHAKESPEARE_URL, timeout=60) as response:
                content = response.read()
        except (urllib.error.URLError, OSError) as error:
            raise PrepareError(f"cannot download {TINYSHAKESPEARE_URL}: {getattr(error, 'reason', error)}; without a "
                               "network use --dataset python-stdlib, or give the file's path") from error
        cache.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_name(f"{kept.name}.tmp{os.getpid()}")
        temporary.write_bytes(content)
        os.replace(temporary, kept)
    yield Document(read_file(kept))


def jsonl_documents(path: Path) -> Iterator[Document]:
    """One JSON object a line, with `text`, or with `prompt` and `answer` (joined as they are, nothing put between)."""
    try:
        lines = open(path, "rb")
    except OSError as error:
        raise PrepareError(f"cannot read {path}: {error.strerror}") from error
    with lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise PrepareError(f"{path}:{number}: not a JSON object: {error}") from error
            if not isinstance(record, dict):
                raise PrepareError(f"{path}:{number}: a {type(record).__name__}, not a JSON object")
            wanted = ["text"] if "text" in record else ["prompt", "answer"]
            missing = [field for field in wanted if not isinstance(record.get(field), str)]
            if missing:
                raise PrepareError(f"{path}:{number}: needs a string in 'text', or in 'prompt' and 'answer'; "
                                   f"it has {sorted(record)} (wrong or missing: {missing})")
            # A lone surrogate such as "\ud800" is legal JSON but no text.
            encoded = [record[field].encode("utf-8", "replace") for field in wanted]
            yield Document(encoded[-1], encoded[0] if len(encoded) == 2 else b"")


def path_documents(inputs: list[Path], include: list[str], skipped: dict[str, int]) -> Iterator[Document]:
    """Files as given; folders walked in bytewise order, hidden and binary files left out (and counted)."""
    def wanted(name: str) -> bool:
        return not include or any(fnmatch.fnmatch(name, pattern) for pattern in include)

    for given in inputs:
        if given.is_dir():
            files = []
            for folder, subfolders, names in os.walk(given):
                subfolders[:] = [name for name in subfolders if not name.startswith(".") and name != "__pycache__"]
                files += [Path(folder) / name for name in names if not name.startswith(".") and wanted(name)]
            files.sort(key=os.fsencode)
            if not files:
                raise PrepareError(f"no file in folder {given}" + (f" matches --include {' '.join(include)}" if include else ""))
        elif given.exists():
            files = [given]
        else:
            raise PrepareError(f"{given} does not exist; give files, folders, or --dataset")
        for path in files:
            if path.suffix in (".jsonl", ".ndjson"):
                yield from jsonl_documents(path)
                continue
            if not path.is_file():  # a socket, a dangling link
                skipped["not a regular file"] = skipped.get("not a regular file", 0) + 1
                continue
            content = read_file(path)
            if b"\0" in content:
                if path == given:
                    raise PrepareError(f"{path} is a binary file (it holds a zero byte); give text, or .jsonl")
                skipped["binary"] = skipped.get("binary", 0) + 1
                continue
            yield Document(content)


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers: encode() gives ids; decode_table() the bytes of every id

class ByteTokenizer:
    """Bytes are ids; 256 is end-of-text."""
    name, vocab_size, end_of_text = "bytes", 257, 256

    def encode(self, text: bytes) -> bytes:
        """`bytes` is a sequence of ids already; the writer widens it without a loop."""
        return text

    def decode_table(self) -> list[bytes]:
        return [bytes([i]) for i in range(256)] + [b"<|endoftext|>"]


class Gpt2Tokenizer:
    """GPT-2's BPE through tiktoken (which downloads its table once)."""
    name = "gpt2"

    def __init__(self) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise PrepareError("--tokenizer gpt2 needs the Python package tiktoken; pip install tiktoken") from error
        try:
            self._bpe = tiktoken.get_encoding("gpt2")
        except Exception as error:  # requests' own errors; tiktoken does not say which
            raise PrepareError(f"tiktoken cannot load its gpt2 table ({type(error).__name__}: {error}); it is downloaded on "
                               "first use: connect once, or set TIKTOKEN_CACHE_DIR, or use --tokenizer tokenizer.json") from error
        self.vocab_size, self.end_of_text = self._bpe.n_vocab, self._bpe.eot_token

    def encode(self, text: bytes) -> list[int]:
        return self._bpe.encode_ordinary(text.decode("utf-8", "replace"))

    def decode_table(self) -> list[bytes]:
        return [self._bpe.decode_single_token_bytes(i) for i in range(self.vocab_size)]


class HuggingFaceTokenizer:
    """Any tokenizer.json, through the tokenizers package."""
    END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>")

    def __init__(self, path: Path, end_of_text: Optional[str]) -> None:
        if path.is_dir():
            path = path / "tokenizer.json"
        self.name = str(path)
        try:
            import tokenizers
        except ImportError as error:
            raise PrepareError("--tokenizer tokenizer.json needs the Python package tokenizers; pip install tokenizers") from error
        if not path.is_file():
            raise PrepareError(f"--tokenizer {path}: no such file; give bytes, gpt2, or the path of a tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            self._description = json.loads(path.read_text(encoding="utf-8"))
        except Exception as error:  # the package raises plain Exception
            raise PrepareError(f"--tokenizer {path}: not a tokenizer.json ({error})") from error
        # "<|endoftext|>" written in a document is text, not the end of it.
        self._tokenizer.encode_special_tokens = True
        candidates = [end_of_text] if end_of_text else list(self.END_OF_TEXT)
        found = [self._tokenizer.token_to_id(token) for token in candidates]
        found = [token for token in found if token is not None]
        if not found:
            raise PrepareError(f"--tokenizer {path} has no end-of-text token named {' or '.join(candidates)}; "
                               "name its own with --end-of-text TOKEN")
        self.end_of_text = found[0]
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids

    def decode_table(self) -> list[bytes]:
        byte_of = byte_level_alphabet() if '"ByteLevel"' in json.dumps(self._description.get("decoder")) else None
        added = {token["id"]: token["content"] for token in self._description.get("added_tokens", [])}
        table = [b""] * self.vocab_size
        for token, index in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if index in added:
                table[index] = added[index].encode()
            elif byte_of is not None:
                table[index] = b"".join(byte_of.get(char, char.encode()) for char in token)
            elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # SentencePiece's byte fallback
                table[index] = bytes([int(token[3:5], 16)])
            else:
                table[index] = token.replace("\u2581", " ").encode()
        return table


def byte_level_alphabet() -> dict[str, bytes]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 stands for itself, the rest are shifted past 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    return {**{chr(value): bytes([value]) for value in printable},
            **{chr(256 + i): bytes([value]) for i, value in enumerate(others)}}


def make_tokenizer(name: str, end_of_text: Optional[str]):
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return Gpt2Tokenizer()
    return HuggingFaceTokenizer(Path(name), end_of_text)


# ----------------------------------------------------------------------------------------------------------------------
# Writing

class ShardWriter:
    """Writes one split's shards of exactly `shard_tokens` tokens (the last one shorter) into `folder`."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, wide: bool) -> None:
        self.folder, self.split, self.shard_tokens, self.wide = folder, split, shard_tokens, wide
        self.files: list[str] = []
        self.tokens = 0          # of all shards
        self._file = None
        self._count = 0          # of the open shard
        self._flags = bytearray()  # one byte a token of the open shard, 1 = target; kept only once something is masked
        self._masked = False

    def add(self, ids, is_target: bool) -> None:
        """`ids`: bytes, or a list of ints; an id that does not fit is refused, never wrapped."""
        if not isinstance(ids, bytes):
            limit = 0xFFFFFFFF if self.wide else 0xFFFF
            if ids and not 0 <= min(ids) <= max(ids) <= limit:
                raise PrepareError(f"token id {max(ids)} does not fit in {'uint32' if self.wide else 'uint16'} "
                                   f"(at most {limit}); use --dtype uint32")
        start = 0
        while start < len(ids):
            if self._file is None:
                self._open()
            part = ids[start: start + self.shard_tokens - self._count]
            self._file.write(self._encode(part))
            if not is_target and not self._masked:
                self._masked = True
                self._flags = bytearray(b"\1") * self._count
            if self._masked:
                self._flags += (b"\1" if is_target else b"\0") * len(part)
            self._count += len(part)
            self.tokens += len(part)
            start += len(part)
            if self._count == self.shard_tokens:
                self.close()

    def _encode(self, ids) -> bytes:
        width = 4 if self.wide else 2
        if isinstance(ids, bytes):  # little-endian widening: every width-th byte is the id
            wide = bytearray(width * len(ids))
            wide[::width] = ids
            return bytes(wide)
        packed = array("I" if self.wide else "H", ids)
        assert packed.itemsize == width
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()

    def _open(self) -> None:
        name = f"{self.split}_{len(self.files):03d}.bin"
        self.files.append(name)
        self._file = open(self.folder / name, "wb")
        self._file.write(b"\0" * (4 * HEADER_INTS))
        self._count, self._masked, self._flags = 0, False, bytearray()

    def close(self) -> None:
        if self._file is None:
            return
        magic, version = (MAGIC_UINT32, VERSION_UINT32) if self.wide else (MAGIC_UINT16, VERSION_UINT16)
        self._file.seek(0)
        self._file.write(struct.pack("<3i", magic, version, self._count))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        if self._masked:
            (self.folder / (self.files[-1] + ".mask")).write_bytes(pack_bits(self._flags))


def pack_bits(flags: bytearray) -> bytes:
    """One byte of 0 or 1 a token -> one bit a token, lowest bit first. The eight strided slices are added as big
    integers, which keeps the loop out of Python."""
    size = (len(flags) + 7) // 8
    padded = flags + bytearray(8 * size - len(flags))
    total = 0
    for bit in range(8):
        total |= int.from_bytes(padded[bit::8], "little") << bit
    return total.to_bytes(size, "little")


def write_decode_table(path: Path, tokenizer) -> None:
    table = tokenizer.decode_table()
    with open(path, "wb") as out:
        out.write(DECODE_MAGIC + struct.pack("<II", len(table), tokenizer.end_of_text))
        for piece in table:
            out.write(struct.pack("<I", len(piece)) + piece)


class Progress:
    """A bar on a terminal, silent elsewhere."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._start = self._last = time.monotonic()

    def show(self, documents: int, size: int, tokens: int, limit: Optional[int]) -> None:
        now = time.monotonic()
        if not self._on or now - self._last < 0.1:
            return
        self._last = now
        bar = ""
        if limit:
            filled = min(30, 30 * size // limit)
            bar = "[" + "#" * filled + "." * (30 - filled) + "] "
        print(f"\r{bar}{documents} documents, {size / 1e6:.1f} MB, {tokens / 1e6:.2f} M tokens, "
              f"{size / 1e6 / (now - self._start):.1f} MB/s \033[K", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self._on:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def place(document: Document) -> float:
    """A number in [0, 1) from the document's content; below --val-fraction it is a validation document."""
    digest = hashlib.blake2b(document.prompt + b"\0" + document.text, digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2.0 ** 64


def split_in_two(document: Document, fraction: float) -> tuple[Document, Document]:
    """A data set of one document: its tail becomes the validation set, cut at the end of a line where there is one."""
    cut = int(len(document.text) * (1 - fraction))
    line_end = document.text.find(b"\n", cut)
    if 0 <= line_end < len(document.text) - 1:
        cut = line_end + 1
    return document._replace(text=document.text[:cut]), document._replace(text=document.text[cut:])


def check_out_folder(out: Path) -> None:
    """An existing folder is replaced only if this script wrote it and nothing else was put there."""
    if not out.exists():
        return
    if not out.is_dir():
        raise PrepareError(f"--out {out} is a file; give a folder")
    names = sorted(entry.name for entry in out.iterdir())
    if not names:
        return
    try:
        meta = json.loads((out / "meta.json").read_text(encoding="utf-8"))
        ours = set(meta["files"]) if meta.get("made_by") == MADE_BY else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        ours = None
    if ours is None:
        raise PrepareError(f"--out {out} is not empty and was not written by prepare.py (no meta.json of its own); "
                           "choose another folder")
    foreign = [name for name in names if name not in ours]
    if foreign:
        raise PrepareError(f"--out {out} also holds {foreign[0]}, which prepare.py did not write; move it or choose another folder")


def put_in_place(temporary: Path, out: Path) -> None:
    """Readers see the old folder or the whole new one."""
    if out.exists():
        old = out.with_name(f"{out.name}.old{os.getpid()}")
        os.rename(out, old)
        os.rename(temporary, out)
        shutil.rmtree(old)
    else:
        os.rename(temporary, out)


def prepare(documents: Iterator[Document], tokenizer, out: Path, *, val_fraction: float, shard_tokens: int,
            dtype: str = "auto", max_bytes: Optional[int] = None, source: str = "", skipped: Optional[dict[str, int]] = None) -> dict:
    """Writes the folder `out` and returns what meta.json says. `max_bytes` counts bytes of text."""
    skipped = {} if skipped is None else skipped
    wide = tokenizer.vocab_size > 65536 if dtype == "auto" else dtype == "uint32"
    if not wide and tokenizer.vocab_size > 65536:
        raise PrepareError(f"--dtype uint16 holds ids up to 65535, tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids; "
                           "use --dtype uint32")
    out = Path(os.path.realpath(out))
    check_out_folder(out)
    temporary = out.with_name(f"{out.name}.tmp{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise PrepareError(f"cannot create a folder beside --out {out}: {error.strerror}") from error
    try:
        writers = {split: ShardWriter(temporary, split, shard_tokens, wide) for split in ("train", "val")}
        counts = {"train": 0, "val": 0}
        progress, size = Progress(), 0

        def write(document: Document, split: str) -> None:
            writer = writers[split]
            writer.add([tokenizer.end_of_text], True)
            if document.prompt:
                writer.add(tokenizer.encode(document.prompt), False)
            writer.add(tokenizer.encode(document.text), True)
            counts[split] += 1

        # The document with the lowest place (and its copies) is held back: should no place be below val_fraction, it is
        # what a small data set validates on, and should it be the only document, it is split in two.
        held: list[Document] = []
        lowest, read = 2.0, 0
        for document in documents:
            if not document.text.strip():
                skipped["empty"] = skipped.get("empty", 0) + 1
                continue
            if max_bytes is not None and size + len(document.prompt) + len(document.text) > max_bytes:
                if read:
                    break
                document = document._replace(text=document.text[:max_bytes])
            size += len(document.prompt) + len(document.text)
            read += 1
            at = place(document)
            if val_fraction == 0:
                write(document, "train")
            elif at < lowest:
                for other in held:
                    write(other, "val" if lowest < val_fraction else "train")
                held, lowest = [document], at
            elif at == lowest:
                held.append(document)
            else:
                write(document, "val" if at < val_fraction else "train")
            progress.show(read, size, writers["train"].tokens + writers["val"].tokens, max_bytes)
        progress.done()
        if read == 0:
            raise PrepareError(f"no text in {source or 'the input'}" + (f" (left out: {skipped})" if skipped else ""))
        if read == 1 and held:
            train, val = split_in_two(held[0], val_fraction)
            write(train, "train")
            write(val, "val")
        else:
            for other in held:
                write(other, "val")
        for writer in writers.values():
            writer.close()
        for split, wanted in (("train", True), ("val", val_fraction > 0)):
            if wanted and not writers[split].files:
                raise PrepareError(f"no document of {read} fell into the {split} split with --val-fraction {val_fraction}; "
                                   "choose another fraction or give more documents")
        write_decode_table(temporary / "decode.bin", tokenizer)
        files = sorted(entry.name for entry in temporary.iterdir()) + ["meta.json"]
        meta = {
            "made_by": MADE_BY, "source": source, "tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text, "dtype": "uint32" if wide else "uint16",
            "bytes": size, "train_tokens": writers["train"].tokens, "val_tokens": writers["val"].tokens,
            "train_documents": counts["train"], "val_documents": counts["val"], "val_fraction": val_fraction,
            "skipped": skipped, "files": files,
        }
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        put_in_place(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return meta


# ----------------------------------------------------------------------------------------------------------------------

def count(text: str) -> int:
    """5000, 10M, 1e8: a positive whole number."""
    factor = {"K": 10 ** 3, "M": 10 ** 6, "G": 10 ** 9, "B": 10 ** 9}.get(text[-1:].upper(), 1)
    try:
        value = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        value = -1.0
    if not 1 <= value < 2 ** 62:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number such as 5000, 10M or 1e8")
    return int(value)


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction from 0 to below 1")
    return value


def parse(argv: Optional[list[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prepare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="*", type=Path, metavar="PATH", help="files, folders, .jsonl files (instead of --dataset)")
    parser.add_argument("--dataset", choices=["python-stdlib", "tinyshakespeare"], help="default without PATH: python-stdlib")
    parser.add_argument("--out", type=Path, help="folder to write (default data/DATASET)")
    parser.add_argument("--tokenizer", default="bytes", help="bytes (default), gpt2, or the path of a tokenizer.json")
    parser.add_argument("--end-of-text", metavar="TOKEN", help="the end-of-text token of a tokenizer.json, where it has an unusual name")
    parser.add_argument("--val-fraction", type=fraction, metavar="F", help="share of the documents kept for validation (default 0.02)")
    parser.add_argument("--shard-tokens", type=count, default=10 ** 8, metavar="N", help="tokens a shard (default 1e8)")
    parser.add_argument("--dtype", choices=["auto", "uint16", "uint32"], default="auto", help="bytes of an id (auto: the smaller that fits)")
    parser.add_argument("--max-bytes", type=count, metavar="N", help=f"stop after N bytes of text (python-stdlib: {STDLIB_MAX_BYTES})")
    parser.add_argument("--include", action="append", default=[], metavar="GLOB", help="only files of a folder whose name matches, e.g. '*.md'")
    arguments = parser.parse_args(argv)
    if arguments.inputs and arguments.dataset:
        parser.error(f"give PATH or --dataset, not both (PATH {arguments.inputs[0]}, --dataset {arguments.dataset})")
    if arguments.inputs and arguments.out is None:
        parser.error("--out FOLDER is needed with PATH, e.g. --out data/mine")
    if arguments.shard_tokens >= 2 ** 31:
        parser.error(f"--shard-tokens {arguments.shard_tokens}: the header counts tokens in an int32; at most {2 ** 31 - 1}")
    if not arguments.inputs and arguments.dataset is None:
        arguments.dataset = "python-stdlib"
    if arguments.out is None:
        arguments.out = Path("data") / arguments.dataset
    return arguments


def main(argv: Optional[list[str]] = None) -> int:
    arguments = parse(argv)
    skipped: dict[str, int] = {}
    start = time.monotonic()
    try:
        tokenizer = make_tokenizer(arguments.tokenizer, arguments.end_of_text)
        max_bytes = arguments.max_bytes
        if arguments.dataset == "python-stdlib":
            documents, source = stdlib_documents(), f"python-stdlib {sys.version.split()[0]}"
            max_bytes = max_bytes or STDLIB_MAX_BYTES
        elif arguments.dataset == "tinyshakespeare":
            documents, source = tinyshakespeare_documents(Path("data") / "downloads"), "tinyshakespeare"
        else:
            documents = path_documents(arguments.inputs, arguments.include, skipped)
            source = " ".join(str(path) for path in arguments.inputs)
        val_fraction = arguments.val_fraction
        if val_fraction is None:
            val_fraction = 0.1 if arguments.dataset == "tinyshakespeare" else 0.02
        meta = prepare(documents, tokenizer, arguments.out, val_fraction=val_fraction, shard_tokens=arguments.shard_tokens,
                       dtype=arguments.dtype, max_bytes=max_bytes, source=source, skipped=skipped)
    except PrepareError as error:
        print(f"prepare.py: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"prepare.py: error: {error.filename or arguments.out}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nprepare.py: interrupted, nothing written", file=sys.stderr)
        return 130
    left_out = "".join(f", {number} {reason} left out" for reason, number in sorted(meta["skipped"].items()))
    print(f"{arguments.out}: {meta['train_documents']} documents, {meta['train_tokens']} tokens to train on; "
          f"{meta['val_documents']} documents, {meta['val_tokens']} tokens to validate on{left_out}")
    print(f"tokenizer {meta['tokenizer']}, vocabulary {meta['vocab_size']}, {meta['dtype']}, {meta['bytes'] / 1e6:.1f} MB "
          f"of text in {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
