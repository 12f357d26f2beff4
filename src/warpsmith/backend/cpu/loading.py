"""From canonical tensors to the engine's packed matrices, one tensor at a time and straight from the file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from warpsmith.backend.cores import usable_cores
from warpsmith.backend.cpu import _cpu
from warpsmith.checkpoint.blocks import LAYOUTS, MXFP4_LEVELS, TYPES, dequantize, ternary
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.levels import IQ4_LEVELS, UNITS, alphabet, levels_of
from warpsmith.checkpoint.quantize import pack_two_bits, quantize
from warpsmith.errors import BadFile, WarpsmithError
from warpsmith.model.config import Config
from warpsmith.model.plan import forward_plan, mtp_plan
from warpsmith.model.weights import expected_shapes

log = logging.getLogger(__name__)

# Types with kernels of their own.
PACKED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# What the others are kept as: exactly, but for Q4_1 and Q5_1, which are rounded to eight bits.
HELD = {
    "Q4_1": "Q8_0",
    "Q5_0": "Q8_0",
    "Q5_1": "Q8_0",
    "IQ4_NL": "Q8_0",
    "MXFP4": "Q8_0",
    "TQ1_0": "Q2_K",
    "TQ2_0": "Q2_K",
    **dict.fromkeys(UNITS, "LEVELS"),
}
# The engine's own type: a nibble numbers one of sixteen levels, sixteen weights share a scale.
LEVELS = np.dtype(
    [("d", "<f2"), ("gap", "u1", 2), ("unit", "<f4"), ("levels", "i1", 16), ("scales", "i1", 16), ("qs", "u1", 128)]
)
_WEIGHTS_AT_A_TIME = 1 << 22  # converted while the rest of a matrix is still in its file


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not name.endswith("ssm_conv1d.weight")


def packed_type(tensor: Tensor) -> str:
    return HELD.get(tensor.type.name, tensor.type.name)


def weight_bytes(config: Config, tensors: Mapping[str, Tensor], every_token: bool = False) -> int:
    """What the weights take once packed, or what of them every token reads: not an MTP head, and of an embedding that
    is not also the LM head only a row."""
    shapes = expected_shapes(replace(config, mtp_layers=0) if every_token else config)
    if every_token and not config.tied:
        del shapes["token_embd.weight"]
    return sum(
        _cpu.packed_bytes(packed_type(tensors[name]), *shape) if is_matrix(name, shape) else 4 * int(np.prod(shape))
        for name, shape in shapes.items()
    )


def check_plan(config: Config) -> None:
    """A pass has its stages in C++: refuse a plan that has others."""
    before, delta, attention, after, entering = (part.split() for part in _cpu.STAGES.split("|"))
    layers = [op for recurrent in config.recurrent for op in (delta if recurrent else attention)]
    runs = [(forward_plan(config), [*before, *layers, *after])]
    if config.mtp_layers:
        runs.append((mtp_plan(config), [*entering, *attention, *after]))
    for planned, known in runs:
        ops = [stage.op for stage in planned]
        if ops != known:
            other = next((op for op, k in zip(ops, known, strict=False) if op != k), "another number of stages")
            raise WarpsmithError(
                f"The CPU engine does not run this plan: it does not expect {other} where the plan has it.",
                "Write the stage in backend/cpu/pass.cpp and name it in pass.h.",
            )


def load(
    engine: _cpu.Engine, config: Config, tensors: Mapping[str, Tensor], progress: Callable[[int, int], object] | None
) -> None:
    """Pack every weight. `progress` hears of the stored bytes done so far and of all there are."""
    check_plan(config)
    shapes = expected_shapes(config)
    total, done = sum(tensors[name].nbytes for name in shapes), 0
    engine.reserve(weight_bytes(config, tensors))
    converted: dict[str, int] = {}
    for name, shape in shapes.items():
        tensor = tensors[name]
        if is_matrix(name, shape):
            if tensor.type.name in HELD:
                converted[tensor.type.name] = converted.get(tensor.type.name, 0) + 1
            raw = np.ascontiguousarray(held(tensor) if tensor.type.name in HELD else tensor.raw())
            engine.add_matrix(name, packed_type(tensor), shape[0], shape[1], raw)
        else:
            values = tensor.float32()
            if name.endswith("ssm_conv1d.weight"):
                values = values.T  # [taps, channels]: a tap of neighbouring channels is one vector
            engine.add_vector(name, np.ascontiguousarray(values).reshape(-1))
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    engine.finish()
    for kind, count in converted.items():
        container = "four bits a weight" if HELD[kind] == "LEVELS" else HELD[kind]
        log.warning(
            "%d tensors of type %s are held as %s, which takes more memory than their file.", count, kind, container
        )


def held(tensor: Tensor) -> np.ndarray:
    """A matrix without kernels of its own as rows of the type it is kept as."""
    kind, raw = tensor.type.name, tensor.raw()
    convert = {"Q8_0": as_q8, "Q2_K": as_q2, "LEVELS": as_levels}[HELD[kind]]
    step = max(1, _WEIGHTS_AT_A_TIME // tensor.shape[1])

    def rows(first: int) -> np.ndarray:
        piece = np.ascontiguousarray(raw[first : first + step])
        with np.errstate(all="ignore"):  # scales of a broken file may be anything
            return convert(kind, piece).view(np.uint8).reshape(len(piece), -1)

    with ThreadPoolExecutor(usable_cores()) as threads:
        try:
            return np.concatenate(list(threads.map(rows, range(0, len(raw), step))))
        except OverflowError as error:
            raise BadFile(
                f"Tensor {tensor.name!r} is {kind} with a scale that half precision cannot hold.",
                "Use another quantisation of the model.",
            ) from error


def as_levels(kind: str, raw: np.ndarray) -> np.ndarray:
    """The IQ types: whole levels, scales and the block's factor stay what they are."""
    d, scales, levels = levels_of(kind, raw.reshape(-1).view(LAYOUTS[kind]))
    known = alphabet(kind)
    number = np.zeros(256, np.uint8)
    number[known.view(np.uint8)] = np.arange(len(known))
    numbers = number[levels.view(np.uint8)].reshape(-1, 8, 2, 16)
    blocks = np.zeros(len(d), LEVELS)
    blocks["d"], blocks["unit"], blocks["scales"] = d, UNITS[kind], scales
    blocks["levels"][:, : len(known)] = known
    blocks["qs"] = (numbers[:, :, 0] | numbers[:, :, 1] << 4).reshape(-1, 128)
    return blocks


def as_q2(kind: str, raw: np.ndarray) -> np.ndarray:
    """Ternary weights, exactly: levels 0, 1, 2 under scales of one, less a min of one."""
    stored = raw.reshape(-1).view(LAYOUTS[kind])
    blocks = np.empty(len(stored), LAYOUTS["Q2_K"])
    blocks["sc"] = 0x11
    blocks["d"] = blocks["dmin"] = stored["d"]
    blocks["qs"] = stored["qs"] if kind == "TQ2_0" else pack_two_bits(ternary(stored))
    return blocks


def as_q8(kind: str, raw: np.ndarray) -> np.ndarray:
    """Levels that are whole numbers stay what they are: Q5_0, IQ4_NL and MXFP4 keep every bit."""
    if kind in ("Q4_1", "Q5_1"):
        return quantize(TYPES["Q8_0"], dequantize(TYPES[kind], raw))
    stored = raw.reshape(-1).view(LAYOUTS[kind])
    blocks = np.empty(len(stored), LAYOUTS["Q8_0"])
    numbers = np.concatenate([stored["qs"] & 15, stored["qs"] >> 4], axis=1)
    if kind == "Q5_0":
        fifth = np.unpackbits(np.ascontiguousarray(stored["qh"]), axis=1, bitorder="little")
        blocks["qs"] = (numbers | fifth << np.uint8(4)).astype(np.int8) - 16
    else:
        blocks["qs"] = (IQ4_LEVELS if kind == "IQ4_NL" else MXFP4_LEVELS)[numbers]
    if kind == "MXFP4":
        scales = np.ldexp(np.float32(1), stored["e"].astype(np.int32) - 128)
        blocks["d"] = scales
        if (blocks["d"] != scales).any():
            raise OverflowError
    else:
        blocks["d"] = stored["d"]
    return blocks
