"""Numbers with units, for people: counts, bytes, durations, rates. Pure functions; machines read the raw values."""

from __future__ import annotations

import math


def format_count(value: float) -> str:
    """A count with an SI suffix.

    >>> format_count(7_241_000), format_count(512), format_count(1.5e12)
    ('7.24M', '512', '1.50T')
    """
    if not math.isfinite(value):
        return str(value)
    for limit, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= limit:
            return f"{value / limit:.2f}{suffix}"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.2f}"


def format_bytes(num_bytes: float) -> str:
    """A size in binary units.

    >>> format_bytes(3 * 2**20)
    '3.0 MiB'
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} PiB"


def format_duration(seconds: float) -> str:
    """A duration in the two largest units that matter.

    >>> format_duration(3.2), format_duration(192), format_duration(7384)
    ('3.2 s', '3 min 12 s', '2 h 03 min')
    """
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds < 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600):02d} h"


def format_energy(joules: float) -> str:
    """Energy in joules or watt-hours.

    >>> format_energy(500), format_energy(7.2e6)
    ('500 J', '2.00 kWh')
    """
    if joules < 3600:
        return f"{joules:.0f} J"
    watt_hours = joules / 3600
    return f"{watt_hours:.2f} Wh" if watt_hours < 1000 else f"{watt_hours / 1000:.2f} kWh"
