"""kill -9 at any instant of a save leaves the last complete checkpoint, or the new one, never half of one."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import torch

from trimtab.checkpoint import CheckpointWriter, latest_good, load

_CHILD = """
import sys, torch
from pathlib import Path
from trimtab.checkpoint import CheckpointWriter
writer = CheckpointWriter(Path(sys.argv[1]), keep_last=2, keep_best=False, background=sys.argv[2] == "yes")
step = int(sys.argv[3])
while True:
    step += 1
    state = {"w": torch.full((200_000,), float(step)), "x": {"y": torch.tensor(step)}}
    writer.request(step, state, {"step": step}, "periodic")
    writer.wait()
    print(step, flush=True)
"""
_KILLS = 12


def test_any_instant(tmp_path: Path) -> None:
    rng = random.Random(0)
    done = 0
    for number in range(_KILLS):
        background = "yes" if number % 2 else "no"
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(tmp_path), background, str(done)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(rng.randint(1, 2)):
            done = max(done, int(child.stdout.readline()))
        time.sleep(rng.random() * 0.05)  # the instant of the kill is what is drawn here
        child.kill()
        rest = child.communicate()[0].split()
        done = max([done, *(int(word) for word in rest)])
        folder, meta, rejected = latest_good(tmp_path / "checkpoints")
        assert folder is not None
        assert not rejected, "no folder with a checkpoint's name is ever half"
        assert meta["step"] in (done, done + 1), "an announced checkpoint is never lost"
        into = {"w": torch.zeros(200_000), "x": {"y": torch.tensor(0)}}
        load(folder, into)
        assert torch.equal(into["w"], torch.full((200_000,), float(meta["step"])))
        assert int(into["x"]["y"]) == meta["step"]
        done = meta["step"]
    CheckpointWriter(tmp_path, keep_last=2, keep_best=False, background=False).close()
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert all(name.startswith("step-") for name in left), f"leftovers of the killed are cleared: {left}"
