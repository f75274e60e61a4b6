"""How fast ranks on this machine exchange tensors: an all-reduce between two real processes.

The processes are fresh Pythons (`python -m trimtab.device.network`), so the caller's torch state does not matter, and a
hang is ended by a timeout. On a machine with two or more NVIDIA devices they use nccl on one device each, else gloo on
the loopback interface. Rate: algorithm bandwidth, bytes of the tensor over time; latency: an all-reduce of 4 bytes.

Limits: between machines it is a matter of the network, which `launch` checks; this is the ceiling within one.
"""

from __future__ import annotations

import datetime
import json
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

_NUM_BYTES = 16 << 20
_REPEATS = 8
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class NetworkRate:
    """Measured between two ranks of this machine."""

    backend: str
    bytes_per_s: float
    """All-reduce of 16 MiB: bytes of the tensor over time."""
    latency_s: float
    """All-reduce of 4 bytes."""
    problem: str = ""
    """Why it could not be measured; the rates are then 0."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure_network() -> NetworkRate:
    """Run the two processes and return what they saw; a failure is a value, not an exception."""
    backend = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() > 1 else "gloo"
    port = _free_port()
    command = [sys.executable, "-m", "trimtab.device.network", backend, str(port)]
    workers = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=_TIMEOUT_S) for worker in workers]
    except subprocess.TimeoutExpired:
        return NetworkRate(backend, 0.0, 0.0, f"two processes did not meet within {_TIMEOUT_S:.0f} s")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if any(worker.returncode for worker in workers):
        lines = [line for _, error in outputs for line in error.splitlines() if line.strip()]
        return NetworkRate(backend, 0.0, 0.0, lines[-1][:300] if lines else "a process died")
    body = json.loads(outputs[0][0].splitlines()[-1])
    return NetworkRate(backend, float(body["bytes_per_s"]), float(body["latency_s"]))


def _timed_all_reduce(tensor: torch.Tensor) -> float:
    best_s = float("inf")
    for _ in range(_REPEATS):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - began)
    return best_s


def main(backend: str, port: str, rank: str) -> None:
    """One of the two ranks; rank 0 prints the result as JSON."""
    device = torch.device("cuda", int(rank)) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=_TIMEOUT_S / 2)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=int(rank), world_size=2, timeout=timeout)
    large_s = _timed_all_reduce(torch.zeros(_NUM_BYTES // 4, device=device))
    small_s = _timed_all_reduce(torch.zeros(1, device=device))
    if rank == "0":
        print(json.dumps({"bytes_per_s": _NUM_BYTES / large_s, "latency_s": small_s}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4])
