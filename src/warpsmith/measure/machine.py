"""Facts about this machine: processor, memory, GPUs, the libraries that matter. Asks the system, guesses nothing."""

from __future__ import annotations

import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from warpsmith.backend.cores import usable_cores as usable_cores


def cpu_model() -> str:
    """The processor's name as its maker gives it, or what the system knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if name := fields.get("model name") or fields.get("Model"):
        return name
    # ARM systems give numbers instead; those of ARM's own server cores have names
    cores = {"0xd0c": "N1", "0xd40": "V1", "0xd49": "N2", "0xd4f": "V2", "0xd84": "V3", "0xd8e": "N3"}
    maker, part = fields.get("CPU implementer"), fields.get("CPU part", "unknown")
    known = cores.get(part) if maker == "0x41" else None
    return f"Neoverse-{known}" if known else f"{platform.machine()}, implementer {maker}, part {part}"


def cpu_features() -> list[str]:
    """Instruction sets the CPU kernels could use; none where the compiled part is missing."""
    try:
        return list(import_module("warpsmith.backend.cpu._cpu").features())
    except ImportError:
        return []


def memory() -> dict[str, int]:
    """Bytes in total and available; empty where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = {key: int(value.split()[0]) for key, _, value in (line.partition(":") for line in lines) if value}
        facts = {"total": kilobytes["MemTotal"] << 10, "available": kilobytes["MemAvailable"] << 10}
    except (OSError, ValueError, LookupError):
        return {}
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        facts = {key: min(value, limit) for key, value in facts.items()}
    except (OSError, ValueError):
        pass
    return facts


def package_version(name: str) -> str | None:
    """The version of an installed package, None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
