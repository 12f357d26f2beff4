"""Which device computes, what each can be told, and what is said when one that is there is not used."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from warpsmith.backend.cpu.backend import CACHE_BYTES, CacheType, CpuBackend
from warpsmith.backend.devices import CACHE_TYPES, DEVICES, backend_for, gpus
from warpsmith.errors import BadRequest, DoesNotFit, NoDevice
from warpsmith.model.synthetic import tiny_model
from warpsmith.model.weights import read_config

TINY = tiny_model()


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(TINY)
    with pytest.raises(BadRequest, match="tpu"):
        backend_for("tpu", TINY, config)
    with pytest.raises(BadRequest, match="threads"):
        backend_for("reference", TINY, config, threads=2)
    for name in ("cuda", "cpu"):
        monkeypatch.setitem(sys.modules, f"warpsmith.backend.{name}", None)  # as if it were not installed
        with pytest.raises(NoDevice, match=name) as caught:
            backend_for(name, TINY, config)
        assert caught.value.exit_code == 4
    assert backend_for("auto", TINY, config).name == "reference"


def test_auto_takes_the_first_device_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, *args: object, context: int | None, progress: object) -> None:
            contexts.append(context)
            raise NoDevice("The driver is too old.")

    class Works:
        name = "cpu"

        def __init__(self, *args: object, threads: int | None = None, progress: object = None) -> None:
            self.threads = threads

    contexts: list[int | None] = []

    for name, classes in (("cuda", {"open_backend": Broken}), ("cpu", {"CpuBackend": Works})):
        module = type(sys)(f"warpsmith.backend.{name}")
        module.__dict__.update(classes)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    config = read_config(TINY)
    assert backend_for("auto", TINY, config).name == "cpu"
    assert backend_for("auto", TINY, config, threads=3).threads == 3  # type: ignore[attr-defined]
    with pytest.raises(NoDevice, match="driver"):
        backend_for("cuda", TINY, config, context=77)
    assert contexts == [None, 77]  # a GPU's memory is planned for it; naming threads does not try the GPU


def stubbed(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A CUDA backend that cannot be made."""

    class Broken:
        def __init__(self, *args: object, **settings: object) -> None:
            raise error

    module = type(sys)("warpsmith.backend.cuda")
    module.__dict__["open_backend"] = Broken
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_what_does_not_fit_on_the_gpu_runs_on_the_cpu_unless_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(TINY)
    stubbed(monkeypatch, DoesNotFit("It is too large."))
    assert backend_for("auto", TINY, config).name == "cpu"
    with pytest.raises(DoesNotFit, match="too large"):
        backend_for("cuda", TINY, config)


def test_a_mistake_is_nobody_s_reason_to_take_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stubbed(monkeypatch, BadRequest("The context is nonsense."))
    with pytest.raises(BadRequest, match="nonsense"):
        backend_for("auto", TINY, read_config(TINY))


def test_cache_types_belong_to_every_device_and_are_refused_where_one_cannot() -> None:
    config, cpu = read_config(TINY), DEVICES[1]
    assert cpu.cache_types == tuple(CACHE_BYTES) == get_args(CacheType)
    for device in DEVICES:
        for kind in set(CACHE_TYPES) - set(device.cache_types):
            with pytest.raises(BadRequest, match=f"{device.name} device cannot keep .* '{kind}'") as caught:
                backend_for(device.name, TINY, config, cache_type_v=kind)
            assert device.cache_types[0] in caught.value.fix
    backend = backend_for("auto", TINY, config, cache_type_k="q8_0")
    assert isinstance(backend, CpuBackend)
    assert (backend.cache_type_k, backend.cache_type_v) == ("q8_0", "f16")
    assert backend_for("reference", TINY, config, cache_type_k="f32").name == "reference"
    with pytest.raises(BadRequest, match="'q2_k'"):
        backend_for("auto", TINY, config, cache_type_k="q2_k")


def test_where_there_is_no_gpu_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, driver = gpus()
    assert driver.about
    if found or driver.problem:
        pytest.skip("there is one")
    stubbed(monkeypatch, NoDevice("No NVIDIA GPU is visible."))
    with caplog.at_level(logging.WARNING):
        backend_for("auto", TINY, read_config(TINY))
    assert not caplog.records


DRIVER = """
#include <string.h>
int cuInit(int flags) { return STATUS; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int length, int device) { strcpy(name, "NVIDIA Pretend 9000"); return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = 1ul << 34; return 0; }
int cuDeviceGetAttribute(int* value, int which, int device) { *value = 9; return 0; }
"""


def on_a_machine_with(status: int, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line beside a driver that lists a GPU (or fails), without the packages of the cuda extra."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform == "win32":
        pytest.skip("needs a C compiler to pretend a driver")
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(DRIVER.replace("STATUS", str(status)))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
    program = "import sys; sys.modules['cuda'] = None; from warpsmith.cli import main; sys.exit(main(sys.argv[1:]))"
    environment: dict[str, Any] = os.environ | {"LD_LIBRARY_PATH": str(folder), "XDG_CACHE_HOME": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, check=False
    )


RUN = ("run", "-p", "def", "-n", "2", "--draft", "none", "-c", "64")


def test_who_has_a_gpu_and_not_the_extra_is_told_in_one_line(tmp_path: Path) -> None:
    done = on_a_machine_with(0, tmp_path, *RUN)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "not used" in line]
    assert len(lines) == 1
    assert "NVIDIA Pretend 9000" in lines[0]
    assert "pip install 'warpsmith[cuda]'" in lines[0]
    assert "pip install 'warpsmith[cuda]'" in on_a_machine_with(0, tmp_path, "doctor").stdout
    asked = on_a_machine_with(0, tmp_path, *RUN, "--device", "cpu")
    assert "not used" not in asked.stderr, "who asks for the cpu knows"
    other = on_a_machine_with(0, tmp_path, *RUN, "-ctk", "q8_0")
    assert "keeps keys and values of this model in f16 only" in other.stderr


def test_a_driver_that_does_not_start_is_worth_a_line(tmp_path: Path) -> None:
    assert "The GPU is not used." in on_a_machine_with(999, tmp_path, *RUN).stderr
    assert "not used" not in on_a_machine_with(100, tmp_path, *RUN).stderr, "no GPU, nothing to say"
