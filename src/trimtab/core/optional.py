"""Optional libraries come in through one door, which names the extra to install when one is missing."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from trimtab.core.errors import UserError


def have(module: str) -> bool:
    """Whether `module` can be imported here (it is not imported)."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def need(module: str, extra: str, purpose: str) -> Any:
    """Import and return `module`, or raise `UserError` with the extra that brings it.

    Args:
        module: dotted module name, such as `"plotly.graph_objects"`.
        extra: name of the trimtab extra that installs it, such as `"report"`.
        purpose: what it is for, in a few words; it ends up in the message.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{purpose} needs the package {module.split('.')[0]!r}, which is not installed ({error}): "
            f"pip install 'trimtab[{extra}]'."
        ) from error
