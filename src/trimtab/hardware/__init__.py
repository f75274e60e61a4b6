"""Hardware facts: what this machine says of itself, without torch."""

from trimtab.hardware.probe import Machine, probe

__all__ = ["Machine", "probe"]
