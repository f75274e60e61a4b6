"""`trimtab compare RUN RUN ...`: what each run spent until the same validation loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trimtab.core.units import format_count, format_duration, format_energy


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, the baseline first.")],
    target: Annotated[
        float, typer.Option("--target", help="Validation loss to reach, nats per token; 0: the lowest all reached.")
    ] = 0.0,
    output: Annotated[Path | None, typer.Option("--output", help="Also write a page with the curves here.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Compare runs: time, tokens, FLOPs, energy and cost to the same validation loss.

    Ratios in brackets are against the first run; below 1 is better. Costs between two evaluations are interpolated.
    """
    from trimtab.report.compare import compare as compare_runs
    from trimtab.report.compare import write_comparison

    comparison, views = compare_runs(runs, target)
    if output is not None:
        write_comparison(comparison, views, output)
    if json_:
        typer.echo(json.dumps({**comparison.to_dict(), "page": str(output) if output else ""}, indent=2))
        return
    unit = "nats per token" if comparison.measure == "loss" else "bits per byte"
    table = Table(title=f"to a validation loss of {comparison.target:.4f} {unit}")
    for name in ("run", "time", "tokens", "compute", "energy", "cost", "tokens/s", "best", "final"):
        table.add_column(name, justify="left" if name == "run" else "right", overflow="fold")
    for index, row in enumerate(comparison.rows):

        def cell(text: str, field: str, index: int = index) -> str:
            ratio = comparison.ratio(index, field)
            return f"{text} ({ratio:.2f}x)" if index and ratio is not None else text

        if row.train_s is None or row.tokens is None or row.flops is None or row.energy_j is None:
            spent = ["not reached"] * 4
        else:
            spent = [
                cell(format_duration(row.train_s), "train_s"),
                cell(format_count(row.tokens), "tokens"),
                cell(f"{format_count(row.flops)}FLOPs", "flops"),
                cell(f"{format_energy(row.energy_j)} {row.energy_kind}", "energy_j"),
            ]
        cost = "no price" if row.cost_usd is None else cell(f"${row.cost_usd:.4f}", "cost_usd")
        speed = cell(f"{row.tokens_per_s:,.0f}", "tokens_per_s")
        table.add_row(escape(row.run), *spent, cost, speed, f"{row.best_loss:.4f}", f"{row.final_loss:.4f}")
    console = Console()
    console.print(table)
    for warning in comparison.warnings:
        console.print(f"note: {warning}", markup=False, highlight=False)
    for name, values in comparison.differences.items():
        console.print(f"differs: {name} = {' | '.join(values)}", markup=False, highlight=False)
    if output is not None:
        console.print(f"page: {output}", markup=False, highlight=False)
