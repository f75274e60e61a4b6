"""
A first run, and what it leaves behind
======================================

Train a small model on a folder of text, look at the records, write the report, and compare two runs honestly.
"""

# %%
# Any folder of text will do. Here: the standard library's ``email`` package, which is on every machine with Python.

import email
import json
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
text = Path(email.__file__).parent


def trimtab(*words: str) -> str:
    """Run a command line and return what it printed."""
    command = [sys.executable, "-m", "trimtab.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout


flags = ["--data.path", str(text), "--data.vocab_size", "1024", "--data.sequence_length", "128"]
flags += ["--data.val_fraction", "0.1", "--model.preset", "llama-1m", "--train.batch_tokens", "1024"]
flags += ["--evaluate.every", "20", "--train.compile", "off", "--evaluate.sample_tokens", "32"]
print(trimtab("train", "--run.name", "plain", "--train.steps", "80", *flags))

# %%
# The run directory holds everything: the resolved configuration, the environment, the records, the checkpoints, the
# page.

for path in sorted((folder / "runs/plain").iterdir()):
    print(path.name)

# %%
# Records are one JSON object a line. The last evaluation:

lines = (folder / "runs/plain/records.jsonl").read_text().splitlines()
evaluations = [json.loads(line) for line in lines if '"kind":"evaluation"' in line]
print(json.dumps(evaluations[-1], indent=1))

# %%
# Now the same with short sequences for the first half of the run, and the comparison: what did each spend until the
# loss that both reached?

trimtab("train", "--run.name", "short-first", "--train.steps", "80", *flags, "--schedule.short_sequence_length", "32")
comparison = json.loads(trimtab("compare", "runs/plain", "runs/short-first", "--json"))
print(f"target {comparison['target']:.3f} nats per token")
for row in comparison["rows"]:
    print(f"{row['run']:12} {row['train_s']:6.2f} s  {row['tokens']:9,.0f} tokens  {row['flops']:.3g} FLOPs")
for warning in comparison["warnings"]:
    print("note:", warning)
