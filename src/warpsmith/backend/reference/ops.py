"""The mathematics of a Qwen3.5 layer, one function an operation.

Shapes: T tokens; nk key heads and nv value heads of the DeltaNet, dk and dv wide; value head h pairs with key head
h mod nk. Every function works in the dtype it is given (float32, or float64 for a finer oracle).
"""

from __future__ import annotations

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis. Canonical weights have their +1 folded in."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + x.dtype.type(eps)) * weight


def l2_norm(x: np.ndarray) -> np.ndarray:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis: the epsilon is inside the root, as the model was trained."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + x.dtype.type(1e-6))


def sigmoid(x: np.ndarray) -> np.ndarray:
    # exp of a non-positive number only, so nothing overflows
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(x.dtype)


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20)))).astype(x.dtype)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rope(x: np.ndarray, positions: np.ndarray, rotary_dim: int, theta: float) -> np.ndarray:
    """Rotate the first `rotary_dim` dimensions of x [T, heads, head_dim] in pairs (j, j + rotary_dim / 2).

    The family's multimodal sections give all three axes the same position for text, which is plain RoPE.
    """
    half = rotary_dim // 2
    frequencies = theta ** (-np.arange(half, dtype=np.float64) / half)
    angles = positions.astype(np.float64)[:, None] * frequencies
    cos, sin = (f(angles).astype(x.dtype)[:, None, :] for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:rotary_dim]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., rotary_dim:]], axis=-1)


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, offset: int) -> np.ndarray:
    """Causal grouped-query attention of q [T, heads, d] over keys and values [L, kv_heads, d] -> [T, heads, d].

    Query t sees keys 0 .. offset + t.
    """
    count, heads, width = q.shape
    kv_heads = keys.shape[1]
    grouped = q.reshape(count, kv_heads, heads // kv_heads, width).transpose(1, 2, 0, 3)  # [kv, group, T, d]
    scores = grouped @ keys.transpose(1, 2, 0)[:, None] * q.dtype.type(width**-0.5)  # [kv, group, T, L]
    if count > 1:
        seen = np.arange(len(keys)) <= offset + np.arange(count)[:, None]
        scores = np.where(seen, scores, q.dtype.type(-np.inf))
    mixed = softmax(scores) @ values.transpose(1, 0, 2)[:, None]  # [kv, group, T, d]
    return mixed.transpose(2, 0, 1, 3).reshape(count, heads, width)


def causal_conv(window: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Depthwise convolution and silu: window [taps - 1 + T, channels], weight [channels, taps] -> [T, channels]."""
    taps = weight.shape[1]
    count = len(window) - taps + 1
    total = weight[:, 0] * window[:count]
    for tap in range(1, taps):
        total = total + weight[:, tap] * window[tap : tap + count]
    return silu(total)


def delta_step(
    state: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, beta: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One token of the gated delta rule: (new state [nv, dk, dv], output [nv, dv]).

    q and k are [nv, dk] (key heads already repeated), decay is the log of the state's fading factor (<= 0):
    S <- e^decay S;  S <- S + k (beta (v - k^T S))^T;  output = q^T S.
    """
    state = state * np.exp(decay)[:, None, None]
    read = (k[:, None, :] @ state)[:, 0]
    write = beta[:, None] * (v - read)
    state = state + k[:, :, None] * write[:, None, :]
    return state, (q[:, None, :] @ state)[:, 0]


def delta_chunk(
    state: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, beta: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`delta_step` over T tokens at once, in matrix form: (state after them, outputs [T, nv, dv]).

    q, k [T, nv, dk], v [T, nv, dv], decay and beta [T, nv]. With G the running sum of decay, the writes D solve
    (I + A) D = beta (V - e^G K S), where A[i, j] = beta_i e^(G_i - G_j) k_i.k_j for j < i.
    """
    count = len(q)
    q, k, v = (x.transpose(1, 0, 2) for x in (q, k, v))  # [nv, T, d]
    decay, beta = decay.T, beta.T  # [nv, T]
    total = np.cumsum(decay, axis=1)
    past = np.tril(np.ones((count, count), dtype=bool))
    # the mask goes in before exp: above the diagonal the difference is positive and would overflow
    fade = np.exp(np.where(past, total[:, :, None] - total[:, None, :], q.dtype.type(-np.inf)))

    overlap = np.tril(beta[:, :, None] * (k @ k.transpose(0, 2, 1)) * fade, -1)
    writes = beta[:, :, None] * (v - np.exp(total)[:, :, None] * (k @ state))
    for i in range(1, count):
        writes[:, i] -= (overlap[:, i, None, :i] @ writes[:, :i])[:, 0]

    outputs = np.exp(total)[:, :, None] * (q @ state) + ((q @ k.transpose(0, 2, 1)) * fade) @ writes
    left = np.exp(total[:, -1:] - total)[:, :, None]  # how much of each token's write is left at the end
    state = np.exp(total[:, -1])[:, None, None] * state + (k * left).transpose(0, 2, 1) @ writes
    return state, outputs.transpose(1, 0, 2)
