"""`trimtab train`: from a configuration to a trained model, a run directory and a report."""

from __future__ import annotations

import datetime
import fcntl
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from trimtab.cli.config import split_arguments
from trimtab.config import RunConfig, apply_overrides, diff_configs, field_docs, load_config
from trimtab.config.load import known_fields
from trimtab.core.atomic import storage_error, write_text
from trimtab.core.errors import ConfigError, RecordError, UserError, refusal
from trimtab.core.optional import have, need
from trimtab.core.units import format_bytes, format_count, format_duration

_MAY_CHANGE = (
    *("run.", "device.", "checkpoint.", "evaluate.", "report.", "train.log_every", "train.target_loss"),
    *("train.micro_batch_tokens", "train.activation_checkpointing"),
)
"""Fields that a resume may change; the others define the run. (The last two change rounding only.)"""


def help_text() -> str:
    """The verb's help: usage, then each field with default, unit and meaning."""
    lines = ["Train a model: [CONFIG.toml] [--section.field VALUE ...].", ""]
    lines.append("With no argument: learn the source text of this Python's standard library, in about three minutes.")
    lines += ["", "Fields (default, unit):", ""]
    docs = field_docs()
    for name, item in known_fields().items():
        lines.append(f"- `--{name}` ({item.default!r}, {item.metadata['unit']}): {docs[name]}")
    return "\n".join(lines)


def lock_run(run_dir: Path) -> Any:
    """Hold the run directory for this process; the lock goes with the process, however it ends.

    Raises:
        UserError: another process works in it.
        StorageError: the folder cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = open(run_dir / ".lock", "w")  # noqa: SIM115 - held until the process ends
    except OSError as error:
        raise storage_error(error, run_dir) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(
            f"The run directory {str(run_dir)!r} is in use by another process: choose another --run.name or wait."
        ) from None
    return handle


def _fresh_name(folder: Path) -> str:
    """The date and time, with a number where a run of that second exists already."""
    stem = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not (folder / name).exists())


def find_run(config: RunConfig) -> Path:
    """The run directory that `--resume` means: the one named, else the newest in `run.dir`."""
    folder = Path(config.run.dir)
    if config.run.name:
        if (folder / config.run.name / "config.toml").is_file():
            return folder / config.run.name
        raise RecordError(
            refusal("run.name", config.run.name, f"must be a run in {str(folder)!r} when resuming", "check --run.dir")
        )
    runs = sorted(folder.glob("*/config.toml"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise RecordError(f"There is no run to resume in {str(folder)!r}: name one with --run.dir and --run.name.")
    return runs[-1].parent


def resumed_config(run_dir: Path, overrides: dict[str, str]) -> RunConfig:
    """The run's own configuration with what a resume may change.

    Raises:
        ConfigError: a flag would change what the run is.
    """
    saved = load_config(run_dir / "config.toml")
    wanted = apply_overrides(saved, overrides)
    for name, (old, new) in diff_configs(saved, wanted).items():
        if not name.startswith(_MAY_CHANGE):
            rule = f"is {old!r} in this run and cannot change on resume"
            raise ConfigError(refusal(name, new, rule, "start a new run for another setting"))
    return wanted


def describe(parts: Any) -> dict[str, Any]:
    """What a dry run shows: derived values with their rule, parameters, memory, expected time."""
    from trimtab.train.build import modelled_memory, time_step
    from trimtab.train.schedule import tokens_before

    config = parts.config
    step_s = parts.step_s or time_step(parts)
    steps, batch_tokens = config.train.steps, config.train.batch_tokens
    tokens = tokens_before(steps, steps, batch_tokens, config.schedule)
    memory = modelled_memory(parts.arch, config, parts.dtype_name)
    return {
        "parameters": parts.num_params,
        "steps": steps,
        "tokens": tokens,
        "training_flops": parts.flops_per_token(config.data.sequence_length) * tokens,
        "memory_bytes_modelled": memory.total,
        "state_bytes_modelled": memory.weights + memory.gradients + memory.optimizer,
        "activation_bytes_modelled": memory.activations + memory.logits,
        "peak_memory_seen_bytes": parts.meter.read().memory_bytes,
        "step_s_timed_eager": step_s,
        "tokens_per_s_timed_eager": batch_tokens / step_s,
        "expected_s": step_s * steps,
        "config_hash": parts.config_hash,
        "derived": parts.derived,
    }


def _dry_run(parts: Any, console: Console, json_: bool) -> None:
    facts = describe(parts)
    if json_:
        typer.echo(json.dumps(facts, indent=2))
        return
    state, activations = format_bytes(facts["state_bytes_modelled"]), format_bytes(facts["activation_bytes_modelled"])
    seen = format_bytes(facts["peak_memory_seen_bytes"])
    lines = {
        "parameters": format_count(facts["parameters"]),
        "steps": f"{facts['steps']} ({format_count(facts['tokens'])} tokens)",
        "memory": f"{state} of weights, gradients and moments, {activations} of activations (modelled)",
        "seen": f"{seen} resident at most, libraries included, after a timed step",
        "compute": f"{format_count(facts['training_flops'])}FLOPs",
        "speed": f"{facts['tokens_per_s_timed_eager']:,.0f} tokens/s (timed here, eager)",
        "expected time": f"{format_duration(facts['expected_s'])} of steps (estimated from that speed)",
        **parts.derived,
        "config hash": facts["config_hash"],
    }
    for name, value in lines.items():
        console.print(f"{name:15} {value}", markup=False, highlight=False, soft_wrap=True)


def train(
    context: typer.Context,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run (the newest, or --run.name).")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Build everything, run no step, write nothing.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end and nothing else.")] = False,
) -> None:
    """Train a model. (Replaced by `help_text`.)"""
    path, overrides = split_arguments(context.args)
    if resume and path is not None:
        raise ConfigError(refusal("CONFIG.toml", str(path), "cannot be given with --resume", "the run has its own"))
    config = load_config(path, overrides)
    run_dir = find_run(config) if resume else Path()
    if resume:
        config = resumed_config(run_dir, overrides)
    need("torch", "train", "trimtab train")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        fix = "start one process; data-parallel training is not built yet"
        raise UserError(refusal("WORLD_SIZE", os.environ["WORLD_SIZE"], "must be 1", fix))
    console = Console(stderr=json_, quiet=json_)
    lock = None
    if not dry_run:
        if not resume:
            run_dir = Path(config.run.dir) / (config.run.name or _fresh_name(Path(config.run.dir)))
            config = apply_overrides(config, {"run.name": run_dir.name})
        lock = lock_run(run_dir)
        if not resume and (run_dir / "records.jsonl").exists():
            raise UserError(
                f"The run {run_dir.name!r} exists already in {config.run.dir!r}: choose another --run.name, or go on "
                f"with it by `trimtab train --resume --run.name {run_dir.name}`."
            )
    try:
        _train(config, run_dir, resume, dry_run, json_, console)
    except UserError:
        if lock is not None and not resume and os.listdir(run_dir) == [".lock"]:
            shutil.rmtree(run_dir, ignore_errors=True)  # refused before anything was written: leave no empty run
        raise
    finally:
        if lock is not None:
            lock.close()


train.__doc__ = help_text()


def _train(config: RunConfig, run_dir: Path, resume: bool, dry_run: bool, json_: bool, console: Console) -> None:
    from trimtab.cli.progress import work_bar
    from trimtab.device import environment
    from trimtab.train.build import build, open_run
    from trimtab.train.loop import run_loop
    from trimtab.train.progress import ProgressView

    def say(text: str) -> None:
        if not json_:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    with work_bar(console) as bar:
        parts = build(config, say, bar, started_s=_process_start_s())
    if dry_run:
        _dry_run(parts, console, json_)
        return
    if not resume:
        write_text(run_dir / "config.toml", f"# hash {parts.config_hash}\n{parts.config_toml}")
        write_text(run_dir / "environment.json", json.dumps(environment(parts.device), indent=2))
    try:
        open_run(parts, run_dir, resume)
        for name, rule in parts.derived.items():
            say(f"{name} = {rule}")
        section = parts.config.train
        with ProgressView(console, section.steps, parts.progress.step, section.log_every, json_) as view:
            if resume:
                view.say(f"resumed from step {parts.progress.step}")
            end = run_loop(parts, view)
    finally:
        parts.close()
    summary: dict[str, Any] = {"run": str(run_dir), "outcome": end.outcome, "step": end.step, "reason": end.reason}
    if parts.config.report.html and have("plotly") and have("jinja2"):
        from trimtab.report import write_report

        summary["report"] = str(write_report(run_dir))
    if json_:
        typer.echo(json.dumps({**summary, "train_s": end.train_s, "startup_s": end.startup_s}, indent=2))
    else:
        say(f"{end.outcome} at step {end.step} after {format_duration(end.train_s)} of training")
        say(f"run     {run_dir}")
        if "report" in summary:
            say(f"report  {summary['report']}")
    if end.outcome == "interrupted":
        say(f"go on with: trimtab train --resume --run.dir {parts.config.run.dir} --run.name {run_dir.name}")
        raise typer.Exit(3)


def _process_start_s() -> float:
    """Unix time at which this process was made, so that imports count as start-up."""
    import psutil

    return float(psutil.Process().create_time())
