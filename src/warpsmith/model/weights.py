"""Which tensors a model of a given shape has. The loader checks files against it; `synth` makes them from it."""

from __future__ import annotations

from warpsmith.checkpoint.canonical import Checkpoint, brief
from warpsmith.errors import BadFile
from warpsmith.model.config import Config, config_from_metadata


def expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Canonical tensor names and shapes ([out, in]), in the order a forward pass meets them."""
    h = config.hidden
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab, h)}
    for layer, recurrent in enumerate(config.recurrent):
        shapes |= _block(config, layer, recurrent)
    for layer in range(config.layers, config.layers + config.mtp_layers):
        block = f"blk.{layer}."
        shapes |= {
            block + "nextn.eh_proj.weight": (h, 2 * h),
            block + "nextn.enorm.weight": (h,),
            block + "nextn.hnorm.weight": (h,),
        }
        shapes |= _block(config, layer, recurrent=False)
        shapes[block + "nextn.shared_head_norm.weight"] = (h,)
    shapes["output_norm.weight"] = (h,)
    if not config.tied:
        shapes["output.weight"] = (config.vocab, h)
    return shapes


def _block(config: Config, layer: int, recurrent: bool) -> dict[str, tuple[int, ...]]:
    h = config.hidden
    if recurrent:
        mixer: dict[str, tuple[int, ...]] = {
            "attn_qkv.weight": (config.conv_channels, h),
            "attn_gate.weight": (config.value_dim, h),
            "ssm_beta.weight": (config.value_heads, h),
            "ssm_alpha.weight": (config.value_heads, h),
            "ssm_conv1d.weight": (config.conv_channels, config.conv_kernel),
            "ssm_dt.bias": (config.value_heads,),
            "ssm_a": (config.value_heads,),
            "ssm_norm.weight": (config.value_head_dim,),
            "ssm_out.weight": (h, config.value_dim),
        }
    else:
        mixer = {
            "attn_q.weight": (2 * config.heads * config.head_dim, h),  # per head: query, then gate
            "attn_k.weight": (config.kv_heads * config.head_dim, h),
            "attn_v.weight": (config.kv_heads * config.head_dim, h),
            "attn_q_norm.weight": (config.head_dim,),
            "attn_k_norm.weight": (config.head_dim,),
            "attn_output.weight": (h, config.heads * config.head_dim),
        }
    return {
        f"blk.{layer}.{name}": shape
        for name, shape in {
            "attn_norm.weight": (h,),
            **mixer,
            "post_attention_norm.weight": (h,),  # the norm before the MLP, in spite of its name
            "ffn_gate.weight": (config.ffn, h),
            "ffn_up.weight": (config.ffn, h),
            "ffn_down.weight": (h, config.ffn),
        }.items()
    }


def read_config(checkpoint: Checkpoint) -> Config:
    """The checkpoint's configuration, after checking that its layers have the tensors it implies and no others."""
    source, tensors = str(checkpoint.path), checkpoint.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise BadFile(
            f"{source}: tensor token_embd.weight is missing.", "The file may be a draft or an adapter, not a model."
        )
    tied = "output.weight" not in tensors
    config = config_from_metadata(checkpoint.metadata, vocab=embedding.shape[0], tied=tied, source=source)
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in tensors:
            raise BadFile(f"{source}: tensor {name} is missing.", "The file is incomplete; download it again.")
        if tensors[name].shape != shape:
            raise BadFile(f"{source}: tensor {name} has shape {list(tensors[name].shape)}, expected {list(shape)}.")
    layers = tuple(f"blk.{i}." for i in range(config.layers))
    if extra := next((name for name in tensors if name not in expected and name.startswith(layers)), None):
        raise BadFile(
            f"{source}: tensor {brief(extra)} has no place in this model, and leaving it out would change it."
        )
    return config
