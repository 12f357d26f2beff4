"""The Qwen3.5 text architecture in plain torch, with Hugging Face's parameter names.

A stack of three Gated DeltaNet layers to one gated attention layer, tied embeddings, and one MTP layer that
predicts the token after next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.deltanet import chunked, recurrent_step


@dataclass(frozen=True)
class Config:
    vocab_size: int = 8192
    hidden_size: int = 512
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 1
    head_dim: int = 256
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True
    mtp_num_hidden_layers: int = 1
    eos_token_id: int = 8178
    pad_token_id: int = 8176

    @property
    def layer_types(self) -> list[str]:
        every = self.full_attention_interval
        kinds = ("linear_attention", "full_attention")
        return [kinds[(i + 1) % every == 0] for i in range(self.num_hidden_layers)]

    def to_json(self) -> dict:
        """The text-only config.json of the family."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        theta, factor = plain.pop("rope_theta"), plain["partial_rotary_factor"]
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **plain,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": theta,
                "partial_rotary_factor": factor,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
            "rope_theta": theta,
            "layer_types": self.layer_types,
            "hidden_act": "silu",
            "attention_bias": False,
            "attn_output_gate": True,
            "mamba_ssm_dtype": "float32",
            "mtp_use_dedicated_embeddings": False,
            "dtype": "bfloat16",
        }

    @classmethod
    def from_json(cls, data: dict) -> Config:
        known = {f.name for f in fields(cls)}
        config = cls(**{k: v for k, v in {**data, **data.get("rope_parameters", {})}.items() if k in known})
        if data.get("layer_types", config.layer_types) != config.layer_types:
            raise ValueError(f"layers are not one attention layer in {config.full_attention_interval}")
        return config


def half_precision(device: torch.device) -> torch.autocast:
    """bf16 products where the chip has them; a CPU run is only ever a test and stays in fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


class RMSNorm(nn.Module):
    """Zero-centred: the stored weight is the distance from one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * (1 + self.weight.float())).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """Over one value head: norm with a plain weight first, then the silu gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return y * F.silu(gate.float())


class Cache:
    """What decoding keeps of a sequence batch: KV rows, the last three convolution inputs, DeltaNet states."""

    def __init__(self, config: Config, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        c = config
        self.length = 0
        conv = 2 * c.linear_num_key_heads * c.linear_key_head_dim + c.linear_num_value_heads * c.linear_value_head_dim
        self.layers: list[dict[str, Tensor]] = []
        for kind in c.layer_types:
            if kind == "full_attention":
                shape = (batch, c.num_key_value_heads, length, c.head_dim)
                layer = {n: torch.zeros(shape, device=device, dtype=dtype) for n in ("k", "v")}
            else:
                state = (batch, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
                layer = {
                    "conv": torch.zeros(batch, c.linear_conv_kernel_dim - 1, conv, device=device, dtype=dtype),
                    "state": torch.zeros(state, device=device),
                }
            self.layers.append(layer)


class DeltaNet(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.key_heads, self.value_heads = c.linear_num_key_heads, c.linear_num_value_heads
        self.width = c.linear_key_head_dim
        keys, values = self.key_heads * self.width, self.value_heads * self.width
        self.in_proj_qkv = nn.Linear(c.hidden_size, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(c.hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(c.hidden_size, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(c.hidden_size, self.value_heads, bias=False)
        self.conv1d = nn.Conv1d(
            2 * keys + values,
            2 * keys + values,
            c.linear_conv_kernel_dim,
            groups=2 * keys + values,
            bias=False,
        )
        self.A_log = nn.Parameter(torch.empty(self.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.norm = GatedRMSNorm(self.width, c.rms_norm_eps)
        self.out_proj = nn.Linear(values, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cache: dict[str, Tensor] | None) -> Tensor:
        length = x.shape[1]
        mixed = self.in_proj_qkv(x)
        taps = self.conv1d.weight.squeeze(1)
        past = taps.shape[1] - 1
        if cache is None:
            padded = F.pad(mixed, (0, 0, past, 0))
        else:
            padded = torch.cat([cache["conv"].to(mixed.dtype), mixed], 1)
            cache["conv"].copy_(padded[:, -past:])
        conv = sum(padded[:, j : j + length] * taps[:, j] for j in range(past + 1))
        keys = self.key_heads * self.width
        q, k, v = F.silu(conv).float().split([keys, keys, self.value_heads * self.width], -1)
        q = l2_normalise(q.unflatten(-1, (self.key_heads, self.width))) * self.width**-0.5
        k = l2_normalise(k.unflatten(-1, (self.key_heads, self.width)))
        v = v.unflatten(-1, (self.value_heads, self.width))
        beta = self.in_proj_b(x).float().sigmoid()
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        if cache is None:
            out, _ = chunked(q, k, v, beta, g, None)
        elif length == 1:
            step = (t.squeeze(1) for t in (q, k, v, beta, g))
            out, state = recurrent_step(*step, cache["state"])
            cache["state"].copy_(state)
            out = out.unsqueeze(1)
        else:
            out, state = chunked(q, k, v, beta, g, cache["state"])
            cache["state"].copy_(state)
        z = self.in_proj_z(x).unflatten(-1, (self.value_heads, self.width))
        return self.out_proj(self.norm(out, z).flatten(-2).to(x.dtype))


def l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, 2 * self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.width, c.rms_norm_eps)
        self.k_norm = RMSNorm(self.width, c.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: dict[str, Tensor] | None, start: int) -> Tensor:
        length = x.shape[1]
        # Each head owns its query rows followed by its gate rows.
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.width)).chunk(2, -1)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.width))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.width)).transpose(1, 2)
        q = rotate(self.q_norm(q), rope).to(v.dtype).transpose(1, 2)
        k = rotate(self.k_norm(k), rope).to(v.dtype).transpose(1, 2)
        if cache is not None:
            cache["k"][:, :, start : start + length] = k
            cache["v"][:, :, start : start + length] = v
            if length > 1 and start > 0:
                raise ValueError("a prompt is prefilled in one piece")
            k, v = (
                cache["k"][:, :, : start + length].to(v.dtype),
                cache["v"][:, :, : start + length].to(v.dtype),
            )
        ratio = self.heads // self.kv_heads
        if length == 1:  # one query: heads that share keys stand in for a sequence of queries
            grouped = F.scaled_dot_product_attention(q.squeeze(2).unflatten(1, (self.kv_heads, ratio)), k, v)
            out = grouped.flatten(1, 2).unsqueeze(2)
        else:
            k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2) * gate.sigmoid()
        return self.o_proj(out.flatten(-2))


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Half-split rotation of the first dimensions of x [B, T, heads, d]; the rest pass through."""
    cos, sin = rope
    half = cos.shape[-1]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def rope_angles(start: int, length: int, dims: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [length, 1, dims / 2] for absolute positions start .. start + length - 1."""
    frequency = theta ** (-torch.arange(0, dims, 2, device=device, dtype=torch.float32) / dims)
    angle = torch.arange(start, start + length, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: Config, kind: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if kind == "full_attention":
            self.self_attn = Attention(c)
        else:
            self.linear_attn = DeltaNet(c)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)
        self.kind = kind

    def forward(self, h: Tensor, rope: tuple[Tensor, Tensor], cache: dict[str, Tensor] | None, start: int) -> Tensor:
        x = self.input_layernorm(h)
        h = h + (self.self_attn(x, rope, cache, start) if self.kind == "full_attention" else self.linear_attn(x, cache))
        return h + self.mlp(self.post_attention_layernorm(h))


class Trunk(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c.layer_types)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class MTP(nn.Module):
    """Predicts token n+2 from the trunk's normed hidden state at n and the embedding of token n+1."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(c, "full_attention")])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, embedding: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        joined = torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1)
        return self.norm(self.layers[0](self.fc(joined).to(hidden.dtype), rope, None, 0))


class Qwen35(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        if config.mtp_num_hidden_layers:
            self.mtp = MTP(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head(self) -> Tensor:
        """The LM head's weight [vocabulary, hidden]."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def rope(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        c = self.config
        device = self.model.norm.weight.device
        return rope_angles(start, length, int(c.head_dim * c.partial_rotary_factor), c.rope_theta, device)

    def hidden(self, ids: Tensor, cache: Cache | None = None, features: list[int] | None = None):
        """Normed hidden states [B, T, H] of `ids`, and the residual stream after each layer in `features`."""
        start = 0 if cache is None else cache.length
        rope = self.rope(start, ids.shape[1])
        h = self.model.embed_tokens(ids)
        taken = {}
        for i, layer in enumerate(self.model.layers):
            h = layer(h, rope, None if cache is None else cache.layers[i], start)
            if features and i in features:
                taken[i] = h
        if cache is not None:
            cache.length += ids.shape[1]
        return self.model.norm(h), [taken[i] for i in features or []]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head)

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.hidden(ids)[0])


def initialise(model: Qwen35, seed: int) -> None:
    """Small normal weights, quiet outputs, DeltaNet decays spread over time scales."""
    torch.manual_seed(seed)
    depth = 2 * len(model.model.layers)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")) or "norm" in name:
            continue
        scale = 1 / math.sqrt(parameter.shape[1]) if parameter.dim() == 2 and "embed" not in name else 0.02
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            scale /= math.sqrt(depth)
        if "conv1d" in name:
            scale = 0.3
        nn.init.normal_(parameter, std=scale)
    for module in model.modules():
        if isinstance(module, DeltaNet):
            nn.init.uniform_(module.A_log, 1.0, 16.0)
            module.A_log.data.log_()
            step = torch.exp(torch.rand_like(module.dt_bias) * (math.log(0.1) - math.log(1e-3)) + math.log(1e-3))
            module.dt_bias.data.copy_(step + torch.log(-torch.expm1(-step)))
