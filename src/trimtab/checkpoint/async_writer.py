"""Saves while training goes on, and keeps the right checkpoints.

`request` copies the state into staging buffers (made once, reused for every save, pinned for an accelerator), starts a
thread that writes the copy, and returns: later updates are not seen. One write is in flight at a time; a request that
comes sooner waits for it, and that wait counts as blocking time. `poll` hands over records of what finished.

A thread, not a process: writing is system calls, checksums and hashes, all of which release the interpreter lock, while
a process needs the state in shared memory and, forked beside torch's threads, may deadlock, or, spawned, costs seconds
of start-up and another copy of torch in memory. The thread is no daemon: an interpreter that ends waits for the write.

A failed periodic save becomes a Fault record and training goes on: the next may succeed, and the older ones are
untouched. A failed last save (`final`, `signal`) also raises from `wait`, since nothing else holds that work.

Kept: the newest `keep_last` and the one of lowest validation loss, noted in `best.json`. A completed save of step n
removes those of later steps: the run went back (a rollback, or a damaged newest one), and what it left behind must not
be resumed from. A failed deletion is a Fault.

Rejected: two staging copies so that a second request need not wait (twice the memory, for a disk that is too slow
anyway); hard links for the best one (not on every file system).

Limits: the copy needs as much host memory as the state; under a process group every rank must request in the same
order, and the writer makes its own gloo group so that its messages never mix with training's.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from trimtab.checkpoint.disk import save
from trimtab.checkpoint.manifest import discard, step_folders, step_of, sweep
from trimtab.checkpoint.ranks import Ranks
from trimtab.core.atomic import storage_error, write_text
from trimtab.core.errors import CheckpointError, StorageError
from trimtab.core.records import Checkpoint, Fault

LAST_REASONS = ("final", "signal")
"""Reasons of saves after which the process ends: their failure is raised."""
BEST = "best.json"


class CheckpointWriter:
    """Writes the checkpoints of one run.

    Args:
        run_dir: the run's folder; leftovers of dead processes in its checkpoints are cleared.
        keep_last: how many of the newest to keep.
        keep_best: whether to keep the one of lowest validation loss too.
        background: write in a thread; no: `request` returns when the checkpoint is complete.
        subfolder: where in `run_dir` they lie.

    Raises:
        StorageError: the folder cannot be made.
    """

    def __init__(
        self, run_dir: Path, keep_last: int, keep_best: bool, background: bool, *, subfolder: str = "checkpoints"
    ) -> None:
        assert keep_last >= 1, f"keep_last is {keep_last}"
        self.run_dir = run_dir
        self.folder = run_dir / subfolder
        self._keep_last, self._keep_best, self._background = keep_last, keep_best, background
        distributed = dist.is_available() and dist.is_initialized()
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo") if distributed else None
        self._ranks = Ranks(self._group)
        self._lock = threading.Lock()
        self._finished: list[Checkpoint | Fault] = []
        self._thread: threading.Thread | None = None
        self._last_error: Exception | None = None
        self._stager: DefaultStager | None = None
        try:
            self._ranks.on_first(self._open)
        except OSError as error:
            raise storage_error(error, self.folder) from error

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        sweep(self.folder)

    def request(
        self,
        step: int,
        state_dict: Mapping[str, Any],
        meta: Mapping[str, Any],
        reason: str,
        val_loss: float | None = None,
    ) -> None:
        """Save this very state as `step-{step}`.

        Args:
            step: updates done.
            state_dict: nested dictionary of tensors; may be changed as soon as this returns.
            meta: JSON-able; serialised before this returns.
            reason: `periodic`, `final`, `signal` or `best`; it goes into the record.
            val_loss: validation loss of this state (nats per token), for `keep_best`.
        """
        began = time.perf_counter()
        self._join()
        frozen_meta: dict[str, Any] = json.loads(json.dumps(meta))
        arguments = (step, self._stage(state_dict) if self._background else state_dict, frozen_meta, reason, val_loss)
        if not self._background:
            self._write(*arguments, began, None)
            return
        blocking_s = time.perf_counter() - began
        self._thread = threading.Thread(
            target=self._write, args=(*arguments, began, blocking_s), name=f"checkpoint-{step}", daemon=False
        )
        self._thread.start()

    def _stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        if self._stager is None:
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=torch.cuda.is_available(),
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=False,
                )
            )
        staged = self._stager.stage(dict(state_dict))
        assert isinstance(staged, dict)
        return staged

    def _write(
        self,
        step: int,
        state_dict: Mapping[str, Any],
        meta: dict[str, Any],
        reason: str,
        val_loss: float | None,
        began: float,
        blocking_s: float | None,
    ) -> None:
        """Save, note the outcome, delete what is not kept; never raises (but for an interrupt in the foreground)."""
        folder = self.folder / f"step-{step}"
        where = str(folder.relative_to(self.run_dir))
        try:
            info = save(folder, state_dict, meta, process_group=self._group)
        except Exception as error:
            kept = "older checkpoints are untouched"
            last = reason in LAST_REASONS
            action = f"the run ends; {kept}" if last else f"training goes on; {kept}"
            text = str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
            self._note(Fault(step=step, what=f"checkpoint not written: {text}", where=where, action=action))
            if last:
                self._last_error = error
            return
        write_s = time.perf_counter() - began
        self._note(
            Checkpoint(
                step=step,
                path=where,
                num_bytes=info.num_bytes,
                blocking_s=write_s if blocking_s is None else blocking_s,
                write_s=write_s,
                reason=reason,
            )
        )
        if self._ranks.rank == 0:
            try:
                self._retain(step, val_loss)
            except (OSError, StorageError) as error:
                self._note(Fault(step=step, what=f"old checkpoints not deleted: {error}", where=where, action="kept"))

    def _note(self, record: Checkpoint | Fault) -> None:
        with self._lock:
            self._finished.append(record)

    def _retain(self, step: int, val_loss: float | None) -> None:
        best_step, best_loss = read_best(self.folder) if self._keep_best else (-1, math.inf)
        if best_step > step or not (self.folder / f"step-{best_step}").is_dir():
            best_step, best_loss = -1, math.inf
        if best_step == step:  # saved again: the old loss no longer describes it unless given anew
            best_step, best_loss = (step, best_loss) if val_loss is None else (-1, math.inf)
        if self._keep_best and val_loss is not None and math.isfinite(val_loss) and val_loss < best_loss:
            best_step = step
            write_text(self.folder / BEST, json.dumps({"step": step, "val_loss": val_loss}))
        present = step_folders(self.folder)
        newest = [folder for folder in present if step_of(folder) <= step][: self._keep_last]
        for folder in present:
            if folder not in newest and step_of(folder) != best_step:
                discard(folder)

    def poll(self) -> list[Checkpoint | Fault]:
        """Records of the writes that finished since the last call, in order."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Return when nothing is in flight.

        Raises:
            StorageError: the last save (`final` or `signal`) failed; `poll` has its Fault. Raised once.
        """
        self._join()
        error, self._last_error = self._last_error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """`wait`, then free the staging buffers; a second call does nothing.

        Raises:
            StorageError: as `wait`, if that was not called.
        """
        try:
            self.wait()
        finally:
            if self._stager is not None:
                self._stager.close()
                self._stager = None


def read_best(checkpoints_dir: Path) -> tuple[int, float]:
    """Step and validation loss of the best checkpoint; (-1, inf) where none is noted."""
    try:
        body = json.loads((checkpoints_dir / BEST).read_bytes())
        return int(body["step"]), float(body["val_loss"])
    except FileNotFoundError:
        return -1, math.inf
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{str(checkpoints_dir / BEST)!r} cannot be read ({error}): delete it; the next evaluation makes it anew."
        ) from error
