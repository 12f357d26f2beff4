"""A forward pass as a short list of stages: what each reads, what it writes, which weights it uses.

The plan is the same for every backend. The reference interprets it in numpy; a kernel backend compiles it. So any
buffer after any stage can be compared between two backends, which is how kernels are developed and debugged.

Buffers hold one row a token (or tree node):
  x       residual stream [hidden], fp32
  qkv     DeltaNet projections before the convolution [conv_channels], channels q | k | v
  z       DeltaNet output gate [value_dim]
  beta    write strength before its sigmoid [value_heads]
  alpha   decay before its softplus [value_heads]
  q       attention queries and gates, per head query then gate [2 * heads * head_dim]
  k, v    attention keys and values, before norm and RoPE [kv_heads * head_dim]
  y       the mixer's output, before its output projection
  h       the MLP's inner activation [ffn]
  hidden  x after the final norm [hidden]
  logits  [vocab]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from warpsmith.model.config import Config


@dataclass(frozen=True)
class Stage:
    """One step of a forward pass. `op` says what is computed, `weights` maps the op's roles to tensor names."""

    op: str
    layer: int | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weights: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.op if self.layer is None else f"{self.op}.{self.layer}"


def forward_plan(config: Config) -> list[Stage]:
    """Token ids to logits through every layer."""
    stages = [Stage("embed", None, ("tokens",), ("x",), {"embedding": "token_embd.weight"})]
    for layer, recurrent in enumerate(config.recurrent):
        stages += _delta_stages(layer) if recurrent else _attention_stages(layer)
        stages += _mlp_stages(layer)
    return [*stages, *_head_stages(config, "output_norm.weight")]


def mtp_plan(config: Config) -> list[Stage]:
    """The multi-token-prediction block: the next token's embedding and the trunk's hidden make the token after it."""
    layer = config.layers
    block = f"blk.{layer}."
    enter = Stage(
        "mtp_in",
        layer,
        ("tokens", "hidden"),
        ("x",),
        {
            "embedding": "token_embd.weight",
            "embedding_norm": block + "nextn.enorm.weight",
            "hidden_norm": block + "nextn.hnorm.weight",
            "project": block + "nextn.eh_proj.weight",
        },
    )
    body = [*_attention_stages(layer), *_mlp_stages(layer)]
    return [enter, *body, *_head_stages(config, block + "nextn.shared_head_norm.weight")]


def _delta_stages(layer: int) -> list[Stage]:
    block = f"blk.{layer}."
    return [
        Stage(
            "delta_in",
            layer,
            ("x",),
            ("qkv", "z", "beta", "alpha"),
            {
                "norm": block + "attn_norm.weight",
                "qkv": block + "attn_qkv.weight",
                "z": block + "attn_gate.weight",
                "beta": block + "ssm_beta.weight",
                "alpha": block + "ssm_alpha.weight",
            },
        ),
        Stage(
            "delta_mix",
            layer,
            ("qkv", "z", "beta", "alpha"),
            ("y",),
            {
                "conv": block + "ssm_conv1d.weight",
                "dt": block + "ssm_dt.bias",
                "a": block + "ssm_a",
                "norm": block + "ssm_norm.weight",
            },
        ),
        Stage("mix_out", layer, ("x", "y"), ("x",), {"project": block + "ssm_out.weight"}),
    ]


def _attention_stages(layer: int) -> list[Stage]:
    block = f"blk.{layer}."
    return [
        Stage(
            "attention_in",
            layer,
            ("x",),
            ("q", "k", "v"),
            {
                "norm": block + "attn_norm.weight",
                "q": block + "attn_q.weight",
                "k": block + "attn_k.weight",
                "v": block + "attn_v.weight",
            },
        ),
        Stage(
            "attention_mix",
            layer,
            ("q", "k", "v"),
            ("y",),
            {"q_norm": block + "attn_q_norm.weight", "k_norm": block + "attn_k_norm.weight"},
        ),
        Stage("mix_out", layer, ("x", "y"), ("x",), {"project": block + "attn_output.weight"}),
    ]


def _mlp_stages(layer: int) -> list[Stage]:
    block = f"blk.{layer}."
    return [
        Stage(
            "mlp_in",
            layer,
            ("x",),
            ("h",),
            {
                "norm": block + "post_attention_norm.weight",
                "gate": block + "ffn_gate.weight",
                "up": block + "ffn_up.weight",
            },
        ),
        Stage("mlp_out", layer, ("x", "h"), ("x",), {"project": block + "ffn_down.weight"}),
    ]


def _head_stages(config: Config, norm: str) -> list[Stage]:
    return [
        Stage("final_norm", None, ("x",), ("hidden",), {"norm": norm}),
        Stage("head", None, ("hidden",), ("logits",), {"head": config.head_tensor}),
    ]
