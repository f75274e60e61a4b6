"""The honest comparison of runs: what each one spent until the same validation loss.

The target is the worst of the runs' best validation losses (the lowest loss that all of them reached), unless one is
given. Cost until the target is interpolated linearly between the two evaluations around the first crossing; a run that
never gets there says so and has no ratio. Ratios are against the first run, below 1 is better. Time is training time:
steps alone, as each run's clock saw them; start-up, evaluation and checkpoints are left out and shown apart.

Limits: one seed each is one throw of the dice: the page says so. Comparing runs on different data or tokenizers by
loss means nothing, so bits per byte are compared when the tokenizers differ, and a warning stands on top.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.core.atomic import write_text
from trimtab.core.errors import RecordError, refusal
from trimtab.core.records import Evaluation
from trimtab.report.html import render
from trimtab.report.plots import COLORS, Figure, figure, line
from trimtab.report.series import RunView, flat, load_run

_IGNORED = ("run.", "report.")
"""Sections whose differences say nothing about the experiment."""


@dataclass(frozen=True)
class CostToLoss:
    """What one run spent until the target; None where it never reached it."""

    run: str
    best_loss: float
    """Lowest validation loss (nats per token, or bits per byte; see `Comparison.measure`)."""
    final_loss: float
    step: float | None
    train_s: float | None
    """Seconds in steps."""
    tokens: float | None
    flops: float | None
    energy_j: float | None
    energy_kind: str
    cost_usd: float | None
    """None also where no price is configured."""
    tokens_per_s: float
    """Median over all steps."""
    total_train_s: float
    other_s: float
    """Evaluation and blocking checkpoint time (seconds)."""

    @property
    def reached(self) -> bool:
        """Whether it got to the target."""
        return self.train_s is not None


@dataclass(frozen=True)
class Comparison:
    """Several runs against the first."""

    target: float
    measure: str
    """`loss` (nats per token) or `bits_per_byte`."""
    rows: tuple[CostToLoss, ...]
    differences: dict[str, tuple[str, ...]]
    """Configuration fields that are not equal in all runs: one value per run."""
    warnings: tuple[str, ...]

    def ratio(self, index: int, field: str) -> float | None:
        """A run's spending over the first run's; None where either is not known."""
        own, first = getattr(self.rows[index], field), getattr(self.rows[0], field)
        return own / first if own is not None and first else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, ratios included."""
        body = dataclasses.asdict(self)
        names = ("train_s", "tokens", "flops", "energy_j", "cost_usd", "tokens_per_s")
        for index, row in enumerate(body["rows"]):
            row["ratio_to_first"] = {name: self.ratio(index, name) for name in names}
        return body


def crossing(losses: Sequence[float], target: float) -> tuple[int, int, float] | None:
    """Indices before and at the first crossing of `target`, and how far between them it lies (0 to 1); None if never.

    >>> crossing([4.0, 3.0, 2.0], 2.5), crossing([4.0, 3.0], 5.0), crossing([4.0, 3.0], 1.0)
    ((1, 2, 0.5), (0, 0, 0.0), None)
    """
    now = next((index for index, loss in enumerate(losses) if loss <= target), None)
    if now is None:
        return None
    if now == 0:
        return 0, 0, 0.0
    last, loss = losses[now - 1], losses[now]
    return now - 1, now, (last - target) / (last - loss) if math.isfinite(last) else 1.0


def _cost(run: RunView, target: float, measure: str) -> CostToLoss:
    evaluations, steps = run.evaluations, run.steps
    values = [getattr(e, measure) for e in evaluations]
    found = crossing(values, target)

    def at(value: Callable[[Evaluation], float]) -> float | None:
        if found is None:
            return None
        before, now, share = evaluations[found[0]], evaluations[found[1]], found[2]
        return value(before) + share * (value(now) - value(before))

    seconds = at(lambda e: e.train_s)
    price = run.price_per_hour
    speeds = sorted(s.tokens_per_s for s in steps)
    blocking = sum(getattr(r, "blocking_s", 0.0) for r in run.records)
    return CostToLoss(
        run=run.name,
        best_loss=min(values),
        final_loss=values[-1],
        step=at(lambda e: e.step),
        train_s=seconds,
        tokens=at(lambda e: e.total_tokens),
        flops=at(lambda e: e.total_flops),
        energy_j=at(lambda e: e.total_energy_j),
        energy_kind=steps[-1].energy_kind if steps else "modelled",
        cost_usd=seconds / 3600 * price if price and seconds is not None else None,
        tokens_per_s=speeds[len(speeds) // 2] if speeds else 0.0,
        total_train_s=sum(s.duration_s for s in steps),
        other_s=sum(e.duration_s for e in evaluations) + blocking,
    )


def _differences(runs: Sequence[RunView]) -> dict[str, tuple[str, ...]]:
    tables = [dict(flat(run.config)) for run in runs]
    names = sorted({name for one in tables for name in one if not name.startswith(_IGNORED)})
    table = {name: tuple(str(one.get(name, "")) for one in tables) for name in names}
    return {name: values for name, values in table.items() if len(set(values)) > 1}


def _same_tokens(runs: Sequence[RunView]) -> bool:
    sizes = [round(run.start.bytes_per_token, 6) if run.start else 0.0 for run in runs]
    return len(set(sizes)) == 1


def compare(paths: Sequence[Path], target: float = 0.0) -> tuple[Comparison, list[RunView]]:
    """Compare runs to the same validation loss.

    Args:
        paths: run directories, the baseline first.
        target: validation loss to reach; 0: the lowest that all of them reached.

    Raises:
        RecordError: fewer than two runs, or one without evaluations.
    """
    if len(paths) < 2:
        raise RecordError(refusal("runs", len(paths), "must be at least two", "name a baseline and a candidate"))
    runs = [load_run(path) for path in paths]
    for run in runs:
        if not run.evaluations:
            raise RecordError(
                f"The run {run.name!r} has no evaluations to compare: set evaluate.every and run it anew."
            )
    warnings = []
    measure = "loss"
    if not _same_tokens(runs):
        measure = "bits_per_byte"
        warnings.append("The runs differ in tokenizer or held-out text: bits per byte are compared, not loss.")
    devices = {run.start.device for run in runs if run.start}
    if len(devices) > 1:
        warnings.append(
            f"The runs were made on different devices ({'; '.join(sorted(devices))}): times do not compare."
        )
    differences = _differences(runs)
    if len(runs) == 2 and not any(name == "train.seed" for name in differences):
        warnings.append("One seed each: repeat with several train.seed before believing a small difference.")
    best = [min(getattr(e, measure) for e in run.evaluations) for run in runs]
    goal = target or max(best)
    rows = tuple(_cost(run, goal, measure) for run in runs)
    return Comparison(goal, measure, rows, differences, tuple(warnings)), runs


def comparison_figures(comparison: Comparison, runs: Sequence[RunView]) -> list[Figure]:
    """Validation curves of all runs against time, tokens, FLOPs and energy."""
    axes: tuple[tuple[str, str, Callable[[Evaluation], float]], ...] = (
        ("time", "training minutes (steps only)", lambda e: e.train_s / 60),
        ("tokens", "million tokens", lambda e: e.total_tokens / 1e6),
        ("flops", "model TFLOPs", lambda e: e.total_flops / 1e12),
        ("energy", "watt-hours", lambda e: e.total_energy_j / 3600),
    )
    unit = "nats per token" if comparison.measure == "loss" else "bits per byte"
    goal = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": comparison.target,
        "y1": comparison.target,
        "line": {"color": "#9ca3af", "width": 1, "dash": "dash"},
    }
    found = []
    for key, title, value in axes:
        data = []
        for index, run in enumerate(runs):
            shown = run.evaluations
            curve = line(
                [value(e) for e in shown],
                [getattr(e, comparison.measure) for e in shown],
                f"{index + 1}: {run.name}",
                COLORS[index % len(COLORS)],
            )
            data.append({**curve, "mode": "lines+markers"})
        figure_title = f"Validation against {title}"
        found.append(figure(key, figure_title, title, unit, data, shapes=[goal], hovermode="closest"))
    return found


def write_comparison(comparison: Comparison, runs: Sequence[RunView], output: Path) -> Path:
    """Write the page of a comparison; raises as `write_report`."""
    page = render("compare.html.j2", comparison_figures(comparison, runs), comparison=comparison, runs=runs)
    write_text(output, page)
    return output
