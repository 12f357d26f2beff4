"""Builds of the weights-first forward kernel: for which models and trees, with which constants and options."""

from __future__ import annotations

from warpsmith.backend.cuda.build.profiles import Profile
from warpsmith.backend.cuda.memory.driver import Chip
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.shape import HEAD_DIM, LARGEST_HIDDEN, STATE_DIM
from warpsmith.errors import NoDevice
from warpsmith.model.config import Config

VARIANTS = (1, 8, 16, 24, 32, 64)  # nodes a build of the kernel takes


def build_constants(layout: Layout, chip: Chip, profile: Profile, nodes: int) -> dict[str, object]:
    """What a build for trees of up to `nodes` nodes is told."""
    return layout.headers() | {
        "NODES": nodes,
        "SHARED_MEMORY": chip.shared_memory,
        "IN_FLIGHT": max(1, round(profile.in_flight / layout.stream.slot_bytes)),
    }


def build_options(source: str, layout: Layout, architecture: str) -> tuple[str, ...]:
    """How the compiler is to weigh registers. Left to itself it begins loads so early in a pass over quantised weights
    that it runs out of registers: 8 nodes in Q8_0 take a quarter longer. BF16 trees it suits."""
    quantised = any(held.format.quantised for held in layout.stream.parts)
    fewer = quantised and source == "forward/forward.cu" and architecture == "sm_90a"  # measured there alone
    return ("--ptxas-options=--register-usage-level=0",) if fewer else ()


def check_shape(config: Config) -> None:
    """The kernels are written for the family's own head shapes."""
    c = config
    fits = c.head_dim == HEAD_DIM and c.rotary_dim == 64 and c.key_head_dim == c.value_head_dim == STATE_DIM
    fits = fits and c.conv_kernel == 4 and c.hidden % 8 == 0 and c.ffn % 4 == 0 and c.layers <= 128
    fits = fits and c.hidden <= LARGEST_HIDDEN and 128 % c.kv_heads == 0 and 128 // c.kv_heads >= 32
    if not fits:
        raise NoDevice("The CUDA kernels do not take this model's shape.", "Use --device cpu.")
