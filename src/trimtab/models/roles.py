"""What each parameter is to an optimizer.

    matrix      a weight that maps features to features inside the network: decays; Muon's
    embedding   a table looked up by token (also when it doubles as the output head): no decay, no Muon
    head        an untied output projection: no Muon, since its rows are tokens, not features
    vector      gains and biases: no decay, no Muon

Works for our decoder and for any module with `get_input_embeddings` and `get_output_embeddings` (transformers).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """Parameter name to role, for every parameter, in the order of `named_parameters`."""
    embedding = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    head = getattr(model, "head_weight", None)
    roles = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in embedding:
            roles[name] = "embedding"
        elif parameter is head:
            roles[name] = "head"
        else:
            roles[name] = "matrix" if parameter.dim() == 2 else "vector"
    return roles


def split_sizes(model: nn.Module, name: str) -> tuple[int, ...]:
    """Row counts of the matrices fused in parameter `name`, in order; empty where it is a single one."""
    own: Callable[[str], tuple[int, ...]] | None = getattr(model, "split_sizes", None)
    return own(name) if own is not None else ()
