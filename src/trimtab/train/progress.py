"""What a person sees while it trains: a live bar on a terminal, plain lines in a pipe, nothing with `--json`."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trimtab.core.records import Evaluation, Sample, Step
from trimtab.core.units import format_duration


class ProgressView:
    """Shows steps, evaluations and samples.

    Args:
        console: where to print.
        num_steps: length of the run.
        first_step: steps done before (a resume).
        log_every: print a line each so many steps where there is no terminal.
        quiet: print nothing.
    """

    def __init__(self, console: Console, num_steps: int, first_step: int, log_every: int, quiet: bool = False) -> None:
        self._console, self._num_steps, self._log_every, self._quiet = console, num_steps, log_every, quiet
        self._step_s = 0.0
        self._bar: Progress | None = None
        if console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("[bold]train"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("train", total=num_steps, completed=first_step, text="")

    def __enter__(self) -> ProgressView:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """One line, above the bar."""
        if not self._quiet:
            self._console.print(escape(text), highlight=False, soft_wrap=True)

    def step(self, record: Step) -> None:
        """Show one step."""
        self._step_s = record.duration_s if not self._step_s else 0.9 * self._step_s + 0.1 * record.duration_s
        text = f"loss {record.loss:.4f}  {record.tokens_per_s:,.0f} tokens/s  MFU {record.mfu:.1%}"
        if self._bar:
            self._bar.update(self._task, completed=record.step, text=text)
        elif record.step % self._log_every == 0 or record.step in (1, self._num_steps):
            left = format_duration(self._step_s * (self._num_steps - record.step))
            self.say(
                f"step {record.step}/{self._num_steps}  {text}  lr {record.lr:.2e}  "
                f"grad norm {record.grad_norm:.2f}  left {left}"
            )

    def evaluation(self, record: Evaluation) -> None:
        """Show a validation result."""
        self.say(f"step {record.step}  validation loss {record.loss:.4f}  {record.bits_per_byte:.4f} bits per byte")

    def sample(self, record: Sample) -> None:
        """Show what the model wrote."""
        self.say(f"sample at step {record.step}:")
        for line in (record.prompt + record.text).splitlines():
            self.say(f"  | {line}")
