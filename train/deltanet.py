"""The gated delta rule in chunks of 64 tokens: batched matrix products, and one short scan over chunks.

Shapes: q, k [B, T, nk, d]; v [B, T, nv, d]; beta, g [B, T, nv]; state [B, nv, d, d] (key-major). q and k come
normalised, q also scaled. Value head h reads key head h // (nv / nk).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 64
BLOCK = 16


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token (no T axis), in fp32: decay, read, write, read out."""
    ratio = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(ratio, 1) for x in (q, k))
    decay = g.exp().unsqueeze(-1)
    # The new state is read through the old one, so that the old one is read from memory only once.
    with torch.autocast(q.device.type, enabled=False):
        read, asked = (torch.stack([k, q], 2) @ state).unbind(2)
    delta = beta.unsqueeze(-1) * (v - decay * read)
    out = decay * asked + (q * k).sum(-1, keepdim=True) * delta
    return out, state * decay.unsqueeze(-1) + k.unsqueeze(-1) * delta.unsqueeze(-2)


def chunked(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Any number of tokens at once. Returns outputs [B, T, nv, d] and the state after the last token."""
    batch, length, heads, width = v.shape
    if state is None:
        state = torch.zeros(batch, heads, width, width, device=v.device)
    queries, erase, write, values, decays, system, weights = _prepare(q, k, v, beta, g)
    update, erase = _solve(_invert(system), values, erase)
    states, deltas, last = _scan(update, erase, write, decays, state.flatten(0, 1))
    out = _read(queries, states, weights, deltas)
    out = out.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4).reshape(batch, -1, heads, width)
    return out[:, :length], last.view_as(state)


def without_autocast(function: Callable) -> Callable:
    """The rule itself stays in fp32 (tf32 in the products) when the layers around it run in bf16."""

    @functools.wraps(function)
    def wrapped(*tensors: Tensor):
        with torch.autocast(tensors[0].device.type, enabled=False):
            return function(*tensors)

    return wrapped


@without_autocast
def _prepare(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Everything inside a chunk that does not need the state. All results are [chunks, batch * heads, ...]."""
    pad = -v.shape[1] % CHUNK
    if pad:
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v))
        beta, g = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (beta, g))
    ratio = v.shape[2] // k.shape[2]

    def split(x: Tensor) -> Tensor:  # [B, T, h, ...] -> [N, B, h, C, ...]
        x = x.float().unflatten(1, (-1, CHUNK))
        return x.transpose(0, 1).transpose(2, 3)

    def repeat(x: Tensor) -> Tensor:  # key heads -> value heads, batch and heads joined
        return x.repeat_interleave(ratio, 2).flatten(1, 2)

    q, k, v = split(q), split(k), split(v).flatten(1, 2)
    beta, g = split(beta).flatten(1, 2), split(g).flatten(1, 2)
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    # Mask before the exponential: above the diagonal the difference is positive and could overflow.
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()
    system = (beta.unsqueeze(-1) * repeat(k @ k.mT) * decay).tril(-1)
    weights = repeat(q @ k.mT) * decay
    k, q = repeat(k), repeat(q)
    erase = k * (beta * total.exp()).unsqueeze(-1)
    write = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    values = v * beta.unsqueeze(-1)
    return q * total.exp().unsqueeze(-1), erase, write, values, total[..., -1].exp(), system, weights


@without_autocast
def _solve(inverse: Tensor, values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    return inverse @ values, inverse @ keys


@without_autocast
def _read(q: Tensor, states: Tensor, weights: Tensor, deltas: Tensor) -> Tensor:
    return q @ states + weights @ deltas


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A [..., 64, 64].

    Diagonal blocks of 16 by the nilpotent product (I - A)(I + A^2)(I + A^4)(I + A^8), then merged pairwise. On the
    whole 64 that product would cancel catastrophically when keys repeat, so it stays within a block, in true fp32.
    """

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            inverse = _unit_lower_inverse(a.flatten(0, -3)).view_as(a)
        finally:
            torch.set_float32_matmul_precision(precision)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


@torch.compiler.disable
@without_autocast
def _invert(a: Tensor) -> Tensor:
    return UnitLowerInverse.apply(a)


@torch.compiler.disable
@without_autocast
def _scan(*arguments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return ScanChunks.apply(*arguments)


def _unit_lower_inverse(a: Tensor) -> Tensor:
    count, size, _ = a.shape
    blocks = size // BLOCK
    cells = a.view(count, blocks, BLOCK, blocks, BLOCK)
    power = torch.stack([cells[:, i, :, i] for i in range(blocks)], 1).reshape(-1, BLOCK, BLOCK)
    eye = torch.eye(BLOCK, device=a.device)
    inverse = eye - power
    for _ in range(3):
        power = torch.bmm(power, power)
        inverse = torch.baddbmm(inverse, inverse, power)
    inverse = inverse.view(count, blocks, BLOCK, BLOCK)
    width = BLOCK
    while width < size:
        top, bottom = inverse[:, 0::2], inverse[:, 1::2]
        pairs = size // (2 * width)
        cells = a.view(count, pairs, 2, width, pairs, 2, width)
        corner = torch.stack([cells[:, i, 1, :, i, 0] for i in range(pairs)], 1)
        corner = -(bottom @ corner @ top)
        upper = torch.cat([top, torch.zeros_like(top)], -1)
        inverse = torch.cat([upper, torch.cat([corner, bottom], -1)], -2)
        width *= 2
    return inverse.squeeze(1)


class ScanChunks(torch.autograd.Function):
    """delta_n = U_n - W_n S_n;  S_{n+1} = a_n S_n + K_n^T delta_n. Returns every S_n, every delta_n, the last S."""

    @staticmethod
    def forward(ctx, update: Tensor, erase: Tensor, write: Tensor, decays: Tensor, state: Tensor):
        update, erase, write, decays = (x.contiguous() for x in (update, erase, write, decays))
        states = update.new_empty(len(update), *state.shape)
        deltas = torch.empty_like(update)
        for n in range(len(update)):
            states[n] = state
            torch.baddbmm(update[n], erase[n], state, alpha=-1, out=deltas[n])
            state = torch.baddbmm(state * decays[n, :, None, None], write[n].mT, deltas[n])
        ctx.save_for_backward(erase, write, decays, states, deltas)
        return states, deltas, state

    @staticmethod
    def backward(ctx, grad_states: Tensor, grad_deltas: Tensor, grad_last: Tensor):
        erase, write, decays, states, deltas = ctx.saved_tensors
        grads = torch.empty_like(states)
        grad_update = torch.empty_like(deltas)
        grad = grad_last
        for n in reversed(range(len(deltas))):
            grads[n] = grad
            torch.baddbmm(grad_deltas[n], write[n], grad, out=grad_update[n])
            grad = torch.addcmul(grad_states[n], grad, decays[n, :, None, None])
            grad = torch.baddbmm(grad, erase[n].mT, grad_update[n], alpha=-1)
        grad_erase = -(grad_update @ states.mT)
        grad_write = deltas @ grads.mT
        grad_decays = (states * grads).sum((-1, -2))
        return grad_update, grad_erase, grad_write, grad_decays, grad
