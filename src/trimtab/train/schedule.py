"""Learning rate, sequence length and batch as pure functions of the step.

`step` is 0 for the first update. Nothing here holds state, so a resumed run cannot restart a schedule by accident, the
most common cause of a loss jump after a resume; and a schedule can be drawn, tested and planned without a model.

Shapes of the learning rate (p = step / num_steps, w = warm-up share, d = decay share, f = final share of the peak):

    all       (step + 1) / ceil(w num_steps)                                during warm-up
    cosine    f + (1 - f) (1 + cos(pi (p - w) / (1 - w))) / 2               Loshchilov & Hutter, arXiv 1608.03983
    linear    1 - (1 - f) (p - w) / (1 - w)
    wsd       1, then linearly to f over the last d num_steps               Hu et al., MiniCPM, arXiv 2404.06395
    constant  1

Sequence-length warm-up (Li et al., arXiv 2108.06084) starts with short sequences at the same tokens per step: attention
costs less and the gradient's noise falls, since tokens of one sequence are correlated.
"""

from __future__ import annotations

import math

from trimtab.config.sections import ScheduleSection


def lr_scale(step: int, num_steps: int, section: ScheduleSection) -> float:
    """The learning rate at `step` over its peak (0 to 1).

    Args:
        step: 0-based index of the update.
        num_steps: length of the run in updates.
        section: the schedule's shape.
    """
    warmup_steps = math.ceil(section.warmup_fraction * num_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    final = section.final_lr_fraction
    if section.name == "constant":
        return 1.0
    if section.name == "wsd":
        decay_steps = max(1, round(section.decay_fraction * num_steps))
        into_decay = step - (num_steps - decay_steps)
        return 1.0 if into_decay < 0 else 1.0 - (1.0 - final) * min(1.0, (into_decay + 1) / (decay_steps + 1))
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    if section.name == "linear":
        return 1.0 - (1.0 - final) * progress
    assert section.name == "cosine", section.name
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def sequence_length_at(step: int, num_steps: int, sequence_length: int, section: ScheduleSection) -> int:
    """Tokens per sequence at `step`: the short length for the first share of the run, then the full one."""
    if section.short_sequence_length and step < round(section.short_sequence_fraction * num_steps):
        return section.short_sequence_length
    return sequence_length


def batch_tokens_at(step: int, num_steps: int, batch_tokens: int, section: ScheduleSection) -> int:
    """Tokens of the optimizer step at `step`, over all ranks."""
    if step < round(section.small_batch_until * num_steps):
        return round(batch_tokens * section.small_batch_fraction)
    return batch_tokens


def tokens_before(step: int, num_steps: int, batch_tokens: int, section: ScheduleSection) -> int:
    """Tokens trained before `step` (the loader's position there)."""
    small_steps = min(step, round(section.small_batch_until * num_steps))
    small = round(batch_tokens * section.small_batch_fraction)
    return small_steps * small + (step - small_steps) * batch_tokens


def steps_for_tokens(num_tokens: int, batch_tokens: int, section: ScheduleSection) -> int:
    """The least number of steps that trains at least `num_tokens`."""
    low, high = 1, max(1, math.ceil(num_tokens / max(1, round(batch_tokens * section.small_batch_fraction))))
    while low < high:
        middle = (low + high) // 2
        if tokens_before(middle, middle, batch_tokens, section) >= num_tokens:
            high = middle
        else:
            low = middle + 1
    return low
