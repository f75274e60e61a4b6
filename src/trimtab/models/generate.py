"""Text from a model, one token at a time, with keys and values kept.

The cache is preallocated for prompt and continuation; each forward then sees only the new token and costs O(S) instead
of O(S^2). The result equals that of running the whole sequence each time (tested). A model whose `forward` takes no
`caches` (a wrapped transformers model) is run whole each time: slow, and meant for samples only.

Limits: one length for the whole batch, no stop token, no paging; `serve` has its own engine.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimtab.core.errors import ConfigError, refusal
from trimtab.models.llama import Llama


class KVCache:
    """Keys and values of one layer, [B, S, G, K] each, filled from the left."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values
        self._length = 0

    def extend(self, keys_BTGK: Tensor, values_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Append; returns all keys and values so far."""
        end = self._length + keys_BTGK.shape[1]
        self._keys[:, self._length : end] = keys_BTGK
        self._values[:, self._length : end] = values_BTGK
        self._length = end
        return self._keys[:, :end], self._values[:, :end]


def make_caches(model: Llama, batch_size: int, max_length: int) -> list[KVCache]:
    """One empty cache per layer, in the weights' type and place."""
    arch, weight = model.arch, model.embedding.weight
    shape = (batch_size, max_length, arch.num_kv_heads, arch.head_dim)
    return [KVCache(weight.new_empty(shape), weight.new_empty(shape)) for _ in range(arch.num_layers)]


def pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> Tensor:
    """One token per row of `logits` [B, V] -> [B, 1]; greedy at temperature 0."""
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Tensor,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue `tokens`.

    The prompt is cut on the left, and the continuation made shorter, where they exceed the model's longest sequence.

    Args:
        model: ours, or any with `forward -> hidden` and `logits`.
        tokens: prompt, [B, T], T at least 1.
        num_tokens: how many to add.
        temperature: softmax temperature; 0: greedy.
        top_k: choose among the k likeliest only; 0: among all.
        generator: source of randomness, on the model's device.

    Returns:
        Prompt and continuation, [B, T + num_tokens] (fewer where the limit of the model is reached).

    Raises:
        ConfigError: an empty prompt or a negative temperature.
    """
    if tokens.shape[1] == 0:
        raise ConfigError(refusal("prompt", "", "must hold at least one token"))
    if temperature < 0:
        raise ConfigError(refusal("temperature", temperature, "must be at least 0", "0 is greedy"))
    limit: int = model.arch.max_sequence_length  # type: ignore[union-attr, assignment]
    num_tokens = min(num_tokens, limit - 1)
    context = tokens[:, -(limit - num_tokens) :]
    caches = make_caches(model, tokens.shape[0], context.shape[1] + num_tokens) if isinstance(model, Llama) else None
    written, start, fresh = tokens, 0, context
    for _ in range(num_tokens):
        if caches is not None:
            hidden = model(fresh, caches=caches, start=start)
            start += fresh.shape[1]
        else:
            hidden = model(context)
        fresh = pick(model.logits(hidden[:, -1]), temperature, top_k, generator)  # type: ignore[operator]
        written, context = torch.cat((written, fresh), 1), torch.cat((context, fresh), 1)
    return written
