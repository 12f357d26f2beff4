"""What a DFlash draft is to the model it drafts for."""

from __future__ import annotations

from warpsmith.checkpoint.dflash import DFlashConfig
from warpsmith.errors import BadRequest
from warpsmith.model.config import Config


def check_fits(config: DFlashConfig, target: Config) -> None:
    """Refuse a draft that was not made for this target."""
    c = config
    problem = None
    if c.hidden != target.hidden:
        problem = f"has a hidden size of {c.hidden}, and the model of {target.hidden}"
    elif c.vocab not in (None, target.vocab):
        problem = f"knows a vocabulary of {c.vocab} tokens, and the model of {target.vocab}"
    elif c.mask_token >= target.vocab:
        problem = f"masks with token {c.mask_token}, outside the model's vocabulary of {target.vocab}"
    elif c.target_depth not in (None, target.layers):
        problem = f"was made for a model of {c.target_depth} layers, and this one has {target.layers}"
    elif max(c.target_layers) >= target.layers:
        problem = f"reads layer {max(c.target_layers)}, and the model's last is {target.layers - 1}"
    if problem:
        raise BadRequest(f"The draft {c.source} {problem}.", "Use a DFlash draft made for this model, or --draft none.")
