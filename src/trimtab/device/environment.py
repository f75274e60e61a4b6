"""What a run's figures depend on beside its configuration: versions, chip, threads, the energy model, settings."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from dataclasses import asdict
from typing import Any

import torch

import trimtab
from trimtab.device.base import Device
from trimtab.hardware import probe

_PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "transformers", "gguf")
_VARIABLES = ("OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "NCCL_", "TORCH", "PYTORCH", "HIP_", "ONEDNN_", "DNNL_")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _git_commit() -> str:
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def environment(device: Device) -> dict[str, Any]:
    """A JSON-able description of where the run happens; no host name, no user, no secrets."""
    return {
        "trimtab": trimtab.__version__,
        "device": {"name": device.name, "description": device.describe(), "memory_bytes": device.memory_total_bytes()},
        "threads": torch.get_num_threads(),
        "machine": asdict(probe()),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES) and "TOKEN" not in k},
        "git_commit": _git_commit(),
    }
