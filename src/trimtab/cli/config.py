"""`trimtab config show|diff|check`: look at a configuration without running anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trimtab.config import RunConfig, config_hash, diff_configs, field_docs, load_config, parse_overrides, to_toml
from trimtab.config.load import known_fields, to_dict
from trimtab.core.errors import TrimtabError

config_app = typer.Typer(help="Show, compare and check configurations.", no_args_is_help=True)
_FREE_FORM = {"allow_extra_args": True, "ignore_unknown_options": True}


def split_arguments(words: list[str]) -> tuple[Path | None, dict[str, str]]:
    """`[CONFIG.toml] [--section.field VALUE ...]` to the path (or None) and the overrides."""
    path = None
    if words and not words[0].startswith("--"):
        path, words = Path(words[0]), words[1:]
    return path, parse_overrides(words)


@config_app.command(context_settings=_FREE_FORM)
def show(
    context: typer.Context,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of TOML.")] = False,
    presets: Annotated[bool, typer.Option("--presets", help="List the model presets instead.")] = False,
) -> None:
    """Print the resolved configuration, each field with meaning and unit: [CONFIG.toml] [--section.field VALUE ...]."""
    if presets:
        from trimtab.models.architecture import presets as model_presets

        table = Table("preset", "parameters", "layers", "dim", "heads", "vocabulary", title="model.preset")
        from trimtab.core.units import format_count

        for name, shape in model_presets().items():
            heads = f"{shape.num_heads}/{shape.num_kv_heads}"
            count = format_count(shape.num_params())
            table.add_row(name, count, str(shape.num_layers), str(shape.dim), heads, str(shape.vocab_size))
        Console().print(table)
        return
    path, overrides = split_arguments(context.args)
    config = load_config(path, overrides)
    if json_:
        typer.echo(json.dumps({"hash": config_hash(config), "config": to_dict(config)}, indent=2))
    else:
        typer.echo(f"# hash {config_hash(config)}")
        typer.echo(to_toml(config, comments=True))


def _config_of(path: Path) -> RunConfig:
    return load_config(path / "config.toml" if path.is_dir() else path)


@config_app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A .toml file or a run directory.")],
    second: Annotated[Path, typer.Argument(help="Another, or nothing: the defaults.")] = Path(""),
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the fields in which two configurations differ (exit 0 if none, 1 if some)."""
    other = RunConfig() if str(second) in ("", ".") else _config_of(second)
    found = diff_configs(_config_of(first), other)
    if json_:
        typer.echo(json.dumps({name: list(values) for name, values in found.items()}, indent=2))
    elif not found:
        typer.echo("The configurations are equal.")
    else:
        table = Table("field", str(first), "defaults" if other == RunConfig() else str(second), "meaning")
        for name, (a, b) in found.items():
            table.add_row(name, escape(repr(a)), escape(repr(b)), escape(field_docs()[name]))
        Console().print(table)
    raise typer.Exit(1 if found else 0)


@config_app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="TOML files.")],
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check files strictly: every section, field, type and range (exit 0 all good, 2 some are not)."""
    results: dict[str, str] = {}
    for path in files:
        try:
            load_config(path)
            results[str(path)] = ""
        except TrimtabError as error:
            results[str(path)] = str(error)
    if json_:
        typer.echo(json.dumps({"checked": len(results), "fields": len(known_fields()), "errors": results}, indent=2))
    else:
        for name, problem in results.items():
            typer.echo(f"{name}: {problem or 'good'}", err=bool(problem))
    raise typer.Exit(2 if any(results.values()) else 0)
