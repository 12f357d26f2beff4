"""Who has a GPU but not the packages that use it is told what to install."""

from __future__ import annotations

from importlib import import_module


def missing_extra() -> str | None:
    """One line for people, or None where there is nothing to gain."""
    try:
        import_module("cuda.bindings.driver")
        import_module("cuda.bindings.nvrtc")
        return None
    except ImportError:
        pass
    from warpsmith.backend.cuda.profiles import OLDEST, capability_from
    from warpsmith.measure import machine

    for gpu in machine.gpus()[0]:
        if capability_from(gpu["compute_capability"]) >= OLDEST:
            return f"{gpu['name']} is not used: install what it needs with `pip install 'warpsmith[cuda]'`"
    return None
