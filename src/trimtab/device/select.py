"""Which device: the one asked for, or the first accelerator that really computes, else the CPU."""

from __future__ import annotations

import torch

from trimtab.config.sections import DeviceSection
from trimtab.core.errors import DeviceError, nearest, refusal
from trimtab.device.accelerators import AcceleratorDevice
from trimtab.device.base import CpuDevice, Device

KINDS = ("cuda", "xpu", "mps")


def _works(device: Device) -> bool:
    try:
        ones = torch.ones(8, 8, device=device.torch_device)
        return bool((ones @ ones).sum().item() == 512.0)
    except (RuntimeError, AssertionError):
        return False


def available_devices() -> list[Device]:
    """All devices that PyTorch offers here and that pass a tiny product, the CPU last."""
    found: list[Device] = []
    for kind in KINDS:
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            continue
        count = 1 if kind == "mps" else module.device_count()
        found += [device for index in range(count) if _works(device := AcceleratorDevice(kind, index))]
    return [*found, CpuDevice()]


def select_device(section: DeviceSection) -> Device:
    """The device that a configuration means, prepared for work.

    Raises:
        DeviceError: it does not exist, or is not on this machine.
    """
    devices = available_devices()
    names = [device.name for device in devices]
    wanted = section.name if section.name != "auto" else names[0]
    wanted = f"{wanted}:0" if wanted in ("cuda", "xpu") else wanted
    for device in devices:
        if device.name == wanted:
            device.prepare(section.num_threads)
            return device
    near = nearest(section.name, [*names, "auto"])
    hint = f"did you mean {near!r}" if near else "use auto"
    raise DeviceError(refusal("device.name", section.name, f"must be auto or one of {', '.join(names)} here", hint))
