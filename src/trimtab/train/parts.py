"""The parts of a run, as the loop works with them, and how a step's rows come out of the loader.

`build` makes one `Parts`, `loop` uses it; neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.checkpoint import CheckpointWriter
from trimtab.config import RunConfig
from trimtab.core.records import Fault, Record, RecordWriter
from trimtab.data import Batch, Corpus, Loader, validation_batches
from trimtab.device import Device, Meter
from trimtab.estimate.flops import train_flops_per_token
from trimtab.models.architecture import Architecture
from trimtab.models.generate import generate
from trimtab.models.loss import linear_cross_entropy
from trimtab.report.sinks import Sink
from trimtab.train.optim import MasterWeights
from trimtab.train.schedule import batch_tokens_at, sequence_length_at
from trimtab.train.state import Progress
from trimtab.train.step import MicroBatch


@dataclass
class Parts:
    """All that the loop works with."""

    config: RunConfig
    """Resolved: nothing in it is derived any more."""
    device: Device
    dtype_name: str
    corpus: Corpus
    loader: Loader
    model: nn.Module
    arch: Architecture
    weights: MasterWeights
    optimizers: list[torch.optim.Optimizer]
    loss_sum: Callable[[MicroBatch], Tensor]
    """What the step differentiates; compiled or not."""
    eager_loss_sum: Callable[[MicroBatch], Tensor]
    """The same, not compiled: evaluation is too short to pay for a second graph."""
    peak_flops: float
    peak_source: str
    meter: Meter
    derived: dict[str, str]
    started_s: float
    """Unix time at which the command began."""
    run_dir: Path = Path()
    config_toml: str = ""
    config_hash: str = ""
    progress: Progress = field(default_factory=Progress)
    resumed_from: int = -1
    compiled: bool = False
    step_s: float = 0.0
    """Seconds of an eager step, where `build` has timed one; 0: it had no need to."""
    records: RecordWriter | None = None
    sinks: list[Sink] = field(default_factory=list)
    writer: CheckpointWriter | None = None

    @property
    def checkpoints(self) -> CheckpointWriter:
        """The writer of this run's checkpoints."""
        assert self.writer is not None, "open_run comes first"
        return self.writer

    @property
    def num_params(self) -> int:
        """All parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def flops_per_token(self, sequence_length: int) -> float:
        """Model FLOPs of forward and backward per token at a sequence length."""
        return train_flops_per_token(self.arch, sequence_length)

    def write(self, record: Record) -> None:
        """Hand a record to the file and the sinks; a sink that fails is left out from then on, with a Fault."""
        assert self.records is not None, "open_run comes first"
        self.records.write(record)
        for sink in list(self.sinks):
            try:
                sink.write(record)
            except Exception as error:  # a third party's library or server: training must not die of it
                self.sinks.remove(sink)
                what = f"sink {sink.name} failed: {type(error).__name__}: {error}"
                step = getattr(record, "step", self.progress.step)
                self.write(Fault(step=step, what=what, where=sink.name, action="sink left out; records.jsonl goes on"))

    def write_finished_checkpoints(self) -> None:
        """Record what the background writer has completed."""
        for record in self.checkpoints.poll():
            self.write(record)

    def validation_batches(self) -> Iterator[Batch]:
        """The held-out batches of an evaluation."""
        data, train = self.config.data, self.config.train
        rows = max(1, (train.micro_batch_tokens or train.batch_tokens) // data.sequence_length)
        num_tokens = self.config.evaluate.tokens
        return validation_batches(self.corpus.val, data.sequence_length, num_tokens, rows, packing=data.packing)

    def generate(self, prompt: str, num_tokens: int, temperature: float) -> str:
        """Text that the model writes after `prompt`."""
        tokenizer = self.corpus.tokenizer
        ids = tokenizer.encode(prompt).tolist() or [tokenizer.eos_id]
        tokens = torch.tensor([ids], device=self.device.torch_device)
        generator = torch.Generator(self.device.torch_device).manual_seed(self.config.train.seed)
        written = generate(self.model, tokens, num_tokens, temperature=temperature, generator=generator)
        return tokenizer.decode(written[0, len(ids) :].tolist())

    def close(self) -> None:
        """Let the last checkpoint complete, then close records and sinks.

        Raises:
            StorageError: the last checkpoint could not be written.
        """
        try:
            if self.writer is not None:
                self.writer.close()
        finally:
            if self.records is not None:
                self.records.close()
            for sink in self.sinks:
                sink.close()


def make_loss(model: nn.Module, forward: Callable[..., Tensor] | None = None) -> Callable[[MicroBatch], Tensor]:
    """Summed cross-entropy of a micro-batch (nats); `forward` may be the model compiled."""
    to_hidden = model if forward is None else forward

    def loss_sum(micro_batch: MicroBatch) -> Tensor:
        hidden = to_hidden(micro_batch.tokens, micro_batch.positions, micro_batch.segments)
        head_weight = cast("Tensor", model.head_weight)
        return linear_cross_entropy(hidden.flatten(0, 1), head_weight, micro_batch.targets.flatten())

    return loss_sum


def micro_batches_of(parts: Parts, step: int) -> tuple[list[MicroBatch], int, int, int]:
    """The micro-batches of `step` (0-based), their target count, their token count and their sequence length."""
    config, num_steps = parts.config, parts.config.train.steps
    num_tokens = batch_tokens_at(step, num_steps, config.train.batch_tokens, config.schedule)
    length = sequence_length_at(step, num_steps, config.data.sequence_length, config.schedule)
    micro_batches, num_targets = read_rows(parts, parts.progress.total_tokens, num_tokens, length)
    return micro_batches, num_targets, num_tokens, length


def read_rows(parts: Parts, position: int, num_tokens: int, length: int) -> tuple[list[MicroBatch], int]:
    """The micro-batches of `num_tokens` from a position of the loader, in rows of `length`, and their target count."""
    batch = parts.loader.batch(position, num_tokens, sequence_length=length)
    rows = max(1, (parts.config.train.micro_batch_tokens or num_tokens) // length)
    starts = range(0, batch.tokens.shape[0], rows)
    return [to_micro_batch(parts, batch, slice(start, start + rows)) for start in starts], batch.num_targets


def to_micro_batch(parts: Parts, batch: Any, part: slice) -> MicroBatch:
    """Rows of a loader's batch as tensors on the device; positions and segments only where documents are packed."""

    def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array[part])).to(parts.device.torch_device, non_blocking=True)

    if parts.config.data.packing == "documents":
        return MicroBatch(tensor(batch.tokens), tensor(batch.targets), tensor(batch.positions), tensor(batch.segments))
    return MicroBatch(tensor(batch.tokens), tensor(batch.targets))
