"""The live accelerator: which one, how fast it really is, what it uses."""

from trimtab.device.base import Device
from trimtab.device.environment import environment
from trimtab.device.gemm import Peak, machine_peak, measure_gemm, pick_dtype
from trimtab.device.meter import Meter, Reading
from trimtab.device.select import available_devices, select_device

__all__ = [
    "Device",
    "Meter",
    "Peak",
    "Reading",
    "available_devices",
    "environment",
    "machine_peak",
    "measure_gemm",
    "pick_dtype",
    "select_device",
]
