"""The loop round the step: data in, records out, evaluation, checkpoints, signals, progress.

The loop acts; it decides nothing that is not written in the configuration. Its state is `Progress`, the weights and the
optimizers; everything else is a pure function of the step, so that a resume needs nothing more.

Order within one turn: batch -> step -> record -> evaluation if due -> checkpoint if due. A checkpoint is taken after
the evaluation of the same step, so `keep_best` knows its loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from trimtab.core.errors import RunError, StorageError, TrimtabError
from trimtab.core.records import Decision, Evaluation, Fault, Record, RunEnd, Sample, Step
from trimtab.train.parts import Parts, micro_batches_of, to_micro_batch
from trimtab.train.progress import ProgressView
from trimtab.train.schedule import lr_scale
from trimtab.train.state import capture_meta, capture_tensors
from trimtab.train.step import StepResult, train_step

MAX_SKIPPED_IN_A_ROW = 20
"""After so many steps without a finite gradient the run stops: nothing is learned any more."""


class StopSignal:
    """Notes SIGINT and SIGTERM; the loop looks after each step. A second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.name = ""
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._old[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: the caller handles signals
                return self
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name


def evaluate(parts: Parts) -> Evaluation:
    """Mean loss and bits per byte on the held-out documents, the same tokens each time."""
    began = time.perf_counter()
    parts.model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in parts.validation_batches():
            micro_batch = to_micro_batch(parts, batch, slice(None))
            total += float(parts.eager_loss_sum(micro_batch))
            count += batch.num_targets
    parts.model.train()
    loss = total / max(1, count)
    progress = parts.progress
    return Evaluation(
        step=progress.step,
        loss=loss,
        bits_per_byte=loss / math.log(2) / parts.corpus.bytes_per_token_val,
        num_tokens=count,
        duration_s=time.perf_counter() - began,
        train_s=progress.train_s,
        total_tokens=progress.total_tokens,
        total_flops=progress.flops,
        total_energy_j=progress.energy_j,
    )


def _is_due(step: int, every: int, num_steps: int) -> bool:
    return step == num_steps or (every > 0 and step % every == 0)


def one_step(parts: Parts) -> tuple[Step, StepResult]:
    """Data, step and its record; moves `parts.progress`."""
    config, progress = parts.config, parts.progress
    began = time.perf_counter()
    parts.meter.start()
    micro_batches, num_targets, num_tokens, length = micro_batches_of(parts, progress.step)
    data_s = time.perf_counter() - began
    scale = lr_scale(progress.step, config.train.steps, config.schedule)
    result = train_step(
        parts.loss_sum,
        micro_batches,
        num_targets,
        parts.weights,
        parts.optimizers,
        scale,
        config.optim.max_grad_norm,
    )
    parts.device.synchronize()
    duration_s = time.perf_counter() - began
    reading = parts.meter.read()
    flops = parts.flops_per_token(length) * num_tokens
    progress.step += 1
    progress.total_tokens += num_tokens
    progress.train_s += duration_s
    progress.flops += flops
    progress.energy_j += reading.energy_j
    progress.num_skipped = 0 if result.applied else progress.num_skipped + 1
    record = Step(
        step=progress.step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=parts.optimizers[0].param_groups[0]["initial_lr"] * scale,
        num_tokens=num_tokens,
        total_tokens=progress.total_tokens,
        duration_s=duration_s,
        data_s=data_s,
        tokens_per_s=num_tokens / duration_s,
        mfu=flops / duration_s / parts.peak_flops if parts.peak_flops else 0.0,
        flops=flops,
        memory_bytes=reading.memory_bytes,
        cpu_s=reading.cpu_s,
        energy_j=reading.energy_j,
        energy_kind=reading.energy_kind,
        sequence_length=length,
        compute_dtype=parts.dtype_name,
    )
    return record, result


def request_checkpoint(parts: Parts, reason: str, val_loss: float | None = None) -> None:
    """Ask for a checkpoint of this very state."""
    tensors = capture_tensors(parts.weights, parts.optimizers)
    architecture = dataclasses.asdict(parts.arch)
    meta = capture_meta(parts.progress, parts.config_toml, parts.config_hash, architecture, parts.corpus.key)
    parts.checkpoints.request(parts.progress.step, tensors, meta, reason, val_loss)


def _skipped(parts: Parts, result: StepResult) -> Iterator[Record]:
    """Records of a step that was not applied; raises when too many came in a row."""
    step = parts.progress.step
    what = f"loss {result.loss} with gradient norm {result.grad_norm} is not finite"
    yield Fault(step=step, what=what, where=f"step {step}", action="update left out; weights and moments unchanged")
    yield Decision(step=step, controller="step", action="skip", reason=what)
    if parts.progress.num_skipped >= MAX_SKIPPED_IN_A_ROW:
        raise RunError(
            f"{MAX_SKIPPED_IN_A_ROW} steps in a row had no finite gradient (last: {what}): start a new run with a "
            f"lower optim.lr; the records and checkpoints in {str(parts.run_dir)!r} are safe."
        )


def run_loop(parts: Parts, view: ProgressView) -> RunEnd:
    """Train until the end, the target loss, or a signal; returns the closing record (already written).

    Raises:
        TrimtabError: training cannot go on; the records and the last checkpoint are safe.
    """
    began = time.perf_counter()
    progress = parts.progress
    if progress.step == 0:
        _evaluate_and_show(parts, view)
    startup_s = time.time() - parts.started_s

    def end(outcome: str, reason: str) -> RunEnd:
        wall_s = time.perf_counter() - began
        step, train_s = progress.step, progress.train_s
        record = RunEnd(step=step, outcome=outcome, reason=reason, train_s=train_s, wall_s=wall_s, startup_s=startup_s)
        parts.write(record)
        return record

    try:
        with StopSignal() as stop:
            outcome, reason = _steps(parts, view, stop)
            try:
                parts.checkpoints.wait()
            finally:
                parts.write_finished_checkpoints()
        if outcome != "interrupted":
            write_sample(parts, view)
    except (MemoryError, RuntimeError) as error:
        failure = _explained(error, parts)
        with contextlib.suppress(StorageError):  # a full disk may have no room for the last word either
            end("failed", str(failure))
        if failure is error:
            raise
        raise failure from error
    return end(outcome, reason)


def _explained(error: Exception, parts: Parts) -> Exception:
    """An out-of-memory error in words; any other error as it is."""
    is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
    if not is_memory or isinstance(error, TrimtabError):
        return error
    train, length = parts.config.train, parts.config.data.sequence_length
    rows = (train.micro_batch_tokens or train.batch_tokens) // length
    fewer = max((n for n in range(1, rows) if rows % n == 0), default=0)
    flag = f"--train.micro_batch_tokens {fewer * length}" if fewer else "--train.activation_checkpointing yes"
    return RunError(
        f"Memory ran out at step {parts.progress.step + 1}; complete checkpoints are safe: go on with `trimtab train "
        f"--resume --run.dir {parts.run_dir.parent} --run.name {parts.run_dir.name} {flag}`."
    )


def _steps(parts: Parts, view: ProgressView, stop: StopSignal) -> tuple[str, str]:
    """All steps that are left; returns the outcome and its reason."""
    config, progress = parts.config, parts.progress
    num_steps = config.train.steps
    while progress.step < num_steps:
        record, result = one_step(parts)
        parts.write(record)
        view.step(record)
        if not result.applied:
            for item in _skipped(parts, result):
                parts.write(item)
        val_loss = None
        if _is_due(progress.step, config.evaluate.every, num_steps):
            val_loss = _evaluate_and_show(parts, view)
        reached = val_loss is not None and val_loss <= config.train.target_loss
        if stop.name or reached or _is_due(progress.step, config.checkpoint.every, num_steps):
            why = "signal" if stop.name else ("final" if reached or progress.step == num_steps else "periodic")
            request_checkpoint(parts, why, val_loss)
        parts.write_finished_checkpoints()
        if reached:
            return "target_reached", f"validation loss {val_loss:.4f} <= {config.train.target_loss}"
        if stop.name and progress.step < num_steps:
            return "interrupted", f"{stop.name} at step {progress.step}"
    return "finished", ""


def _evaluate_and_show(parts: Parts, view: ProgressView) -> float:
    """Evaluate, record, show; returns the validation loss."""
    evaluation = evaluate(parts)
    parts.write(evaluation)
    view.evaluation(evaluation)
    parts.progress.best_val_loss = min(parts.progress.best_val_loss, evaluation.loss)
    return evaluation.loss


def write_sample(parts: Parts, view: ProgressView) -> None:
    """Let the model write a text, show and record it."""
    section = parts.config.evaluate
    if not section.sample_tokens:
        return
    text = parts.generate(section.prompt, section.sample_tokens, section.temperature)
    sample = Sample(step=parts.progress.step, prompt=section.prompt, text=text)
    parts.write(sample)
    view.sample(sample)
