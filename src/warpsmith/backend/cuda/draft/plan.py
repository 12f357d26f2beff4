"""What a draft takes beside a model on the device: known before either is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from warpsmith.backend.base import MemoryPart
from warpsmith.backend.cuda.draft.formats import handed_over
from warpsmith.backend.cuda.draft.layout import COLUMNS, DIM, DraftLayout, DraftStream, HeadStream
from warpsmith.backend.cuda.large.deal import Deal
from warpsmith.backend.cuda.large.formats import EMBEDDINGS, ROUNDED
from warpsmith.backend.cuda.large.layout import LargeLayout
from warpsmith.backend.cuda.top import top_bytes
from warpsmith.backend.cuda.weights.stream import EMBEDDING
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.dflash import HEAD, DFlashConfig
from warpsmith.model.config import Config


def draft_parts(layout: DraftLayout, context: int, sequences: int = 1, lent: int = 0) -> list[MemoryPart]:
    """The weights, with `lent` bytes of copies of the target's, what a launch writes, and what is remembered of as many
    sequences."""
    c = layout.config
    vectors = 4 * (c.layers * 2 * (c.hidden + c.head_dim) + 2 * c.hidden)
    turns = (64 + (context + COLUMNS) // 64 + 1) * (DIM // 2) * 8
    parcels = layout.stream.parcels.nbytes + layout.first_parcel.nbytes
    tables = sum(table.nbytes for table in layout.tables) + parcels
    own = layout.stream.stream_bytes + layout.copied + vectors + turns + tables
    own += sum(layout.scratch_bytes().values())
    own += sum(top_bytes().values()) if layout.copied else 0  # else the target's find the best tokens
    return [
        MemoryPart("draft", own + lent),
        MemoryPart("draft's memory", sequences * sum(layout.memory_bytes().values())),
    ]


def head_stream(config: Config, stored: Mapping[str, str], sms: int, speaks: int | None = None) -> HeadStream:
    """A copy of the LM head that a target of another layout lends, or of as many first rows as a draft speaks."""
    name = config.head_tensor
    head = {name: handed_over(stored[name])}
    return HeadStream(name.removesuffix(".weight"), speaks or config.vocab, config.hidden, sms, head)


def held_head(
    config: Config, stored: Mapping[str, str], sms: int, draft: DFlashConfig, draft_types: Mapping[str, str]
) -> HeadStream | None:
    """The LM head that a draft holds itself: its own, or a copy of the target's first rows. None: it reads the
    target's."""
    if draft.own_head:
        own = {HEAD: handed_over(draft_types[HEAD])}
        return HeadStream(HEAD.removesuffix(".weight"), draft.speaks or config.vocab, config.hidden, sms, own)
    return head_stream(config, stored, sms, draft.speaks) if draft.speaks else None


def embedding_type(stored: Mapping[str, str]) -> str:
    """What a copy of a target's embeddings is held as."""
    return stored[EMBEDDING] if stored[EMBEDDING] in EMBEDDINGS else ROUNDED


def planned_draft(
    target: LargeLayout | None,
    config: Config,
    stored: Mapping[str, str],
    sms: int,
    draft: DFlashConfig,
    draft_types: Mapping[str, str],
    capacity: Sequence[int],
    context: int,
) -> list[MemoryPart]:
    """Beside a target of this layout of slabs; None: of the other, which lends copies."""
    stream = DraftStream(draft, sms, {name: handed_over(kind) for name, kind in draft_types.items()})
    head: Deal | HeadStream | None = held_head(config, stored, sms, draft, draft_types)
    lent = 0
    if target is None:
        lent = config.vocab * TYPES[embedding_type(stored)].row_bytes(config.hidden)
        if head is None:
            copy = head_stream(config, stored, sms)
            head, lent = copy.deals[0], lent + copy.nbytes
    else:
        head = head or target.deals[-1]
    return draft_parts(DraftLayout(draft, stream, head, max(capacity)), context, lent=lent)
