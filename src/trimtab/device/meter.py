"""What a step costs: CPU seconds, joules, memory. A few tens of microseconds per reading.

Energy comes from a counter where there is one (Intel and AMD RAPL through powercap; NVML through `pynvml` for NVIDIA),
else from a model with stated constants (`estimate.energy`); each figure says which. A virtual machine has no RAPL, so
there it is modelled. RAPL domains overlap: only packages are summed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.config.sections import DeviceSection
from trimtab.device.base import Device
from trimtab.estimate.energy import PowerModel, modelled_energy_j
from trimtab.hardware.probe import num_usable_cores


@dataclass(frozen=True)
class Reading:
    """Cost since `Meter.start`."""

    wall_s: float
    cpu_s: float
    energy_j: float
    energy_kind: str
    """`measured` or `modelled`."""
    memory_bytes: int


class RaplCounter:
    """Package energy counters of the powercap tree.

    Args:
        root: the tree; a test gives its own.
    """

    def __init__(self, root: Path = Path("/sys/class/powercap")) -> None:
        self._files: list[tuple[Path, int]] = []
        for folder in sorted(root.glob("intel-rapl:?")):
            try:
                if (folder / "name").read_text().startswith("package"):
                    int((folder / "energy_uj").read_text())
                    self._files.append((folder / "energy_uj", int((folder / "max_energy_range_uj").read_text())))
            except (OSError, ValueError):
                continue
        self._last = [self._value(path) for path, _ in self._files]

    @property
    def is_available(self) -> bool:
        """Whether any package can be read."""
        return bool(self._files)

    @staticmethod
    def _value(path: Path) -> int:
        return int(path.read_text())

    def joules_since_last(self) -> float:
        """Joules of all packages since the last call (counters wrap at their range)."""
        total = 0
        for index, (path, span) in enumerate(self._files):
            now = self._value(path)
            total += (now - self._last[index]) % (span + 1)
            self._last[index] = now
        return total / 1e6


class NvmlCounter:
    """Energy counter of one NVIDIA GPU (Volta and newer) through `pynvml`, if that is installed."""

    def __init__(self, index: int) -> None:
        self._handle: Any = None
        try:
            import pynvml  # type: ignore[import-not-found, unused-ignore]

            pynvml.nvmlInit()
            self._nvml: Any = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            self._last = pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except Exception:
            self._handle = None  # any NVML error means there is no counter here; energy is then modelled and says so

    @property
    def is_available(self) -> bool:
        """Whether the counter can be read."""
        return self._handle is not None

    def joules_since_last(self) -> float:
        """Joules since the last call."""
        now = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        joules, self._last = (now - self._last) / 1e3, now
        return float(joules)


class Meter:
    """Reads the cost of a stretch of work: `start()`, work, `read()`."""

    def __init__(self, device: Device, section: DeviceSection) -> None:
        self._device = device
        self._num_cores = section.num_threads or num_usable_cores()
        self.model = PowerModel.for_device(section.busy_w, section.idle_w, self._num_cores)
        counter: RaplCounter | NvmlCounter = RaplCounter()
        if device.name.startswith("cuda"):
            counter = NvmlCounter(device.torch_device.index or 0)
        self._counter = counter if counter.is_available else None
        self.energy_kind = "measured" if self._counter else "modelled"
        self.start()

    def start(self) -> None:
        """Begin a stretch."""
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        if self._counter:
            self._counter.joules_since_last()

    def read(self) -> Reading:
        """Cost since `start`."""
        wall_s, cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu
        if self._counter:
            energy_j = self._counter.joules_since_last()
        else:
            load = min(1.0, cpu_s / max(wall_s, 1e-9) / self._num_cores) if self._device.name == "cpu" else 1.0
            energy_j = modelled_energy_j(self.model, wall_s, load)
        return Reading(wall_s, cpu_s, energy_j, self.energy_kind, self._device.memory_used_bytes())
