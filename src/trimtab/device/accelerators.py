"""Accelerators that PyTorch drives: CUDA and ROCm (one API), Intel XPU, Apple MPS.

These paths follow PyTorch's documented modules of the same shape (`torch.cuda`, `torch.xpu`, `torch.mps`); on a machine
without the hardware only their selection and refusal are tested.
"""

from __future__ import annotations

from typing import Any

import torch

from trimtab.device.base import Device


class AcceleratorDevice(Device):
    """One accelerator by PyTorch's type and index.

    Args:
        kind: `cuda` (NVIDIA, and AMD through ROCm), `xpu` or `mps`.
        index: which one, counted from 0.
    """

    def __init__(self, kind: str, index: int = 0) -> None:
        self._kind, self._index = kind, index
        self._module: Any = getattr(torch, kind)

    @property
    def name(self) -> str:
        """`cuda:0` and so on."""
        return self._kind if self._kind == "mps" else f"{self._kind}:{self._index}"

    @property
    def torch_device(self) -> torch.device:
        """For `.to(...)`."""
        return torch.device(self.name)

    def describe(self) -> str:
        """Vendor's name of the chip, with ROCm said where it is ROCm."""
        if self._kind == "mps":
            return "Apple GPU (MPS)"
        chip = str(self._module.get_device_name(self._index))
        return f"{chip} (ROCm {torch.version.hip})" if self._kind == "cuda" and torch.version.hip else chip

    def prepare(self, num_threads: int = 0) -> None:
        """Make it the current device; allow TF32 in fp32 products, as the field does."""
        if num_threads:
            torch.set_num_threads(num_threads)
        if self._kind != "mps":
            self._module.set_device(self._index)
        if self._kind == "cuda":
            torch.set_float32_matmul_precision("high")

    def synchronize(self) -> None:
        """Wait for the device's queue."""
        self._module.synchronize()

    def memory_used_bytes(self) -> int:
        """Peak of the caching allocator (bytes)."""
        if self._kind == "mps":
            return int(self._module.driver_allocated_memory())
        return int(self._module.max_memory_allocated(self._index))

    def memory_total_bytes(self) -> int:
        """Memory of the device (bytes)."""
        if self._kind == "mps":
            return int(self._module.recommended_max_memory())
        return int(self._module.get_device_properties(self._index).total_memory)
