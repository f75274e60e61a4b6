"""Background writing does not see later updates; the right checkpoints are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.checkpoint import CheckpointWriter, load
from trimtab.checkpoint import async_writer as module
from trimtab.checkpoint.async_writer import read_best
from trimtab.core.errors import StorageError
from trimtab.core.records import Checkpoint, Fault


def steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (run_dir / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("background", [True, False])
def test_later_updates_are_not_seen(tmp_path: Path, background: bool) -> None:
    weights = {"w": torch.zeros(500_000)}
    writer = CheckpointWriter(tmp_path, keep_last=9, keep_best=False, background=background)
    for step in range(1, 6):
        weights["w"].fill_(step)
        meta = {"step": step}
        writer.request(step, weights, meta, "periodic")
        weights["w"].fill_(-1.0)
        meta["step"] = -1
    writer.close()
    for step in range(1, 6):
        into = {"w": torch.zeros(500_000)}
        assert load(tmp_path / "checkpoints" / f"step-{step}", into)["step"] == step
        assert torch.equal(into["w"], torch.full((500_000,), float(step)))
    records = writer.poll()
    assert [r.step for r in records] == [1, 2, 3, 4, 5]
    assert all(isinstance(r, Checkpoint) and r.num_bytes > 2_000_000 and r.write_s >= r.blocking_s for r in records)


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep_last=2, keep_best=True, background=True)
    for step, loss in enumerate([3.0, 1.5, 2.0, float("nan"), 1.9, 2.5], start=1):
        writer.request(step, {"w": torch.zeros(1)}, {}, "periodic", val_loss=loss)
    writer.close()
    assert steps(tmp_path) == [2, 5, 6]
    assert read_best(tmp_path / "checkpoints") == (2, 1.5)


def test_going_back_removes_what_was_left_behind(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep_last=3, keep_best=False, background=False)
    for step in (10, 20, 30, 15):
        writer.request(step, {"w": torch.zeros(1)}, {}, "periodic")
    writer.close()
    assert steps(tmp_path) == [10, 15]


def test_a_failed_periodic_save_is_a_fault_and_a_failed_last_one_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(tmp_path, keep_last=3, keep_best=False, background=True)
    real = module.save

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise StorageError("Cannot write: the disk is full.")

    monkeypatch.setattr(module, "save", full)
    writer.request(1, {"w": torch.zeros(1)}, {}, "periodic")
    writer.wait()
    (fault,) = writer.poll()
    assert isinstance(fault, Fault)
    assert "the disk is full" in fault.what
    assert "training goes on" in fault.action
    monkeypatch.setattr(module, "save", real)
    writer.request(2, {"w": torch.zeros(1)}, {}, "periodic")
    monkeypatch.setattr(module, "save", full)
    writer.request(3, {"w": torch.zeros(1)}, {}, "final")
    with pytest.raises(StorageError):
        writer.wait()
    writer.close()
    assert steps(tmp_path) == [2]
    assert json.loads((tmp_path / "checkpoints" / "step-2" / "meta.json").read_text()) == {}
