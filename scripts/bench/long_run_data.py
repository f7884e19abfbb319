"""The text of long_run.py: sources and documentation of pinned packages, as tokens.

    python scripts/bench/long_run_data.py FOLDER    # needs pip install sentencepiece==0.2.3

Downloads the archives of :data:`PACKAGES` with ``pip download`` (their sha256 are checked), reads
their files in order and encodes them with the vocabulary of 32,000 that the package mistral-common
carries. Every run writes the same ``tokens.bin`` and ``tokens.idx``, in Megatron's format, and
``data.json``, which says what is in them.

A document is one sequence of the training: 16,384 consecutive tokens of a package, which span
several of its files. Training documents are shuffled, those of validation follow each other; the
two are of different packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy

SUFFIXES = (".py", ".md", ".rst", ".txt")
LARGEST_FILE = 256 << 10  # bytes: larger ones are tables of numbers
VOCABULARY = 32_000
END = 2  # of a file: the vocabulary's </s>
TOKENIZER = "mistral_common/data/tokenizer.model.v1"
SENTENCEPIECE = "0.2.3"


@dataclass(frozen=True)
class Package:
    """An archive on the package index.

    Args:
        use: "train", "validation" or "tokenizer".
        source: the archive of sources, which has the documentation too, instead of the wheel.
    """

    name: str
    version: str
    sha256: str
    licence: str
    use: str = "train"
    source: bool = False


PACKAGES = (
    Package(
        "django",
        "5.2.19",
        "ad03d8abc51dbff95ebf34b27123cf0c26a3b62db7ba0cd520783686362533d1",
        "BSD-3-Clause",
        source=True,
    ),
    Package(
        "sympy",
        "1.14.0",
        "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
        "BSD-3-Clause",
    ),
    Package(
        "keras",
        "3.15.1",
        "836460e480930acbd19bb7a17e62f9ecad40e8a9af9a651fc8d0586a96d27e20",
        "Apache-2.0",
    ),
    Package(
        "twisted",
        "26.10.0",
        "3732f42af218925a0fe78d6668db55853f7fb532245a89a2669babe7d3000fa8",
        "MIT",
    ),
    Package(
        "networkx",
        "3.4.2",
        "df5d4365b724cf81b8c6a7312509d0c22386097011ad1abe274afd5e9d3bbc5f",
        "BSD-3-Clause",
        "validation",
    ),
    Package(
        "mistral-common",
        "1.13.1",
        "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
        "Apache-2.0",
        "tokenizer",
    ),
)


def write_documents(prefix: Path, documents: numpy.ndarray) -> None:
    """Write tokens ``[documents, length]`` below 65,536 as Megatron's ``.bin`` and ``.idx``."""
    count, length = documents.shape
    documents.astype("<u2").tofile(prefix.with_suffix(".bin"))
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, count, count + 1))
        numpy.full(count, length, "<i4").tofile(file)
        (numpy.arange(count, dtype="<i8") * length * 2).tofile(file)
        numpy.arange(count + 1, dtype="<i8").tofile(file)


def download(folder: Path) -> dict[str, Path]:
    """The archives, by name of the package."""
    rows = [f"{p.name}=={p.version} --hash=sha256:{p.sha256}" for p in PACKAGES]
    rows += [f"--{'no' if p.source else 'only'}-binary {p.name}" for p in PACKAGES]
    (folder / "packages.txt").write_text("\n".join(rows))
    command = [*(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")]
    command += ["--require-hashes", "--dest", str(folder), "-r", str(folder / "packages.txt")]
    subprocess.run(command, check=True)
    names = {p.name: f"{p.name.replace('-', '_')}-{p.version}*" for p in PACKAGES}
    return {name: next(folder.glob(pattern)) for name, pattern in names.items()}


def files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file of an archive, in the order of their names."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in sorted(wheel.namelist()):
                yield name, wheel.read(name)
        return
    with tarfile.open(archive) as source:
        for member in sorted((m for m in source if m.isfile()), key=lambda m: m.name):
            yield member.name, source.extractfile(member).read()  # type: ignore[union-attr]


def texts(archive: Path) -> Iterator[str]:
    """Text files of an archive, each after a line with its name; none of them twice."""
    seen = set()
    for name, content in files(archive):
        if not name.endswith(SUFFIXES) or not content.strip() or len(content) > LARGEST_FILE:
            continue
        digest = hashlib.sha256(content).digest()
        if digest in seen:
            continue
        seen.add(digest)
        try:
            yield f"# {name}\n{content.decode()}"
        except UnicodeDecodeError:
            continue


def encode(folder: Path, seq_len: int, train: int, validation: int) -> None:
    """Write the documents and what is in them into a folder."""
    import sentencepiece

    if sentencepiece.__version__ != SENTENCEPIECE:
        raise SystemExit(
            f"sentencepiece {sentencepiece.__version__}: these tokens are of {SENTENCEPIECE}. "
            f"pip install sentencepiece=={SENTENCEPIECE}"
        )
    archives = folder / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    paths = download(archives)
    (tokenizer,) = (p for p in PACKAGES if p.use == "tokenizer")
    model = dict(files(paths[tokenizer.name]))[TOKENIZER]
    encoder = sentencepiece.SentencePieceProcessor(model_proto=model)
    parts: dict[str, list[numpy.ndarray]] = {"train": [], "validation": []}
    rows = []
    for package in PACKAGES:
        row = {**vars(package)}
        if package.use in parts:
            tokens: list[int] = []
            size = 0
            for text in texts(paths[package.name]):
                size += len(text.encode())
                tokens += [*encoder.encode(text), END]
            whole = len(tokens) // seq_len
            parts[package.use].append(
                numpy.array(tokens[: whole * seq_len], dtype="<u2").reshape(whole, seq_len)
            )
            row |= {"bytes": size, "tokens": len(tokens)}
        rows.append(row)
        print(row, flush=True)
    documents = {use: numpy.concatenate(found) for use, found in parts.items()}
    chosen = numpy.random.RandomState(45).permutation(len(documents["train"]))[:train]
    everything = numpy.concatenate([documents["train"][chosen], documents["validation"]])
    everything = everything[: train + validation]
    if len(chosen) < train or len(everything) < train + validation:
        raise SystemExit(f"{len(chosen)} and {len(documents['validation'])} documents: too few")
    write_documents(folder / "tokens", everything)
    about = {
        "seq_len": seq_len,
        "vocabulary": VOCABULARY,
        "train": train,
        "validation": validation,
        "sha256": hashlib.sha256((folder / "tokens.bin").read_bytes()).hexdigest(),
        "packages": rows,
    }
    (folder / "data.json").write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    encode(parser.parse_args().folder, 16_384, 1_010, 17)
