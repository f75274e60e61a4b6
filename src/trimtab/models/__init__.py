"""Models: the Llama-family decoder of our own, its presets, and the ways in and out of other people's files.

`architecture` is torch-free, so importing this package is too: the names below that need torch are fetched on first
use. `hf.AutoModel` and `gguf` need `trimtab[hf]`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trimtab.models.architecture import Architecture, get_preset, presets, resolve

if TYPE_CHECKING:
    from trimtab.models.build import build_model, model_tokenizer
    from trimtab.models.generate import generate
    from trimtab.models.llama import Llama
    from trimtab.models.loss import linear_cross_entropy
    from trimtab.models.roles import parameter_groups_by_role, parameter_roles, split_sizes

__all__ = [
    "Architecture",
    "Llama",
    "build_model",
    "generate",
    "get_preset",
    "linear_cross_entropy",
    "model_tokenizer",
    "parameter_groups_by_role",
    "parameter_roles",
    "presets",
    "resolve",
    "split_sizes",
]
_HOME = {
    "Llama": "llama",
    "build_model": "build",
    "generate": "generate",
    "linear_cross_entropy": "loss",
    "model_tokenizer": "build",
    "parameter_groups_by_role": "roles",
    "parameter_roles": "roles",
    "split_sizes": "roles",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"trimtab.models.{_HOME[name]}"), name)
        globals()[name] = value  # also replaces the submodule of the same name (`generate`) in this namespace
        return value
    raise AttributeError(f"module 'trimtab.models' has no attribute {name!r}")
