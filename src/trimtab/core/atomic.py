"""Files that are complete or absent.

A file is written beside its final name, flushed to the disk, then renamed: POSIX makes the rename atomic, so a reader
(or a process killed at any instant) sees the old file, the new file, or none, never half. The folder is flushed too,
since on ext4 a rename can otherwise be lost with the power. Disk-full and read-only become `StorageError` in one place.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trimtab.core.errors import StorageError

_WHY = {
    errno.ENOSPC: "the disk is full: free some space or choose another folder",
    errno.EDQUOT: "the disk quota is used up: free some space or choose another folder",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: "permission is denied: choose another folder or change its permissions",
    errno.EPERM: "the operation is not permitted: choose another folder or change its permissions",
    errno.ENOTDIR: "a part of the path is a file, not a folder: choose another folder",
    errno.EEXIST: "a file of that name is in the way: choose another folder",
}


def storage_error(error: OSError, path: Path | str, safe: str = "") -> StorageError:
    """The `StorageError` that explains an `OSError` at `path`; `safe` says what is not lost."""
    why = _WHY.get(error.errno or 0, f"{error.strerror or error}")
    return StorageError(f"Cannot write {str(path)!r}: {why}.{' ' + safe if safe else ''}")


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk (a no-op where folders cannot be opened)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is flushed and renamed to `path`, on failure removed.

    Raises:
        StorageError: the disk is full or the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        os.close(descriptor)
    except OSError as error:
        raise storage_error(error, path) from error
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to `path`, complete or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes to `path`, complete or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def file_hash(path: Path) -> str:
    """Hex BLAKE2b-128 digest of a file's content, read in 4 MiB pieces."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as handle:
        while piece := handle.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()
