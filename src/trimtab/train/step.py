"""The whole training step, in one free function.

    for each micro-batch:  forward -> summed loss / tokens of the whole step -> backward -> add to the fp32 gradients
    global norm -> clip -> optimizers (group lr = initial_lr * schedule(step) * decision.lr_scale) -> compute weights

The loss of each micro-batch is divided by the number of target tokens of the *whole* step before backward, so that
gradient accumulation gives the gradient of the full batch exactly, also when micro-batches hold unequal numbers of
targets (the common bug: averaging the averages).

A step whose loss or gradient norm is not finite is not taken: weights, moments and step counters stay as they were.
Zero times NaN is NaN, so the gradients are not scaled away; the optimizer is simply not called.

There is one host synchronisation per step: the read of loss and norm together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.train.optim import MasterWeights


@dataclass(frozen=True)
class MicroBatch:
    """What one forward on one rank sees; all of shape [B, T] on the device."""

    tokens: Tensor
    targets: Tensor
    """Next tokens; -100 where there is nothing to predict."""
    positions: Tensor | None = None
    segments: Tensor | None = None
    """Document number of each token, for block-diagonal attention; None: one stream."""


@dataclass(frozen=True)
class StepResult:
    """What a step did."""

    loss: float
    """Mean cross-entropy over the step's targets (nats per token)."""
    grad_norm: float
    """Global norm before clipping."""
    applied: bool
    """False when loss or norm was not finite and the update was left out."""


def train_step(
    loss_sum: Callable[[MicroBatch], Tensor],
    micro_batches: Sequence[MicroBatch],
    num_targets: int,
    weights: MasterWeights,
    optimizers: Sequence[torch.optim.Optimizer],
    lr_scale: float,
    max_grad_norm: float,
) -> StepResult:
    """Train one optimizer step.

    Args:
        loss_sum: summed cross-entropy of a micro-batch (nats), differentiable; compiled or not.
        micro_batches: the step's share of this rank.
        num_targets: target tokens of the whole step, over all micro-batches.
        weights: fp32 masters of the model that `loss_sum` evaluates.
        optimizers: what moves the masters.
        lr_scale: factor on every group's `initial_lr` (schedule times decisions).
        max_grad_norm: clip the global norm to this; 0: do not clip.
    """
    assert micro_batches
    assert num_targets > 0
    weights.zero_grad()
    total = torch.zeros((), dtype=torch.float32, device=micro_batches[0].tokens.device)
    for micro_batch in micro_batches:
        loss = loss_sum(micro_batch) / num_targets
        loss.backward()
        weights.accumulate()
        total += loss.detach()

    gradients = weights.gradients()
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    loss_value, norm_value = torch.stack([total, norm.float()]).tolist()
    if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
        weights.zero_grad()
        return StepResult(loss_value, norm_value, applied=False)

    if max_grad_norm and norm_value > max_grad_norm:
        torch._foreach_mul_(gradients, max_grad_norm / (norm_value + 1e-6))
    weights.hand_to_optimizer(gradients)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_scale
        optimizer.step()
    weights.publish()
    return StepResult(loss_value, norm_value, applied=True)
