"""Where trimtab keeps what outlives a run."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root(cache_dir: str = "") -> Path:
    """The cache folder: `cache_dir`, or `$XDG_CACHE_HOME/trimtab`, or `~/.cache/trimtab`."""
    if cache_dir:
        return Path(cache_dir).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "trimtab"
