"""From canonical tensors to the engine's packed matrices, one tensor at a time and straight from the file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from warpsmith.backend.cpu import _cpu
from warpsmith.checkpoint.blocks import IQ4_LEVELS, LAYOUTS, TYPES, dequantize
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.quantize import quantize
from warpsmith.errors import WarpsmithError
from warpsmith.model.config import Config
from warpsmith.model.plan import forward_plan, mtp_plan
from warpsmith.model.weights import expected_shapes

log = logging.getLogger(__name__)

# Types with kernels of their own. The others become Q8_0, which holds them exactly or nearly so.
PACKED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not name.endswith("ssm_conv1d.weight")


def packed_type(tensor: Tensor) -> str:
    return tensor.type.name if tensor.type.name in PACKED else "Q8_0"


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
            if tensor.type.name not in PACKED:
                converted[tensor.type.name] = converted.get(tensor.type.name, 0) + 1
            raw = np.ascontiguousarray(tensor.raw() if tensor.type.name in PACKED else as_q8(tensor))
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
        log.warning("%d tensors of type %s are held as Q8_0, which takes more memory than their file.", count, kind)


def as_q8(tensor: Tensor) -> np.ndarray:
    """A tensor without kernels of its own as stored Q8_0 blocks. Levels that are whole numbers stay what they are:
    Q5_0 and IQ4_NL keep every bit, IQ4_XS rounds only its scales to half precision."""
    kind = tensor.type.name
    raw = np.ascontiguousarray(tensor.raw())
    if kind not in ("Q5_0", "IQ4_NL", "IQ4_XS"):
        return quantize(TYPES["Q8_0"], dequantize(tensor.type, raw))
    stored = raw.reshape(-1).view(LAYOUTS[kind])
    with np.errstate(all="ignore"):
        nibbles: np.ndarray
        if kind == "IQ4_XS":
            s = np.arange(8)
            low = stored["sc_l"][:, s // 2] >> (4 * (s % 2)) & 15
            high = stored["sc_h"][:, None] >> 2 * s & 3
            scale = stored["d"].astype(np.float32)[:, None] * ((low | high << 4).astype(np.float32) - 32)
            nibbles = stored["qs"].reshape(-1, 16)
        else:
            scale, nibbles = stored["d"], stored["qs"]
        levels = np.concatenate([nibbles & 15, nibbles >> 4], axis=1)
        blocks = np.empty(len(levels), LAYOUTS["Q8_0"])
        blocks["d"] = scale.reshape(-1)
    if kind == "Q5_0":
        fifth = np.unpackbits(np.ascontiguousarray(stored["qh"]), axis=1, bitorder="little")
        blocks["qs"] = (levels | fifth << np.uint8(4)).astype(np.int8) - 16
    else:
        blocks["qs"] = IQ4_LEVELS.astype(np.int8)[levels]
    return blocks.view(np.uint8).reshape(len(raw), -1)
