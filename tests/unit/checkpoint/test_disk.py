"""A checkpoint is complete or absent, verified on load, and comes back to the bit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.checkpoint import disk
from trimtab.checkpoint.disk import latest_good, load, read_meta, save
from trimtab.checkpoint.manifest import MANIFEST
from trimtab.core.errors import CheckpointError, StorageError


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"w": torch.randn(5, 7, generator=generator), "half": torch.randn(3, generator=generator).bfloat16()},
        "optimizer": {"w": {"step": torch.tensor(float(seed)), "exp_avg": torch.randn(5, 7, generator=generator)}},
        "random": torch.get_rng_state(),
    }


def empty() -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(5, 7), "half": torch.zeros(3).bfloat16()},
        "optimizer": {"w": {"step": torch.tensor(0.0), "exp_avg": torch.zeros(5, 7)}},
        "random": torch.zeros_like(torch.get_rng_state()),
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)


def test_comes_back_to_the_bit(tmp_path: Path) -> None:
    meta = {"step": 3, "loss": float("nan"), "text": "ü", "list": [1, 2.5]}
    info = save(tmp_path / "step-3", state(1), meta)
    into = empty()
    found = load(tmp_path / "step-3", into)
    assert equal(into, state(1))
    assert found["step"] == 3
    assert found["loss"] != found["loss"]
    assert found["list"] == [1, 2.5]
    on_disk = sum(path.stat().st_size for path in (tmp_path / "step-3").iterdir() if path.name != MANIFEST)
    assert info.num_bytes == on_disk
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"], "nothing hidden stays"


@settings(max_examples=40, deadline=None)
@given(which=st.integers(0, 3), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, which: int, where: float, bit: int) -> None:
    folder = tmp_path_factory.mktemp("flip") / "step-1"
    save(folder, state(), {"step": 1})
    files = sorted(path for path in folder.iterdir())
    victim = files[which]
    content = bytearray(victim.read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    victim.write_bytes(content)
    into = empty()
    with pytest.raises(CheckpointError):
        load(folder, into)
    assert equal(into, empty()), "a refused load changes nothing"
    assert latest_good(folder.parent)[0] is None


@pytest.mark.parametrize("how", ["cut", "missing", "manifest missing", "manifest empty"])
def test_damage_is_named_and_the_older_one_is_taken(tmp_path: Path, how: str) -> None:
    save(tmp_path / "step-1", state(1), {"step": 1})
    save(tmp_path / "step-2", state(2), {"step": 2})
    data = next((tmp_path / "step-2").glob("*.distcp"))
    if how == "cut":
        data.write_bytes(data.read_bytes()[:-5])
    elif how == "missing":
        data.unlink()
    elif how == "manifest missing":
        (tmp_path / "step-2" / MANIFEST).unlink()
    else:
        (tmp_path / "step-2" / MANIFEST).write_bytes(b"")
    found, meta, rejected = latest_good(tmp_path)
    assert found == tmp_path / "step-1"
    assert meta["step"] == 1
    assert [path.name for path, _ in rejected] == ["step-2"]
    assert "is damaged" in rejected[0][1]


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "step-1", state(), {})
    path = tmp_path / "step-1" / MANIFEST
    body = json.loads(path.read_text())
    body["schema"] = 99
    path.write_text(json.dumps(body))
    with pytest.raises(
        CheckpointError, match="schema 99 but this trimtab reads up to 1: use the trimtab that wrote it"
    ):
        read_meta(tmp_path / "step-1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["model"].update(w=torch.zeros(5, 8)), r"'model.w' has shape \(5, 7\) there but \(5, 8\) here"),
        (
            lambda s: s["model"].update(w=torch.zeros(5, 7).half()),
            "has dtype torch.float32 there but torch.float16 here",
        ),
        (lambda s: s["model"].update(more=torch.zeros(1)), "it has no tensor 'model.more'"),
        (lambda s: s["model"].pop("half"), "its tensor 'model.half' has no place here"),
    ],
)
def test_another_architecture_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    save(tmp_path / "step-1", state(), {})
    into = empty()
    change(into)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "step-1", into)


def test_anything_but_tensors_is_our_mistake(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="step is a int, not a tensor"):
        save(tmp_path / "step-1", {"step": 3}, {})
    assert not list(tmp_path.iterdir())


def test_saving_again_replaces_atomically(tmp_path: Path) -> None:
    save(tmp_path / "step-1", state(1), {"n": 1})
    save(tmp_path / "step-1", state(2), {"n": 2})
    into = empty()
    assert load(tmp_path / "step-1", into)["n"] == 2
    assert equal(into, state(2))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "step-1", state(1), {"n": 1})
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _path: usage._replace(free=100))
    with pytest.raises(StorageError, match=r"the disk is full: .* Older checkpoints are untouched"):
        save(tmp_path / "step-2", state(2), {"n": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_really_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real file system of 1 MiB, with the look before the leap switched off."""
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=1m tmpfs {small} 2>/dev/null"):
        pytest.skip("mounting is not allowed here")
    try:
        monkeypatch.setattr(disk, "check_space", lambda _folder, _num_bytes: None)
        save(small / "step-1", {"w": torch.ones(1000)}, {})
        with pytest.raises(StorageError, match="the disk is full"):
            save(small / "step-2", {"w": torch.ones(1_000_000)}, {})
        into = {"w": torch.zeros(1000)}
        load(small / "step-1", into)
        assert into["w"].sum() == 1000
        assert [path.name for path in small.iterdir()] == ["step-1"]
    finally:
        os.system(f"umount {small}")


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(StorageError, match="Cannot write"):
        save(tmp_path / "runs" / "step-1", state(), {})
