"""How a configuration field is declared: default, unit and range beside the name; the docstring follows the field.

The loader checks the range, `--help` and `trimtab config show` print the unit and the docstring, and a test walks every
field of every section. Ranges are data rather than code in `__post_init__`, so all refusals are worded alike.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from trimtab.core.errors import ConfigError, nearest, refusal


def option(
    default: Any,
    unit: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with its unit and its range.

    Args:
        default: the value when nothing is said.
        unit: such as "tokens", "steps", "seconds", "fraction", "name", "path", "yes/no".
        low: least value, itself allowed.
        high: greatest value, itself allowed.
        above: a bound that the value must exceed.
        choices: the names allowed, for a string.
    """
    metadata = {"unit": unit, "low": low, "high": high, "above": above, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def check_section(section: Any, name: str) -> None:
    """Check each field of a section against its declared range.

    Raises:
        ConfigError: names the field, the value, the rule and the fix.
    """
    for item in dataclasses.fields(section):
        check_value(f"{name}.{item.name}", getattr(section, item.name), item)


def check_value(where: str, value: Any, item: dataclasses.Field[Any]) -> None:
    """Check one value against the range in its field's metadata; raises `ConfigError`."""
    meta = item.metadata
    fix = f"the default is {item.default!r}"
    if meta["choices"] and value not in meta["choices"]:
        near = nearest(str(value), meta["choices"])
        hint = f"did you mean {near!r}" if near else fix
        raise ConfigError(refusal(where, value, f"must be one of {', '.join(meta['choices'])}", hint))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if not math.isfinite(value):
        raise ConfigError(refusal(where, value, "must be a finite number", fix))
    low, high, above = meta["low"], meta["high"], meta["above"]
    if above is not None and not value > above:
        raise ConfigError(refusal(where, value, f"must be above {above:g} ({meta['unit']})", fix))
    if low is not None and value < low:
        raise ConfigError(refusal(where, value, f"must be at least {low:g} ({meta['unit']})", fix))
    if high is not None and value > high:
        raise ConfigError(refusal(where, value, f"must be at most {high:g} ({meta['unit']})", fix))
