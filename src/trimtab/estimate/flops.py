"""Model FLOPs of a decoder: the arithmetic that the mathematics asks for, not what a machine happens to execute.

A product of [m, k] and [k, n] counts 2 m k n; backward counts twice forward (one product per operand). Counted: the
projections, the head, and attention's two products with causal masking taken into account (a token sees (T + 1) / 2
keys on average). Not counted, as is the custom of MFU (PaLM, Chowdhery et al., arXiv 2204.02311, appendix B): norms,
softmax, rotary, activations, the embedding look-up, the optimizer, and recomputation. PaLM and nanoGPT count attention
without the causal half: their MFU is a little higher than ours for the same run, at T = 256 and D = 512 by about 1 %.
"""

from __future__ import annotations

from typing import Protocol

BACKWARD_OVER_FORWARD = 2.0
"""Backward makes two products for each of forward's: gradients of input and of weight."""


class Shape(Protocol):
    """The numbers that are read here; `trimtab.models.Architecture` has them."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_dim(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def tie_embeddings(self) -> bool: ...


def matrix_params(shape: Shape) -> int:
    """Weights that take part in a product for every token: projections and head, tied or not."""
    attention = shape.dim * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    feed_forward = shape.dim * shape.ffn_dim * (3 if shape.activation == "swiglu" else 2)
    return shape.num_layers * (attention + feed_forward) + shape.vocab_size * shape.dim


def forward_flops_per_token(shape: Shape, sequence_length: int) -> float:
    """Model FLOPs of one forward, per token, head included, averaged over the positions of a causal sequence.

    >>> from types import SimpleNamespace
    >>> one = SimpleNamespace(vocab_size=8, dim=4, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, ffn_dim=8,
    ...     activation="swiglu", tie_embeddings=True)
    >>> forward_flops_per_token(one, 1)  # 2 * (4*4*4 + 3*4*8 + 8*4) weights + 2 products with the token itself
    400.0
    """
    mean_keys = (sequence_length + 1) / 2
    attention = shape.num_layers * 2 * (2.0 * shape.num_heads * shape.head_dim * mean_keys)
    return 2.0 * matrix_params(shape) + attention


def train_flops_per_token(shape: Shape, sequence_length: int) -> float:
    """Model FLOPs of forward and backward, per token (about 6 N, plus attention)."""
    return (1.0 + BACKWARD_OVER_FORWARD) * forward_flops_per_token(shape, sequence_length)
