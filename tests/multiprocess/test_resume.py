"""A run that is killed and resumed ends in the very bits of one that was not. Real processes, real kill -9."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.checkpoint.disk import latest_good
from trimtab.core.records import Checkpoint, Fault, RunEnd, RunStart, Step, latest_attempt, read_records

STEPS = 200


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "trimtab.cli.main", *words]


def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command(*words), capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == code, f"exit {result.returncode}: {result.stderr}\n{result.stdout}"
    return result


def final_state(run_dir: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint, read without knowing the model."""
    folder, meta, rejected = latest_good(run_dir / "checkpoints")
    assert folder is not None
    assert not rejected
    assert meta["progress"]["step"] == STEPS
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = run_dir / "state.pt"
    dcp_to_torch_save(folder, path)

    def flat(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
        if isinstance(tree, torch.Tensor):
            return {prefix: tree}
        found: dict[str, torch.Tensor] = {}
        for key, value in tree.items():
            found |= flat(value, f"{prefix}/{key}")
        return found

    return flat(torch.load(path, weights_only=False))


def wait_for_step(run_dir: Path, process: subprocess.Popen[str], step: int) -> None:
    """Return when the run has recorded `step`; fail if it ends before."""
    deadline = time.monotonic() + 120
    records = run_dir / "records.jsonl"
    while time.monotonic() < deadline:
        if (
            records.exists()
            and '"kind":"step","schema":1' in (text := records.read_text())
            and f'"step":{step},' in text
        ):
            return
        if process.poll() is not None:
            out, err = process.communicate()
            pytest.fail(f"the run ended (exit {process.returncode}) before step {step}: {out}{err}")
        time.sleep(0.005)  # polls a condition; the deadline is generous
    process.kill()
    pytest.fail(f"step {step} was not reached in time")


@pytest.fixture(scope="module")
def straight(tiny_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 steps without interruption."""
    folder = tmp_path_factory.mktemp("runs")
    run("train", "--run.dir", str(folder), "--run.name", "straight", "--train.steps", str(STEPS), *tiny_flags)
    return folder / "straight"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_killed_and_resumed_equals_straight(optimizer: str, tiny_flags: list[str], tmp_path: Path) -> None:
    flags = ["--run.dir", str(tmp_path), "--train.steps", str(STEPS), "--optim.name", optimizer, *tiny_flags]
    flags += ["--schedule.short_sequence_length", "16", "--checkpoint.every", "30"]
    run("train", "--run.name", "straight", *flags)
    process = subprocess.Popen(
        command("train", "--run.name", "killed", *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    killed = tmp_path / "killed"
    wait_for_step(killed, process, 75)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not [r for r in read_records(killed) if isinstance(r, RunEnd)]
    run("train", "--resume", "--run.dir", str(tmp_path), "--run.name", "killed")

    wanted, found = final_state(tmp_path / "straight"), final_state(killed)
    assert wanted.keys() == found.keys()
    assert len(wanted) > 40
    for name, tensor in wanted.items():
        assert torch.equal(tensor, found[name]), f"{name} differs after the resume"
    starts = [r for r in read_records(killed) if isinstance(r, RunStart)]
    assert [start.resumed_from_step >= 30 for start in starts] == [False, True]
    losses = [r.loss for r in latest_attempt(read_records(killed)) if isinstance(r, Step)]
    assert losses == [r.loss for r in read_records(tmp_path / "straight") if isinstance(r, Step)]


def test_killed_before_the_first_checkpoint_starts_over(tiny_flags: list[str], straight: Path, tmp_path: Path) -> None:
    flags = ["--run.dir", str(tmp_path), "--run.name", "a", "--train.steps", str(STEPS), *tiny_flags]
    process = subprocess.Popen(command("train", *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_step(tmp_path / "a", process, 3)
    process.kill()
    process.communicate()
    run("train", "--resume", "--run.dir", str(tmp_path), "--run.name", "a")
    wanted, found = final_state(straight), final_state(tmp_path / "a")
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(
    number: int, tiny_flags: list[str], straight: Path, tmp_path: Path
) -> None:
    flags = ["--run.dir", str(tmp_path), "--run.name", "a", "--train.steps", str(STEPS), *tiny_flags]
    process = subprocess.Popen(command("train", *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_step(tmp_path / "a", process, 20)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert f"trimtab train --resume --run.dir {tmp_path} --run.name a" in out
    end = [r for r in read_records(tmp_path / "a") if isinstance(r, RunEnd)][-1]
    saved = [r for r in read_records(tmp_path / "a") if isinstance(r, Checkpoint)][-1]
    assert end.outcome == "interrupted"
    assert (saved.reason, saved.step) == ("signal", end.step)
    run("train", "--resume", "--run.dir", str(tmp_path), "--run.name", "a")
    wanted, found = final_state(straight), final_state(tmp_path / "a")
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_fault(
    tiny_flags: list[str], straight: Path, tmp_path: Path
) -> None:
    flags = ["--run.dir", str(tmp_path), "--run.name", "a", "--checkpoint.every", "50", *tiny_flags]
    process = subprocess.Popen(
        command("train", "--train.steps", str(STEPS), *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_step(tmp_path / "a", process, 130)
    process.kill()
    process.communicate()
    newest = tmp_path / "a" / "checkpoints" / "step-100"
    data = next(newest.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    run("train", "--resume", "--run.dir", str(tmp_path), "--run.name", "a")
    faults = [r for r in read_records(tmp_path / "a") if isinstance(r, Fault)]
    assert len(faults) == 1
    assert "does not match its hash" in faults[0].what
    assert faults[0].action == "fell back to step 50"
    wanted, found = final_state(straight), final_state(tmp_path / "a")
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


def test_two_runs_in_one_directory(tiny_flags: list[str], tmp_path: Path) -> None:
    flags = ["--run.dir", str(tmp_path), "--run.name", "a", "--train.steps", "100000", *tiny_flags]
    process = subprocess.Popen(command("train", *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_step(tmp_path / "a", process, 2)
    second = run("train", *flags, code=2)
    assert "is in use by another process" in second.stderr
    process.kill()
    process.communicate()
    third = run("train", *flags, code=2)
    assert "exists already" in third.stderr
    assert "--resume" in third.stderr


def test_json_prints_one_object(tiny_flags: list[str], tmp_path: Path) -> None:
    flags = ["--run.dir", str(tmp_path), "--run.name", "a", "--train.steps", "2", "--json", *tiny_flags]
    body = json.loads(run("train", *flags).stdout)
    assert body["outcome"] == "finished"
    assert Path(body["report"]).stat().st_size > 1_000_000
