"""Launches of a prompt's kernels, and how its matrix products are cut into tiles."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

from warpsmith.backend.cuda.large.formats import SLAB_BYTES, SLABS
from warpsmith.backend.cuda.memory.driver import Device, check
from warpsmith.backend.cuda.prefill.structures import Gemm, Piece, Span
from warpsmith.backend.cuda.weights.formats import FORMATS, Bf16

PLAIN, SILU, RESIDUAL, LOGITS = range(4)  # Ending of product.cuh
QUEUED = "sm_90a"  # the architecture with wgmma, whose products are queued; all others have mma.sync
SHARED, DIRECT_SHARED = 232_448, 101_376  # bytes of shared memory a block may ask for, there and on all others
FEWEST = 64  # tokens of a tile over slabs
BLOCK_K = 256  # k of a slab
ROW_BYTES = {kind.type.ggml_id: kind.type.row_bytes(32) for kind in FORMATS}  # of 32 k, by the type's number in a file
BF16 = Bf16.type.ggml_id


def shared_memory(architecture: str) -> int:
    """SHARED_MEMORY_HERE of queued.cuh and direct.cuh."""
    return SHARED if architecture == QUEUED else DIRECT_SHARED


class AnyTile(Protocol):
    """A variant of the product: so many rows by so many tokens at a time."""

    kernel: ClassVar[str]

    @property
    def tokens(self) -> int: ...
    @property
    def rate(self) -> float: ...
    @property
    def threads(self) -> int: ...
    @property
    def beside(self) -> int:
        """CTAs that have the same tokens and share them out."""

    def rows(self, ending: int) -> int: ...
    def ctas(self, ending: int) -> int:
        """That share a tile, and K."""

    def shared(self, ending: int, types: int) -> int: ...
    def constant(self, ending: int, types: int) -> dict[str, object] | None: ...


@dataclass(frozen=True)
class Tile:
    """Over row tiles: `Config`'s arguments (gemm.cuh), and which part of the full rate it reaches. `types`: the one
    type's number in a file."""

    kernel: ClassVar[str] = "gemm"
    beside: ClassVar[int] = 1
    tokens: int
    row_blocks: int  # of 64 rows a warpgroup, 0: one warpgroup; of few rows: 2 where warpgroups have their own
    stage_tiles: int
    stages: int
    step_tiles: int
    ahead: int
    rate: float  # measured on an H200, fixed costs apart
    sends: bool = True  # results leave through shared memory where a warpgroup has one block of rows

    @property
    def threads(self) -> int:
        return 256 if self.row_blocks == 0 else 384

    def constant(self, ending: int, types: int) -> dict[str, object] | None:
        steps = (self.stage_tiles, self.stages, self.step_tiles, self.ahead)
        numbers = (self.tokens, self.row_blocks, *steps, ending, types)
        pairs: dict[str, object] = {"PAIRS": 1} if self.ctas(ending) == 2 else {}
        return {"GEMM_VARIANT": ",".join(map(str, numbers)), **pairs}

    def rows(self, ending: int) -> int:
        return 64 if self.row_blocks == 0 else 64 * self.row_blocks * (1 if ending == RESIDUAL else 2)

    def ctas(self, ending: int) -> int:
        return 2 if ending == RESIDUAL and self.row_blocks == 0 else 1

    def shared(self, ending: int, types: int) -> int:
        """`Config::SHARED`: where it is little, the next launch's blocks have room beside."""
        n, residual, both = self.tokens, ending == RESIDUAL, self.row_blocks == 2
        ring = self.row_blocks == 0 or (both and not residual) or types != BF16
        stage = (n * 64 + (self.rows(ending) * ROW_BYTES[types] if ring else 0)) * self.stage_tiles
        sums = -(-n // 16) * 2048 * (1 + self.row_blocks) if residual and not both else 0
        squares = n * 16 * (2 if both else 1) if residual else 0
        sends = self.sends and not residual and not both
        results = self.rows(ending) // (64 if ending == SILU else 32) * n * 64 if sends else 0
        scales = 0 if residual else -(-n * 8 // 128) * 128
        return 1024 + scales + self.stages * stage + sums + squares + results


@dataclass(frozen=True)
class SlabTile:
    """Over slabs: tokens and CTAs of a cluster of `SlabConfig` (slab_gemm.cuh), and which part of the full rate it
    reaches."""

    kernel: ClassVar[str] = "slab_gemm"
    threads: ClassVar[int] = 384
    tokens: int
    beside: int
    rate: float  # measured on an H200, fixed costs apart
    memory: int = SHARED

    def constant(self, ending: int, types: int) -> dict[str, object] | None:
        """As many stages of activations and slots of weights as there is room for; none where that is too few. The
        smallest tile fits everywhere, if with a single slot."""
        slot = 2 * 4 * max(SLAB_BYTES[name] for i, name in enumerate(SLABS) if types >> i & 1)
        stage = self.tokens * 128
        room = self.memory - 1024 - self.tokens * (32 if ending == RESIDUAL else 8) - 128
        stages = min(8, (room - 2 * slot) // stage)
        if stages < 3 and self.tokens == FEWEST:
            stages = min(8, (room - slot) // stage)
        if stages < 3:
            return None
        slots = min(4, (room - stages * stage) // slot)
        numbers = (self.tokens, stages, slots, ending, types, self.beside)
        pairs: dict[str, object] = {"PAIRS": 1} if self.beside == 2 else {}
        return {"SLAB_VARIANT": ",".join(map(str, numbers)), **pairs}

    def rows(self, ending: int) -> int:
        return 128

    def ctas(self, ending: int) -> int:
        return 1

    def shared(self, ending: int, types: int) -> int:
        return self.memory


WIDE_TILES = (
    Tile(64, 0, 2, 5, 2, 2, 0.6),
    Tile(128, 1, 2, 8, 1, 8, 0.65),
    Tile(176, 1, 2, 7, 1, 8, 0.72),
    Tile(136, 2, 2, 4, 2, 2, 0.85),
    Tile(160, 2, 2, 4, 1, 2, 0.85),
)
NARROW_TILES = (Tile(32, 0, 4, 4, 2, 2, 0.5), Tile(72, 1, 4, 8, 2, 4, 0.4), Tile(128, 2, 4, 5, 1, 8, 0.6))
# Blocks with scales come through shared memory, which has no room for more.
SCALED_WIDE_TILES = (Tile(64, 0, 2, 5, 2, 2, 0.6), Tile(128, 2, 2, 5, 2, 2, 0.8), Tile(136, 2, 2, 5, 2, 2, 0.8))
SCALED_NARROW_TILES = (Tile(32, 0, 4, 4, 2, 2, 0.5), Tile(128, 2, 4, 4, 2, 2, 0.6))
SLAB_TILES = (SlabTile(FEWEST, 1, 0.4), SlabTile(128, 1, 0.6), SlabTile(232, 2, 0.78), SlabTile(256, 2, 0.8))

# Without wgmma, for 99 KB of shared memory. Rates of the widest are an H200's; nothing else was measured, nor any other
# chip.
DIRECT_WIDE_TILES = (Tile(64, 1, 2, 8, 1, 4, 0.2, False), Tile(128, 1, 2, 5, 1, 4, 0.27, False))
DIRECT_NARROW_TILES = (Tile(32, 2, 4, 8, 1, 4, 0.16, False), Tile(64, 2, 4, 5, 1, 4, 0.23, False))
DIRECT_SCALED_WIDE_TILES = (Tile(64, 1, 2, 5, 1, 2, 0.2, False), Tile(128, 1, 2, 3, 1, 2, 0.27, False))
DIRECT_SCALED_NARROW_TILES = (Tile(32, 2, 2, 6, 1, 2, 0.16, False), Tile(64, 2, 2, 5, 1, 2, 0.23, False))
DIRECT_SLAB_TILES = (
    SlabTile(FEWEST, 1, 0.24, DIRECT_SHARED),
    SlabTile(96, 1, 0.28, DIRECT_SHARED),
    SlabTile(128, 1, 0.31, DIRECT_SHARED),
)


def tile_count(tile: AnyTile, ending: int, rows: int, octets: int) -> int:
    return math.ceil(rows / tile.rows(ending) / tile.beside) * tile.beside * math.ceil(octets * 8 / tile.tokens)


def tile_clocks(tile: AnyTile, ending: int, rows: int, k: int, octets: int, sms: int) -> float:
    ctas = tile.ctas(ending)
    waves = math.ceil(tile_count(tile, ending, rows, octets) * ctas / sms)
    return waves * (3500 + k / ctas / 16 * tile.rows(ending) * tile.tokens / 128 / tile.rate)


Kernels = Callable[[str, int, dict[str, object]], Any]  # by name, bytes of shared memory, what the build is told


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid; arguments are read from where they are when it is queued."""

    config: Any
    function: Any
    arguments: int
    call: tuple[int, int, int, None]  # the same as addresses
    changes: bool  # arguments are others for every piece


class Launcher:
    """Queues kernels, each of which may start while the one before it ends (`early`: where kernels know of it).

    A short prompt is some 130 launches of a few microseconds: the driver is called as directly as Python can."""

    def __init__(self, device: Device, early: bool) -> None:
        self.device, self.early = device, early
        self._configs: dict[tuple[int, int, int], Any] = {}

    @cached_property
    def driver(self) -> Any:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
        library.cuGraphExecKernelNodeSetParams_v2.argtypes = [ctypes.c_void_p] * 3
        library.cuGraphLaunch.argtypes = [ctypes.c_void_p] * 2
        return library

    @cached_property
    def _queue(self) -> Callable[..., int]:
        return self.driver.cuLaunchKernelEx

    def launch(self, each: Launch) -> None:
        if code := self._queue(*each.call):
            self.check(code)

    def check(self, code: int) -> None:
        if code:
            check((self.device.cu.CUresult(code),))

    def config(self, grid: int, threads: int, shared: int) -> Any:
        key = (grid, threads, shared)
        if key not in self._configs:
            cu = self.device.cu
            config = cu.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes, config.hStream = shared, 0
            if self.early:
                early = cu.CUlaunchAttribute()
                early.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                early.value.programmaticStreamSerializationAllowed = 1
                config.attrs, config.numAttrs = [early], 1
            self._configs[key] = config
        return self._configs[key]


class Step:
    """A kernel with its arguments, which may be changed in place between launches."""

    def __init__(self, launcher: Launcher, kernel: Any, threads: int, *arguments: ctypes.Structure) -> None:
        self.launcher, self.kernel, self.threads, self.arguments = launcher, kernel, threads, arguments
        self._pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        self._address = ctypes.addressof(self._pointers)
        self._changes = any(isinstance(argument, Piece) for argument in arguments)

    def on(self, grid: int) -> Launch:
        config = self.launcher.config(grid, self.threads, self.kernel.shared_bytes)
        function = self.kernel.function
        call = (config.getPtr(), int(function), self._address, None)
        return Launch(config, function, self._address, call, self._changes)


class Product:
    """One matrix: its arguments, and the steps that multiply it by tiles of any width."""

    def __init__(
        self,
        kernels: Kernels,
        launcher: Launcher,
        tiles: Sequence[AnyTile],
        types: int,
        ending: int,
        gemm: Gemm,
        sms: int,
    ) -> None:
        self.kernels, self.launcher, self.ending, self.gemm, self.sms = kernels, launcher, ending, gemm, sms
        self.types = types
        self.builds = {t: constant for t in tiles if (constant := t.constant(ending, types)) is not None}
        groups = gemm.row_groups + -(-gemm.gate_rows // 32)
        self.rows, self.k = groups * (64 if ending == SILU else 32), gemm.k_tiles * 32
        self._steps: dict[tuple[AnyTile, int], Step] = {}

    def on(self, span: Span, octets: int) -> Launch:
        tile = min(self.builds, key=lambda t: tile_clocks(t, self.ending, self.rows, self.k, octets, self.sms))
        key = (tile, ctypes.addressof(span))
        if key not in self._steps:
            kernel = self.kernels(tile.kernel, tile.shared(self.ending, self.types), self.builds[tile])
            self._steps[key] = Step(self.launcher, kernel, tile.threads, self.gemm, span)
        work = tile_count(tile, self.ending, self.rows, octets)
        if tile.ctas(self.ending) == 2:
            return self._steps[key].on(2 * work)  # a tile a pair
        # few tiles of row tiles: the other SMs have the weights brought into L2
        spread = tile.kernel == "gemm" and 2 * work <= self.sms
        most = self.sms // tile.beside * tile.beside
        return self._steps[key].on(most if spread else min(most, work))
