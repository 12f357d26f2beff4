"""The kernels' arguments, field by field as they declare them."""

from __future__ import annotations

import ctypes

from warpsmith.backend.cuda.shape import MAX_FEATURES, MAX_STOPS
from warpsmith.backend.tree import MAX_NODES


class Request(ctypes.Structure):
    """`Request` of params.cuh."""

    _fields_ = [
        ("nodes", ctypes.c_int),
        ("length", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("stop_after", ctypes.c_int),
        ("stops", ctypes.c_int),
        ("features", ctypes.c_int),
        ("want_logits", ctypes.c_int),
        ("want_hidden", ctypes.c_int),
        ("zero", ctypes.c_uint),
        ("tokens", ctypes.c_int * MAX_NODES),
        ("parents", ctypes.c_int * MAX_NODES),
        ("stop_ids", ctypes.c_int * MAX_STOPS),
        ("feature_layers", ctypes.c_int * MAX_FEATURES),
        ("made", ctypes.c_void_p),
    ]


class Draw(ctypes.Structure):
    """`Draw` of decide.cuh."""

    _fields_ = [
        ("window", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("lists", ctypes.c_void_p),
        ("inverse_temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("log_min_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("serial", ctypes.c_uint32),
        ("sampled", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("windowed", ctypes.c_int),
        ("last_n", ctypes.c_int),
        ("biased", ctypes.c_int),
        ("repeat", ctypes.c_float),
        ("frequency", ctypes.c_float),
        ("presence", ctypes.c_float),
    ]


POINTERS_BEFORE_CONTEXT = (
    "stream",
    "stream_start",
    "head_start",
    "embedding",
    "vectors",
    "rope",
    "delta",
    "history",
    "keys",
    "values",
)
POINTERS_AFTER_CONTEXT = (
    "exchange", "parts",
    "pending_raw", "pending_key", "pending_write", "pending_fade", "pending_keys", "pending_values", "branch_state",
    "out_tokens", "out_count", "out_logits", "out_features", "out_hidden", "profile",
)  # fmt: skip


class Params(ctypes.Structure):
    """`Params` of params.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS_BEFORE_CONTEXT),
        ("context", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in POINTERS_AFTER_CONTEXT),
    ]


class MadeTree(ctypes.Structure):
    """`MadeTree` of made_tree.cuh."""

    _fields_ = [("nodes", ctypes.c_int), ("tokens", ctypes.c_int * MAX_NODES), ("parents", ctypes.c_int * MAX_NODES)]


class Path(ctypes.Structure):
    """`Path` of common/commit.cuh."""

    _fields_ = [("count", ctypes.c_int), ("node", ctypes.c_int * MAX_NODES), ("last", ctypes.c_int)]


class Commit(ctypes.Structure):
    """`Commit` of common/commit.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("delta", "history", "made")),
        ("length", ctypes.c_int),
        ("path", Path),
    ]


class TopRequest(ctypes.Structure):
    """`Top` of top.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "keys", "sums", "arrived", "out")),
        ("count", ctypes.c_int),
    ]


class Stream(ctypes.Structure):
    """`Stream` of stream.cu."""

    _fields_ = [("bytes", ctypes.c_void_p), ("start", ctypes.c_void_p)]


class Pack(ctypes.Structure):
    """`Pack` of pack.cu."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("part_start", ctypes.c_void_p),
        ("first_tiles", ctypes.c_void_p),
        ("format", ctypes.c_int),
        ("part_tile", ctypes.c_int),
        ("first_row", ctypes.c_int),
        ("offset", ctypes.c_int),
        ("count", ctypes.c_int),
        ("k", ctypes.c_int),
        ("tile_rows", ctypes.c_int),
        ("weave", ctypes.c_int),
    ]
