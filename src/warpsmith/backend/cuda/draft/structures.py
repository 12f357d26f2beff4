"""The arguments of a draft's kernels, field by field as they declare them."""

from __future__ import annotations

import ctypes

from warpsmith.backend.cuda.draft.layout import ABREAST, COLUMNS, MAX_LAYERS
from warpsmith.backend.cuda.shape import MAX_STOPS
from warpsmith.backend.tree import MAX_NODES


class DraftParams(ctypes.Structure):
    """`Params` of kernels/draft/shape.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in
          ("stream", "parcels", "first_parcel", "head_stream", "head_parcels", "first_head_parcel", "stages", "runs",
           "tiles", "embedding", "vectors", "rope", "keys", "values", "positions", "waiting")),
        ("capacity", ctypes.c_longlong),
        *((name, ctypes.c_void_p) for name in
          ("counter", "words", "sums", "head_sums", "parts", "part_stats", "out_logits", "out_hidden", "profile")),
    ]  # fmt: skip


class DraftRequest(ctypes.Structure):
    """`Request` of kernels/draft/shape.cuh."""

    _fields_ = [
        *((name, ctypes.c_int) for name in
          ("nodes", "position", "rows", "first_position", "appended", "want_logits", "want_hidden")),
        ("tokens", ctypes.c_int * COLUMNS),
        ("window", ctypes.c_int * MAX_LAYERS),
        ("causal", ctypes.c_int * MAX_LAYERS),
        ("context", ctypes.c_ubyte * (2 * MAX_LAYERS)),
        ("path", ctypes.c_void_p),
    ]  # fmt: skip


class Enter(ctypes.Structure):
    """`Enter` of kernels/draft/enter.cu."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("weights", "rows", "out")), ("count", ctypes.c_int)]


class Gather(ctypes.Structure):
    """`Gather` of kernels/draft/gather.cu."""

    _fields_ = [
        ("waiting", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("groups", "rows", "group", "first")),
        ("apart", ctypes.c_longlong),
        ("path", ctypes.c_void_p),
        ("tree", ctypes.c_void_p),
        ("times", ctypes.c_void_p),
        ("offsets", ctypes.c_int * ABREAST),
    ]


class Report(ctypes.Structure):
    """`Report` of kernels/draft/report.cuh."""

    _fields_ = [
        ("serial", ctypes.c_uint32),
        *((name, ctypes.c_int) for name in ("grown", "verified", "decided")),
        *((name, ctypes.c_int * MAX_NODES) for name in ("token", "path", "tree_tokens", "tree_parents")),
        ("scores", ctypes.c_double * MAX_NODES),
        *((name, ctypes.c_uint64) for name in ("began", "grew", "ran", "walked", "committing", "committed")),
    ]


class Grow(ctypes.Structure):
    """`Grow` of kernels/draft/tree.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tops", "tree", "report")),
        *((name, ctypes.c_int) for name in ("root", "depth", "width", "nodes", "verified")),
        ("least", ctypes.c_double * MAX_NODES),
    ]


class Walk(ctypes.Structure):
    """`Walk` of kernels/sample/walk.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tree", "chosen", "tops", "path", "report", "times")),
        *((name, ctypes.c_int) for name in ("count", "length", "serial", "stops")),
        ("stop_ids", ctypes.c_int * MAX_STOPS),
    ]
