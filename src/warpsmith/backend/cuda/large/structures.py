"""The arguments of the activations-first kernels, field by field as they declare them."""

from __future__ import annotations

import ctypes

from warpsmith.backend.cuda.shape import MAX_FEATURES, MAX_STOPS
from warpsmith.backend.tree import MAX_NODES


class LargeRequest(ctypes.Structure):
    """`Request` of kernels/large/shape.cuh."""

    _fields_ = [
        *((name, ctypes.c_int) for name in
          ("nodes", "length", "steps", "stops", "features", "want_logits", "want_hidden", "whole")),
        ("tokens", ctypes.c_int * MAX_NODES),
        ("parents", ctypes.c_int * MAX_NODES),
        ("stop_ids", ctypes.c_int * MAX_STOPS),
        ("feature_layers", ctypes.c_int * MAX_FEATURES),
        ("place", ctypes.c_ubyte * MAX_NODES),
        ("made", ctypes.c_void_p),
    ]  # fmt: skip


class LargeParams(ctypes.Structure):
    """`Params` of kernels/large/shape.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in
          ("stream", "parcels", "first_parcel", "stages", "runs", "tiles", "recurrent", "embedding", "vectors", "rope",
           "delta", "history", "keys", "values")),
        ("context", ctypes.c_longlong),
        *((name, ctypes.c_void_p) for name in
          ("counter", "words", "sums", "head_sums", "queries", "parts", "part_stats", "best", "pending_raw",
           "pending_key", "pending_write", "pending_fade", "pending_keys", "pending_values", "branch_state",
           "out_tokens", "out_count", "out_logits", "out_features", "out_hidden", "profile")),
    ]  # fmt: skip


class LargePack(ctypes.Structure):
    """`Pack` of kernels/large/pack.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "stream", "offsets")),
        *((name, ctypes.c_int) for name in
          ("source", "first_row", "offset", "count", "blocks", "row_bytes", "pattern")),
    ]  # fmt: skip
