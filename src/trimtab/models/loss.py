"""Cross-entropy straight from hidden states, without ever holding the logits of a batch.

    loss = sum over rows n of  logsumexp(W h_n) - (W h_n)[target_n]

Rows are taken in pieces. Each piece makes its logits, its loss and, since loss gradients need nothing from later
layers, at once the gradients of hidden states and weight; backward only scales them. Memory: piece x V instead of
N x V, three times over (Wijmans et al., "Cut your losses", arXiv 2411.09009; Liger kernel, arXiv 2410.10989).

The log-softmax is fp32 whatever the type of the hidden states: bf16 has 8 bits, and a sum over V terms needs more. The
weight's gradient is summed over pieces in fp32 too.

Measured forward and backward, N = 2048, D = 256, V = 4096, two Xeon cores, PyTorch 2.13, ms:

                                                              bf16    fp32
    F.cross_entropy(F.linear(h, W).float())                   51      103
    F.linear_cross_entropy(options=LinearCrossEntropyOptions) 71      68
    this module, pieces of 512 rows                           24      52
    F.linear_cross_entropy (all logits, bf16 log-softmax)     18      77

Rejected, therefore: PyTorch's chunked form (slower here, not compilable); its plain form, the fastest in bf16, which
rounds every token's loss to 8 bits (the sum above came out 1 % off) and holds all logits. A fresh buffer per piece
costs more than the arithmetic (page faults), hence the shared ones. Limits: first-order gradients only; no label
smoothing, no class weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100
"""Target of rows that do not count."""
_PIECE_ELEMENTS = 1 << 21
"""Logits of a piece (fp32: 8 MiB). Measured: 512 rows at V = 4,096 were the fastest in bf16 and in fp32, see above."""
_MIN_ROWS = 256
"""Fewer rows than this waste the product's tiles and re-read a large W too often."""


def rows_per_piece(num_rows: int, vocab_size: int) -> int:
    """Rows whose logits are made at once: pieces of equal size (but the last), each about `_PIECE_ELEMENTS` logits."""
    most = max(_MIN_ROWS, _PIECE_ELEMENTS // vocab_size)
    num_pieces = max(1, -(-num_rows // most))
    return max(1, -(-num_rows // num_pieces))


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and both gradients, piece by piece, in buffers that all pieces share."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        """Loss; both gradients are kept for `backward`."""
        num_rows, vocab_size = hidden.shape[0], weight.shape[0]
        step = rows_per_piece(num_rows, vocab_size)
        loss = hidden.new_zeros((), dtype=torch.float32)
        logits = hidden.new_empty(step, vocab_size)  # and then their gradient
        log_p = logits.new_empty(step, vocab_size, dtype=torch.float32)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty(0)
        for start in range(0, num_rows, step):
            rows, index = hidden[start : start + step], targets[start : start + step, None]
            counts = index != ignore_index
            index = index.clamp_min(0)
            size = rows.shape[0]
            torch.mm(rows, weight.t(), out=logits[:size])
            torch.log_softmax(logits[:size], -1, dtype=torch.float32, out=log_p[:size])
            target_log_p = log_p[:size].gather(1, index)
            loss -= (target_log_p * counts).sum()
            grad_logits = torch.exp(log_p[:size], out=logits[:size])
            grad_logits.scatter_(1, index, torch.expm1(target_log_p).to(logits.dtype))
            torch.mm(grad_logits, weight, out=grad_hidden[start : start + step])
            part = grad_logits.t() @ (rows * counts)  # rows that do not count are zeroed on the narrow side
            grad_weight = part if start == 0 else grad_weight.float().add_(part)
        grad_hidden *= (targets != ignore_index)[:, None]
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The kept gradients, scaled."""
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0]
        return grad_hidden * scale, grad_weight * scale, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """Summed cross-entropy of `hidden @ weight.T` (nats), fp32 scalar.

    Args:
        hidden: [N, D].
        weight: [V, D], in the type of `hidden`.
        targets: [N], token ids; `ignore_index` where a row does not count.
        ignore_index: see `targets`.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, ignore_index)
    loss = hidden.new_zeros((), dtype=torch.float32)
    step = rows_per_piece(hidden.shape[0], weight.shape[0])
    for rows, index in zip(hidden.split(step), targets.split(step), strict=True):
        log_p = F.log_softmax(F.linear(rows, weight), dim=-1, dtype=torch.float32)
        loss += F.nll_loss(log_p, index, reduction="sum", ignore_index=ignore_index)
    return loss
