"""`trimtab VERB`: dispatch, and the one place where an error becomes a sentence and an exit code.

Exit codes: 0 done; 1 the answer is no; 2 bad input (one sentence, no traceback); 3 failed while running (what is safe,
how to go on). `--debug` before the verb shows the traceback of the first two kinds as well.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import trimtab
from trimtab.cli.compare import compare
from trimtab.cli.config import config_app
from trimtab.cli.doctor import doctor
from trimtab.cli.report import report
from trimtab.cli.train import train
from trimtab.core.errors import TrimtabError, nearest

app = typer.Typer(
    name="trimtab",
    help="Train large language models on an even keel. Start with `trimtab train`; every verb has --help.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
_FREE_FORM = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command(context_settings=_FREE_FORM)(train)
app.command()(report)
app.command()(compare)
app.command()(doctor)
app.add_typer(config_app, name="config")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trimtab {trimtab.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of expected errors too.")] = False,
) -> None:
    """Train large language models on an even keel."""


def _unknown_verb(arguments: list[str]) -> str:
    verbs = [*(command.name or command.callback.__name__ for command in app.registered_commands if command.callback)]
    verbs += [group.name for group in app.registered_groups if group.name]
    for word in arguments:
        if not word.startswith("-"):
            if word in verbs:
                return ""
            near = nearest(word, verbs)
            hint = f"did you mean {near!r}" if near else f"verbs are {', '.join(sorted(verbs))}"
            return f"There is no verb {word!r}: {hint}."
    return ""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    problem = _unknown_verb(words)
    if problem:
        print(f"trimtab: {problem}", file=sys.stderr)
        sys.exit(2)
    try:
        app(words, prog_name="trimtab")
    except TrimtabError as error:
        if "--debug" in words:
            raise
        print(f"trimtab: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print(
            "trimtab: interrupted; complete checkpoints are safe, go on with `trimtab train --resume`.", file=sys.stderr
        )
        sys.exit(3)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
