"""What the arms share: the same tokens, the same validation windows, the same clock, the same turns, the same result.

Every arm is its own process. The driver lets them run in turns of a few steps each (`Settings.turn_steps`), so that a
noisy neighbour or a clock change hits all of them alike; only the arm whose turn it is computes. The clock runs inside
steps only: waiting for a turn and evaluating are outside it, in every arm.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """Steps between evaluations; 0: none."""
    val_windows: int
    corpus: str
    """Folder with train.npy and val.npy (token ids)."""
    turn_steps: int = 10
    compiled: bool = False


def windows(path: Path) -> Tensor:
    """Token ids as rows of SEQUENCE_LENGTH + 1 with stride SEQUENCE_LENGTH, int64 [num, 257]."""
    tokens = torch.from_numpy(np.load(path).astype(np.int64))
    return tokens.unfold(0, SEQUENCE_LENGTH + 1, SEQUENCE_LENGTH)


@dataclass
class Clock:
    """Turns, step times and the validation curve of one arm."""

    settings: Settings
    loss_of: Callable[[Tensor, Tensor], Tensor]
    """(tokens, targets) -> summed loss (nats), evaluation mode."""
    val: Tensor
    setup_s: float = 0.0
    """Compiling, before the first step (seconds)."""
    step_s: list[float] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)

    def wait_for_turn(self) -> None:
        """Announce readiness and block until the driver says go; call before each step."""
        if len(self.step_s) % self.settings.turn_steps == 0:
            print("READY", flush=True)
            if not sys.stdin.readline():
                sys.exit(1)

    def start(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def stop(self) -> None:
        """A step ended; evaluates when due."""
        self.step_s.append(time.perf_counter() - self._began)
        step, every = len(self.step_s), self.settings.eval_every
        if every and (step % every == 0 or step == self.settings.steps):
            self.curve.append({"step": step, "train_s": sum(self.step_s), "loss": self.evaluate()})

    def evaluate(self) -> float:
        """Mean validation loss (nats per token)."""
        total = 0.0
        with torch.no_grad():
            for rows in self.val.split(BATCH_SEQUENCES):
                total += float(self.loss_of(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
        return total / (self.val.shape[0] * SEQUENCE_LENGTH)

    def print_result(self, **extra: object) -> None:
        """The one line of JSON that the driver reads."""
        body = {"curve": self.curve, "step_s": self.step_s, "setup_s": self.setup_s, **extra}
        print("RESULT " + json.dumps(body), flush=True)
