"""Joules, where the machine has a meter that may be read: the processors' RAPL counters, and the GPU's own.

A meter counts all that its part of the machine does, for whomever.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"


@dataclass
class Meter:
    """`joules` are those since it was made. It has to be asked before its counter has come round once."""

    name: str
    count: Callable[[], int]
    unit: float  # joules of one count
    range: int | None = None  # counts after which it begins again
    _sum: int = 0
    _last: int = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self._last = self.count()

    def joules(self) -> float:
        with self._lock:
            now = self.count()
            passed = now - self._last
            if passed < 0:
                passed += self.range or 0
            self._sum, self._last = self._sum + max(passed, 0), now
            return self._sum * self.unit


def processor_meters(powercap: Path = POWERCAP) -> list[Meter]:
    """One for each processor package; none where the kernel has no such counters or keeps them to root."""
    meters = []
    for zone in sorted(powercap.glob("intel-rapl:*")):  # AMD's have the same name; parts of a package have two colons
        try:
            name = (zone / "name").read_text().strip()
            if zone.name.count(":") == 1 and name.startswith("package"):
                limit = int((zone / "max_energy_range_uj").read_text())
                meters.append(Meter(name, _reader(zone / "energy_uj"), 1e-6, limit))
        except (OSError, ValueError):
            continue
    return meters


def _reader(path: Path) -> Callable[[], int]:
    return lambda: int(path.read_text())


def gpu_meter(uuid: UUID, library: str | Path = NVML) -> Meter | None:
    """Of the GPU with this identity; None where its driver has no meter for it."""
    try:
        nvml = ctypes.CDLL(str(library))
        handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)):
            return None

        def count() -> int:
            if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
                raise OSError("the GPU's energy counter cannot be read")
            return millijoules.value

        return Meter("gpu", count, 1e-3)
    except (OSError, AttributeError):  # no driver, or an old one
        return None


def cuda_identity() -> UUID | None:
    """Of the GPU that the cuda device computes on: the first that is visible."""
    try:
        from cuda.bindings import driver

        code, device = driver.cuDeviceGet(0)
        if int(code):
            return None
        code, identity = driver.cuDeviceGetUuid(device)
        return None if int(code) else UUID(bytes=bytes(identity.bytes))
    except (ImportError, RuntimeError):
        return None


def meters_of(device: str) -> list[Meter]:
    """Those of the parts of this machine that compute when a model runs on `device`."""
    identity = cuda_identity() if device == "cuda" else None
    gpu = gpu_meter(identity) if identity is not None else None
    return [*processor_meters(), *([gpu] if gpu is not None else [])]
