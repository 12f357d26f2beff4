"""The CUDA backend's host side, without a GPU: chips, and what it says where it cannot run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from warpsmith.backend.cuda.build.profiles import choose, parse
from warpsmith.backend.cuda.builds import build_constants, check_shape
from warpsmith.backend.cuda.memory import driver
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.devices import Driver
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.cli import doctor
from warpsmith.draft.budget import Budgeted
from warpsmith.draft.select import make_proposer
from warpsmith.errors import BadFile, BadRequest, NoDevice
from warpsmith.model.config import SIZES
from warpsmith.model.synthetic import tiny_model
from warpsmith.model.weights import read_config
from warpsmith.wisp import WISP

MODEL = SIZES["0.8B"]

# -- chips -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "capability", "name", "measured"),
    [
        ("NVIDIA H200", (9, 0), "h200", True),
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100", False),
        ("NVIDIA GH200 480GB", (9, 0), "h200", False),  # a relative of the one that was measured
        ("NVIDIA GeForce RTX 3090", (8, 6), "rtx-3090", False),
        ("NVIDIA GeForce RTX 3060", (8, 6), "rtx-3090", False),
        ("NVIDIA GeForce RTX 4090", (8, 9), "rtx-4090", False),
        ("NVIDIA GeForce RTX 5090", (12, 0), "rtx-5090", False),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "generic", False),
        ("NVIDIA of tomorrow", (17, 3), "generic", False),
    ],
)
def test_a_chip_gets_its_own_profile_or_that_of_a_relative(
    device: str, capability: tuple[int, int], name: str, measured: bool
) -> None:
    profile, was_measured = choose(device, capability)
    assert (profile.name, was_measured) == (name, measured)


def test_a_device_s_own_numbers_count() -> None:
    """A cut-down part has fewer SMs or less shared memory than the profile says."""
    profile, _ = choose("NVIDIA GeForce RTX 3090", (8, 6))
    whole = driver.Chip("whole", (8, 6), profile.sms, profile.shared_memory)
    less = driver.Chip("less", (8, 6), profile.sms, profile.shared_memory - (20 << 10))
    assert "constexpr int SMS = 60;" in str(build_constants(Layout(MODEL, 60), whole, profile, 1)["schedule.cuh"])
    layout = Layout(MODEL, profile.sms)
    assert build_constants(layout, whole, profile, 1) != build_constants(layout, less, profile, 1)


def profile_text(**changes: str | None) -> str:
    fields: dict[str, str | None] = {
        "devices": '["A"]',
        "compute_capability": '"8.6"',
        "multiprocessors": "82",
        "memory_gb": "24",
        "shared_memory_kib": "99",
        "in_flight_kib": "32",
        "largest_tree": "16",
        "measured": "false",
    }
    return "\n".join(f"{key} = {value}" for key, value in (fields | changes).items() if value is not None)


def test_a_profile_is_read() -> None:
    profile = parse("new", profile_text())
    assert (profile.devices, profile.capability, profile.sms) == (("A",), (8, 6), 82)
    assert profile.memory == 24 * 10**9
    assert (profile.shared_memory, profile.in_flight, profile.largest_tree) == (99 << 10, 32 << 10, 16)
    assert not profile.measured


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("devices", "7"),
        ("devices", "[7]"),
        ("compute_capability", '"7.5"'),
        ("compute_capability", "8.6"),
        ("compute_capability", '"new"'),
        ("multiprocessors", "0"),
        ("multiprocessors", "true"),
        ("memory_gb", "0"),
        ("shared_memory_kib", "16"),
        ("in_flight_kib", "-1"),
        ("largest_tree", "65"),
        ("largest_tree", None),
        ("measured", "1"),
        ("clusters", "4"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(field: str, value: str | None) -> None:
    with pytest.raises(BadFile, match=field):
        parse("new", profile_text(**{field: value}))


def test_a_profile_that_is_not_toml_is_refused() -> None:
    with pytest.raises(BadFile, match=r"chips/new\.toml"):
        parse("new", "devices = [")


def test_doctor_tells_the_profile_and_whether_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"compute_capability": "9.0", "multiprocessors": 132, "memory": 150 << 30}
    names = ("NVIDIA H200", "NVIDIA H100 PCIe")
    found = [facts | {"name": name} for name in names]
    monkeypatch.setattr(doctor, "gpus", lambda: (found, Driver("driver for CUDA 13.0")))
    assert doctor.main(SimpleNamespace(json=False)) == 0  # type: ignore[arg-type]
    page = capsys.readouterr().out
    assert "NVIDIA H200: compute capability 9.0, 132 SMs, 150.00 GiB; profile h200, measured on this chip" in page
    assert "PCIe: compute capability 9.0, 132 SMs, 150.00 GiB; profile h200, not measured on this chip" in page


def test_drafts_keep_to_the_largest_tree() -> None:
    backend = ReferenceBackend(SIZES["tiny"], tiny_model().tensors)
    backend.largest_tree = 16
    proposer = make_proposer("ngram", "auto", backend)
    assert isinstance(proposer, Budgeted)
    assert proposer.draft.nodes == 15
    assert make_proposer("ngram", 15, backend) is not None
    with pytest.raises(BadRequest, match="15 drafted nodes, not 16"):
        make_proposer("ngram", 16, backend)
    backend.largest_launch = 8  # a larger tree would read the weights twice
    proposer = make_proposer("ngram", "auto", backend)
    assert isinstance(proposer, Budgeted)
    assert proposer.draft.nodes == 7


# -- no usable GPU -----------------------------------------------------------------------------------------------------


def fake_driver(init: int = 0, devices: int = 1, capability: tuple[int, int] = (9, 0)) -> Any:
    """As much of NVIDIA's bindings as finding out about a device needs."""
    attributes = {"MAJOR": capability[0], "MINOR": capability[1]}
    names = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="MAJOR",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="MINOR",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="SMS",
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="SHARED",
    )
    return SimpleNamespace(
        cuInit=lambda flags: (init,),
        cuDeviceGetCount=lambda: (0, devices),
        cuDeviceGet=lambda ordinal: (0, ordinal),
        cuDeviceGetName=lambda size, device: (0, b"NVIDIA Something\0\0"),
        cuDeviceGetAttribute=lambda which, device: (0, attributes.get(which, 50)),
        CUdevice_attribute=names,
    )


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        (fake_driver(init=100), "No NVIDIA GPU is visible"),
        (fake_driver(devices=0), "No NVIDIA GPU is visible"),
        (fake_driver(init=999), r"does not start \(error 999\)"),
        (fake_driver(capability=(7, 5)), "NVIDIA Something has compute capability 7.5, and the kernels need 8.0"),
    ],
)
def test_it_says_why_a_gpu_cannot_be_used(bindings: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_bindings", lambda: bindings)
    with pytest.raises(NoDevice, match=words) as refused:
        driver.Device()
    assert refused.value.exit_code == 4
    assert "--device cpu" in refused.value.fix


def test_the_command_exits_4_where_no_gpu_can_be_used() -> None:
    command = [sys.executable, "-m", "warpsmith.cli", "run", "--device", "cuda", "-p", "x"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, capture_output=True, text=True, env=hidden, timeout=60)
    assert result.returncode == 4
    assert re.match(r"error: (There is no NVIDIA driver|No NVIDIA GPU|The CUDA bindings)", result.stderr)
    assert not result.stdout


def test_shapes_the_kernels_do_not_take() -> None:
    check_shape(MODEL)
    check_shape(read_config(open_checkpoint(WISP)))
    check_shape(SIZES["9B"])
    with pytest.raises(NoDevice, match="shape"):
        check_shape(SIZES["27B"])  # a unit of its rows is more than the registers hold
