"""The contract between the engine and whoever computes.

A backend holds the weights of one model and computes trees of tokens on top of a committed `State`. Nothing is
written to the committed state until `commit`. **Row invariance**: in `forward` and `decode` a node's result depends,
to the bit, only on the committed state and the node's own ancestors, not on what else ran beside it. That is what
makes greedy speculative output equal greedy plain output byte for byte. `prefill` may use other orders; both modes
start from the same prefill, and splitting a prompt at multiples of `PREFILL_CHUNK` does not change a bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from warpsmith.backend.sampling import Sampling, choose
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.errors import BadRequest
from warpsmith.model.config import Config

PREFILL_CHUNK = 64


@dataclass(frozen=True)
class Want:
    """What a forward pass should return. Asking for less is faster: logits of a 248K vocabulary are 1 MB a row."""

    tokens: Literal["none", "argmax", "top", "logits"] = "argmax"
    top: int = 0  # with tokens="top": how many
    features: tuple[int, ...] = ()  # layers whose output (residual stream) is returned, concatenated in this order
    hidden: bool = False  # the residual stream after the final norm: what the MTP head reads
    every_row: bool = False  # prefill and MTP: tokens for every position, not just the last


ARGMAX = Want()
LOGITS = Want(tokens="logits")


@dataclass
class Output:
    """One row a node (prefill, MTP: one row a position for features and hidden; tokens as `Want.every_row` says).

    Ties go to the lowest token id. `argmax` is filled for every kind of `Want.tokens` but "none".
    """

    argmax: np.ndarray | None = None  # int32 [n]
    top_ids: np.ndarray | None = None  # int32 [n, k], best first
    top_logits: np.ndarray | None = None  # float32 [n, k]
    logsumexp: np.ndarray | None = None  # float32 [n], over the whole vocabulary; with "top"
    logits: np.ndarray | None = None  # float32 [n, vocab]
    features: np.ndarray | None = None  # float32 [n, len(features) * hidden]
    hidden: np.ndarray | None = None  # float32 [n, hidden]


class State(ABC):
    """The committed past of one sequence: KV rows, the last convolution inputs, the DeltaNet states."""

    length: int  # tokens committed
    context: int  # tokens there is room for


@dataclass(frozen=True)
class Snapshot:
    """A copy of a state at some length, owned by the backend that made it."""

    length: int
    nbytes: int
    data: Any = field(repr=False)


@dataclass(frozen=True)
class MemoryPart:
    what: str
    nbytes: int


class BlockMemory(ABC):  # noqa: B024  every backend keeps its own
    """What a `BlockDraft` has seen of one sequence."""


class BlockDraft(ABC):
    """A network that guesses a block of positions at once (DFlash): weights that any number of sequences share."""

    @abstractmethod
    def new_memory(self) -> BlockMemory:
        """Of a sequence that has not begun."""

    @abstractmethod
    def append(self, memory: BlockMemory, features: np.ndarray, position: int) -> None:
        """Rows [n, features * hidden] of tokens that were committed at `position` onwards; later ones come later."""

    @abstractmethod
    def fill(self, memory: BlockMemory, root: int, position: int, rows: int, want: Want) -> Output:
        """What may stand at the next `rows` positions after `root`, which stands at `position`: a row of tokens for
        each, and rows of `hidden` for the root and each. The whole block is computed and nothing of it is kept."""

    @abstractmethod
    def forget(self, memory: BlockMemory) -> None:
        """Make it that of a sequence that has not begun."""

    @abstractmethod
    def snapshot(self, memory: BlockMemory) -> Any: ...

    @abstractmethod
    def restore(self, memory: BlockMemory, saved: Any) -> None: ...


class Backend(ABC):
    """One model, ready to compute."""

    name: str  # "reference", "cpu", "cuda"
    config: Config
    prefill_multiple: int = PREFILL_CHUNK  # splitting a prompt at multiples of this changes no bit
    largest_tree: int = MAX_NODES  # nodes that `forward` takes on this device

    @abstractmethod
    def memory(self, context: int) -> list[MemoryPart]:
        """What a state of this context and the weights take, part by part."""

    @abstractmethod
    def new_state(self, context: int) -> State:
        """An empty sequence with room for `context` tokens; `DoesNotFit` if there is no memory for it."""

    @abstractmethod
    def prefill(self, state: State, ids: Sequence[int], want: Want = ARGMAX) -> Output:
        """Run and commit a chain of any length; built for throughput."""

    @abstractmethod
    def forward(self, state: State, tree: Tree, want: Want = ARGMAX) -> Output:
        """Run up to `largest_tree` nodes on top of the committed state without changing it."""

    @abstractmethod
    def commit(self, state: State, path: Sequence[int]) -> None:
        """Make `path` (node indices of the last `forward`'s tree, root first) part of the committed past."""

    @abstractmethod
    def snapshot(self, state: State) -> Snapshot: ...

    @abstractmethod
    def restore(self, state: State, snapshot: Snapshot) -> None: ...

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        """Embedding rows, float32 [n, hidden]: what a draft without embeddings of its own starts from."""
        raise BadRequest(
            f"The {self.name} backend does not lend its embeddings.", "Use another draft, or --draft none."
        )

    def head(self, hidden: np.ndarray, want: Want = ARGMAX) -> Output:
        """The LM head on rows [n, hidden] that are normed already: how a draft without a head of its own speaks."""
        raise BadRequest(f"The {self.name} backend does not lend its LM head.", "Use --draft none.")

    def block_draft(self, config: Any, tensors: Mapping[str, Tensor], capacity: Sequence[int]) -> BlockDraft | None:
        """A DFlash network beside the model, on its device; None where numpy has to do.

        `config` is a `DFlashConfig`, `tensors` are the weights by z-lab's names, `capacity` says of how many tokens
        each layer keeps keys and values.
        """
        return None

    def decode(
        self,
        state: State,
        token: int,
        count: int,
        stop: frozenset[int] = frozenset(),
        sampling: Sampling | None = None,
        history: Sequence[int] = (),
    ) -> Generator[int]:
        """Plain decoding: commit `token`, yield the next, and so on, up to `count` tokens or one in `stop`.

        Each token is the sampler's choice (`choose`) from the logits at its place; without `sampling` that is the
        argmax. `history` is the text up to and with `token`, for the penalties: all of it, or as much as they look
        back on. The last token yielded is not committed. Backends override this to stay on the device between tokens;
        closing the generator brings one that ran ahead back to the last token it yielded.
        """
        want, text = wanted_for(sampling), list(history)
        for _ in range(count):
            output = self.forward(state, Tree.chain([token]), want)
            self.commit(state, [0])
            token = next_token(output, 0, sampling, text, state.length)
            text.append(token)
            yield token
            if token in stop:
                return

    def bytes_a_token(self, length: int) -> int | None:
        """What decoding one token after `length` others must read and write: every weight it needs, the keys and
        values, the DeltaNet states in and out. None where nobody counted."""
        return None

    def read_bandwidth(self) -> float | None:
        """Bytes a second that this device reads while it does nothing else, measured now; None where that is unknown.
        Held against `bytes_a_token`, it says how fast decoding could be at best."""
        return None

    def mtp(
        self, state: State, tokens: Sequence[int], hidden: np.ndarray, position: int, want: Want = ARGMAX
    ) -> Output:
        """Run a chain through the MTP block; `config.mtp_layers` says whether there is one.

        Row i takes token i and the hidden (after the final norm, or the block's own last output) of the position
        before it; its keys and values land at `position + i`, over whatever was there. `Output.hidden` feeds the
        next step.
        """
        raise BadRequest(f"The {self.name} backend does not run MTP heads.", "Use another draft, or --draft none.")


def wanted_for(sampling: Sampling | None) -> Want:
    """What a forward pass must return for the sampler to choose from."""
    return ARGMAX if sampling is None or sampling.greedy else LOGITS


def next_token(output: Output, row: int, sampling: Sampling | None, history: Sequence[int], position: int) -> int:
    """The sampler's choice at absolute `position`, from a row of an output that was wanted for it."""
    if sampling is None or sampling.greedy:
        assert output.argmax is not None
        return int(output.argmax[row])
    assert output.logits is not None
    return choose(output.logits[row], sampling, history, position)


def check_room(state: State, tokens: int) -> None:
    """Refuse to run past the end of the context."""
    if state.length + tokens > state.context:
        raise BadRequest(
            f"{state.length + tokens} tokens do not fit in a context of {state.context}.",
            "Raise the context length (-c) or shorten the prompt.",
        )


def check_tokens(config: Config, ids: np.ndarray) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= config.vocab):
        raise BadRequest(f"Token ids must be in [0, {config.vocab}).", "The prompt was made with another tokenizer.")


def output_from_logits(logits: np.ndarray, want: Want) -> Output:
    """Fill an `Output` from float32 logits [n, vocab] as `want` asks. The meaning of "argmax" and "top" is here."""
    output = Output()
    if want.tokens == "none":
        return output
    output.argmax = logits.argmax(axis=1).astype(np.int32)
    if want.tokens == "top":
        order = np.argsort(-logits, axis=1, kind="stable")[:, : want.top]
        output.top_ids = order.astype(np.int32)
        output.top_logits = np.take_along_axis(logits, order, axis=1)
        peak = logits.max(axis=1, keepdims=True)
        output.logsumexp = (peak + np.log(np.exp(logits - peak).sum(axis=1, keepdims=True)))[:, 0].astype(np.float32)
    elif want.tokens == "logits":
        output.logits = logits
    return output
