"""The folder in which prepared corpora are kept, and the discipline that keeps it whole.

    CACHE/fingerprints/F.json    what the input looked like (paths, sizes, times, settings) -> key of the corpus
    CACHE/corpora/KEY/           a complete corpus; KEY is a hash of its content and settings
    CACHE/locks/F.lock           held (flock) by the one process that builds for fingerprint F
    CACHE/.building-F-*/         being built; left over if nobody holds F's lock
    CACHE/.removing-F-*/         left over, being removed

How: a corpus is built in a `.building-` folder and renamed when complete, so a kill -9 leaves a folder that no reader
looks at and the next builder removes. The kernel drops the lock of a killed process. A second process that wants the
same corpus waits for the lock, then finds the corpus there. Two inputs of equal content may build at once; the second
rename fails and the first one's corpus is used.

Rejected: lock files with a process id in them (stale after a kill, wrong across machines), a database.
Limits: `flock` must work on the cache's file system (local disks and NFSv4 do; set `data.cache_dir` otherwise).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from trimtab.core.atomic import storage_error, sync_folder, write_text


def digest_of(*parts: object) -> str:
    """Hex BLAKE2b-128 of the JSON of some plain values."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class Cache:
    """One cache folder; nothing is written before `lock`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, fingerprint: str) -> Path | None:
        """The complete corpus that was built for a fingerprint, if it is there."""
        try:
            entry = json.loads((self.root / "fingerprints" / f"{fingerprint}.json").read_text(encoding="utf-8"))
            folder = self.folder(str(entry["key"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return folder if (folder / "corpus.json").is_file() else None

    def folder(self, key: str) -> Path:
        """Where the corpus of a content key lies."""
        return self.root / "corpora" / key

    def remember(self, fingerprint: str, key: str) -> None:
        """Record that a fingerprint leads to a content key."""
        write_text(self.root / "fingerprints" / f"{fingerprint}.json", json.dumps({"key": key}) + "\n")

    @contextlib.contextmanager
    def lock(self, fingerprint: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the right to build for a fingerprint; `waiting` is called first if another process holds it."""
        descriptor = self._open_lock(fingerprint)
        try:
            try:
                free = self._try(descriptor)
                if not free:
                    waiting()
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                raise storage_error(error, self.root, "Set data.cache_dir to a disk that has file locks.") from error
            yield
        finally:
            os.close(descriptor)

    def _open_lock(self, fingerprint: str) -> int:
        path = self.root / "locks" / f"{fingerprint}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise storage_error(error, self.root, "Set data.cache_dir.") from error

    @staticmethod
    def _try(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    @contextlib.contextmanager
    def building(self, fingerprint: str) -> Iterator[Path]:
        """A fresh temporary folder, removed at the end unless `publish` moved it. Call with the lock held."""
        self._remove_stale(fingerprint)
        try:
            folder = Path(tempfile.mkdtemp(prefix=f".building-{fingerprint}-", dir=self.root))
            folder.chmod(0o755)
        except OSError as error:
            raise storage_error(error, self.root, "Set data.cache_dir.") from error
        try:
            yield folder
        except OSError as error:
            raise storage_error(
                error, folder, "Nothing is lost; the corpus is built anew at the next start."
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _remove_stale(self, own: str) -> None:
        for folder in self.root.glob(".removing-*"):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in self.root.glob(".building-*"):
            fingerprint = folder.name.removeprefix(".building-").partition("-")[0]
            if fingerprint == own:
                self._remove(folder)
                continue
            descriptor = self._open_lock(fingerprint)
            try:
                if self._try(descriptor):
                    self._remove(folder)
            finally:
                os.close(descriptor)

    def _remove(self, folder: Path) -> None:
        # Renamed first: a worker that outlives its killed parent for a moment can then make no new file in it.
        target = folder.with_name(folder.name.replace(".building-", ".removing-"))
        with contextlib.suppress(OSError):
            folder.rename(target)
        shutil.rmtree(target, ignore_errors=True)

    def publish(self, folder: Path, key: str) -> Path:
        """Rename a complete folder to its place; if another process was first, its corpus is the one."""
        target = self.folder(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        sync_folder(folder)
        try:
            os.rename(folder, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not (target / "corpus.json").is_file():
                raise
        sync_folder(target.parent)
        return target
