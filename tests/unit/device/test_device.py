"""Selection and refusal, the meter, the probe, the peak cache, the checkup. On whatever machine this is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trimtab.config.sections import DeviceSection
from trimtab.core.errors import DeviceError
from trimtab.device import Meter, available_devices, environment, machine_peak, measure_gemm, pick_dtype, select_device
from trimtab.device.checkup import checkup
from trimtab.device.cpu import tune_allocator
from trimtab.device.meter import RaplCounter
from trimtab.device.network import measure_network
from trimtab.hardware.disk import disk_write_rate
from trimtab.hardware.probe import cgroup_cores, cgroup_memory_bytes, disk_free_bytes, memory_info, probe


def test_the_cpu_is_always_there_and_auto_takes_what_computes() -> None:
    names = [device.name for device in available_devices()]
    assert names[-1] == "cpu"
    device = select_device(DeviceSection())
    assert device.name == names[0]
    ones = torch.ones(4, 4, device=device.torch_device)
    assert (ones @ ones).sum().item() == 64.0


def test_an_absent_device_is_refused_by_name() -> None:
    with pytest.raises(DeviceError, match="device.name must be auto or one of .*cpu here, but got 'cuda:93'"):
        select_device(DeviceSection(name="cuda:93"))
    with pytest.raises(DeviceError, match="did you mean 'cpu'"):
        select_device(DeviceSection(name="cpuu"))


def test_threads_are_set_and_restored() -> None:
    device = select_device(DeviceSection(name="cpu", num_threads=1))
    assert torch.get_num_threads() == 1
    device.prepare(0)
    assert torch.get_num_threads() == probe().num_cores_usable


def test_peaks_are_measured_once_and_only_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = select_device(DeviceSection(name="cpu"))
    first = machine_peak(device, "fp32")
    assert first.flops > 1e9
    assert machine_peak(device, "fp32").flops == first.flops
    path = tmp_path / "trimtab" / "peaks.json"
    cache = json.loads(path.read_text())
    path.write_text(json.dumps(dict.fromkeys(cache, 9e99)))
    assert machine_peak(device, "fp32", refresh=True).flops == 9e99
    path.write_text("not json")
    assert machine_peak(device, "fp32").flops > 1e9


def test_measuring_does_not_disturb_a_training_runs_randomness() -> None:
    """`build` seeds after it measures; this only shows why it must."""
    device = select_device(DeviceSection(name="cpu"))
    assert measure_gemm(device, torch.float32, (64, 64, 64), budget_s=0.0) > 0
    name, why = pick_dtype(device)
    assert name in ("bf16", "fp32")
    assert "GFLOP/s" in why


def test_the_meter_adds_up() -> None:
    device = select_device(DeviceSection(name="cpu"))
    meter = Meter(device, DeviceSection(busy_w=100.0, idle_w=40.0, num_threads=1))
    meter.start()
    x = torch.randn(400, 400)
    for _ in range(20):
        x = x @ x / 400
    reading = meter.read()
    assert reading.wall_s > 0
    assert reading.cpu_s > 0
    assert reading.memory_bytes > 50e6
    if reading.energy_kind == "modelled":
        assert 40.0 * reading.wall_s <= reading.energy_j <= 100.0 * reading.wall_s * 1.001


def test_rapl_counters_wrap(tmp_path: Path) -> None:
    for name, kind in (("intel-rapl:0", "package-0"), ("intel-rapl:1", "psys")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "name").write_text(kind + "\n")
        (folder / "energy_uj").write_text("900")
        (folder / "max_energy_range_uj").write_text("999")
    counter = RaplCounter(tmp_path)
    assert counter.is_available
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("100")
    assert counter.joules_since_last() == pytest.approx(200e-6), "the package alone, round the corner"
    assert not RaplCounter(tmp_path / "none").is_available


def test_container_limits_count(tmp_path: Path) -> None:
    assert cgroup_cores(tmp_path) == float("inf")
    assert cgroup_memory_bytes(tmp_path) == 0
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert cgroup_cores(tmp_path) == 1.5
    assert cgroup_memory_bytes(tmp_path) == 1 << 30
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_cores(tmp_path) == float("inf")
    assert cgroup_memory_bytes(tmp_path) == 0
    (tmp_path / "meminfo").write_text("MemTotal: 2048 kB\nMemAvailable: 1024 kB\n")
    assert memory_info(tmp_path / "meminfo") == (2 << 20, 1 << 20)


def test_the_disk_is_measured_and_left_clean(tmp_path: Path) -> None:
    assert disk_write_rate(tmp_path / "not" / "yet", num_bytes=1 << 20) > 0
    assert not list(tmp_path.iterdir())
    assert disk_free_bytes(tmp_path / "not" / "yet") > 0


def test_two_ranks_talk() -> None:
    rate = measure_network()
    assert not rate.problem
    assert rate.bytes_per_s > 1e6
    assert 0 < rate.latency_s < 1


def test_the_checkup_finds_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    blocker = tmp_path / "file"
    blocker.write_text("")
    found = checkup(DeviceSection(name="cpu"), tmp_path)
    assert found.is_healthy
    assert found.gemm_flops["cpu"]["fp32"] > 1e9
    assert found.uses["train.dtype"].startswith(("bf16", "fp32"))
    assert json.loads(json.dumps(found.to_dict()))["machine"]["num_cores_usable"] >= 1
    if found.machine.num_cores_usable > 1:
        assert any("OMP_NUM_THREADS=1" in problem.what for problem in found.problems)
    monkeypatch.setattr("trimtab.device.checkup.disk_write_rate", _refuse)
    assert not checkup(DeviceSection(name="cpu"), tmp_path).is_healthy


def _refuse(_folder: Path) -> float:
    raise OSError(30, "Read-only file system")


def test_the_environment_holds_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    facts = json.dumps(environment(select_device(DeviceSection(name="cpu"))))
    assert "hunter2" not in facts
    assert '"OMP_NUM_THREADS": "2"' in facts


def test_the_allocator_can_be_tuned_twice() -> None:
    assert tune_allocator() == tune_allocator()
