"""The devices, and why one cannot be used. `auto` takes the first of the list that can, and says why not a GPU that is
there."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from warpsmith.errors import BadRequest, DoesNotFit, NoDevice, WarpsmithError

if TYPE_CHECKING:  # the command line's help should not wait for numpy
    from warpsmith.backend.base import Backend
    from warpsmith.checkpoint.canonical import Checkpoint
    from warpsmith.model.config import Config

log = logging.getLogger(__name__)

NO_DEVICE = 100  # the driver's code for a machine on which it sees no GPU


@dataclass(frozen=True)
class Device:
    """Who can compute, and what it can be told."""

    name: str
    backend: str  # class in `warpsmith.backend.NAME`
    cache_types: tuple[str, ...]  # for keys and values; the first is its own choice
    settings: tuple[str, ...] = ()  # that it can be given
    offers: tuple[str, ...] = ()  # what it takes of that which everybody is offered
    own_memory: bool = False  # what does not fit on it may fit on another

    def refusal(self, settings: Mapping[str, Any]) -> BadRequest | None:
        """What is wrong with settings that were given."""
        for name, value in settings.items():
            if name in _CACHES:
                if value not in self.cache_types:
                    kinds = ", ".join(self.cache_types)
                    return BadRequest(
                        f"The {self.name} device cannot keep keys and values as {value!r}.",
                        f"Use {kinds}, or another device.",
                    )
            elif name not in self.settings:
                return BadRequest(
                    f"The {self.name} device has no setting for {name}.", f"Leave it out, or use {_owners(name)}."
                )
        return None

    def open(self, checkpoint: Checkpoint, config: Config, settings: Mapping[str, Any]) -> Backend:
        """With a model on it. What the settings offer and the backend does not take is left out."""
        try:
            made = getattr(import_module(f"warpsmith.backend.{self.name}"), self.backend)
        except (ImportError, AttributeError) as error:
            raise NoDevice(
                f"The {self.name} device is not part of this installation ({error}).",
                "Use --device auto to see what is.",
            ) from None
        taken = {name: settings[name] for name in (*self.settings, *self.offers) if name in settings}
        return made(config, checkpoint.tensors, **taken)


def _owners(setting: str) -> str:
    owners = [device.name for device in DEVICES if setting in device.settings]
    return f"the {' or '.join(owners)} device" if owners else "another device"


_CACHES = ("cache_type_k", "cache_type_v")
DEVICES = (  # as `auto` tries them
    Device(
        "cuda",
        "open_backend",
        ("f16", "q8_0", "q4_0"),
        (*_CACHES, "memory_limit"),
        offers=("context", "progress"),
        own_memory=True,
    ),
    Device("cpu", "CpuBackend", ("f16", "f32", "q8_0"), ("threads", "cpu_features", *_CACHES), offers=("progress",)),
    Device("reference", "ReferenceBackend", ("f32",)),
)
CACHE_TYPES = tuple(dict.fromkeys(kind for device in DEVICES for kind in device.cache_types))


def backend_for(
    device: str,
    checkpoint: Checkpoint,
    config: Config,
    context: int | None = None,
    progress: Callable[[int, int], object] | None = None,
    **settings: Any,
) -> Backend:
    """The named device with a model on it; "auto" is the fastest that can be used here.

    `context` is the longest that will be asked for, None the model's own: a GPU's memory is planned before loading.
    `settings` are keywords of the backends, None where nothing was said. `auto` takes a device that has them all.
    """
    said = {name: value for name, value in settings.items() if value is not None}
    given = said | {"context": context, "progress": progress}
    problem: WarpsmithError = BadRequest(f"No device has settings for {', '.join(said)}.", "Leave some out.")
    for each in DEVICES if device == "auto" else (_named(device),):
        if device == "auto" and any(name not in (*each.settings, *_CACHES) for name in said):
            continue  # naming a setting of one device chooses it
        try:
            if refusal := each.refusal(said):
                raise refusal
            return each.open(checkpoint, config, given)
        except (NoDevice, DoesNotFit, BadRequest) as error:
            final = isinstance(error, DoesNotFit) and not each.own_memory
            if device != "auto" or final or (isinstance(error, BadRequest) and error is not refusal):
                raise
            _say_why_not(each, error)
            problem = error
    raise problem


def _named(name: str) -> Device:
    for device in DEVICES:
        if device.name == name:
            return device
    names = ", ".join(["auto", *(device.name for device in DEVICES)])
    raise BadRequest(f"There is no device {name!r}.", f"Choose one of {names}.")


def _say_why_not(device: Device, error: WarpsmithError) -> None:
    """A line for whoever has a GPU and does not get it."""
    if device.name != "cuda":
        return
    found, driver = gpus()
    if found or driver.problem:
        fix = "" if "--device cpu" in error.fix else f" {error.fix}"  # that is what is done
        name = found[0]["name"] if found else "The GPU"
        log.warning("%s is not used. %s%s", name, error.problem, fix)


@dataclass(frozen=True)
class Driver:
    about: str  # a few words
    problem: bool = False  # it is there and does not work


def gpus() -> tuple[list[dict[str, Any]], Driver]:
    """NVIDIA GPUs as the driver lists them. Asked without the optional packages, so that it can tell who lacks them."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return [], Driver("no NVIDIA driver")
    if (status := driver.cuInit(0)) != 0:
        return [], Driver(f"the NVIDIA driver does not start (error {status})", problem=status != NO_DEVICE)
    number = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    cuda = f"driver for CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    driver.cuDeviceGetCount(ctypes.byref(number))
    return [_gpu(driver, i) for i in range(number.value)], Driver(cuda)


def _gpu(driver: ctypes.CDLL, ordinal: int) -> dict[str, Any]:
    device, number, total, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(128)
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)

    def attribute(which: int) -> int:
        driver.cuDeviceGetAttribute(ctypes.byref(number), which, device)
        return number.value

    return {
        "name": name.value.decode(errors="replace"),
        "compute_capability": f"{attribute(75)}.{attribute(76)}",
        "multiprocessors": attribute(16),
        "memory": total.value,
    }
