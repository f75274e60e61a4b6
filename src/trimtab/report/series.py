"""A run as columns of numbers: what plots, tables and comparisons are made of.

All of it comes from `records.jsonl` (by `core.records`), `config.toml` and `environment.json` of the run directory.
After a resume, superseded records are dropped, so a curve never runs back on itself.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trimtab.core.errors import RecordError
from trimtab.core.records import (
    Checkpoint,
    Decision,
    Evaluation,
    Fault,
    Record,
    RunEnd,
    RunStart,
    Sample,
    Step,
    latest_attempt,
    read_records,
)

R = TypeVar("R", bound=Record)
_SMOOTHING = 0.9
"""Weight of the past in the smoothed loss curve (an average over about ten steps)."""


@dataclass(frozen=True)
class RunView:
    """One run, read from disk."""

    path: Path
    records: tuple[Record, ...]
    config_text: str
    config: dict[str, Any]
    environment: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.start.run_name if self.start else self.path.name

    def of(self, kind: type[R]) -> list[R]:
        """Its records of one kind, in order."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def start(self) -> RunStart | None:
        """The first start."""
        return next(iter(self.of(RunStart)), None)

    @property
    def end(self) -> RunEnd | None:
        """How the last attempt ended; None while it runs, or when it was killed."""
        last = next((r for r in reversed(self.records) if isinstance(r, RunStart | RunEnd)), None)
        return last if isinstance(last, RunEnd) else None

    @property
    def steps(self) -> list[Step]:
        """All steps that count."""
        return self.of(Step)

    @property
    def evaluations(self) -> list[Evaluation]:
        """All evaluations that count."""
        return self.of(Evaluation)

    @property
    def events(self) -> list[Record]:
        """What happened beside steps: starts, checkpoints, decisions, faults, ends."""
        return [r for r in self.records if isinstance(r, RunStart | Checkpoint | Decision | Fault | RunEnd)]

    @property
    def samples(self) -> list[Sample]:
        """Texts that the model wrote."""
        return self.of(Sample)

    @property
    def price_per_hour(self) -> float:
        """US dollars per hour of the machine, as configured; 0: not given."""
        value = self.config.get("device", {}).get("price_per_hour", 0.0)
        return float(value) if isinstance(value, int | float) else 0.0


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def load_run(path: Path) -> RunView:
    """Read a run directory.

    Raises:
        RecordError: it holds no records.
    """
    records = tuple(latest_attempt(read_records(path)))
    if not records:
        raise RecordError(f"The run at {str(path)!r} has no records yet: let it make a step first.")
    text = _read_text(path / "config.toml")
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        config = {}
    try:
        environment = json.loads(_read_text(path / "environment.json") or "{}")
    except ValueError:
        environment = {}
    return RunView(path, records, text, config, environment if isinstance(environment, dict) else {})


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested tables as (dotted name, value as text), in order."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            rows += flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            rows.append((f"{prefix}{key}", ", ".join(map(str, value))))
        else:
            rows.append((f"{prefix}{key}", str(value)))
    return rows


def smooth(values: Sequence[float], weight: float = _SMOOTHING) -> list[float]:
    """Exponential moving average with bias correction; values that are not finite leave it unchanged.

    >>> smooth([1.0, 1.0, 1.0])
    [1.0, 1.0, 1.0]
    """
    mean, total, out = 0.0, 0.0, []
    for value in values:
        if value - value == 0.0:  # finite
            mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        out.append(mean / total if total else value)
    return [round(value, 6) for value in out]


def thin(count: int, most: int) -> list[int]:
    """Indices of at most about `most` points of `count`, evenly spread, first and last included.

    >>> thin(5, 10), thin(9, 3)
    ([0, 1, 2, 3, 4], [0, 4, 8])
    """
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
