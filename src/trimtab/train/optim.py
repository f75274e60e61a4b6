"""fp32 master weights, and the optimizers that move them.

The model computes in `compute_dtype` (bf16 or fp32); the optimizer sees fp32 masters only. In bf16 the weights are cast
once per optimizer step instead of once per product, as autocast does; gradients of micro-batches are summed in fp32.
In fp32 the masters are the model's own parameters and nothing is copied.

Optimizers act on *pieces*: views of a master. A fused projection (query, key and value in one matrix) is one product in
the model but three matrices to Muon, whose update is orthogonal per matrix (Jordan et al. 2024, "Muon").

Groups: hidden matrices decay; embeddings, the head, norms and biases do not. Each group keeps `initial_lr`; the step
sets `lr = initial_lr * schedule(step) * decision.lr_scale`.

Rejected: one flat buffer for all weights (one fused call less per step, but the checkpoint would hold an opaque blob
that no other layout can load).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trimtab.config.sections import OptimSection


@dataclass(frozen=True)
class Piece:
    """A part of one parameter that the optimizer treats as a tensor of its own."""

    name: str
    """`layers.0.attention.qkv.weight` or, for a part of a fused matrix, the same with `[0:256]` of its rows."""
    role: str
    """`matrix`, `embedding`, `head` or `vector`."""
    parameter: nn.Parameter
    """fp32 view of the master; what the optimizer holds."""
    index: int
    """Position of the owning parameter in `MasterWeights.params`."""
    rows: slice
    """Rows of the owning parameter."""


class MasterWeights:
    """fp32 copies of a model's weights, and the traffic between the two.

    Args:
        model: its parameters are cast to `compute_dtype` in place.
        compute_dtype: `torch.bfloat16` or `torch.float32`.
        role_of: parameter name to role (`matrix`, `embedding`, `head`, `vector`).
        splits_of: parameter name to the row counts of the matrices fused in it, or an empty sequence.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_dtype: torch.dtype,
        role_of: Callable[[str], str],
        splits_of: Callable[[str], Iterable[int]],
    ) -> None:
        named = list(model.named_parameters())
        self.names = [name for name, _ in named]
        self.params: list[Tensor] = [parameter for _, parameter in named]
        self.is_copy = compute_dtype != torch.float32
        if self.is_copy:
            self.masters: list[Tensor] = [parameter.detach().float().clone() for parameter in self.params]
            self.grads: list[Tensor] = [torch.zeros_like(master) for master in self.masters]
            for parameter in self.params:
                parameter.data = parameter.data.to(compute_dtype)
        else:
            self.masters = [parameter.detach() for parameter in self.params]
            self.grads = []
        self._num_accumulated = 0
        self.pieces: list[Piece] = []
        for index, (name, master) in enumerate(zip(self.names, self.masters, strict=True)):
            sizes = list(splits_of(name)) or [master.shape[0] if master.dim() else 1]
            start = 0
            for size in sizes:
                rows = slice(start, start + size)
                view = master[rows] if len(sizes) > 1 else master
                label = f"{name}[{start}:{start + size}]" if len(sizes) > 1 else name
                self.pieces.append(Piece(label, role_of(name), nn.Parameter(view), index, rows))
                start += size

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.params:
            parameter.grad = None
        self._num_accumulated = 0

    def accumulate(self) -> None:
        """Take over the gradients of one micro-batch (call after each backward)."""
        if not self.is_copy:
            return  # autograd has summed them in fp32 already
        fresh = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.params]
        if self._num_accumulated == 0:
            torch._foreach_copy_(self.grads, fresh)
        else:
            torch._foreach_add_(self.grads, [grad.float() for grad in fresh])
        self._num_accumulated += 1
        for parameter in self.params:
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """The fp32 gradients, one per parameter (a parameter without one gives zeros)."""
        if self.is_copy:
            return self.grads
        return [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.params]

    def hand_to_optimizer(self, gradients: list[Tensor]) -> None:
        """Point every piece's `.grad` at its part of `gradients`."""
        for piece in self.pieces:
            whole = gradients[piece.index]
            piece.parameter.grad = whole if piece.parameter.shape == whole.shape else whole[piece.rows]

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the model's compute weights (after the optimizer moved them, or after a load)."""
        if self.is_copy:
            torch._foreach_copy_(self.params, self.masters)

    def state_dict(self) -> dict[str, Tensor]:
        """Master weights by parameter name."""
        return dict(zip(self.names, self.masters, strict=True))


def build_optimizers(weights: MasterWeights, section: OptimSection, fused: bool) -> list[torch.optim.Optimizer]:
    """The optimizers of a run: AdamW alone, or Muon for hidden matrices and AdamW for the rest.

    Args:
        weights: whose pieces to move.
        section: learning rates and decays.
        fused: use the fused AdamW kernel (CPU and accelerators of PyTorch have one).
    """
    roles: dict[str, list[nn.Parameter]] = {"decay": [], "plain": [], "muon": []}
    for piece in weights.pieces:
        is_matrix = piece.role == "matrix"
        key = "muon" if is_matrix and section.name == "muon" else ("decay" if is_matrix else "plain")
        roles[key].append(piece.parameter)
    groups = []
    if roles["decay"]:
        groups.append({"params": roles["decay"], "weight_decay": section.weight_decay, "initial_lr": section.lr})
    groups.append({"params": roles["plain"], "weight_decay": 0.0, "initial_lr": section.lr})
    betas = (section.beta1, section.beta2)
    adamw = torch.optim.AdamW(groups, lr=section.lr, betas=betas, eps=section.eps, fused=fused)
    optimizers: list[torch.optim.Optimizer] = [adamw]
    if roles["muon"]:
        muon_group = {"params": roles["muon"], "initial_lr": section.muon_lr}
        optimizers.append(
            torch.optim.Muon(
                [muon_group],
                lr=section.muon_lr,
                weight_decay=section.weight_decay,
                momentum=section.muon_momentum,
                adjust_lr_fn="original",
            )
        )
    return optimizers


def optimizer_state(optimizers: list[torch.optim.Optimizer], weights: MasterWeights) -> dict[str, dict[str, Tensor]]:
    """Optimizer state tensors by piece name, independent of the order of groups."""
    name_of = {id(piece.parameter): piece.name for piece in weights.pieces}
    found: dict[str, dict[str, Tensor]] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            found[name_of[id(parameter)]] = {k: v for k, v in state.items() if isinstance(v, Tensor)}
    return found


def materialise_state(optimizers: list[torch.optim.Optimizer], weights: MasterWeights) -> None:
    """Make all optimizer state exist (zeros, step 0), so that a checkpoint can be loaded into it in place."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if isinstance(optimizer, torch.optim.Muon):
                    state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                else:
                    state.setdefault("step", torch.zeros((), dtype=torch.float32, device=parameter.device))
                    state.setdefault("exp_avg", torch.zeros_like(parameter))
                    state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
