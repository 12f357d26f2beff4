"""Which of the two forward passes a model takes, and what it will take on a chip: asked before a GPU is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from warpsmith.backend.base import MemoryPart
from warpsmith.backend.cuda.build.profiles import Profile
from warpsmith.backend.cuda.draft.plan import planned_draft
from warpsmith.backend.cuda.large.layout import LargeLayout, takes
from warpsmith.backend.cuda.large.plan import large_parts, variants_for
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.memory.plan import weights_first_parts
from warpsmith.backend.cuda.memory.room import CONTEXT_BYTES
from warpsmith.backend.cuda.schedule import busy_sms
from warpsmith.backend.cuda.shape import LARGEST_HIDDEN
from warpsmith.checkpoint.dflash import DFlashConfig
from warpsmith.model.config import Config

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
FEW_BYTES = 2048  # hidden size up to which a model of K-quants is faster when it is held in BF16


def activations_first(config: Config, stored: Mapping[str, str]) -> bool:
    """Whether that pass suits a model: it is too wide for the other, or of K-quants, which stay as they are."""
    wide = config.hidden > LARGEST_HIDDEN
    quantised = config.hidden > FEW_BYTES and any(kind in K_QUANTS for kind in stored.values())
    return (wide or quantised) and takes(config)


@dataclass(frozen=True)
class PlannedDraft:
    """A draft beside the model: its shape, the types of its tensors, and of how many tokens each layer keeps rows."""

    config: DFlashConfig
    stored: Mapping[str, str]
    capacity: Sequence[int]


def planned(
    config: Config,
    stored: Mapping[str, str],
    chip: Profile,
    context: int,
    cache_types: tuple[str, str],
    draft: PlannedDraft | None = None,
) -> list[MemoryPart]:
    """What a model with tensors of these types takes on a chip, its draft with it, and CUDA itself."""
    large = LargeLayout(config, chip.sms, stored, cache_types) if activations_first(config, stored) else None
    if large is not None:
        largest_tree = variants_for(chip.shared_memory)[-1]
        parts = large_parts(large, context, largest_tree=largest_tree)
    else:
        layout = Layout(config, min(chip.sms, busy_sms(config)), stored)
        parts = weights_first_parts(layout, context)
    if draft is not None:
        parts += planned_draft(large, config, stored, chip.sms, draft.config, draft.stored, draft.capacity, context)
    return [*parts, MemoryPart("CUDA itself", CONTEXT_BYTES)]
