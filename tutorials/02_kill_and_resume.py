"""
Kill it, resume it, get the same bits
=====================================

A run is killed with ``kill -9`` and resumed. Its weights are then compared with those of a run that was left alone.
"""

# %%
# A small run with a checkpoint every 20 steps, left alone.

import email
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from trimtab.checkpoint import latest_good
from trimtab.core.records import Step, read_records

folder = Path(tempfile.mkdtemp())
program = [sys.executable, "-m", "trimtab.cli.main", "train"]
flags = ["--data.path", str(Path(email.__file__).parent), "--data.vocab_size", "512", "--data.sequence_length", "64"]
flags += ["--data.val_fraction", "0.1", "--model.preset", "llama-1m", "--train.batch_tokens", "512"]
flags += ["--train.steps", "100", "--checkpoint.every", "20", "--train.compile", "off", "--evaluate.sample_tokens", "0"]
subprocess.run([*program, "--run.name", "alone", *flags], cwd=folder, check=True, capture_output=True)

# %%
# The same again, but killed as soon as step 50 is recorded: no handler runs, nothing is flushed.

process = subprocess.Popen([*program, "--run.name", "killed", *flags], cwd=folder, stdout=subprocess.DEVNULL)
records = folder / "runs/killed/records.jsonl"
while not records.exists() or '"step":50,' not in records.read_text():
    time.sleep(0.01)
process.send_signal(signal.SIGKILL)
print("exit code:", process.wait())

# %%
# What survives: complete checkpoints only.

print(sorted(path.name for path in (folder / "runs/killed/checkpoints").glob("step-*")))
resumed = subprocess.run(
    [*program, "--resume", "--run.name", "killed"], cwd=folder, check=True, capture_output=True, text=True
)
print(next(line for line in resumed.stdout.splitlines() if line.startswith("resumed")))

# %%
# Both ended at step 100. Are the files of the last checkpoint the same, and every loss on the way?


def tensors(name: str) -> bytes:
    """The tensor file of the newest checkpoint."""
    newest, _, _ = latest_good(folder / "runs" / name / "checkpoints")
    assert newest is not None
    return next(newest.glob("*.distcp")).read_bytes()


def losses(name: str) -> dict[int, float]:
    """Loss by step; the resumed run wrote some steps twice."""
    return {r.step: r.loss for r in read_records(folder / "runs" / name) if isinstance(r, Step)}


assert tensors("alone") == tensors("killed")
assert losses("alone") == losses("killed")
print("identical, to the bit, with torch", torch.__version__)
