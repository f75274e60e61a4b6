"""How fast this machine really multiplies matrices: the denominator of MFU, and what decides the compute type.

A vendor's peak is for a chip at full clock with no neighbour; on a shared virtual machine it means little. So the rate
is measured, best of several short blocks over a few shapes, and kept in a cache file by chip, threads, PyTorch release
and type. A later, higher measurement replaces a lower one, because a neighbour can only make a machine look slower.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from trimtab.core.atomic import write_text
from trimtab.core.errors import StorageError
from trimtab.core.folders import cache_root
from trimtab.device.base import Device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU_SHAPES = ((2048, 512, 1536), (2048, 704, 256), (2048, 2048, 2048))
"""(rows, inner, columns): the best of these on two AVX512 or AMX cores; larger ones leave the cache."""
ACCELERATOR_SHAPES = ((8192, 4096, 4096), (8192, 8192, 8192))
BF16_WORTH_IT = 1.2
"""bf16 must multiply this much faster than fp32 to be chosen; below, its casts and rounding are not paid for."""


@dataclass(frozen=True)
class Peak:
    """A measured rate."""

    flops: float
    """FLOP/s."""
    source: str
    """In words: measured when and over which shape."""


def measure_gemm(device: Device, dtype: torch.dtype, shape: tuple[int, int, int], budget_s: float = 0.2) -> float:
    """FLOP/s of `x @ w.T` at (rows, inner, columns): the best block within `budget_s` seconds after a warm-up."""
    rows, inner, columns = shape
    x = torch.randn(rows, inner, device=device.torch_device).to(dtype)
    weight = torch.randn(columns, inner, device=device.torch_device).to(dtype)
    torch.nn.functional.linear(x, weight)
    device.synchronize()
    best_s, deadline = float("inf"), time.perf_counter() + budget_s
    while True:
        began = time.perf_counter()
        for _ in range(3):
            torch.nn.functional.linear(x, weight)
        device.synchronize()
        best_s = min(best_s, (time.perf_counter() - began) / 3)
        if time.perf_counter() >= deadline:
            return 2.0 * rows * inner * columns / best_s


def _read_cache(path: Path) -> dict[str, float]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {k: float(v) for k, v in body.items() if isinstance(v, int | float)} if isinstance(body, dict) else {}


def machine_peak(device: Device, dtype_name: str, refresh: bool = False) -> Peak:
    """The best GEMM rate seen on this device in a type.

    Args:
        device: prepared (threads set).
        dtype_name: `fp32`, `bf16` or `fp16`.
        refresh: measure again even if the cache has a rate; the higher one is kept.
    """
    path = cache_root() / "peaks.json"
    key = f"{device.describe()} | torch {torch.__version__} | {dtype_name}"
    cached = _read_cache(path).get(key, 0.0)
    if cached and not refresh:
        return Peak(cached, f"measured {dtype_name} GEMM, best seen on this machine")
    shapes = CPU_SHAPES if device.name == "cpu" else ACCELERATOR_SHAPES
    rates = {shape: measure_gemm(device, DTYPES[dtype_name], shape) for shape in shapes}
    shape, flops = max(rates.items(), key=lambda item: item[1])
    if flops > cached:
        with contextlib.suppress(StorageError):  # an unwritten cache costs a second next time, nothing else
            write_text(path, json.dumps({**_read_cache(path), key: flops}, indent=2))
    best = max(flops, cached)
    return Peak(best, f"measured {dtype_name} GEMM, best at {'x'.join(map(str, shape))}")


def pick_dtype(device: Device) -> tuple[str, str]:
    """The compute type that pays here, and why, in words."""
    fp32, bf16 = machine_peak(device, "fp32").flops, machine_peak(device, "bf16").flops
    ratio = bf16 / fp32
    text = f"bf16 GEMM {bf16 / 1e9:,.0f} GFLOP/s, fp32 {fp32 / 1e9:,.0f}: {ratio:.1f}x"
    return ("bf16" if ratio >= BF16_WORTH_IT else "fp32"), text
