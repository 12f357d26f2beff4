"""What a DFlash draft computes, as a plan beside that of the model it drafts for, and which models it fits.

Buffers hold one row a token. Those of the context belong to committed tokens, those of the block to the positions that
are guessed, the root's first:
  features  outputs of the model's layers that the draft reads, side by side [layers * hidden]
  c         a committed token, as every layer of the draft sees it [hidden]
  k, v      of the context: what a layer keeps of a committed token, after norm and RoPE [kv_heads * head_dim]
  x         the block's residual stream [hidden]
  q, k, v   of the block: before norm and RoPE [heads * head_dim], [kv_heads * head_dim]
  y, h      the attention's output and the MLP's inner activation
  hidden    x after the final norm [hidden]
Embeddings and head are the model's own.
"""

from __future__ import annotations

from warpsmith.checkpoint.dflash import DFlashConfig
from warpsmith.errors import BadRequest
from warpsmith.model.config import Config
from warpsmith.model.plan import Stage


def context_plan(config: DFlashConfig) -> list[Stage]:
    """Features of committed tokens to the keys and values that each layer keeps of them."""
    enter = Stage("context_in", None, ("features",), ("c",), {"project": "fc.weight", "norm": "hidden_norm.weight"})
    keep = [
        Stage("context_keep", layer, ("c",), ("k", "v"), _attention(layer, k="k_proj", v="v_proj", k_norm="k_norm"))
        for layer in range(config.layers)
    ]
    return [enter, *keep]


def block_plan(config: DFlashConfig) -> list[Stage]:
    """The root and masked positions after it to a guess for each of these."""
    stages = [Stage("embed", None, ("tokens",), ("x",), {})]
    for layer in range(config.layers):
        block = f"layers.{layer}."
        norm = {"norm": block + "input_layernorm.weight"}
        mlp_norm = {"norm": block + "post_attention_layernorm.weight"}
        gate_up = {"gate": block + "mlp.gate_proj.weight", "up": block + "mlp.up_proj.weight"}
        qkv = _attention(layer, q="q_proj", k="k_proj", v="v_proj")
        norms = _attention(layer, q_norm="q_norm", k_norm="k_norm")
        stages += [
            Stage("attention_in", layer, ("x",), ("q", "k", "v"), norm | qkv),
            Stage("block_mix", layer, ("q", "k", "v"), ("y",), norms),
            Stage("mix_out", layer, ("x", "y"), ("x",), _attention(layer, project="o_proj")),
            Stage("mlp_in", layer, ("x",), ("h",), mlp_norm | gate_up),
            Stage("mlp_out", layer, ("x", "h"), ("x",), {"project": block + "mlp.down_proj.weight"}),
        ]
    return [*stages, Stage("final_norm", None, ("x",), ("hidden",), {"norm": "norm.weight"})]


def _attention(layer: int, **roles: str) -> dict[str, str]:
    return {role: f"layers.{layer}.self_attn.{name}.weight" for role, name in roles.items()}


def check_fits(config: DFlashConfig, target: Config) -> None:
    """Refuse a draft that was not made for this target."""
    c = config
    problem = None
    if c.hidden != target.hidden:
        problem = f"has a hidden size of {c.hidden}, and the model of {target.hidden}"
    elif c.vocab not in (None, target.vocab):
        problem = f"knows a vocabulary of {c.vocab} tokens, and the model of {target.vocab}"
    elif c.speaks is not None and c.speaks > target.vocab:
        problem = f"speaks {c.speaks} tokens, and the model {target.vocab}"
    elif c.mask_token >= target.vocab:
        problem = f"masks with token {c.mask_token}, outside the model's vocabulary of {target.vocab}"
    elif c.target_depth not in (None, target.layers):
        problem = f"was made for a model of {c.target_depth} layers, and this one has {target.layers}"
    elif max(c.target_layers) >= target.layers:
        problem = f"reads layer {max(c.target_layers)}, and the model's last is {target.layers - 1}"
    if problem:
        raise BadRequest(f"The draft {c.source} {problem}.", "Use a DFlash draft made for this model, or --draft none.")
