"""The arguments of the kernels of a prompt, field by field as they declare them."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

from warpsmith.backend.base import PREFILL_CHUNK


def _fields(pointers: str, ints: str = "") -> list[tuple[str, Any]]:
    return [*((n, ctypes.c_void_p) for n in pointers.split()), *((n, ctypes.c_int) for n in ints.split())]


class Span(ctypes.Structure):
    """`Span` of prefill/common.cuh."""

    _fields_ = _fields("", "first octets capacity")


class Piece(ctypes.Structure):
    """`Piece` of prefill/common.cuh."""

    _fields_ = _fields("", "lead end base capacity")


class Embed(ctypes.Structure):
    """`Embed` of prefill/embed.cu."""

    _fields_: ClassVar = [
        *_fields("ids stream head_start table norm residual out squares best"),
        ("few", ctypes.c_int * PREFILL_CHUNK),
    ]


class Gemm(ctypes.Structure):
    """`Gemm` of prefill/gemm.cuh."""

    _fields_ = _fields(
        "stream start x out squares_in squares_out residual norm gates logits",
        "row_tiles k_tiles row_groups next_chunks gate_rows first_token tokens second third types",
    )


class Delta(ctypes.Structure):
    """`Delta` of prefill/delta.cuh."""

    _fields_ = _fields("raw gates vectors history state n b q o fade states y arrived")


class Attention(ctypes.Structure):
    """`Attention` of prefill/attention.cuh."""

    _fields_ = _fields("raw vectors rope keys values queries parts stats y", "context")


class Queries(ctypes.Structure):
    """`Queries` of prefill/attention.cuh."""

    _fields_ = _fields("", "first count")


class Head(ctypes.Structure):
    """`Head` of prefill/head.cu."""

    _fields_ = _fields("stream start x squares logits best", "first count")


class Rows(ctypes.Structure):
    """`Rows` of prefill/rows.cu."""

    _fields_ = _fields("residual squares norm out", "first stride")
