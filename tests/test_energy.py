"""Meters of energy: the kernel's files for processors, NVIDIA's library for GPUs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpsmith.backend.cuda.memory.driver import Device
from warpsmith.errors import NoDevice
from warpsmith.measure.energy import Meter, cuda_identity, gpu_meter, meters_of, processor_meters
from warpsmith.serve.metrics import Metrics

UUID_HERE = UUID("12345678-1234-5678-1234-567812345678")
FAKE = """
#include <string.h>
static unsigned long long spent = 5000;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
    *device = &spent;
    return strcmp(uuid, "GPU-12345678-1234-5678-1234-567812345678") ? 6 : 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void* device, unsigned long long* energy) {
    *energy = *(unsigned long long*)device += 250;
    return 0;
}
"""


def zone(folder: Path, name: str, domain: str, energy: int, limit: int = 1_000_000) -> Path:
    path = folder / name
    path.mkdir()
    for file, value in (("name", domain), ("energy_uj", energy), ("max_energy_range_uj", limit)):
        (path / file).write_text(f"{value}\n")
    return path / "energy_uj"


def test_packages_are_counted_once_and_parts_of_them_not_again(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 400_000)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 999_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 1)
    zone(tmp_path, "intel-rapl:2", "psys", 1)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 1)
    (tmp_path / "intel-rapl:3").mkdir()  # nothing to read
    meters = processor_meters(tmp_path)
    assert [(meter.name, meter.joules()) for meter in meters] == [("package-0", 0), ("package-1", 0)]
    first.write_text("900000")
    second.write_text("1000")  # came round
    assert [meter.joules() for meter in meters] == [pytest.approx(0.5), pytest.approx(0.002)]
    assert processor_meters(tmp_path / "nowhere") == []


@given(st.lists(st.integers(0, 999), max_size=20), st.integers(0, 999))
def test_a_counter_that_comes_round_loses_nothing(steps: list[int], start: int) -> None:
    now = start
    meter = Meter("m", lambda: now % 1000, 1.0, 1000)
    for step in steps:
        now += step
        assert meter.joules() == now - start


def test_a_gpu_is_found_by_its_identity(tmp_path: Path) -> None:
    source, library = tmp_path / "fake.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(FAKE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    meter = gpu_meter(UUID_HERE, library)
    assert meter is not None
    assert [meter.joules(), meter.joules()] == [pytest.approx(0.25), pytest.approx(0.5)]
    assert gpu_meter(UUID(int=1), library) is None
    assert gpu_meter(UUID_HERE, tmp_path / "missing.so") is None


def test_metrics_tell_of_joules_where_there_is_a_meter(tmp_path: Path) -> None:
    metrics = Metrics()
    assert b"joules" not in metrics.text()
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 0, 10_000_000)
    metrics.energy.meters = processor_meters(tmp_path)
    counter.write_text("2500000")
    assert b'warpsmith_energy_joules_total{meter="package-0"} 2.5' in metrics.text()
    counter.unlink()  # it may be taken away
    assert b"joules" not in metrics.text()


@pytest.mark.gpu
def test_a_real_gpu_spends_something() -> None:
    try:
        Device()
    except NoDevice as error:
        pytest.skip(str(error))
    assert cuda_identity() is not None
    meter = next(meter for meter in meters_of("cuda") if meter.name == "gpu")
    while meter.joules() == 0:  # the counter moves every few milliseconds
        pass
