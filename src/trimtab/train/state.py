"""What a checkpoint of a training run holds, and its exact restoration.

Tensors: fp32 master weights by name, optimizer state by piece, torch's random state. Numbers: step, tokens, seconds,
FLOPs, joules, the loader's position, numpy's and Python's random state, the configuration as TOML with its hash, and
the architecture. The compute weights are not stored: they are the masters, rounded.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from trimtab.train.optim import MasterWeights, materialise_state, optimizer_state


@dataclass
class Progress:
    """How far a run is; all figures over every attempt."""

    step: int = 0
    """Updates done."""
    total_tokens: int = 0
    train_s: float = 0.0
    """Seconds in steps."""
    flops: float = 0.0
    energy_j: float = 0.0
    best_val_loss: float = float("inf")
    num_skipped: int = 0
    """Steps in a row that were not applied."""


def capture_tensors(weights: MasterWeights, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """The tensors of the run's state; live references, not copies."""
    return {
        "model": weights.state_dict(),
        "optimizer": optimizer_state(optimizers, weights),
        "random": {"torch": torch.get_rng_state()},
    }


def capture_meta(
    progress: Progress, config_toml: str, config_hash: str, architecture: dict[str, Any], corpus_key: str
) -> dict[str, Any]:
    """The JSON-able part of the run's state."""
    version, internal, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    body = asdict(progress)
    body["best_val_loss"] = repr(progress.best_val_loss)
    return {
        "progress": body,
        "config_toml": config_toml,
        "config_hash": config_hash,
        "architecture": architecture,
        "corpus_key": corpus_key,
        "random_python": [version, list(internal), gauss],
        "random_numpy": {**legacy, "state": {**legacy["state"], "key": legacy["state"]["key"].tolist()}},
    }


def template(weights: MasterWeights, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Tensors of the right shapes to load into; the run's own, so that a load needs no second copy."""
    materialise_state(optimizers, weights)
    return capture_tensors(weights, optimizers)


def restore(tensors: dict[str, Any], meta: dict[str, Any], weights: MasterWeights) -> Progress:
    """Finish a load: random states, compute weights, progress.

    Args:
        tensors: the structure from `template`, after the load filled it in place.
        meta: what `capture_meta` wrote.
        weights: whose compute copies to refresh.
    """
    torch.set_rng_state(tensors["random"]["torch"])
    version, internal, gauss = meta["random_python"]
    random.setstate((version, tuple(internal), gauss))
    saved = meta["random_numpy"]
    key = np.array(saved["state"]["key"], dtype=np.uint32)
    np.random.set_state({**saved, "state": {**saved["state"], "key": key}})
    weights.publish()
    body = dict(meta["progress"])
    body["best_val_loss"] = float(body["best_val_loss"])
    return Progress(**body)
