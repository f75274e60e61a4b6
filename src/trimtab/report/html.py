"""The page of a run: one HTML file that holds everything, script included, and opens offline.

Figures are drawn by plotly.js, which is copied into the page from the installed `plotly` (4.5 MB: the price of a page
that can be mailed and opened on a train). Text of any origin (prompts, samples, error messages) is escaped by jinja2;
JSON inside the script has its `<` escaped, so a sample that says `</script>` stays text.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from trimtab.core.atomic import write_text
from trimtab.core.optional import need
from trimtab.core.units import format_bytes, format_count, format_duration, format_energy
from trimtab.report.plots import Figure, describe_event, minutes_since_start, run_figures
from trimtab.report.series import RunView, flat, load_run


def tiles(run: RunView) -> list[tuple[str, str, str]]:
    """The figures at the top of the page: (label, value, remark)."""
    found: list[tuple[str, str, str]] = []
    steps, evaluations, start, end = run.steps, run.evaluations, run.start, run.end
    if evaluations:
        last, best = evaluations[-1], min(evaluations, key=lambda e: e.loss)
        found.append(("validation loss", f"{last.loss:.4f}", f"best {best.loss:.4f} at step {best.step}"))
        found.append(("bits per byte", f"{last.bits_per_byte:.4f}", f"on {format_count(last.num_tokens)} tokens"))
    if start:
        remark = f"{format_count(start.num_params_non_embedding)} without embeddings"
        found.append(("parameters", format_count(start.num_params), remark))
    if steps:
        train_s = sum(s.duration_s for s in steps)
        tokens = sum(s.num_tokens for s in steps)
        total = start.num_steps if start else steps[-1].step
        found.append(("steps", f"{steps[-1].step:,}", f"of {total:,}; {format_count(tokens)} tokens"))
        found.append(("training time", format_duration(train_s), "steps only"))
        steady = sorted(steps[len(steps) // 10 :], key=lambda s: s.tokens_per_s)
        middle = steady[len(steady) // 2]
        found.append(("tokens per second", f"{middle.tokens_per_s:,.0f}", f"median; MFU {middle.mfu:.1%}"))
        found.append(("compute", f"{format_count(sum(s.flops for s in steps))}FLOPs", "of the model, counted"))
        memory = max(s.memory_bytes for s in steps)
        found.append(("peak memory", format_bytes(memory), start.device if start else ""))
        energy = sum(s.energy_j for s in steps)
        found.append(("energy", format_energy(energy), f"{steps[-1].energy_kind}; steps only"))
        if run.price_per_hour:
            cost = train_s / 3600 * run.price_per_hour
            found.append(
                ("cost", f"${cost:,.2f}" if cost >= 1 else f"${cost:.4f}", f"at ${run.price_per_hour:g} an hour")
            )
    if end:
        found.append(("outcome", end.outcome.replace("_", " "), end.reason))
    return found


def render(template: str, figures: list[Figure], **values: Any) -> str:
    """A page from a template of this package.

    Raises:
        UserError: jinja2 or plotly is not installed.
    """
    jinja2 = need("jinja2", "report", "The report")
    need("plotly", "report", "The report")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trimtab.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    script = resources.files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")
    figures_json = json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = environment.get_template(template)
    return str(page.render(figures=figures, figures_json=figures_json, plotly_script=script, **values))


def report_html(run: RunView) -> str:
    """The page of a run as text."""
    events = [(minutes_since_start(run, record), record.kind, describe_event(record)) for record in run.events]
    return render(
        "report.html.j2",
        run_figures(run),
        run=run,
        tiles=tiles(run),
        events=events[-500:],
        derived=run.start.derived if run.start else {},
        environment=flat(run.environment),
    )


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write the page of a run; returns where it is.

    Args:
        run_dir: the run.
        output: the file to write; None: `report.html` in the run directory.

    Raises:
        RecordError: the run has no records.
        UserError: the extra `report` is not installed.
        StorageError: the file cannot be written.
    """
    path = output or run_dir / "report.html"
    write_text(path, report_html(load_run(run_dir)))
    return path
