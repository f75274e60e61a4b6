"""Where else the records go: TensorBoard, Weights & Biases, MLflow, Trackio, behind one small interface.

`records.jsonl` is the run's memory; a sink is a copy for a dashboard that somebody already uses. All sinks get the same
names, made in one place (`scalars`), so a run looks the same in each. A sink keeps its data inside the run directory
unless the library's own settings name a server.

A sink that cannot be opened stops the run before its first step (the wish is never silently dropped); one that fails
later is left out with a Fault record, since a dashboard must not cost a day of training.

Rejected: `torch.utils.tensorboard` (this package never imports torch; the same event files come from `tensorboard`).
Limits: samples go to TensorBoard as text, to the others not at all.
"""

from __future__ import annotations

import math
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.core.errors import UserError
from trimtab.core.optional import need
from trimtab.core.records import Evaluation, Record, Sample, Step
from trimtab.core.registry import Registry

PROJECT = "trimtab"
_STEP_FIELDS = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "memory_bytes", "energy_j", "duration_s", "data_s")


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record under the names that every sink uses; empty for records without any."""
    if isinstance(record, Step):
        return {f"train/{name}": float(getattr(record, name)) for name in _STEP_FIELDS}
    if isinstance(record, Evaluation):
        return {"validation/loss": record.loss, "validation/bits_per_byte": record.bits_per_byte}
    return {}


def finite_scalars(record: Record) -> dict[str, float]:
    """`scalars` without not-a-number and infinity, for stores that have no word for them."""
    return {name: value for name, value in scalars(record).items() if math.isfinite(value)}


class Sink(ABC):
    """The contract: records come in order of time; steps may go back after a resume. Not-a-number may come."""

    name: str

    @abstractmethod
    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, str]) -> None:
        """Open it; `config` is the run's configuration as text, with its hash."""

    @abstractmethod
    def write(self, record: Record) -> None:
        """Take one record; records without numbers may be passed over."""

    @abstractmethod
    def close(self) -> None:
        """Flush what is pending."""


SINKS: Registry[type[Sink]] = Registry("report.sinks")


@SINKS.add("tensorboard")
class TensorBoardSink(Sink):
    """Event files in `RUN/tensorboard`; look with `tensorboard --logdir runs`."""

    name = "tensorboard"

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, str]) -> None:
        need("tensorboard", "tensorboard", "The TensorBoard sink")
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, text_pb
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        self._add(0.0, 0, text_pb("config", f"```toml\n{config['config']}\n```"))

    def _add(self, time_s: float, step: int, summary: Any) -> None:
        self._writer.add_event(self._event(wall_time=time_s, step=step, summary=summary))

    def write(self, record: Record) -> None:
        """Numbers as scalars, samples as text."""
        if found := scalars(record):
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in found.items()]
            self._add(record.time_s, record.step, self._summary(value=values))  # type: ignore[attr-defined]
        elif isinstance(record, Sample):
            text = f"**{record.prompt}**{record.text}"
            self._add(record.time_s, record.step, self._text("sample", text))

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


@SINKS.add("wandb")
class WandbSink(Sink):
    """Weights & Biases; files in `RUN/wandb` (set `WANDB_MODE=offline` to stay local). A resume goes on in its run."""

    name = "wandb"

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, str]) -> None:
        wandb = need("wandb", "wandb", "The Weights & Biases sink")
        self._run = wandb.init(
            project=PROJECT, name=run_name, id=run_name, resume="allow", dir=str(run_dir), config=dict(config)
        )

    def write(self, record: Record) -> None:
        """Numbers, with the training step as the x axis."""
        if found := scalars(record):
            self._run.log({**found, "step": record.step})  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the run there."""
        self._run.finish()


@SINKS.add("mlflow")
class MlflowSink(Sink):
    """MLflow; a SQLite file beside the runs, `runs/mlflow.db`, unless `MLFLOW_TRACKING_URI` names a server."""

    name = "mlflow"

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, str]) -> None:
        mlflow = need("mlflow", "mlflow", "The MLflow sink")
        if not mlflow.environment_variables.MLFLOW_TRACKING_URI.is_set():
            mlflow.set_tracking_uri(f"sqlite:///{(run_dir.parent / 'mlflow.db').absolute()}")
        mlflow.set_experiment(PROJECT)
        self._mlflow = mlflow
        mlflow.start_run(run_name=run_name)
        sections = tomllib.loads(config["config"])
        fields = {f"{name}.{key}": value for name, body in sections.items() for key, value in body.items()}
        mlflow.log_params(fields)
        mlflow.set_tag("config_hash", config["config_hash"])

    def write(self, record: Record) -> None:
        """Finite numbers."""
        if found := finite_scalars(record):
            self._mlflow.log_metrics(found, step=record.step)  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the run there."""
        self._mlflow.end_run()


@SINKS.add("trackio")
class TrackioSink(Sink):
    """Trackio (a local dashboard with the interface of W&B)."""

    name = "trackio"

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, str]) -> None:
        self._trackio = need("trackio", "trackio", "The Trackio sink")
        self._trackio.init(project=PROJECT, name=run_name, config=dict(config), resume="allow")

    def write(self, record: Record) -> None:
        """Finite numbers."""
        if found := finite_scalars(record):
            self._trackio.log(found, step=record.step)  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the run there."""
        self._trackio.finish()


def check_sinks(names: str) -> list[type[Sink]]:
    """The classes of a comma-separated list of sinks.

    Raises:
        ConfigError: an unknown name; the nearest is named.
    """
    return [SINKS.get(name.strip()) for name in names.split(",") if name.strip()]


def open_sinks(names: str, run_dir: Path, run_name: str, config: Mapping[str, str]) -> list[Sink]:
    """The sinks of a comma-separated list.

    Raises:
        ConfigError: an unknown name; the nearest is named.
        UserError: its package is not installed, or it refuses to open.
    """
    opened: list[Sink] = []
    for kind in check_sinks(names):
        try:
            opened.append(kind(run_dir, run_name, config))
        except UserError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            what = f"The sink {kind.name!r} of report.sinks cannot be opened ({why}): fix it or leave it out."
            raise UserError(what) from error
    return opened
