"""How fast a folder's disk takes a checkpoint: a file written in pieces and flushed."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

from trimtab.hardware.probe import disk_free_bytes, nearest_folder

_PIECE_BYTES = 4 << 20


def disk_write_rate(folder: Path, num_bytes: int = 64 << 20) -> float:
    """Bytes per second of a sequential write with a flush at the end (what a checkpoint does).

    Args:
        folder: where; its nearest existing parent is used. Nothing stays there.
        num_bytes: how much to write; less if the disk has not ten times that free.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = nearest_folder(folder)
    num_bytes = max(_PIECE_BYTES, min(num_bytes, disk_free_bytes(folder) // 10))
    piece = os.urandom(_PIECE_BYTES)
    descriptor, name = tempfile.mkstemp(prefix=".trimtab-disk-", dir=folder)
    try:
        began = time.perf_counter()
        written = 0
        while written < num_bytes:
            written += os.write(descriptor, piece)
        os.fsync(descriptor)
        return written / (time.perf_counter() - began)
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(name)
