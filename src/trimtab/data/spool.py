"""Documents between reading and tokenizing: made unique, split into train and validation, spooled to part files.

How: a document is known by the BLAKE2b-128 of its text. One seen before is dropped. The digest as a fraction of 2^64
is compared with a threshold: below it, the document is held out. So the split depends on the text alone, not on order,
folder or seed, and a document never changes sides when the corpus grows. Parts are what a worker tokenizes and what
becomes one shard; their size doubles every 16 parts (2 MiB to 512 MiB), so that a small corpus has parts for several
workers and 1 TB does not have a hundred thousand files. It does not depend on the number of workers.

Rejected: a random split (a rebuilt corpus would leak), near-duplicate removal (MinHash belongs to curation tools).
Limits: 16 bytes of digest per document are held in memory while building (about 100 bytes as Python objects).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trimtab.data.sources import Document

_FRAME = struct.Struct("<IQ")
_PART_BYTES = 2 << 20
_PARTS_PER_DOUBLING = 16
_MAX_DOUBLINGS = 8

TRAIN, VAL = "train", "val"


def _part_limit(number: int) -> int:
    return _PART_BYTES << min(number // _PARTS_PER_DOUBLING, _MAX_DOUBLINGS)


def document_hash(text: str) -> int:
    """The 64-bit hash that decides on which side of the split a text falls; the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest()[:8], "little")


class _Side:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._file: BinaryIO | None = None
        self._filled = 0
        self.parts: list[Path] = []
        self.num_documents = self.num_bytes = 0

    def add(self, identity: bytes, content: bytes) -> None:
        if self._file is None or self._filled >= _part_limit(len(self.parts) - 1):
            self.close()
            self.parts.append(self._folder / f"{self._name}-{len(self.parts):05d}.spool")
            self._file, self._filled = open(self.parts[-1], "wb"), 0  # noqa: SIM115 - closed in close()
        self._file.write(_FRAME.pack(len(identity), len(content)) + identity)
        self._file.write(content)
        self._filled += len(content)
        self.num_documents += 1
        self.num_bytes += len(content)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Spool:
    """Unique documents on disk, in order of arrival.

    Args:
        folder: made here; holds the part files.
        threshold: documents whose `document_hash` is below it are held out.
    """

    def __init__(self, folder: Path, threshold: int) -> None:
        folder.mkdir(parents=True)
        self.sides = {TRAIN: _Side(folder, TRAIN), VAL: _Side(folder, VAL)}
        self._threshold = threshold
        self._seen: set[bytes] = set()
        self._digest = hashlib.blake2b(digest_size=16)
        self.num_duplicates = 0
        self.lowest, self.highest = 1 << 64, -1

    def add(self, document: Document, side: str = "") -> None:
        """Append a document unless its text was seen; `side` overrides the split by hash."""
        content = document.text.encode()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if digest in self._seen:
            self.num_duplicates += 1
            return
        self._seen.add(digest)
        number = int.from_bytes(digest[:8], "little")
        self.lowest, self.highest = min(self.lowest, number), max(self.highest, number)
        identity = document.id.encode("utf-8", "replace")
        self._digest.update(digest + _FRAME.pack(len(identity), 0) + identity)
        self.sides[side or (VAL if number < self._threshold else TRAIN)].add(identity, content)

    def close(self) -> None:
        """Flush the part files."""
        for side in self.sides.values():
            side.close()

    @property
    def num_documents(self) -> int:
        """Unique documents."""
        return len(self._seen)

    @property
    def digest(self) -> str:
        """Hex digest of all unique documents, ids and order included."""
        return self._digest.hexdigest()


def read_part(path: Path) -> Iterator[Document]:
    """The documents of a part file."""
    with open(path, "rb") as handle:
        while frame := handle.read(_FRAME.size):
            id_bytes, text_bytes = _FRAME.unpack(frame)
            identity = handle.read(id_bytes).decode()
            yield Document(identity, handle.read(text_bytes).decode())
