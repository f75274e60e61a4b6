"""Verbs that work: help with units, dry run, config, doctor, report and compare as a newcomer calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.config.load import known_fields

Run = Callable[..., tuple[int, str, str]]


def test_help_names_every_field_with_default_and_unit(trimtab: Run) -> None:
    code, out, _ = trimtab("train", "--help")
    assert code == 0
    flat = " ".join(out.replace("│", " ").split())
    for name in known_fields():
        assert name in flat, name
    assert "0.003" in flat
    for verb in ("config", "train", "report", "compare", "doctor"):
        assert verb in trimtab("--help")[1]


def test_a_dry_run_writes_nothing_and_says_what_it_would_take(
    trimtab: Run, tmp_path: Path, tiny_flags: list[str]
) -> None:
    code, out, _ = trimtab("train", "--dry-run", "--json", "--train.steps", 7, *tiny_flags)
    assert code == 0
    facts = json.loads(out)
    assert facts["steps"] == 7
    assert facts["tokens"] == 7 * 128
    assert facts["expected_s"] == pytest.approx(7 * facts["step_s_timed_eager"])
    assert facts["memory_bytes_modelled"] > facts["state_bytes_modelled"] > 16 * facts["parameters"]
    code, out, _ = trimtab("train", "--dry-run", *tiny_flags)
    assert code == 0
    for word in ("parameters", "memory", "expected time", "train.steps", "train.dtype", "config hash"):
        assert word in out
    assert not list(tmp_path.iterdir())


def test_a_run_is_reported_and_compared(trimtab: Run, tmp_path: Path, tiny_flags: list[str]) -> None:
    flags = ["--evaluate.every", "5", "--report.sinks", "tensorboard", *tiny_flags]
    assert trimtab("train", "--train.steps", 20, "--run.name", "a", *flags)[0] == 0
    assert trimtab("train", "--train.steps", 20, "--run.name", "b", "--optim.lr", "1e-2", *flags)[0] == 0
    names = {path.name for path in (tmp_path / "runs/a").iterdir()}
    assert {"config.toml", "environment.json", "records.jsonl", "report.html", "checkpoints", "tensorboard"} <= names
    code, out, _ = trimtab("report", "runs/a", "--output", "page.html", "--json")
    assert code == 0
    assert "validation loss" in json.loads(out)["figures"]
    assert (tmp_path / "page.html").stat().st_size > 1_000_000
    code, out, _ = trimtab("compare", "runs/a", "runs/b", "--output", "c.html", "--json")
    assert code == 0
    body = json.loads(out)
    assert [row["run"] for row in body["rows"]] == ["a", "b"]
    assert set(body["differences"]) == {"optim.lr"}
    code, out, _ = trimtab("compare", "runs/a", "runs/a")
    assert code == 0
    assert "1.00x" in out.replace("\n", "")


def test_a_target_loss_ends_the_run_early(trimtab: Run, tmp_path: Path, tiny_flags: list[str]) -> None:
    flags = ["--train.target_loss", "5.0", "--evaluate.every", "5", "--train.steps", "500", "--json", *tiny_flags]
    code, out, _ = trimtab("train", *flags)
    assert code == 0
    body = json.loads(out)
    assert body["outcome"] == "target_reached"
    assert body["step"] < 500


def test_config_show_diff_check(trimtab: Run, tmp_path: Path) -> None:
    code, out, _ = trimtab("config", "show", "--optim.lr", "2e-3")
    assert code == 0
    path = tmp_path / "a.toml"
    path.write_text(out)
    assert trimtab("config", "check", path)[0] == 0
    assert trimtab("config", "diff", path, path)[0] == 0
    code, out, _ = trimtab("config", "diff", path, "--json")
    assert code == 1
    assert "optim.lr" in out
    assert "llama-3.1-405b" in trimtab("config", "show", "--presets")[1]


def test_the_doctor_speaks_json(trimtab: Run, tmp_path: Path) -> None:
    code, out, _ = trimtab("doctor", "--json", "--device", "cpu", "--run.dir", tmp_path)
    body = json.loads(out)
    assert code == (0 if body["healthy"] else 1)
    assert body["gemm_flops"]["cpu"]["bf16"] > 0


def test_importing_is_light() -> None:
    """`import trimtab` brings neither torch nor numpy, and `trimtab --help` no torch."""
    code = "import sys, trimtab; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = "import sys, trimtab.cli.main, trimtab.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
