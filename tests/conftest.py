"""Settings every test shares."""

import os
import signal
from functools import cache
from pathlib import Path

import pytest

# Two BLAS threads on two busy cores wait for each other far longer than they compute; must be set before numpy loads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell that starts the tests in the background ignores Ctrl-C for them, and every command a test starts would inherit
# that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Costs, compiled kernels, histories and models of the person who runs the tests are none of their business. The folder
# stays, so that kernels need not be compiled for every run.
HOME = Path(__file__).parents[1] / ".pytest_cache" / "home"
for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "HF_HOME"):
    os.environ[variable] = str(HOME / variable.lower())
for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
    os.environ.pop(variable, None)


@cache
def why_no_gpu() -> str | None:
    from warpsmith.backend.cuda.memory.driver import Device
    from warpsmith.errors import NoDevice

    try:
        Device()
    except NoDevice as error:
        return str(error)
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # of xdist, which begins with the files of most tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that compile kernels take longest. They come first, so that no process waits for another at the end."""
    items.sort(key=lambda item: not item.path.name.startswith("test_cuda"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before a test's fixtures, some of which take seconds to make what nobody would use."""
    if item.get_closest_marker("gpu") and (why := why_no_gpu()):
        pytest.skip(why)
