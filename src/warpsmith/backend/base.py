"""The contract between the engine and whoever computes.

A backend holds the weights of one model and computes trees of tokens, each on top of the committed past of a sequence.
Nothing is written to that past until `commit`. What was drafted and not committed belongs to the sequence's `State`
too, so any number of states can be run in any order, alone or several in one `forward`.

**Row invariance**: in `forward` and `decode` a node's result depends, to the bit, only on the committed past and the
node's own ancestors, not on which other nodes or sequences ran beside it. That is what makes greedy speculative output
equal greedy plain output byte for byte. `prefill` may use other orders; both modes start from the same prefill, and
splitting a prompt at multiples of `PREFILL_CHUNK` does not change a bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from warpsmith.backend.block_draft import BlockDraft
from warpsmith.backend.finite import NOT_FINITE, not_finite
from warpsmith.backend.host_memory import free_memory
from warpsmith.backend.rows import HostRows, Rows
from warpsmith.backend.sampling import Sampling, choose
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.dflash import DFlashConfig
from warpsmith.errors import BadRequest
from warpsmith.model.config import Config

PREFILL_CHUNK = 64


WantedTokens = Literal["none", "argmax", "top", "logits"]


@dataclass(frozen=True)
class Want:
    """What a forward pass should return. Asking for less is faster: logits of a 248K vocabulary are 1 MB a row."""

    tokens: WantedTokens = "argmax"
    top: int = 0  # with tokens="top": how many
    features: tuple[int, ...] = ()  # layers whose output (residual stream) is returned, concatenated in this order
    hidden: bool = False  # the residual stream after the final norm: what the MTP head reads
    every_row: bool = False  # prefill and MTP: tokens for every position, not just the last


ARGMAX = Want()
LOGITS = Want(tokens="logits")


@dataclass
class Output:
    """One row a node, sequence after sequence (prefill, MTP: one row a position for features and hidden; tokens as
    `Want.every_row` says).

    Ties go to the lowest token id. `argmax` is filled for every kind of `Want.tokens` but "none"; it is `NOT_FINITE`
    where the logits hold an infinity above or a NaN. What is wide stays where it was computed: `Rows` says how long it
    can be read.
    """

    argmax: np.ndarray | None = None  # int32 [n]
    top_ids: np.ndarray | None = None  # int32 [n, k], best first
    top_logits: np.ndarray | None = None  # float32 [n, k]
    logsumexp: np.ndarray | None = None  # float32 [n], over the whole vocabulary; with "top"
    logits: Rows | None = None  # [n, vocab]
    features: Rows | None = None  # [n, len(features) * hidden]
    hidden: Rows | None = None  # [n, hidden]

    def __getitem__(self, rows: slice | Sequence[int]) -> Output:
        """The same of some nodes, for outputs that have a row of everything for each."""
        return Output(**{name: value[rows] for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True)
class Drafted:
    """A tree on top of a committed past, and what the model says at its nodes."""

    tree: Tree
    output: Output


class State(ABC):
    """One sequence: its committed past (KV rows, the last convolution inputs, the DeltaNet states), and the tree of its
    last `forward` until a path of that is committed."""

    length: int  # tokens committed
    context: int  # tokens there is room for
    drafted: Drafted | None = None


Batch = Sequence[tuple[State, Tree]]


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


@dataclass(frozen=True)
class Listener:
    """Who wants rows of tokens that are decoded plainly: of which layers, and who is told the position of the first and
    the output. The rows can be read until the call returns."""

    features: tuple[int, ...]
    heard: Callable[[int, Output], object]


class Backend(ABC):
    """One model, ready to compute."""

    name: str  # "reference", "cpu", "cuda"
    config: Config
    # splitting a prompt at multiples of this changes no bit; 1: generated tokens leave the bits of prefilled ones, too
    prefill_multiple: int = PREFILL_CHUNK
    advances: bool = False  # whether `advance` is faster than its parts
    prefills_together: bool = False  # whether `prefill_together` is
    largest_tree: int = MAX_NODES  # nodes that a `forward` takes on this device, of all sequences together
    largest_launch: int = MAX_NODES  # nodes of a tree for which the weights are read once

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, int | str]:
        """Everything besides the model that speed or bits depend on: device, threads, types of weights and caches."""

    @abstractmethod
    def memory(self, context: int, sequences: int = 1, snapshots: int = 0) -> list[MemoryPart]:
        """What the weights, as many states of this context and so many bytes of snapshots take, part by part."""

    def free_memory(self) -> int | None:
        """Bytes that states and snapshots may still take; None where that is unknown."""
        return free_memory()

    @abstractmethod
    def snapshot_bytes(self, length: int) -> int:
        """What a snapshot of a state of this length takes."""

    @abstractmethod
    def new_state(self, context: int) -> State:
        """An empty sequence with room for `context` tokens; `DoesNotFit` if there is no memory for it."""

    @abstractmethod
    def prefill(self, state: State, ids: Sequence[int], want: Want = ARGMAX) -> Output:
        """Run and commit a chain of any length; built for throughput."""

    def prefill_together(self, batch: Sequence[tuple[State, Sequence[int]]], want: Want = ARGMAX) -> list[Output]:
        """The `prefill` of some different states, up to `largest_tree` tokens in all, to the bit. Where the backend
        `prefills_together` it is one call. Of each chain the tokens of the last row are told."""
        return [self.prefill(state, ids, want) for state, ids in batch]

    @abstractmethod
    def forward(self, batch: Batch, want: Want = ARGMAX) -> Output:
        """Run a tree on top of each of some different states, up to `largest_tree` nodes in all, and change nothing
        that is committed. Rows follow the batch: the nodes of its first tree, then those of its second."""

    def verify(
        self, state: State, tree: Tree, sampling: Sampling | None = None, history: Sequence[int] = ()
    ) -> tuple[list[int], list[int]]:
        """Follow the sampler through the tree that was last run on the state, with an output `wanted_for` it.

        Returns the nodes it chose at, a path from the root, and the token it chose at each; all but the last of these
        are the tokens of the path's next nodes. `history` is what `decode` takes. To be called before the backend
        computes anything else: its rows are read. Backends override this to walk where the logits are.
        """
        output = drafted(state, tree).output

        def choose_at(node: int, text: list[int], position: int) -> int:
            return next_token(output, node, sampling, text, position)

        return walk(tree, choose_at, history, state.length)

    def advance(self, batch: Sequence[tuple[State, int]], want: Want = ARGMAX) -> Output:
        """A token more for each of some different states: a `forward` of roots and the commit of each, to the bit.
        Where the backend `advances` they are one call."""
        output = self.forward([(state, Tree.root(token)) for state, token in batch], want)
        for state, _ in batch:
            self.commit(state, [0])
        return output

    def decode_together(
        self, batch: Sequence[tuple[State, int]], count: int, stop: frozenset[int] = frozenset()
    ) -> np.ndarray:
        """`advance`, and again with the argmax of each as its next token, up to `count` times: these, int32 [times,
        states], of which the last are not committed. It ends once one of them is in `stop` or is `NOT_FINITE`."""
        states, rows = [state for state, _ in batch], [np.array([token for _, token in batch], np.int32)]
        while len(rows) <= count and (len(rows) == 1 or not stop.union({NOT_FINITE}).intersection(rows[-1].tolist())):
            output = self.advance(list(zip(states, rows[-1].tolist(), strict=True)))
            assert output.argmax is not None
            rows.append(output.argmax)
        return np.stack(rows[1:])

    def verifies_unseen(self, sampling: Sampling | None, stop: frozenset[int]) -> bool:
        """Whether this sampler can go through a `GrowingTree` of a draft on this device, and end at these tokens."""
        return False

    @abstractmethod
    def commit(self, state: State, path: Sequence[int]) -> None:
        """Make `path` (node indices of the state's last tree, root first) part of the committed past."""

    @abstractmethod
    def snapshot(self, state: State) -> Snapshot:
        """A copy of the committed past: of keys and values only the rows in use."""

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

    def block_draft(
        self, config: DFlashConfig, tensors: Mapping[str, Tensor], capacity: Sequence[int]
    ) -> BlockDraft | None:
        """A DFlash network beside the model, on its device; None where numpy has to do.

        `tensors` are the weights by z-lab's names, `capacity` says of how many tokens each layer keeps keys and values.
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
        listener: Listener | None = None,
    ) -> Generator[int]:
        """Plain decoding: commit `token`, yield the next, and so on, up to `count` tokens or one in `stop`.

        Each token is the sampler's choice (`choose`) from the logits at its place; without `sampling` that is the
        argmax. `history` is the text up to and with `token`, for the penalties: all of it, or as much as they look
        back on. The last token yielded is not committed. A `listener` hears of the rows of committed tokens, some at a
        time, and of the last ones when the generator ends or is closed. Backends override this to stay on the device
        between tokens; closing the generator brings one that ran ahead back to the last token it yielded.
        """
        want, text = wanted_for(sampling), list(history)
        if listener is not None:
            want = replace(want, features=listener.features)
        for _ in range(count):
            output = self.forward([(state, Tree.chain([token]))], want)
            self.commit(state, [0])
            if listener is not None:
                listener.heard(state.length - 1, output)
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

    @property
    def runs_mtp(self) -> bool:
        """Whether it can run an MTP block of this model's shape."""
        return type(self).mtp is not Backend.mtp

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
        if (token := int(output.argmax[row])) == NOT_FINITE:
            raise not_finite(position)
        return token
    assert output.logits is not None
    return choose(output.logits.row(row), sampling, history, position)


def walk(
    tree: Tree, choose_at: Callable[[int, list[int], int], int], history: Sequence[int], length: int
) -> tuple[list[int], list[int]]:
    """A path from the root of a tree on top of `length` tokens, and what `choose_at(node, text so far, position)` takes
    at its nodes."""
    text, path = list(history), [0]
    while True:
        text.append(choose_at(path[-1], text, length + len(path)))
        child = tree.child.get((path[-1], text[-1]))
        if child is None:
            return path, text[len(history) :]
        path.append(child)


def keep_drafted(batch: Batch, output: Output) -> Output:
    """Give each state its tree and its rows of the output; returns the output."""
    first = 0
    for state, tree in batch:
        own = output[first : first + len(tree)] if len(batch) > 1 else output
        state.drafted = Drafted(tree, own)
        first += len(tree)
    return output


def drafted(state: State, tree: Tree) -> Drafted:
    """What was drafted on the state, if that is this tree."""
    if state.drafted is None or state.drafted.tree is not tree:
        raise BadRequest("This tree was not the last to be run on this state.", "Call forward first.")
    return state.drafted


def take_drafted(state: State, path: Sequence[int]) -> list[int]:
    """The path, if it can be committed; there is nothing drafted on the state afterwards."""
    nodes = list(path)
    if state.drafted is None:
        raise BadRequest("There is no forward pass to commit.", "Call forward first; each is committed once.")
    tree = state.drafted.tree
    if not nodes or not 0 <= nodes[-1] < len(tree) or nodes != tree.path(nodes[-1]):
        raise BadRequest(f"{nodes} is not a path of the tree from its root.")
    state.drafted = None
    return nodes


def output_from_logits(logits: np.ndarray, want: Want) -> Output:
    """Fill an `Output` from float32 logits [n, vocab] as `want` asks. The meaning of "argmax" and "top" is here."""
    output = Output()
    if want.tokens == "none":
        return output
    output.argmax = logits.argmax(axis=1).astype(np.int32)
    output.argmax[~np.isfinite(logits.max(axis=1))] = NOT_FINITE
    if want.tokens == "top":
        order = np.argsort(-logits, axis=1, kind="stable")[:, : want.top]
        output.top_ids = order.astype(np.int32)
        output.top_logits = np.take_along_axis(logits, order, axis=1)
        peak = logits.max(axis=1, keepdims=True)
        output.logsumexp = (peak + np.log(np.exp(logits - peak).sum(axis=1, keepdims=True)))[:, 0].astype(np.float32)
    elif want.tokens == "logits":
        output.logits = HostRows(logits)
    return output


def join_outputs(parts: Sequence[Output]) -> Output:
    """One output, on the host, from those of consecutive pieces of a sequence."""

    def join(name: str) -> Any:
        found = [value for part in parts if (value := getattr(part, name)) is not None]
        if found and isinstance(found[0], Rows):
            return HostRows(np.concatenate([rows.numpy() for rows in found]))
        return np.concatenate(found) if found else None

    return Output(**{name: join(name) for name in Output.__dataclass_fields__})
