"""Bytes that training holds: weights, gradients, optimizer state, activations. A model, from plain numbers.

Activations are those that autograd keeps for backward in our decoder, per block and token, in units of features:

    input of each norm (2 D), norm outputs (2 D), rotated q and k, v, attention output ((2 H + 2 G) K), softmax
    statistics (H, fp32), gate, up, their product and silu (4 F, or 3 F for ReLU^2)

which follows Korthikanti et al. (arXiv 2205.05198) with flash attention and without dropout. With checkpointing a block
keeps its input alone, and one block's full set exists while it is recomputed. The loss holds one piece of logits.

The figures are modelled: allocators fragment, kernels take workspace. Limits: one device, no sharding.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.estimate.flops import Shape, matrix_params

_FP32 = 4
_LOGITS_PER_PIECE = 1 << 21
_MIN_ROWS_PER_PIECE = 256


@dataclass(frozen=True)
class TrainingMemory:
    """Modelled bytes of one training process."""

    weights: int
    """Compute weights and, where they are in another type, the fp32 masters."""
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def num_params(shape: Shape) -> int:
    """All weights but norm gains of QK-norm (a few per layer); a tied table counts once."""
    table = shape.vocab_size * shape.dim
    return matrix_params(shape) + (0 if shape.tie_embeddings else table) + (2 * shape.num_layers + 1) * shape.dim


def activation_bytes_per_token(shape: Shape, compute_bytes: int, checkpointing: bool) -> int:
    """Bytes kept for backward, per token of the micro-batch."""
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    feed_forward = shape.ffn_dim * (4 if shape.activation == "swiglu" else 3)
    block = (4 * shape.dim + heads + feed_forward) * compute_bytes + shape.num_heads * _FP32
    ends = 2 * shape.dim * compute_bytes
    if checkpointing:
        return shape.num_layers * shape.dim * compute_bytes + block + ends
    return shape.num_layers * block + ends


def training_memory(
    shape: Shape,
    micro_batch_tokens: int,
    compute_bytes: int = 2,
    optimizer: str = "adamw",
    checkpointing: bool = False,
) -> TrainingMemory:
    """Bytes of a training process on one device.

    Args:
        shape: the decoder.
        micro_batch_tokens: tokens of one forward.
        compute_bytes: 2 for bf16 (with fp32 masters beside), 4 for fp32.
        optimizer: `adamw` (two fp32 moments) or `muon` (one for hidden matrices, two for the rest).
        checkpointing: blocks are recomputed in backward.
    """
    params, table = num_params(shape), shape.vocab_size * shape.dim
    is_mixed = compute_bytes != _FP32
    hidden = matrix_params(shape) - table
    moments = 2 * params - (hidden if optimizer == "muon" else 0)
    rows = min(micro_batch_tokens, max(_MIN_ROWS_PER_PIECE, _LOGITS_PER_PIECE // shape.vocab_size))
    return TrainingMemory(
        weights=params * (compute_bytes + (_FP32 if is_mixed else 0)),
        gradients=params * ((compute_bytes + _FP32) if is_mixed else _FP32),
        optimizer=moments * _FP32,
        activations=micro_batch_tokens * activation_bytes_per_token(shape, compute_bytes, checkpointing),
        logits=rows * shape.vocab_size * (compute_bytes + _FP32) + table * _FP32,
    )
