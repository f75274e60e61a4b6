"""What `trimtab doctor` finds out: what the machine has, what is fast on it, what trimtab will use, what is wrong.

Everything is measured here and now, not looked up: a driver, a container limit, a neighbour make paper figures wrong.
Problems are values with a remedy and a severity; the caller decides what to print and whether to fail.

Takes about ten seconds on a CPU. Limits: GEMM rates are of one device of each kind.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.config.sections import DeviceSection
from trimtab.core.optional import have
from trimtab.device.base import Device
from trimtab.device.cpu import tune_allocator
from trimtab.device.gemm import BF16_WORTH_IT, machine_peak
from trimtab.device.network import NetworkRate, measure_network
from trimtab.device.select import available_devices, select_device
from trimtab.hardware.disk import disk_write_rate
from trimtab.hardware.probe import Machine, disk_free_bytes, probe

DTYPES = ("fp32", "bf16", "fp16")
_LOW_MEMORY_BYTES = 2 << 30
_LOW_DISK_BYTES = 2 << 30
_SLOW_DISK = 50e6
"""Bytes per second below which a checkpoint of a 100M-parameter model (1.2 GB of state) takes over 20 s."""
_EXTRAS = {"tokenizers": "train", "transformers": "hf", "gguf": "hf", "jinja2": "report", "plotly": "report"}


@dataclass(frozen=True)
class Problem:
    """Something that is wrong or could be better."""

    severity: str
    """`error`: training cannot work; `warning`: it works, slower or with less."""
    what: str
    remedy: str


@dataclass(frozen=True)
class Checkup:
    """All findings; converts to JSON by `to_dict`."""

    machine: Machine
    devices: tuple[dict[str, Any], ...]
    """Name, description and memory of each usable device."""
    gemm_flops: dict[str, dict[str, float]]
    """Device name to type to measured FLOP/s; 0 where the type does not work there."""
    disk: dict[str, Any]
    network: NetworkRate
    uses: dict[str, str]
    """What trimtab takes when nothing is configured, each with its reason."""
    problems: tuple[Problem, ...]
    torch: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @property
    def is_healthy(self) -> bool:
        """Whether no problem is an error."""
        return not any(problem.severity == "error" for problem in self.problems)


def _rates(device: Device, say: Callable[[str], None]) -> dict[str, float]:
    found = {}
    for dtype in DTYPES:
        say(f"measuring {dtype} products on {device.name}")
        try:
            found[dtype] = machine_peak(device, dtype, refresh=True).flops
        except (RuntimeError, TypeError):  # the backend has no such product
            found[dtype] = 0.0
    return found


def _disk(folder: Path) -> tuple[dict[str, Any], list[Problem]]:
    free = disk_free_bytes(folder.absolute())
    facts: dict[str, Any] = {"folder": str(folder), "free_bytes": free, "write_bytes_per_s": 0.0}
    try:
        facts["write_bytes_per_s"] = disk_write_rate(folder.absolute())
    except OSError as error:
        what = f"the folder for runs, {str(folder)!r}, cannot be written ({error.strerror})"
        return facts, [Problem("error", what, "choose another --run.dir")]
    problems = []
    if free < _LOW_DISK_BYTES:
        problems.append(Problem("warning", f"only {free / 2**30:.1f} GiB free where runs go", "free some space"))
    if facts["write_bytes_per_s"] < _SLOW_DISK:
        rate = facts["write_bytes_per_s"] / 1e6
        problems.append(Problem("warning", f"the disk for runs writes {rate:.0f} MB/s", "use a faster --run.dir"))
    return facts, problems


def _machine_problems(machine: Machine, device: Device) -> list[Problem]:
    problems = []
    if machine.memory_free_bytes < _LOW_MEMORY_BYTES:
        free = machine.memory_free_bytes / 2**30
        problems.append(
            Problem("warning", f"only {free:.1f} GiB of memory free", "close something, or use a smaller model")
        )
    if machine.num_cores_usable < machine.num_cores_seen:
        what = f"this process may use {machine.num_cores_usable} of {machine.num_cores_seen} cores"
        problems.append(Problem("warning", what, "threads are sized for that; raise the container's limit for more"))
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) < machine.num_cores_usable and device.name == "cpu":
        what = f"OMP_NUM_THREADS={wanted} asks for fewer threads than the {machine.num_cores_usable} usable cores"
        problems.append(Problem("warning", what, "trimtab sets its own number (device.num_threads); unset it"))
    if not device.can_compile():
        problems.append(Problem("warning", "no C++ compiler: torch.compile is off on the CPU", "install g++ or clang"))
    if sys.platform.startswith("linux") and not tune_allocator():
        what = "the C library is not glibc: freed memory goes back each step, up to 1.4x slower on a CPU"
        problems.append(Problem("warning", what, "use a glibc-based image"))
    if shutil.which("nvidia-smi") and not torch.cuda.is_available():
        what = f"an NVIDIA driver is here but torch {torch.__version__} cannot use it"
        problems.append(Problem("warning", what, "install the CUDA build of torch"))
    for module, extra in _EXTRAS.items():
        if not have(module):
            problems.append(Problem("warning", f"{module} is not installed", f"pip install 'trimtab[{extra}]'"))
    return problems


def checkup(section: DeviceSection, run_dir: Path, say: Callable[[str], None] = lambda _text: None) -> Checkup:
    """Examine this machine.

    Args:
        section: which device and how many threads, as in a run.
        run_dir: the folder that holds runs; its disk is measured.
        say: is told what is being done.

    Raises:
        DeviceError: the device asked for is not here.
    """
    machine = probe()
    device = select_device(section)
    devices = available_devices()
    kinds = {found.name.partition(":")[0]: found for found in reversed(devices)}
    rates = {}
    for found in kinds.values():
        found.prepare(section.num_threads)
        rates[found.name] = _rates(found, say)
    say("measuring the disk")
    disk, problems = _disk(run_dir)
    say("measuring the exchange between two ranks")
    network = measure_network()
    if network.problem:
        problems.append(
            Problem("warning", f"ranks cannot talk here: {network.problem}", "check the loopback interface")
        )
    problems = _machine_problems(machine, device) + problems
    own = rates.get(device.name) or _rates(device, say)
    ratio = own["bf16"] / own["fp32"] if own["fp32"] else 0.0
    dtype = "bf16" if ratio >= BF16_WORTH_IT else "fp32"
    uses = {
        "device.name": f"{device.name}: {'as configured' if section.name != 'auto' else 'the first that works'}",
        "train.dtype": f"{dtype}: bf16 products are {ratio:.1f} times as fast as fp32 (threshold {BF16_WORTH_IT})",
        "device.num_threads": f"{torch.get_num_threads()}",
        "train.compile": "possible" if device.can_compile() else "off: no C++ compiler",
    }
    return Checkup(
        machine=machine,
        devices=tuple(
            {"name": d.name, "description": d.describe(), "memory_bytes": d.memory_total_bytes()} for d in devices
        ),
        gemm_flops=rates,
        disk=disk,
        network=network,
        uses=uses,
        problems=tuple(problems),
        torch=torch.__version__,
    )
