"""One checkpoint on disk: written whole or not at all, verified before it is believed.

A checkpoint is a nested dictionary of tensors (torch Distributed Checkpoint files) and a JSON-able dictionary, `meta`.
`save` writes both into a hidden sibling folder, hashes and flushes every file, writes the manifest, flushes it, and
renames the folder to its name: one atomic step, so a kill -9 at any instant leaves a complete checkpoint or none. A
second save of a step first moves the complete old folder aside under a name from which it is brought back.

`load` checks every hash, then every name, shape and dtype against the state it is to fill, and only then copies, in
place and without any cast: what comes back has the bits that went in. Under a process group each rank writes and
hashes its own shards and reads what its (possibly different) sharding needs.

Rejected: `torch.save` of one file (no shards, no resharding); safetensors alone (no DTensor); `dcp.async_save` (its
commit is not atomic, and it has no hashes). Tensors only: DCP would pickle any other object; those belong in `meta`.

Limits: all ranks must see one file system. `meta` comes back as JSON brings it (tuples as lists, keys as text). The
DCP metadata file is a pickle: load no checkpoint from someone you do not trust.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trimtab.checkpoint.manifest import (
    META,
    FileEntry,
    check_files,
    damaged,
    entries_of,
    hidden_name,
    read_manifest,
    step_folders,
    sweep,
    write_manifest,
    write_synced,
)
from trimtab.checkpoint.ranks import Ranks
from trimtab.core.atomic import storage_error, sync_folder
from trimtab.core.errors import CheckpointError

_SPACE_MARGIN = 1 << 16
"""Bytes asked for beyond the tensors, for metadata and manifest."""


@dataclass(frozen=True)
class SavedInfo:
    """A checkpoint that is complete on disk."""

    num_bytes: int
    write_s: float
    """From the call to completeness (seconds)."""


def flatten(state_dict: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Tensors of a nested dictionary by dotted path; the tensors themselves, not copies.

    Raises:
        TypeError: a leaf is not a tensor, or two paths spell the same name.
    """
    flat: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        path = f"{prefix}{key}"
        if isinstance(value, Tensor):
            found = {path: value}
        elif isinstance(value, Mapping):
            found = flatten(value, f"{path}.")
        else:
            raise TypeError(f"A checkpoint's {path} is a {type(value).__name__}, not a tensor: put it in meta.")
        if twice := flat.keys() & found.keys():
            raise TypeError(f"Two entries of the checkpoint are both called {min(twice)}: rename one.")
        flat.update(found)
    return flat


def _os_error_in(error: BaseException) -> OSError | None:
    """The `OSError` that an exception is, or was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


class _Writer(FileSystemWriter):
    """DCP's writer, except that a full disk comes out as the `OSError` it was, not as torch's complaint about it."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause = _os_error_in(error)
            if cause is None or cause is error:
                raise
            raise OSError(cause.errno, cause.strerror) from error


def _no_single_process_warning() -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _first_failure(error: CheckpointException) -> BaseException:
    """The exception behind DCP's own, which is no `Exception` and would slip through handlers."""
    for wrapped, _ in error.failures.values():
        return wrapped
    return RuntimeError(str(error))


def _make_part(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = hidden_name(folder, "part")
    part.mkdir()
    return part


def _local_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that this rank holds of them."""
    total = 0
    for tensor in tensors.values():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        total += local.numel() * local.element_size()
    return total


def check_space(folder: Path, num_bytes: int) -> None:
    """Refuse before writing what cannot fit, so that the run's records can still be written.

    Raises:
        OSError: ENOSPC.
    """
    if shutil.disk_usage(folder).free < num_bytes + _SPACE_MARGIN:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _commit(part: Path, folder: Path, meta: Mapping[str, Any], of_ranks: list[dict[str, FileEntry]]) -> int:
    """Complete `part` and give it its name; returns its size (bytes)."""
    write_synced(part / META, json.dumps(meta))
    entries = {name: entry for of_rank in of_ranks for name, entry in of_rank.items()}
    entries |= entries_of(part, ".metadata") | entries_of(part, META)
    total = write_manifest(part, entries)
    displaced = None
    if folder.exists():
        displaced = hidden_name(folder, "old")
        folder.rename(displaced)
    try:
        part.rename(folder)
    except OSError:
        if displaced is not None:
            displaced.rename(folder)
        raise
    sync_folder(folder.parent)
    if displaced is not None:
        shutil.rmtree(displaced, ignore_errors=True)
    return total


def save(
    folder: Path,
    state_dict: Mapping[str, Any],
    meta: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> SavedInfo:
    """Write a checkpoint; when this returns it is complete on disk, when it raises there is none of it.

    Args:
        folder: its final place, such as `runs/a/checkpoints/step-250`; one already there is replaced atomically.
        state_dict: nested dictionary of tensors (plain or DTensor).
        meta: what JSON can hold; not-a-number and infinity survive.
        process_group: the ranks that save together, each calling this; None: the default group, or one process.

    Raises:
        StorageError: the disk is full or read-only; older checkpoints are untouched.
        TypeError: a leaf is not a tensor, or `meta` does not fit JSON.
    """
    began = time.perf_counter()
    tensors = flatten(state_dict)
    ranks = Ranks(process_group)
    part: Path | None = None
    try:
        part = scratch = ranks.on_first(lambda: _make_part(folder))
        ranks.on_all(lambda: check_space(scratch, _local_bytes(tensors)))
        _no_single_process_warning()
        try:
            writer = _Writer(scratch)
            save_tensors(dict(tensors), storage_writer=writer, process_group=process_group, no_dist=ranks.alone)
        except CheckpointException as error:
            raise _first_failure(error) from error
        entries = ranks.on_all(lambda: entries_of(scratch, f"__{ranks.rank}_*.distcp"))
        total = ranks.on_first(lambda: _commit(scratch, folder, meta, entries))
    except BaseException as error:
        if part is not None and ranks.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            raise storage_error(error, folder, "Older checkpoints are untouched.") from error
        raise
    return SavedInfo(total, time.perf_counter() - began)


def verify(folder: Path, process_group: dist.ProcessGroup | None = None) -> None:
    """Check a checkpoint byte for byte; the ranks share the work.

    Raises:
        CheckpointError: it is damaged or of a newer schema; all ranks get the same error.
    """
    ranks = Ranks(process_group)
    entries = sorted(ranks.on_first(lambda: read_manifest(folder)).items())
    ranks.on_all(lambda: check_files(folder, dict(entries[ranks.rank :: ranks.size])))


def read_meta(folder: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint (its hash checked, the tensors not read).

    Raises:
        CheckpointError: it is damaged or of a newer schema.
    """
    entries = read_manifest(folder)
    if META not in entries:
        raise damaged(folder, f"{META} is not in the manifest")
    check_files(folder, {META: entries[META]})
    meta: dict[str, Any] = json.loads((folder / META).read_bytes())
    return meta


def _another_architecture(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {str(folder)!r} is of another architecture: {what}: "
        "use the configuration saved with its run, or start a new run."
    )


def _check_fits(folder: Path, tensors: Mapping[str, Tensor], saved: Mapping[str, Any], strict: bool) -> None:
    """Refuse a checkpoint whose tensors are not those of the state to be filled."""
    for name, tensor in tensors.items():
        entry = saved.get(name)
        if entry is None:
            continue
        if not isinstance(entry, TensorStorageMetadata):
            raise _another_architecture(folder, f"{name!r} is not a tensor there")
        there, here = tuple(entry.size), tuple(tensor.shape)
        if there != here:
            raise _another_architecture(folder, f"tensor {name!r} has shape {there} there but {here} here")
        if entry.properties.dtype != tensor.dtype:
            what = f"tensor {name!r} has dtype {entry.properties.dtype} there but {tensor.dtype} here"
            raise _another_architecture(folder, what)
    for name in tensors:
        if name not in saved:
            raise _another_architecture(folder, f"it has no tensor {name!r}")
    for name in saved if strict else ():
        if name not in tensors:
            raise _another_architecture(folder, f"its tensor {name!r} has no place here")


def load(
    folder: Path,
    into_state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    check_hashes: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill the tensors of `into_state_dict` in place, bit for bit, and return the checkpoint's `meta`.

    Args:
        folder: a `step-N` folder.
        into_state_dict: nested dictionary of tensors with the names, shapes and dtypes that were saved.
        strict: refuse a checkpoint that holds more; no: read just these (a model without its optimizer).
        check_hashes: read every byte first; no: only right after `latest_good` has done it.
        process_group: the ranks that load together.

    Raises:
        CheckpointError: damaged, of a newer schema, or of another architecture; no tensor was changed.
    """
    tensors = flatten(into_state_dict)
    ranks = Ranks(process_group)
    if check_hashes:
        verify(folder, process_group)
    meta = ranks.on_first(lambda: read_meta(folder))
    reader = FileSystemReader(folder)
    try:
        saved = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise damaged(folder, f".metadata cannot be read ({error})") from error
    _check_fits(folder, tensors, saved, strict)
    _no_single_process_warning()
    try:
        with torch.no_grad():
            load_tensors(dict(tensors), storage_reader=reader, process_group=process_group, no_dist=ranks.alone)
    except CheckpointException as error:
        cause = _first_failure(error)
        raise damaged(folder, f"its tensors cannot be read ({cause})") from error
    return meta


def _find_good(checkpoints_dir: Path) -> tuple[Path | None, dict[str, Any], list[tuple[Path, str]]]:
    sweep(checkpoints_dir, delete=False)
    rejected: list[tuple[Path, str]] = []
    for folder in step_folders(checkpoints_dir):
        try:
            check_files(folder, read_manifest(folder))
            return folder, read_meta(folder), rejected
        except CheckpointError as error:
            rejected.append((folder, str(error)))
    return None, {}, rejected


def latest_good(
    checkpoints_dir: Path, *, process_group: dist.ProcessGroup | None = None
) -> tuple[Path | None, dict[str, Any], list[tuple[Path, str]]]:
    """The newest checkpoint that is whole, its `meta`, and those passed over with the reason.

    Returns:
        `(None, {}, rejected)` where there is none. The caller writes a Fault record for each rejected one.
    """
    return Ranks(process_group).on_first(lambda: _find_good(checkpoints_dir))
