"""Token shards: the memory-mapped files in which a corpus lies on disk.

Layout (little-endian; sizes in bytes):

    0    8  magic "TRIMTOK\\0"           40   8  largest token id
    8    4  schema version              48   8  end-of-text id
    12   4  bytes per token (2 or 4)    56   8  UTF-8 bytes of text
    16   8  number of tokens            64  32  BLAKE2b-256 of all that follows the header
    24   8  number of documents         96  16  zero
    32   8  zero                        112 16  BLAKE2b-128 of bytes 0 to 111
    128     tokens, each document ended by the end-of-text id; zero up to a multiple of 8
            start of each document in tokens (uint64)

How: header and file size are checked at each opening (microseconds), the content checksum by `verify` (reads it all).
Document ids lie in a text file beside the shard (`.ids`, one a line) and are read only when a report asks for them.

Rejected: `.npy` (no room for checksum and documents), one file for all (no parallel writing), Arrow (a dependency in
the innermost loop). Limits: token ids below 2^32.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimtab.core.errors import DataError, refusal

SCHEMA = 1
_MAGIC = b"TRIMTOK\0"
_HEADER = struct.Struct("<8sIIQQQQQQ32s16x")
HEADER_BYTES = _HEADER.size + 16
_DTYPES: dict[int, type[np.unsignedinteger]] = {2: np.uint16, 4: np.uint32}
_FIX = "delete its folder, and it is built anew"


def token_bytes(vocab_size: int) -> int:
    """Bytes per token that ids below `vocab_size` need: 2 or 4."""
    return 2 if vocab_size <= 1 << 16 else 4


class ShardWriter:
    """Writes one shard as documents arrive; `close` makes it valid. Use as a context manager.

    Args:
        path: the file to write (the caller renames its folder when all are complete).
        vocab_size: ids must be below it; it decides the width.
        eos_id: appended to each document.
    """

    def __init__(self, path: Path, vocab_size: int, eos_id: int) -> None:
        self._path, self._vocab_size, self._eos_id = path, vocab_size, eos_id
        self._width = token_bytes(vocab_size)
        self._file = open(path, "wb")  # noqa: SIM115 - closed in close()
        self._file.write(bytes(HEADER_BYTES))
        self._digest = hashlib.blake2b(digest_size=32)
        self._starts: list[int] = []
        self._ids: list[str] = []
        self.num_tokens = self.num_bytes = self.max_id = 0

    def _put(self, content: bytes) -> None:
        self._digest.update(content)
        self._file.write(content)

    def add(self, identity: str, tokens: npt.NDArray[np.uint32], num_bytes: int) -> None:
        """Append a document of `num_bytes` of text."""
        largest = max(int(tokens.max(initial=0)), self._eos_id)
        if largest >= self._vocab_size:
            raise DataError(refusal("A token id", largest, f"must be below the vocabulary size {self._vocab_size}"))
        self._starts.append(self.num_tokens)
        self._ids.append(" ".join(identity.splitlines()))
        self._put(np.append(tokens, np.uint32(self._eos_id)).astype(f"<u{self._width}").tobytes())
        self.num_tokens += len(tokens) + 1
        self.num_bytes += num_bytes
        self.max_id = max(self.max_id, largest)

    def close(self) -> None:
        """Write document starts, ids and the header, and flush to the disk."""
        self._put(bytes(-self.num_tokens * self._width % 8))
        self._put(np.array(self._starts, dtype="<u8").tobytes())
        header = _HEADER.pack(
            _MAGIC,
            SCHEMA,
            self._width,
            self.num_tokens,
            len(self._starts),
            0,
            self.max_id,
            self._eos_id,
            self.num_bytes,
            self._digest.digest(),
        )
        self._file.seek(0)
        self._file.write(header + hashlib.blake2b(header, digest_size=16).digest())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._path.with_suffix(".ids").write_text(
            "".join(f"{name}\n" for name in self._ids), encoding="utf-8", errors="replace"
        )

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


class TokenShard:
    """A shard opened for reading, memory-mapped.

    Args:
        path: the file.
        vocab_size: if given, the shard's largest id must be below it.

    Raises:
        DataError: missing, foreign, of a newer schema, damaged, truncated, or with an id out of range.
    """

    def __init__(self, path: Path | str, vocab_size: int | None = None) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as handle:
                header = handle.read(HEADER_BYTES)
                size = os.fstat(handle.fileno()).st_size
        except OSError as error:
            raise DataError(f"Token shard {str(path)!r} cannot be read ({error.strerror}): {_FIX}.") from error
        if len(header) < HEADER_BYTES:
            raise DataError(
                f"Token shard {str(path)!r} is truncated: expected at least {HEADER_BYTES} bytes, found {size}: {_FIX}."
            )
        (
            magic,
            schema,
            width,
            self.num_tokens,
            self.num_documents,
            _,
            self.max_id,
            self.eos_id,
            self.num_bytes,
            self._checksum,
        ) = _HEADER.unpack(header[: _HEADER.size])
        if magic != _MAGIC:
            raise DataError(f"{str(path)!r} is not a token shard (its first bytes are {magic!r}): {_FIX}.")
        if schema > SCHEMA:
            raise DataError(f"Token shard {str(path)!r} has schema {schema}, above {SCHEMA}: use a newer trimtab.")
        if hashlib.blake2b(header[: _HEADER.size], digest_size=16).digest() != header[_HEADER.size :]:
            raise DataError(f"Token shard {str(path)!r} has a damaged header (its checksum differs): {_FIX}.")
        token_end = HEADER_BYTES + self.num_tokens * width
        starts_at = token_end + (-self.num_tokens * width) % 8
        expected = starts_at + 8 * self.num_documents
        if size != expected:
            word = "truncated" if size < expected else "too long"
            raise DataError(f"Token shard {str(path)!r} is {word}: expected {expected} bytes, found {size}: {_FIX}.")
        if vocab_size is not None:
            check_vocabulary([self], vocab_size)
        content = np.memmap(self.path, dtype=np.uint8, mode="r").view(np.ndarray)
        self.tokens: npt.NDArray[np.unsignedinteger] = content[HEADER_BYTES:token_end].view(_DTYPES[width])
        """Token ids [num_tokens], uint16 or uint32, read-only."""
        self.document_starts: npt.NDArray[np.uint64] = content[starts_at:].view(np.uint64)
        """Index into `tokens` at which each document starts [num_documents]."""
        self._content = content
        self._names: list[str] | None = None

    def document_name(self, index: int) -> str:
        """Id of the document with that index in this shard."""
        if self._names is None:
            try:
                self._names = self.path.with_suffix(".ids").read_text(encoding="utf-8").split("\n")
            except OSError:
                self._names = []
        return self._names[index] if index < len(self._names) - 1 else f"{self.path.name}[{index}]"

    def verify(self) -> None:
        """Read all and compare with the checksum in the header; raises `DataError` where they differ."""
        digest = hashlib.blake2b(digest_size=32)
        for start in range(HEADER_BYTES, len(self._content), 1 << 22):
            digest.update(self._content[start : start + (1 << 22)].data)
        if digest.digest() != self._checksum:
            raise DataError(f"Token shard {str(self.path)!r} is damaged (its checksum differs): {_FIX}.")


def check_vocabulary(shards: Iterable[TokenShard], vocab_size: int) -> None:
    """Raise `DataError` if a shard holds an id that a model of `vocab_size` has no row for."""
    for shard in shards:
        if shard.max_id >= vocab_size:
            raise DataError(
                f"Token shard {str(shard.path)!r}: token id out of range, {shard.max_id} must be below the vocabulary "
                f"size {vocab_size}: use the tokenizer it was made with, or {_FIX}."
            )
