"""A GPU that is not there: the driver's calls on host memory, and kernels compiled for the CPU (see machine.h).

The whole CUDA backend runs on it unchanged, kernels included. It is slow and always in order; it shows wrong logic, not
races or speed.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import platform
import re
import shutil
import subprocess
import tempfile
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from warpsmith.backend.cuda.backend import CudaBackend
from warpsmith.backend.cuda.build.compiler import sources
from warpsmith.backend.cuda.prefill.products import Launch, Launcher

HERE = Path(__file__).parent
ARGUMENTS = {"forward": ["Params", "Request"], "commit": ["Params", "Commit"], "pack": ["Pack"], "top": ["Top"],
             "draft": ["Params", "Request"], "gather": ["Gather"], "head": ["Params", "Request"],
             "enter": ["Enter"], "tree": ["Grow"], "walk": ["Walk", "Draw"]}  # fmt: skip
PROMPTS = {"embed": ["Embed", "Piece"], "rows": ["Rows", "Piece"], "head": ["Head", "Piece"], "gemm": ["Gemm", "Span"],
           "slab_gemm": ["Gemm", "Span"], "attention_rows": ["Attention", "Piece"],
           **{f"attention_{name}": ["Attention", "Piece", "Queries"] for name in ("flash", "merge")},
           **{f"delta_{name}": ["Delta", "Piece"] for name in ("prep", "scan", "output")}}  # fmt: skip
ARGUMENTS |= {f"prefill/{name}.cu": types for name, types in PROMPTS.items()}
TOGETHER = ("forward", "draft", "head")  # their blocks wait for each other
MUCH_RUN = ("pack",)  # whatever the test
FLAGS = ["-std=c++17", "-shared", "-fPIC", "-w", "-fno-strict-aliasing", "-ffp-contract=off"]
# x86 processors have fp16, which the compiler is not told by itself.
FLAGS += ["-fvisibility=hidden", *(["-march=native"] if platform.machine() == "x86_64" else [])]

UNSET, BEHIND = 0xA5, 640  # what memory holds that nobody has written; bytes behind every buffer

_often = False  # kernels that are built now will be run often


def build(name: str, architecture: str, constants: Mapping[str, Any], options: tuple[str, ...] = ()) -> bytes:
    """What `_compiled` is asked for once the kernel is launched: most of what a backend builds a test does not run."""
    kernel = Path(name).stem
    if name not in ARGUMENTS and kernel not in ARGUMENTS:
        return b""  # not emulated
    given = tuple(sorted((k, str(v)) for k, v in constants.items()))
    return repr((name, kernel, architecture, given, _often)).encode()


@cache
def _folder() -> Path:
    """The kernels, with the machine's instructions replaced."""
    folder = Path(tempfile.mkdtemp(prefix="warpsmith-emulated-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, text in sources().items():
        text = re.sub(
            r"extern __shared__ __align__\(\d+\) u8 memory\[\];", "u8* memory = machine::shared_memory();", text
        )
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "machine.h").write_text((HERE / "machine.h").read_text())
    for name in ("ptx.cuh", "halves.cuh", "wgmma.cuh", "cluster.cuh"):
        (folder / "common" / name).write_text((HERE / name).read_text())
    return folder


@cache
def _precompile_machine(level: str) -> None:
    """Half a second less for every kernel."""
    header = _folder() / "machine.h"
    header.with_suffix(".h.gch").mkdir(exist_ok=True)
    compiled = header.with_suffix(".h.gch") / level
    subprocess.run(["g++", level, *FLAGS, "-x", "c++-header", header, "-o", compiled], check=True)


@cache
def _compiled(name: str, kernel: str, architecture: str, constants: tuple[tuple[str, str], ...], often: bool) -> str:
    generated = {key: value for key, value in constants if key.endswith(".cuh")}
    defined = [f"#define {key} {value}" for key, value in constants if key not in generated]
    if architecture == "sm_90a":
        defined.append("#define __CUDA_ARCH_FEAT_SM90_ALL 1")
    draws = kernel == "forward" and (name.startswith("large/") or dict(constants).get("NODES") == "1")
    types = [*(ARGUMENTS.get(name) or ARGUMENTS[kernel]), *(["Draw"] if draws else [])]
    together = str(kernel in TOGETHER and name not in ARGUMENTS).lower()
    passed = ", ".join(f"*(const {kind}*)arguments[{i}]" for i, kind in enumerate(types))
    text = "\n".join(
        [
            '#include "machine.h"',
            f"#define __CUDA_ARCH__ {900 if architecture.startswith('sm_9') else 800}",
            *defined,
            f'#include "{name}"',
            "EXPORTED int launch(int grid, int threads, int shared, unsigned seed, void** arguments) {",
            f"    const auto run = [&] {{ {kernel}({passed}); }};",
            f"    return machine::run({together}, grid, threads, shared, seed, run);",
            "}",
        ]
    )
    key = hashlib.sha256(repr((text, generated, often)).encode()).hexdigest()[:12]
    folder = _folder() / f"{kernel}-{key}"
    folder.mkdir()
    for header, generated_text in generated.items():
        (folder / header).write_text(generated_text)
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(text)
    level = "-O0" if name.startswith("prefill/") else "-O1" if often or kernel in MUCH_RUN else "-Og"
    _precompile_machine(level)
    subprocess.run(["g++", level, *FLAGS, f"-I{folder}", f"-I{_folder()}", source, "-o", library], check=True)
    return str(library)


class Function:
    """A kernel, whose address the backend may ask for."""

    def __init__(self, image: bytes) -> None:
        self._image = image

    @cached_property
    def _launch(self) -> Any:
        return ctypes.CDLL(_compiled(*literal_eval(self._image.decode()))).launch

    def __call__(self, *arguments: Any) -> int:
        return self._launch(*arguments)

    def __int__(self) -> int:
        return id(self)


class Config(SimpleNamespace):
    def getPtr(self) -> int:
        return id(self)


def launch(launcher: Launcher, each: Launch) -> None:
    """Without the driver's own library."""
    config = each.config
    size = (config.gridDimX, 1, 1, config.blockDimX, 1, 1, config.sharedMemBytes, 0)
    launcher.device.cu.cuLaunchKernel(each.function, *size, each.arguments)


class Again:
    """Launches that come again, one by one."""

    def __init__(self, launcher: Launcher, launches: Sequence[Launch]) -> None:
        self.launcher, self.launches = launcher, launches

    def queue(self) -> None:
        for each in self.launches:
            launch(self.launcher, each)


class Driver:
    """The functions of `cuda.bindings.driver` that the backend calls."""

    CU_MEMHOSTALLOC_DEVICEMAP = 2
    CUDA_MEMCPY2D = SimpleNamespace
    CUlaunchConfig = Config
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_DEVICE=2)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="sms",
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="shared",
    )

    def __init__(self, sms: int) -> None:
        self.attributes = {"major": 9, "minor": 0, "sms": sms, "shared": 227 << 10}
        self.memory: dict[int, np.ndarray] = {}
        self.behind: dict[int, np.ndarray] = {}  # what nobody may write
        self.launches = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cuEvent") or name in (
            "cuInit",
            "cuCtxSetCurrent",
            "cuCtxSynchronize",
            "cuFuncSetAttribute",
        ):
            return lambda *_: (0, 0)
        raise AttributeError(name)

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, 1

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return 0, ordinal

    def cuDeviceGetAttribute(self, which: str, device: int) -> tuple[int, int]:
        return 0, self.attributes[which]

    def cuDeviceGetName(self, length: int, device: int) -> tuple[int, bytes]:
        return 0, b"NVIDIA H200"

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return 0, 1

    def cuMemGetInfo(self) -> tuple[int, int, int]:
        return 0, 1 << 34, 1 << 34

    def cuMemAlloc(self, nbytes: int) -> tuple[int, int]:
        place = np.full(nbytes + 128 + BEHIND, UNSET, np.uint8)
        pointer = -(-place.ctypes.data // 128) * 128
        begins = pointer - place.ctypes.data
        self.memory[pointer], self.behind[pointer] = place, place[begins + nbytes : begins + nbytes + BEHIND]
        return 0, pointer

    def cuMemFree(self, pointer: int) -> tuple[int]:
        del self.memory[pointer], self.behind[pointer]
        return (0,)

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[int, int]:
        return self.cuMemAlloc(nbytes)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        return 0, address

    def cuMemFreeHost(self, address: int) -> tuple[int]:
        return self.cuMemFree(address)

    def cuMemsetD8(self, pointer: int, value: int, nbytes: int) -> tuple[int]:
        ctypes.memset(pointer, value, nbytes)
        return (0,)

    def cuMemsetD2D32Async(self, at: int, pitch: int, word: int, width: int, height: int, stream: int) -> tuple[int]:
        for row in range(height):
            np.ctypeslib.as_array((ctypes.c_uint32 * width).from_address(at + row * pitch))[:] = word
        return (0,)

    def cuMemcpyDtoD(self, to: int, source: int, nbytes: int) -> tuple[int]:
        ctypes.memmove(to, source, nbytes)
        return (0,)

    cuMemcpyHtoD = cuMemcpyDtoH = cuMemcpyDtoD

    def cuMemcpyHtoDAsync(self, to: int, source: int, nbytes: int, stream: int) -> tuple[int]:
        return self.cuMemcpyDtoD(to, source, nbytes)

    cuMemcpyDtoHAsync = cuMemcpyHtoDAsync

    def cuMemcpy2D(self, copy: SimpleNamespace) -> tuple[int]:
        for row in range(copy.Height):
            source, to = copy.srcDevice + row * copy.srcPitch, copy.dstDevice + row * copy.dstPitch
            ctypes.memmove(to, source, copy.WidthInBytes)
        return (0,)

    def cuStreamQuery(self, stream: int) -> tuple[int]:
        return (0,)

    def cuModuleLoadData(self, image: bytes) -> tuple[int, bytes]:
        return 0, image

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[int, Function | None]:
        return 0, Function(module) if module else None

    def cuLaunchKernel(self, function: Any, *rest: int) -> tuple[int]:
        grid, _, _, threads, _, _, shared, _, arguments, *_ = rest
        assert function is not None, "this kernel is not emulated"
        self.launches += 1  # each has an order of its own
        assert function(grid, threads, shared, self.launches, ctypes.c_void_p(arguments)), "some threads wait for ever"
        assert all((bytes == UNSET).all() for bytes in self.behind.values()), "a kernel has written behind a buffer"
        return (0,)

    cuLaunchCooperativeKernel = cuLaunchKernel


@contextmanager
def emulated_gpu(sms: int, variants: tuple[int, ...], prompts: bool = False, often: bool = False) -> Iterator[Driver]:
    """A machine with a GPU of so many SMs; the kernel is built for trees of these sizes. `prompts`: they go through
    kernels of their own, which for chips without wgmma are emulated. `often`: kernels are run so much that it pays to
    compile them for longer."""
    driver = Driver(sms)
    _folder()  # once, before several threads build
    with (
        mock.patch(f"{__name__}._often", often),
        mock.patch("warpsmith.backend.cuda.memory.driver._bindings", return_value=driver),
        mock.patch("warpsmith.backend.cuda.backend.build", build),
        mock.patch("warpsmith.backend.cuda.top.build", build),
        mock.patch("warpsmith.backend.cuda.weights_first.build", build),
        mock.patch("warpsmith.backend.cuda.large.backend.build", build),
        mock.patch("warpsmith.backend.cuda.draft.network.build", build),
        mock.patch("warpsmith.backend.cuda.draft.lent.build", build),
        mock.patch("warpsmith.backend.cuda.draft.mtp.build", build),
        mock.patch("warpsmith.backend.cuda.draft.step.build", build),
        mock.patch("warpsmith.backend.cuda.large.plan.VARIANTS", variants),
        mock.patch("warpsmith.backend.cuda.weights_first.VARIANTS", variants),
        mock.patch("warpsmith.backend.cuda.backend.target", return_value="sm_90a"),
        mock.patch.object(
            CudaBackend, "_prepare_prompts", CudaBackend._prepare_prompts if prompts else lambda *_: None
        ),
        mock.patch("warpsmith.backend.cuda.prefill.kernels.build", build),
        mock.patch("warpsmith.backend.cuda.prefill.run.Replay", Again),
        mock.patch("warpsmith.backend.cuda.prefill.products.Launcher.launch", launch),
    ):
        yield driver
