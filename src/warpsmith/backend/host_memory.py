"""What this process may still allocate, so that too much is refused before it is tried."""

from __future__ import annotations

from pathlib import Path

from warpsmith.errors import DoesNotFit


def check_fits(nbytes: int, what: str) -> None:
    """Refuse before allocating what the machine cannot hold."""
    free = free_memory()
    if free is not None and nbytes > free:
        raise DoesNotFit(
            f"{what} would take {_size(nbytes)} of memory, and {_size(free)} are free.",
            "Use a smaller model, a shorter context (-c) or fewer bits.",
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def free_memory() -> int | None:
    """Bytes: what the system has, what a container allows, and what is left of the address space; None if unknown."""
    limits = [limit for limit in (_available(), _container(), _address_space()) if limit is not None]
    return min(limits, default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _container() -> int | None:
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # there is none, or its limit is "max"
        return None


def _address_space() -> int | None:
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        return None if limit == resource.RLIM_INFINITY else max(0, limit - used)
    except (ImportError, OSError, ValueError):
        return None
