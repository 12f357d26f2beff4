"""The CPU engine: hand-written C++ behind the backend contract."""

from warpsmith.backend.cpu.backend import CpuBackend, CpuState

__all__ = ["CpuBackend", "CpuState"]
