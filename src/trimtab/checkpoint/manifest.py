"""What makes a checkpoint folder whole: its manifest, and the names of folders that are not (yet, or any more) one.

`manifest.json` lists every file with its size and BLAKE2b-128 hash, the schema number, and a digest of the list itself,
so that a flipped bit anywhere, in the list too, is found. A folder named `step-N` without a valid manifest is damaged.

Everything else in `checkpoints/` is hidden and says whose it is: `.step-N.KIND-PID-BORN-RANDOM`. KIND `part` is being
written, `trash` is being deleted, `old` is a complete checkpoint that a second save of the same step is replacing.
`sweep` clears what dead processes left: parts and trash go, an `old` returns to its name if its successor never took
it. A process is known by its id and its birth time, because a container restarts with the same process ids.

Rejected: one hash over the whole folder (it could not say which file is damaged); a marker file for completeness (the
rename is already atomic, and a marker says nothing about damage); a signature (a manifest finds accidents, not
attackers: load no checkpoint from someone you do not trust, torch's own metadata file is a pickle).

Limits: hashes are of bytes read back just after writing, mostly from the page cache; a disk that loses flushed data
is found at load. Process ids are those of this host: two hosts must not write into one run directory at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trimtab.core.atomic import file_hash, sync_folder
from trimtab.core.errors import CheckpointError

SCHEMA = 1
"""Version of the layout of a checkpoint folder; a reader refuses a larger one."""
MANIFEST, META = "manifest.json", "meta.json"
_STEP = re.compile(r"step-(\d+)")
_HIDDEN = re.compile(r"\.(step-\d+|.+)\.(part|trash|old)-(\d+)-(\d+)-[0-9a-f]{8}")
_BIRTH_SLACK_S = 2
"""Birth times are derived from the boot time, which clock adjustment moves by about a second."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    num_bytes: int
    blake2b: str


def step_of(folder: Path) -> int:
    """The step in a folder's name, or -1 where it is not a checkpoint's name."""
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else -1


def step_folders(checkpoints_dir: Path) -> list[Path]:
    """All `step-N` entries, newest (highest step) first; empty where there is no such folder."""
    try:
        found = [path for path in checkpoints_dir.iterdir() if step_of(path) >= 0]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=step_of, reverse=True)


def hidden_name(folder: Path, kind: str) -> Path:
    """A fresh hidden sibling of `folder` that belongs to this process."""
    born = int(psutil.Process().create_time())
    return folder.parent / f".{folder.name}.{kind}-{os.getpid()}-{born}-{secrets.token_hex(4)}"


def _is_alive(pid: int, born: int) -> bool:
    try:
        return bool(abs(int(psutil.Process(pid).create_time()) - born) <= _BIRTH_SLACK_S)
    except psutil.Error:
        return False


def sweep(checkpoints_dir: Path, delete: bool = True) -> None:
    """Clear what dead processes left behind; what cannot be cleared (a read-only disk) stays.

    Args:
        checkpoints_dir: the folder that holds `step-N`.
        delete: also delete parts and trash; no: only bring back displaced checkpoints.
    """
    try:
        entries = list(checkpoints_dir.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in entries:
        match = _HIDDEN.fullmatch(path.name)
        if match is None or _is_alive(int(match.group(3)), int(match.group(4))):
            continue
        home = path.parent / match.group(1)
        if match.group(2) == "old" and not home.exists():
            try:
                path.rename(home)
            except OSError:
                continue
        elif delete:
            shutil.rmtree(path, ignore_errors=True)


def discard(folder: Path) -> None:
    """Delete a checkpoint so that a kill on the way never leaves half of one under a checkpoint's name.

    Raises:
        OSError: the folder could not be renamed; it is untouched.
    """
    trash = hidden_name(folder, "trash")
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write_synced(path: Path, text: str) -> None:
    """Write a file and flush it to the disk."""
    with open(path, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())


def entries_of(folder: Path, pattern: str) -> dict[str, FileEntry]:
    """Size and hash of the files that match a glob pattern."""
    return {path.name: FileEntry(path.stat().st_size, file_hash(path)) for path in sorted(folder.glob(pattern))}


def write_manifest(folder: Path, entries: dict[str, FileEntry]) -> int:
    """Write the manifest of a folder and flush it; returns the total size (bytes)."""
    total = sum(entry.num_bytes for entry in entries.values())
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "written_s": time.time(),
        "total_bytes": total,
        "files": {name: {"bytes": entry.num_bytes, "blake2b": entry.blake2b} for name, entry in entries.items()},
    }
    write_synced(folder / MANIFEST, json.dumps({**body, "digest": _digest(body)}, indent=1))
    sync_folder(folder)
    return total


def damaged(folder: Path, what: str) -> CheckpointError:
    """The refusal of a checkpoint that is not whole."""
    return CheckpointError(f"The checkpoint {str(folder)!r} is damaged: {what}; use another checkpoint of the run.")


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """The files that a checkpoint must have.

    Raises:
        CheckpointError: no manifest, an unreadable or altered one, or one of a newer schema.
    """
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint folder {str(folder)!r}: name an existing step-N folder.")
    try:
        body = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise damaged(folder, f"{MANIFEST} is missing") from None
    except (OSError, ValueError) as error:
        raise damaged(folder, f"{MANIFEST} cannot be read ({error})") from None
    if not isinstance(body, dict) or not isinstance(body.get("schema"), int):
        raise damaged(folder, f"{MANIFEST} has no schema number")
    if body["schema"] > SCHEMA:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} has schema {body['schema']} but this trimtab reads up to {SCHEMA}: "
            "use the trimtab that wrote it, or a newer one."
        )
    digest = body.pop("digest", None)
    if digest != _digest(body):
        raise damaged(folder, f"{MANIFEST} was altered (its digest does not match)")
    return {name: FileEntry(item["bytes"], item["blake2b"]) for name, item in body["files"].items()}


def check_files(folder: Path, entries: dict[str, FileEntry]) -> None:
    """Compare files with their entries, byte for byte.

    Raises:
        CheckpointError: the first file that is missing, cut short or altered.
    """
    for name, entry in entries.items():
        path = folder / name
        try:
            num_bytes = path.stat().st_size
            if num_bytes != entry.num_bytes:
                raise damaged(folder, f"{name} holds {num_bytes} bytes instead of {entry.num_bytes}")
            if file_hash(path) != entry.blake2b:
                raise damaged(folder, f"the content of {name} does not match its hash")
        except FileNotFoundError:
            raise damaged(folder, f"{name} is missing") from None
        except OSError as error:
            raise damaged(folder, f"{name} cannot be read ({error.strerror})") from None
