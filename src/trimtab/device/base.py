"""The contract of a device: what training needs to know and do, and nothing else.

A concrete device is a final class. It changes process-wide settings (threads, allocator) only in `prepare`, which is
idempotent. Rejected: wrapping tensors or streams; PyTorch's own device abstraction is good enough.
"""

from __future__ import annotations

import random
import shutil
from abc import ABC, abstractmethod

import numpy as np
import torch


class Device(ABC):
    """One device of this process."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As in `device.name`: `cpu`, `cuda:0`, ..."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """For `.to(...)`."""

    @abstractmethod
    def describe(self) -> str:
        """Model and size in words, for people and for the peak cache's key; stable between processes."""

    @abstractmethod
    def prepare(self, num_threads: int = 0) -> None:
        """Process-wide settings for speed; 0 threads: all usable cores. Safe to call again."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when all work given to the device is done."""

    @abstractmethod
    def memory_used_bytes(self) -> int:
        """Peak memory since the process began: device memory, or resident set on a CPU (bytes)."""

    @abstractmethod
    def memory_total_bytes(self) -> int:
        """Memory that can be used at all (bytes)."""

    def seed_all(self, seed: int) -> None:
        """Seed Python, numpy and torch (all devices)."""
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def can_compile(self) -> bool:
        """Whether torch.compile can build code here."""
        return True


class CpuDevice(Device):
    """The host's cores. See `cpu.tune_allocator` for what makes large activations cheap."""

    @property
    def name(self) -> str:
        """`cpu`."""
        return "cpu"

    @property
    def torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def describe(self) -> str:
        """CPU model and threads."""
        from trimtab.hardware import probe

        return f"{probe().cpu_model}, {torch.get_num_threads()} threads"

    def prepare(self, num_threads: int = 0) -> None:
        """Threads, denormals, allocator."""
        from trimtab.device.cpu import tune_allocator
        from trimtab.hardware.probe import num_usable_cores

        torch.set_num_threads(num_threads or num_usable_cores())
        torch.set_flush_denormal(True)
        tune_allocator()

    def synchronize(self) -> None:
        """CPU work is done when the call returns."""

    def memory_used_bytes(self) -> int:
        """Peak resident set (bytes)."""
        from trimtab.device.cpu import peak_resident_bytes

        return peak_resident_bytes()

    def memory_total_bytes(self) -> int:
        """Memory of the host or the container (bytes)."""
        from trimtab.hardware import probe

        return probe().memory_total_bytes

    def can_compile(self) -> bool:
        """Inductor needs a C++ compiler on a CPU."""
        return any(shutil.which(name) for name in ("g++", "clang++", "c++"))
