"""Energy where nothing can be metered: a line between rest and full load.

    joules = (idle_w + (busy_w - idle_w) * load) * seconds

`load` is the share of the usable cores (or the device) that was busy. The line fits servers to about 10 % (Fan, Weber,
Barroso, "Power provisioning for a warehouse-sized computer", ISCA 2007, section 4). The defaults, 10 W per core busy
and 30 % of that at rest, are a server CPU's thermal design power over its cores (Intel Xeon 8480+, 350 W / 56 cores =
6.3 W; AMD EPYC 9334, 210 W / 32 = 6.6 W) with memory, fans and conversion on top: an assumption, not a measurement.
In the ratio of two runs on one machine the constants cancel.
"""

from __future__ import annotations

from dataclasses import dataclass

BUSY_W_PER_CORE = 10.0
IDLE_FRACTION = 0.3


@dataclass(frozen=True)
class PowerModel:
    """Power at full load and at rest (watts)."""

    busy_w: float
    idle_w: float

    @classmethod
    def for_device(cls, busy_w: float, idle_w: float, num_cores: int) -> PowerModel:
        """The configured constants, or the defaults for `num_cores` where they are 0."""
        busy = busy_w or BUSY_W_PER_CORE * num_cores
        return cls(busy, idle_w or IDLE_FRACTION * busy)


def modelled_energy_j(model: PowerModel, seconds: float, load: float) -> float:
    """Joules of `seconds` at `load` (0 to 1)."""
    return (model.idle_w + (model.busy_w - model.idle_w) * load) * seconds
