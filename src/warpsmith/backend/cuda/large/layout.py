"""The activations-first forward pass: its stages, and the sizes of everything.

For models whose weights are K-quants, or whose rows are too long for the registers: activations of all nodes are held,
weights pass by (see kernels/large/forward.cu). The host's view of kernels/large/shape.cuh.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise

from warpsmith.backend.cuda.large.deal import BLOCK_K, GROUP_BLOCKS, ROWS, LargeStage, most_parts
from warpsmith.backend.cuda.large.formats import EMBEDDINGS, ROUNDED, SLABS
from warpsmith.backend.cuda.large.stream import SlabStages
from warpsmith.backend.cuda.memory.sizes import Sizes
from warpsmith.backend.cuda.shape import HEAD_DIM, MAX_OWN_LOGITS, STATE_DIM
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.model.config import Config

FEWER_GROUP_BLOCKS = 7
KEPT_STATES = 5  # of a DeltaNet's channels while a tree is walked


def takes(config: Config) -> bool:
    """Whether the kernels are written for this shape."""
    c = config
    widths = (c.hidden, c.ffn, c.value_dim, c.heads * c.head_dim)
    return (
        all(k % BLOCK_K == 0 for k in widths)
        and (c.head_dim, c.rotary_dim, c.key_head_dim, c.value_head_dim, c.conv_kernel) == (HEAD_DIM, 64, 128, 128, 4)
        and c.hidden <= 8192
        and c.layers <= 128
        and 128 % c.kv_heads == 0
        and c.heads // c.kv_heads <= 8
    )


class LargeLayout(SlabStages, Sizes):
    """Sizes and offsets for one model on one number of SMs, with keys and values kept as named types."""

    def __init__(
        self, config: Config, sms: int, stored: Mapping[str, str], cache_types: tuple[str, str] = ("f16", "f16")
    ) -> None:
        super().__init__(config, sms, cache_types)
        self.stored = stored
        self.splits = 128 // config.kv_heads
        # Fewer superblocks leave more room for weights on their way, where that does not cut the residual stream into
        # more groups. (A draft that borrows the head counts on as many.)
        blocks = config.hidden // BLOCK_K
        if -(-blocks // FEWER_GROUP_BLOCKS) == -(-blocks // GROUP_BLOCKS):
            self.group_blocks = FEWER_GROUP_BLOCKS

    @cached_property
    def stages(self) -> list[LargeStage]:
        c = self.config
        stages: list[LargeStage] = []
        for layer, recurrent in enumerate(c.recurrent):
            block = f"blk.{layer}."
            if recurrent:
                rows = [
                    [("attn_qkv", c.conv_channels)],
                    [("attn_gate", c.value_dim)],
                    [("ssm_beta", c.value_heads), ("ssm_alpha", c.value_heads)],
                ]
                out, out_k = "ssm_out", c.value_dim
            else:
                kv = c.kv_heads * c.head_dim
                rows = [[("attn_q", 2 * c.heads * c.head_dim)], [("attn_k", kv)], [("attn_v", kv)]]
                out, out_k = "attn_output", c.heads * c.head_dim
            stages += [
                self._stage(f"in.{layer}", c.hidden, block, *rows),
                self._stage(f"mix_out.{layer}", out_k, block, [(out, c.hidden)]),
                self._stage(f"mlp_in.{layer}", c.hidden, block, [("ffn_gate", c.ffn), ("ffn_up", c.ffn)], woven=True),
                self._stage(f"mlp_out.{layer}", c.ffn, block, [("ffn_down", c.hidden)]),
            ]
        head = c.head_tensor.removesuffix(".weight")
        return [*stages, self._stage("head", c.hidden, "", [(head, c.vocab)], in_rounds=True)]

    # -- what a pass writes ---------------------------------------------------------------------------------------

    def scratch_bytes(self, nodes: int) -> dict[str, int]:
        """Between SMs, for trees of up to `nodes` nodes."""
        c = self.config
        parts = nodes * c.heads * (self.splits + 2)
        return {
            "counter": 6 * 128,
            "words": max(self.word_bytes(1), self.word_bytes(nodes)),
            "sums": self.layer_results * max(2, nodes) * ROWS * 4,  # one node's are in two places
            "head_sums": self.deals[-1].results * nodes * ROWS * 4,
            "queries": nodes * c.heads * HEAD_DIM * 2,
            "parts": parts * HEAD_DIM * 2,
            "part_stats": parts * 8,
            "best": nodes * self.sms * 8,
            "branch_state": KEPT_STATES * c.value_dim * STATE_DIM * 4,
        }

    @cached_property
    def sum_tags(self) -> int:
        """Last bits of sums that tell which stage of a pass they are of from which one wrote to the same place before,
        and from none: they are all ones (see kernels/large/words.cuh)."""
        results = [deal.results for deal in self.deals[:-1]]
        tags = 7
        for place in {count - 1 for count in results}:
            writers = [stage for stage, count in enumerate(results) if place < count]
            turns = [[stage for stage in writers if stage % 2 == turn] for turn in (0, 1)]  # one node's two places
            while any((a ^ b) & tags == 0 for each in (writers, *turns) for a, b in pairwise([-1, *each])):
                tags = 2 * tags + 1
        return tags

    @cached_property
    def layer_results(self) -> int:
        """Tiles of results that a layer's stage writes at most."""
        return max(deal.results for deal in self.deals[:-1])

    def word_bytes(self, nodes: int) -> int:
        """What SMs poll for in the build for so many nodes (see kernels/large/words.cuh)."""
        c = self.config
        if nodes == 1:
            squares, block, places = max(self.sms, c.hidden // 128), BLOCK_K // 2, 2
        else:
            squares, block, places = c.hidden // 128, -(-nodes * (17 * 8 + 1) // 32) * 32, 1
        residual = c.hidden // BLOCK_K * block + -(-nodes * squares // 4) * 4
        mixed = max(c.heads * c.head_dim, c.value_dim) // BLOCK_K * block + nodes * c.value_dim // 8
        if nodes > 1:  # a DeltaNet's before its heads are normed, and q and k
            mixed += nodes * (c.value_dim // 2 + 2 * c.key_heads * STATE_DIM)
        return places * 4 * (2 * residual + mixed + c.ffn // BLOCK_K * block)

    @property
    def samples(self) -> bool:
        return -(-self.stages[-1].tiles // self.sms) * ROWS <= MAX_OWN_LOGITS

    @property
    def table_bytes(self) -> int:
        return sum(table.nbytes for table in self.tables) + self.parcels.nbytes + 2 * self.sms * 4 + self.config.layers

    @property
    def embedding_bytes(self) -> int:
        c = self.config
        return c.vocab * TYPES[self.embedding_type].row_bytes(c.hidden)

    @property
    def embedding_type(self) -> str:
        stored = self.stored["token_embd.weight"]
        return stored if stored in EMBEDDINGS else ROUNDED

    def vectors(self) -> list[str]:
        names: list[str] = []
        for layer, recurrent in enumerate(self.config.recurrent):
            block = f"blk.{layer}."
            names += [block + "attn_norm.weight", block + "post_attention_norm.weight"]
            if recurrent:
                names += [block + n for n in ("ssm_conv1d.weight", "ssm_dt.bias", "ssm_a", "ssm_norm.weight")]
            else:
                names += [block + "attn_q_norm.weight", block + "attn_k_norm.weight"]
        return [*names, "output_norm.weight"]

    # -- compile-time constants -----------------------------------------------------------------------------------

    def constants(self, nodes: int) -> dict[str, object]:
        c = self.config
        mask = sum(1 << i for i, slab in enumerate(SLABS) if any(p.type == slab for s in self.stages for p in s.parts))
        return {
            "HIDDEN": c.hidden, "FFN": c.ffn, "VOCAB": c.vocab, "LAYERS": c.layers, "HEADS": c.heads,
            "KV_HEADS": c.kv_heads, "KEY_HEADS": c.key_heads, "VALUE_HEADS": c.value_heads, "EPS": f"{c.eps!r}f",
            "SLAB_TYPE_MASK": mask, "EMBEDDING_TYPE": EMBEDDINGS.index(self.embedding_type),
            "GROUP_BLOCKS": self.group_blocks, "SMS": self.sms, "NODES": nodes,
            "DELTA_LAYERS": self.delta_layers, "KEY_TYPE": self.key_rows.number, "VALUE_TYPE": self.value_rows.number,
            "LAYER_RESULTS": self.layer_results, "SUM_TAGS": self.sum_tags,
            "MOST_PARTS": most_parts(self.deals),
            "TABLE_ENTRIES": max(-(-deal.tables.size // 8) * 8 for deal in self.deals[:-1]),
        }  # fmt: skip
