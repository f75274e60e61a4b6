"""A bar for long work outside the training loop: building the corpus, mostly."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_PLAIN_EVERY_S = 2.0


@contextlib.contextmanager
def work_bar(console: Console) -> Iterator[Callable[[str, float, float], None]]:
    """Yields `show(what, done, total)`: a bar on a terminal, a line every two seconds elsewhere."""
    if not console.is_terminal:
        last: dict[str, float] = {}

        def plain(what: str, done: float, total: float) -> None:
            now = time.monotonic()
            if now - last.get(what, -_PLAIN_EVERY_S) >= _PLAIN_EVERY_S or done >= total:
                last[what] = now
                share = f"{done / total:.0%}" if total else f"{done:,.0f}"
                console.print(f"{what}: {share}", markup=False, highlight=False)

        yield plain
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: float, total: float) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total or None)
            progress.update(tasks[what], completed=done, total=total or None)

        yield show
