"""The arguments of a draft's kernels, field by field as they declare them."""

from __future__ import annotations

import ctypes

from warpsmith.backend.cuda.draft.layout import COLUMNS, MAX_LAYERS
from warpsmith.backend.cuda.large.structures import LargeParams, LargeRequest
from warpsmith.backend.cuda.shape import MAX_FEATURES


class DraftParams(LargeParams):
    """`DraftParams` of kernels/draft/shape.cuh."""

    _fields_ = [  # noqa: RUF012
        (name, ctypes.c_void_p) for name in ("head_stream", "head_start", "waiting", "positions")
    ]


class DraftRequest(LargeRequest):
    """`DraftRequest` of kernels/draft/shape.cuh."""

    _fields_ = [  # noqa: RUF012
        *((name, ctypes.c_int) for name in ("rows", "first_position", "appended")),
        ("window", ctypes.c_int * MAX_LAYERS),
        ("causal", ctypes.c_int * MAX_LAYERS),
    ]


class Enter(ctypes.Structure):
    """`Enter` of kernels/draft/enter.cu."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("weights", "rows", "out")), ("count", ctypes.c_int)]


class Gather(ctypes.Structure):
    """`Gather` of kernels/draft/gather.cu."""

    _fields_ = [
        ("waiting", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("first", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("offsets", ctypes.c_longlong * (COLUMNS * MAX_FEATURES)),
    ]
