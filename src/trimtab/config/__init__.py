"""What a person can set: frozen dataclasses, one file per section, and the strict loader."""

from trimtab.config.load import (
    apply_overrides,
    config_hash,
    diff_configs,
    field_docs,
    load_config,
    parse_overrides,
    to_toml,
)
from trimtab.config.run import RunConfig

__all__ = [
    "RunConfig",
    "apply_overrides",
    "config_hash",
    "diff_configs",
    "field_docs",
    "load_config",
    "parse_overrides",
    "to_toml",
]
