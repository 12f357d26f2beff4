"""How many processors there are to share."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Cores this process may run on, also inside a container with a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores
