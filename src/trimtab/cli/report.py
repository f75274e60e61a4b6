"""`trimtab report RUN`: the page of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Run directory, such as runs/a.")],
    output: Annotated[Path | None, typer.Option("--output", help="File to write [default: RUN/report.html].")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the figures at the top as one JSON object.")] = False,
) -> None:
    """Write one self-contained HTML page about a run: curves, events, samples, configuration, environment.

    Works while the run goes on, and after a crash. The page opens offline.
    """
    from trimtab.report.html import tiles, write_report
    from trimtab.report.series import load_run

    path = write_report(run, output)
    if json_:
        figures = {label: {"value": value, "remark": remark} for label, value, remark in tiles(load_run(run))}
        typer.echo(json.dumps({"report": str(path), "figures": figures}, indent=2))
    else:
        typer.echo(f"report  {path}")
