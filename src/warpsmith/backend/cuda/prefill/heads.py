"""Logits of some tokens of a piece: the LM head over either stream of weights."""

from __future__ import annotations

from dataclasses import dataclass

from warpsmith.backend.cuda.memory.driver import Buffer, Pinned
from warpsmith.backend.cuda.prefill.products import Launch, Product, Step
from warpsmith.backend.cuda.prefill.structures import Head, Span
from warpsmith.backend.tree import MAX_NODES


@dataclass
class RowTileHead:
    """A kernel of its own (head.cu)."""

    octets: int  # of tokens that it takes at once
    arguments: Head
    found: Buffer  # the best of the tokens of an octet, ranked
    fetched: Pinned  # the same, on the host
    steps: dict[int, Step]
    sms: int

    def on(self, first: int, count: int) -> Launch:
        self.arguments.first, self.arguments.count = first, count
        return self.steps[1 if octets_of(first, count) == 1 else self.octets].on(self.sms)

    def best(self, token: int) -> int | None:
        """The best token after the only launch of a piece, of an octet; see kernels/sample/ranked.cuh."""
        self.found.fetch(self.fetched, self.found.nbytes)
        self.found.device.synchronize()
        return int(~self.fetched.array[token % 8 * 2])


@dataclass
class SlabHead:
    """A product like the others."""

    product: Product
    span: Span
    octets = MAX_NODES // 8

    def best(self, token: int) -> int | None:
        return None  # nobody looked

    def on(self, first: int, count: int) -> Launch:
        self.span.first, self.span.octets = first // 8, octets_of(first, count)
        self.product.gemm.first_token, self.product.gemm.tokens = first, count
        return self.product.on(self.span, self.span.octets)


def octets_of(first: int, count: int) -> int:
    return (first + count + 7) // 8 - first // 8
