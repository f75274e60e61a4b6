"""What this machine says of itself, without torch: cores that may be used, memory that may be used, CPU, disk.

A container sees all cores and all memory of its host but may use a share: the limits of its control group (v2, then v1)
and the scheduler's affinity count, since a thread pool sized for the host runs several times slower.
"""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
)
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Machine:
    """Facts on one machine."""

    cpu_model: str
    num_cores_seen: int
    """Logical cores of the host."""
    num_cores_usable: int
    """Cores this process may use: affinity and the control group's quota, rounded up."""
    memory_total_bytes: int
    """Memory this process may use: the host's, or the control group's limit."""
    memory_free_bytes: int
    cpu_flags: tuple[str, ...]
    """Instruction sets that matter for training, of those present."""
    system: str
    python: str


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that the control group grants; infinity when there is no limit."""
    quota, _, period = _read(root / "cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        return int(quota) / int(period)
    old_quota, old_period = (_read(root / "cpu" / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if old_quota.isdigit() and old_period.isdigit() and int(old_period):
        return int(old_quota) / int(old_period)
    return float("inf")


def cgroup_memory_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that the control group grants (bytes); 0 when there is no limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _read(root / name).strip()
        if text.isdigit() and int(text) < _NO_LIMIT:
            return int(text)
    return 0


def memory_info(path: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """Total and available memory of the host (bytes); zeros where it cannot be read."""
    found: dict[str, int] = {}
    for line in _read(path).splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[key] = int(words[0]) * 1024
    if not found and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    return found.get("MemTotal", 0), found.get("MemAvailable", 0)


def _cpu_info() -> tuple[str, tuple[str, ...]]:
    model, flags = platform.processor() or platform.machine(), set[str]()
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        if key.strip().lower() in ("flags", "features"):
            flags = set(value.split())
            break
    return model, tuple(flag for flag in _FLAGS if flag in flags)


def num_usable_cores() -> int:
    """Cores this process may keep busy."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    limit = cgroup_cores()
    return max(1, affinity if limit == float("inf") else min(affinity, -int(-limit // 1)))


def probe() -> Machine:
    """Read the facts of this machine now."""
    model, flags = _cpu_info()
    total, free = memory_info()
    limit = cgroup_memory_bytes()
    return Machine(
        cpu_model=model,
        num_cores_seen=os.cpu_count() or 1,
        num_cores_usable=num_usable_cores(),
        memory_total_bytes=min(total, limit) if limit else total,
        memory_free_bytes=min(free, limit) if limit else free,
        cpu_flags=flags,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def nearest_folder(path: Path) -> Path:
    """`path`, or its nearest parent that is an existing folder."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def disk_free_bytes(path: Path) -> int:
    """Free space where `path` (or its nearest existing parent) lies (bytes)."""
    return shutil.disk_usage(nearest_folder(path)).free
