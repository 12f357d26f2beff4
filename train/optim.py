"""Muon for the matrices of the layers, AdamW for everything else."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonalise(g: Tensor) -> Tensor:
    """Newton-Schulz: pushes every singular value of each matrix in g [n, rows, columns] towards one."""
    x = g.bfloat16() if g.is_cuda else g.clone()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum, orthogonalised per matrix; matrices of one shape are updated together."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float, decay: float) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for p in parameters:
            shapes.setdefault(p.shape, []).append(p)
        self.groups = list(shapes.values())
        self.buffers = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grads = torch.stack([p.grad for p in group])
            buffer.lerp_(grads, 1 - self.momentum)
            rows, columns = group[0].shape
            update = orthogonalise(grads.lerp_(buffer, self.momentum)).float() * max(1, rows / columns) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate)


class Optimizer:
    """Both, under one learning-rate multiplier in [0, 1]."""

    def __init__(self, model: nn.Module, matrix_rate: float, other_rate: float, decay: float) -> None:
        matrices, embeddings, others = [], [], []
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            if p.dim() == 2 and min(p.shape) >= 64 and "embed" not in name:
                matrices.append(p)
            else:
                (embeddings if p.dim() == 2 else others).append(p)
        self.matrix_rate, self.other_rate = matrix_rate, other_rate
        self.muon = Muon(matrices, momentum=0.95, decay=decay)
        groups = [{"params": others, "weight_decay": 0.0}]
        if embeddings:
            groups.append({"params": embeddings, "weight_decay": decay})
        fused = others[0].is_cuda
        self.adam = torch.optim.AdamW(groups, lr=other_rate, betas=(0.9, 0.97), eps=1e-10, fused=fused)

    def step(self, multiplier: float) -> None:
        self.muon.step(self.matrix_rate * multiplier)
        for group in self.adam.param_groups:
            group["lr"] = self.other_rate * multiplier
        self.adam.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self.adam.zero_grad(set_to_none=True)
        for group in self.muon.groups:
            for p in group:
                p.grad = None

    def state(self) -> dict:
        return {"buffers": self.muon.buffers, "adam": self.adam.state_dict()}

    def restore(self, state: dict) -> None:
        for mine, theirs in zip(self.muon.buffers, state["buffers"], strict=True):
            mine.copy_(theirs)
        self.adam.load_state_dict(state["adam"])


def multiplier(progress: float, warmup: float, decay_from: float) -> float:
    """Warm up, stay, then go linearly to zero: progress in [0, 1]."""
    if progress < warmup:
        return progress / warmup
    if progress < decay_from:
        return 1.0
    return max(0.0, (1 - progress) / (1 - decay_from))
