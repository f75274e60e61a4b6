"""Causal attention: PyTorch's, except where a CPU is faster with plain batched products.

PyTorch's flash kernel for CPUs is good forward and slow backward, and it never uses AMX for short sequences. With short
sequences the T x T scores fit the cache, and four batched products with a softmax between them win. Forward and
backward, bf16, head size 64, two Xeon cores with AMX, PyTorch 2.13, ms (batch x heads x T):

                        8x4x256   8x8x256   32x4x64   2x4x1024
    flash (sdpa)        15.8      33.7      21.7      27.0
    this module         5.6       11.4      3.0       23.4

so it is taken on CPUs, for training (forward alone, flash is faster), up to `MAX_SEQUENCE` tokens. Grouped queries
share their keys and values without a copy: the queries of one group lie behind each other as rows of one product.

Rejected: recomputing the scores in backward (they are a few MiB at these lengths). Limits: scores are kept, so memory
grows with T^2; first-order gradients only.

Shapes: B batch, H query heads, G key/value heads, R = H / G, T sequence, K head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_SEQUENCE = 512
"""Longest sequence for which batched products are taken on a CPU (tokens)."""


class _BatchedAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(K) + mask) v by batched products."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """`q` [N, R T, K], `k` and `v` [N, T, K], `mask` (added) [1 or N, R T, T] -> [N, R T, K]."""
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
        weights = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(q, k, v, weights)
        return torch.bmm(weights, v)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of `q`, `k` and `v`."""
        (grad,) = grad_outputs
        q, k, v, weights = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        grad_v = torch.bmm(weights.transpose(1, 2), grad)
        grad_weights = torch.bmm(grad, v.transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_q = torch.bmm(grad_scores, k) * scale
        grad_k = torch.bmm(grad_scores.transpose(1, 2), q) * scale
        return grad_q, grad_k, grad_v, None


def causal_bias(length: int, mask: Tensor | None, like: Tensor) -> Tensor:
    """What is added to the scores: 0 where a token may look, -inf elsewhere; [1 or B, T, T] in the type of `like`.

    Args:
        length: T.
        mask: [B, 1, T, T], True where a token may look (causal already); None: plain causal.
        like: gives type and place.
    """
    if mask is None:
        allowed = torch.ones(length, length, dtype=torch.bool, device=like.device).tril()[None]
    else:
        allowed = mask[:, 0]
    return torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill(~allowed, float("-inf"))


def prefers_batched(x: Tensor) -> bool:
    """Whether a training forward on [B, T, D] takes the batched form."""
    return x.device.type == "cpu" and x.shape[1] <= MAX_SEQUENCE and torch.is_grad_enabled()


def batched_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention of `q` [B, T, H, K] to `k`, `v` [B, T, G, K] with `bias` from `causal_bias`; returns [B, T, H K]."""
    B, T, H, K = q.shape
    G = k.shape[2]
    R = H // G
    rows = q.view(B, T, G, R, K).permute(0, 2, 3, 1, 4).reshape(B * G, R * T, K)
    keys, values = (x.transpose(1, 2).reshape(B * G, T, K) for x in (k, v))
    mask = bias.repeat(1, R, 1) if R > 1 else bias
    if mask.shape[0] > 1:
        mask = mask.repeat_interleave(G, dim=0)
    y: Tensor = _BatchedAttention.apply(rows, keys, values, mask)
    return y.view(B, G, R, T, K).permute(0, 3, 1, 2, 4).reshape(B, T, H * K)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, bias: Tensor | None = None
) -> Tensor:
    """Attention of `q` [B, T, H, K] to `k`, `v` [B, S, G, K]; returns [B, T, H K].

    Args:
        q, k, v: queries, keys, values.
        mask: [B or 1, 1, T, S], True where a token may look; None: all, or causal.
        is_causal: plain causal attention, T = S.
        bias: from `causal_bias`, when the batched form is to be taken; it replaces mask and `is_causal`.
    """
    if bias is not None:
        return batched_attention(q, k, v, bias)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = k.shape[1] < q.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)
    return y.transpose(1, 2).flatten(2)
