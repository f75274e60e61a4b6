"""Figures as plotly JSON: built from plain numbers, drawn in the reader's browser.

Plain dictionaries rather than `plotly.graph_objects`: the page needs the JSON alone, and the library takes a second to
import. A curve has at most `MAX_POINTS` points, thinned evenly; extremes of the raw loss may be lost in runs of more
steps, the smoothed curve is made before thinning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.core.records import Checkpoint, Decision, Fault, Record, RunEnd, RunStart, Step
from trimtab.report.series import RunView, smooth, thin

MAX_POINTS = 3000
COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
Figure = dict[str, Any]


def _clean(values: Sequence[float]) -> list[float | None]:
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values]


def line(x: Sequence[float], y: Sequence[float], name: str, color: str, **more: Any) -> dict[str, Any]:
    """One curve, thinned; not-a-number becomes a gap."""
    keep = thin(len(x), MAX_POINTS)
    xs, ys = [x[i] for i in keep], _clean([y[i] for i in keep])
    return {"type": "scatter", "mode": "lines", "x": xs, "y": ys, "name": name, "line": {"color": color}, **more}


def figure(key: str, title: str, x_title: str, y_title: str, data: list[dict[str, Any]], **layout: Any) -> Figure:
    """A figure with the page's common layout."""
    axis = {"gridcolor": "rgba(128,128,128,0.2)", "zeroline": False}
    base = {
        "margin": {"l": 62, "r": 16, "t": 8, "b": 46},
        "height": 300,
        "xaxis": {**axis, "title": {"text": x_title}},
        "yaxis": {**axis, "title": {"text": y_title}, **layout.pop("yaxis", {})},
        "legend": {"orientation": "h", "y": 1.12, "x": 0},
        "hovermode": "x unified",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12},
    }
    return {"key": key, "title": title, "data": data, "layout": {**base, **layout}}


def _loss(run: RunView) -> Figure:
    steps = run.steps
    x, y = [s.step for s in steps], [s.loss for s in steps]
    thin_line = {"color": COLORS[0], "width": 1}
    data = [
        line(x, y, "training", COLORS[0], opacity=0.3, line=thin_line),
        line(x, smooth(y), "training, smoothed", COLORS[0]),
    ]
    if run.evaluations:
        points = line([e.step for e in run.evaluations], [e.loss for e in run.evaluations], "validation", COLORS[1])
        data.append({**points, "mode": "lines+markers"})
    marks = [
        {"type": "line", "x0": r.step, "x1": r.step, "yref": "paper", "y0": 0, "y1": 1, "line": _mark_line(r)}
        for r in run.events
        if isinstance(r, Fault | Decision)
    ]
    return figure("loss", "Loss", "step", "nats per token", data, shapes=marks[:200])


def _mark_line(record: Record) -> dict[str, Any]:
    return {"color": COLORS[3] if isinstance(record, Fault) else COLORS[4], "width": 1, "dash": "dot"}


def _bits(run: RunView) -> Figure:
    found = run.evaluations
    points = line([e.step for e in found], [e.bits_per_byte for e in found], "validation", COLORS[1])
    return figure("bits", "Validation, bits per byte", "step", "bits per byte", [{**points, "mode": "lines+markers"}])


def _of_step(key: str, title: str, unit: str, value: Callable[[Step], float], color: int = 0, **layout: Any) -> Any:
    def make(run: RunView) -> Figure:
        steps = run.steps
        curve = line([s.step for s in steps], [value(s) for s in steps], title.lower(), COLORS[color])
        return figure(key, title, "step", unit, [curve], **layout)

    return make


def _energy(run: RunView) -> Figure:
    total, sums = 0.0, []
    for step in run.steps:
        total += step.energy_j / 3600
        sums.append(total)
    kinds = sorted({step.energy_kind for step in run.steps})
    curve = line([s.step for s in run.steps], sums, "energy", COLORS[2])
    return figure("energy", f"Energy so far ({', '.join(kinds)})", "step", "watt-hours", [curve])


_EVENT_KINDS: tuple[tuple[type[Record], str, str], ...] = (
    (RunStart, "start", COLORS[2]),
    (Checkpoint, "checkpoint", COLORS[0]),
    (Decision, "decision", COLORS[4]),
    (Fault, "fault", COLORS[3]),
    (RunEnd, "end", COLORS[2]),
)


def describe_event(record: Record) -> str:
    """One line on what happened."""
    if isinstance(record, RunStart):
        return "started" if record.resumed_from_step < 0 else f"resumed from step {record.resumed_from_step}"
    if isinstance(record, Checkpoint):
        size = record.num_bytes / 2**20
        cost = f"training stood still for {record.blocking_s * 1e3:.0f} ms"
        return f"checkpoint of step {record.step} ({record.reason}, {size:.1f} MiB): {cost}"
    if isinstance(record, Decision):
        return f"step {record.step}: {record.controller} decided {record.action}: {record.reason}"
    if isinstance(record, Fault):
        return f"step {record.step}: {record.what}; {record.action}"
    assert isinstance(record, RunEnd), record
    return f"{record.outcome} at step {record.step}" + (f": {record.reason}" if record.reason else "")


def minutes_since_start(run: RunView, record: Record) -> float:
    """Minutes of wall time from the run's first record (time between attempts included)."""
    return round((record.time_s - run.records[0].time_s) / 60, 4)


def _events(run: RunView) -> Figure:
    data = []
    for kind, name, color in _EVENT_KINDS:
        found = [r for r in run.events if isinstance(r, kind)]
        if found:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": [minutes_since_start(run, r) for r in found],
                    "y": [name] * len(found),
                    "text": [describe_event(r) for r in found],
                    "hovertemplate": "%{text}<extra></extra>",
                    "marker": {"size": 11, "color": color, "symbol": "diamond"},
                    "name": name,
                    "showlegend": False,
                }
            )
    times = [minutes_since_start(run, s) for s in run.steps]
    steps = [s.step for s in run.steps]
    progress = line(times, steps, "steps done", "#9ca3af", yaxis="y2", hoverinfo="skip")
    right = {"overlaying": "y", "side": "right", "title": {"text": "step"}, "showgrid": False}
    right |= {"tickmode": "auto", "nticks": 5, "tickformat": "d", "rangemode": "tozero"}
    order = [name for _, name, _ in reversed(_EVENT_KINDS)]
    axis = {"type": "category", "categoryorder": "array", "categoryarray": order, "title": {"text": ""}}
    margin = {"l": 84, "r": 56, "t": 8, "b": 46}
    x_title = "minutes since the first start"
    extra: dict[str, Any] = {"yaxis2": right, "hovermode": "closest", "margin": margin, "showlegend": False}
    return figure("events", "Events", x_title, "", [progress, *data], yaxis=axis, **extra)


_ZERO = {"yaxis": {"rangemode": "tozero"}}
RUN_FIGURES: tuple[Callable[[RunView], Figure], ...] = (
    _loss,
    _bits,
    _of_step("lr", "Learning rate", "per step", lambda s: s.lr, 4, **_ZERO),
    _of_step("norm", "Gradient norm before clipping", "global norm", lambda s: s.grad_norm, 3, yaxis={"type": "log"}),
    _of_step("speed", "Throughput", "tokens per second", lambda s: s.tokens_per_s, 5, **_ZERO),
    _of_step("mfu", "Model FLOPs utilization", "% of measured peak", lambda s: 100 * s.mfu, 5, **_ZERO),
    _of_step("memory", "Memory, peak so far", "GiB", lambda s: s.memory_bytes / 2**30, 6, **_ZERO),
    _energy,
    _events,
)


def run_figures(run: RunView) -> list[Figure]:
    """All figures of one run's page; those without data are left out."""
    found = [make(run) for make in RUN_FIGURES]
    return [item for item in found if any(curve.get("x") for curve in item["data"])]
