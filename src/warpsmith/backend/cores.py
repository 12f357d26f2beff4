"""How many processors there are to share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_cores() -> int:
    """Cores this process may run on, also inside a container with a quota. The threads of one core count once."""
    cores = physical_cores(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def team_of(cores: int) -> int:
    """How many threads work together on so many cores.

    At every step they wait for the slowest. Where all cores are taken, other work takes a core from one of them and so
    stops them all: one core of eight is left to it. Decoding waits for memory and loses nothing by that.
    """
    return cores - cores // 8


def physical_cores(processors: Iterable[int], topology: Path = _TOPOLOGY) -> int:
    """How many cores these processors belong to. One whose core the system does not tell is a core of its own.

    Two threads of a core share its multipliers and its way to memory: a second one wins little, and takes turns with
    the first in a way that changes from run to run.
    """
    return len({_core_of(processor, topology) for processor in processors})


def _core_of(processor: int, topology: Path) -> str:
    try:
        return (topology / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(processor)
