"""Arm (c): trimtab through its own parts: `build`, then the loop's `one_step`, with the recipe's schedule.

The loader, the step, the metering of energy and memory and the Step record are all inside the clock. Evaluation is the
benchmark's own, on the very windows of the other arms.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from common import SEQUENCE_LENGTH, SHAPES, TOKENS_PER_STEP, VOCAB_SIZE, Clock, Settings, windows

from trimtab.config import load_config
from trimtab.train.build import build
from trimtab.train.loop import one_step
from trimtab.train.parts import Parts
from trimtab.train.step import MicroBatch, train_step

SCHEDULE = {
    "schedule.name": "wsd",
    "schedule.warmup_fraction": "0.05",
    "schedule.decay_fraction": "0.5",
    "schedule.short_sequence_length": "64",
    "schedule.short_sequence_fraction": "0.5",
}
"""As in recipes/stdlib_5m_cpu.toml."""


def config_flags(settings: Settings, schedule: dict[str, str]) -> dict[str, str]:
    """The run's configuration fields."""
    shape = SHAPES[settings.dim]
    return {
        "data.vocab_size": str(VOCAB_SIZE),
        "data.sequence_length": str(SEQUENCE_LENGTH),
        "model.preset": "llama-5m",
        "model.dim": str(shape["dim"]),
        "model.num_layers": str(shape["num_layers"]),
        "model.num_heads": str(shape["num_heads"]),
        "model.ffn_dim": str(shape["ffn_dim"]),
        "optim.lr": str(settings.lr),
        "train.steps": str(settings.steps),
        "train.batch_tokens": str(TOKENS_PER_STEP),
        "train.seed": str(settings.seed),
        "train.compile": "on" if settings.compiled else "off",
        **schedule,
    }


def _compile(parts: Parts) -> float:
    """Run forward and backward once at each sequence length of the schedule, with a learning rate of 0; seconds."""
    began = time.perf_counter()
    schedule = parts.config.schedule
    for length in {schedule.short_sequence_length or SEQUENCE_LENGTH, SEQUENCE_LENGTH}:
        batch = parts.loader.batch(0, TOKENS_PER_STEP, sequence_length=length)
        micro = MicroBatch(torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets))
        train_step(parts.loss_sum, [micro], batch.num_targets, parts.weights, parts.optimizers, 0.0, 1.0)
    for optimizer in parts.optimizers:
        optimizer.state.clear()
    return time.perf_counter() - began


def run(settings: Settings, schedule: dict[str, str]) -> None:
    """Train one model and print the result line."""
    parts = build(load_config(None, config_flags(settings, schedule)), lambda _text: None)
    train = np.load(Path(settings.corpus) / "train.npy", mmap_mode="r")
    assert parts.corpus.num_train_tokens == len(train), "all arms learn from the same tokens"
    val = windows(Path(settings.corpus) / "val.npy")[: settings.val_windows]
    clock = Clock(settings, lambda tokens, targets: parts.eager_loss_sum(MicroBatch(tokens, targets)), val)
    if settings.compiled:
        clock.setup_s = _compile(parts)
    data_s = []
    for _ in range(settings.steps):
        clock.wait_for_turn()
        clock.start()
        record, result = one_step(parts)
        assert result.applied
        clock.stop()
        data_s.append(record.data_s)
    clock.print_result(data_s=data_s)
