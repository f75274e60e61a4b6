"""What the three arms share: the same tokens, the same validation windows, the same clock, the same result line."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SHAPES = {
    256: {"dim": 256, "num_layers": 4, "num_heads": 4, "ffn_dim": 704},
    512: {"dim": 512, "num_layers": 6, "num_heads": 8, "ffn_dim": 1408},
}
"""Llama-family shapes of 4.3M and 21.4M parameters at a vocabulary of 4,096, tied head."""
VOCAB_SIZE = 4096
SEQUENCE_LENGTH = 256
BATCH_SEQUENCES = 8
TOKENS_PER_STEP = SEQUENCE_LENGTH * BATCH_SEQUENCES


@dataclass
class Settings:
    """One run of one arm."""

    arm: str
    dim: int
    steps: int
    lr: float
    seed: int
    eval_every: int
    val_windows: int
    corpus: str
    """Folder with train.npy and val.npy (token ids)."""


def windows(path: Path) -> Tensor:
    """Token ids as rows of SEQUENCE_LENGTH + 1 with stride SEQUENCE_LENGTH, int64 [num, 257]."""
    tokens = torch.from_numpy(np.load(path).astype(np.int64))
    return tokens.unfold(0, SEQUENCE_LENGTH + 1, SEQUENCE_LENGTH)


class Watch:
    """Counts training seconds only; evaluations are outside the clock in every arm."""

    def __init__(self) -> None:
        self.train_s = 0.0
        self._began = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self.train_s += time.perf_counter() - self._began


def mean_loss(loss_of, val: Tensor) -> float:
    """Mean validation loss (nats per token) by `loss_of(tokens, targets) -> summed loss`, without gradients."""
    total = 0.0
    with torch.no_grad():
        for rows in val.split(BATCH_SEQUENCES):
            total += float(loss_of(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return total / (val.shape[0] * SEQUENCE_LENGTH)


def print_result(
    settings: Settings, curve: list[dict[str, float]], step_s: list[float], extra: dict[str, object]
) -> None:
    """The one line of JSON that the driver reads."""
    warm = sorted(step_s[len(step_s) // 10 :])
    median_s = warm[len(warm) // 2]
    body = {
        "arm": settings.arm,
        "dim": settings.dim,
        "lr": settings.lr,
        "seed": settings.seed,
        "steps": settings.steps,
        "curve": curve,
        "median_step_s": median_s,
        "tokens_per_s": TOKENS_PER_STEP / median_s,
        "mean_tokens_per_s": TOKENS_PER_STEP * len(step_s) / sum(step_s),
        **extra,
    }
    print("RESULT " + json.dumps(body), flush=True)
