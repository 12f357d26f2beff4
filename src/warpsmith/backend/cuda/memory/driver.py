"""The CUDA driver, as much of it as we use: one device, plain allocations, modules, launches.

A thin layer over `cuda.bindings`, so that the rest of the backend speaks of buffers and kernels, and so that every
driver error becomes one of ours.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from warpsmith.backend.cuda.build.profiles import OLDEST
from warpsmith.backend.cuda.memory.room import CONTEXT_BYTES, Room, gib
from warpsmith.errors import DoesNotFit, NoDevice, WarpsmithError

OUT_OF_MEMORY, NO_DEVICE = 2, 100  # of the driver's error codes


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise NoDevice(
            "The CUDA bindings are not installed.", "Install them with `pip install 'warpsmith[cuda]'`."
        ) from None
    return driver


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or an error in its words."""
    code, *values = result
    if int(code) == OUT_OF_MEMORY:
        raise DoesNotFit("The GPU's memory is full.", "End other programs that use it, or use --device cpu.")
    if int(code) != 0:
        raise WarpsmithError(
            f"The CUDA driver reports {code.name}.", "Another program may be using the GPU; try again."
        )
    return values[0] if len(values) == 1 else values


@dataclass(frozen=True)
class Chip:
    """What a kernel is built for."""

    name: str
    capability: tuple[int, int]
    sms: int
    shared_memory: int  # bytes a block may ask for


class Device:
    """One GPU and its primary context, made current for the calling thread. `limit`: bytes that may be taken on it."""

    def __init__(self, ordinal: int = 0, limit: int | None = None) -> None:
        self.cu = cu = _bindings()
        self.limit, self.held = limit, 0
        try:
            code = int(cu.cuInit(0)[0])
        except RuntimeError:  # the bindings raise when there is no driver library at all
            raise NoDevice("There is no NVIDIA driver on this machine.", "Use --device cpu.") from None
        if code not in (0, NO_DEVICE):
            raise NoDevice(
                f"The NVIDIA driver does not start (error {code}).", "Check `nvidia-smi`, or use --device cpu."
            )
        if code == NO_DEVICE or check(cu.cuDeviceGetCount()) <= ordinal:
            raise NoDevice(
                "No NVIDIA GPU is visible.", "Check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use --device cpu."
            )
        self.handle = check(cu.cuDeviceGet(ordinal))
        attribute = cu.CUdevice_attribute

        def get(which: Any) -> int:
            return int(check(cu.cuDeviceGetAttribute(which, self.handle)))

        self.chip = Chip(
            name=check(cu.cuDeviceGetName(128, self.handle)).split(b"\0")[0].decode(),
            capability=(
                get(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                get(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            ),
            sms=get(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            shared_memory=get(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        )
        if self.chip.capability < OLDEST:
            has, needed = (".".join(map(str, version)) for version in (self.chip.capability, OLDEST))
            raise NoDevice(
                f"{self.chip.name} has compute capability {has}, and the kernels need {needed}.", "Use --device cpu."
            )
        self.context = check(cu.cuDevicePrimaryCtxRetain(self.handle))
        check(cu.cuCtxSetCurrent(self.context))

    def room(self) -> Room:
        return Room(self.chip.name, int(check(self.cu.cuMemGetInfo())[0]), self.limit, self.held)

    def free_memory(self) -> int:
        return self.room().free

    def synchronize(self) -> None:
        check(self.cu.cuCtxSynchronize())

    def allocate(self, nbytes: int) -> Buffer:
        return Buffer(self, nbytes)

    def zeros(self, nbytes: int) -> Buffer:
        buffer = Buffer(self, nbytes)
        buffer.clear()
        return buffer

    def upload(self, array: np.ndarray) -> Buffer:
        buffer = Buffer(self, array.nbytes)
        buffer.write(array)
        return buffer

    def load(self, image: bytes) -> Module:
        return Module(self, image)


class Buffer:
    """Device memory, freed with the object."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        over = device.limit is not None and CONTEXT_BYTES + device.held + nbytes > device.limit
        code, pointer = (OUT_OF_MEMORY, 0) if over else device.cu.cuMemAlloc(max(nbytes, 16))
        if int(code) == OUT_OF_MEMORY:
            raise DoesNotFit(
                f"{gib(nbytes)} more do not fit: {device.room()}.", "Use a smaller context (-c) or a smaller model."
            )
        check((code, pointer))
        self.pointer = int(pointer)
        device.held += nbytes

    def __del__(self) -> None:
        if pointer := getattr(self, "pointer", 0):
            self.device.cu.cuMemFree(pointer)
            self.device.held -= self.nbytes
            self.pointer = 0

    def clear(self) -> None:
        check(self.device.cu.cuMemsetD8(self.pointer, 0, max(self.nbytes, 16)))

    def fill_starts(self, word: int, pieces: int, words: int) -> None:
        """Queue setting the first words of as many equal pieces."""
        pitch = self.nbytes // pieces
        check(self.device.cu.cuMemsetD2D32Async(self.pointer, pitch, word, words, pieces, 0))

    def write(self, array: np.ndarray, offset: int = 0) -> None:
        data = np.ascontiguousarray(array)
        check(self.device.cu.cuMemcpyHtoD(self.pointer + offset, data.ctypes.data, data.nbytes))

    def read(self, dtype: Any, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
        out = np.empty(shape, dtype)
        check(self.device.cu.cuMemcpyDtoH(out.ctypes.data, self.pointer + offset, out.nbytes))
        return out

    def copy_from(self, other: Buffer) -> None:
        check(self.device.cu.cuMemcpyDtoD(self.pointer, other.pointer, min(self.nbytes, other.nbytes)))

    def copy_starts(self, other: Buffer, pieces: int, nbytes: int) -> None:
        """Of as many equal pieces as both buffers have, the first bytes of each."""
        cu = self.device.cu
        copy = cu.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.srcPitch = other.pointer, other.nbytes // pieces
        copy.dstDevice, copy.dstPitch = self.pointer, self.nbytes // pieces
        copy.WidthInBytes, copy.Height = nbytes, pieces
        check(cu.cuMemcpy2D(copy))

    def fill(self, source: Pinned, nbytes: int, offset: int = 0) -> None:
        """Queue a copy; the source must stay as it is until an event after it has happened."""
        check(self.device.cu.cuMemcpyHtoDAsync(self.pointer + offset, source.address, nbytes, 0))

    def fetch(self, to: Pinned, nbytes: int) -> None:
        """Queue a copy to the host, which is there when the device has been waited for."""
        check(self.device.cu.cuMemcpyDtoHAsync(to.address, self.pointer, nbytes, 0))


class Pinned:
    """Host memory that stays in place: the device reads it or writes into it while the host goes on."""

    def __init__(self, device: Device, dtype: Any, count: int) -> None:
        cu = device.cu
        nbytes = np.dtype(dtype).itemsize * count
        self.address = int(check(cu.cuMemHostAlloc(nbytes, cu.CU_MEMHOSTALLOC_DEVICEMAP)))
        self.pointer = int(check(cu.cuMemHostGetDevicePointer(self.address, 0)))
        self.device = device
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address)).view(dtype)
        self.array[:] = 0

    def __del__(self) -> None:
        if address := getattr(self, "address", 0):
            self.device.cu.cuMemFreeHost(address)
            self.address = 0


class Event:
    """A point in the queue of copies and launches."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.handle = check(device.cu.cuEventCreate(0))

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self.device.cu.cuEventDestroy(handle)
            self.handle = None

    def record(self) -> None:
        check(self.device.cu.cuEventRecord(self.handle, 0))

    def wait(self) -> None:
        """Until everything queued before it is done; at once if it was never recorded."""
        check(self.device.cu.cuEventSynchronize(self.handle))

    def seconds_since(self, earlier: Event) -> float:
        return float(check(self.device.cu.cuEventElapsedTime(earlier.handle, self.handle))) / 1e3


class Module:
    """A loaded cubin."""

    def __init__(self, device: Device, image: bytes) -> None:
        self.device = device
        self.handle = check(device.cu.cuModuleLoadData(image))

    def kernel(self, name: str, shared_bytes: int = 0) -> Kernel:
        cu = self.device.cu
        function = check(cu.cuModuleGetFunction(self.handle, name.encode()))
        if shared_bytes > 48 << 10:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuFuncSetAttribute(function, attribute, shared_bytes))
        return Kernel(self, function, shared_bytes)


class Kernel:
    def __init__(self, module: Module, function: Any, shared_bytes: int) -> None:
        self.module, self.function, self.shared_bytes = module, function, shared_bytes  # the module must stay loaded

    def launch(self, grid: int, threads: int, *arguments: ctypes.Structure, cooperative: bool = False) -> None:
        """Queue the kernel; arguments are structs passed by value."""
        cu = self.module.device.cu
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        address = ctypes.addressof(pointers)
        size = (grid, 1, 1, threads, 1, 1, self.shared_bytes, 0)
        if cooperative:
            check(cu.cuLaunchCooperativeKernel(self.function, *size, address))
        else:
            check(cu.cuLaunchKernel(self.function, *size, address, 0))
