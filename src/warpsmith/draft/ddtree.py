"""The best tree of n nodes from what a draft believes about each of the next positions.

A draft that guesses positions independently of each other gives marginals: for depth d the likeliest tokens and their
log-probabilities. The expected number of accepted tokens of a tree is the sum over its nodes of the probability of
the path to them, so the best tree of n nodes holds the n likeliest paths; as a path is never likelier than its
beginning, they form a tree by themselves. A heap finds them best first (DDTree, arXiv 2604.12989).
"""

from __future__ import annotations

import heapq
from math import inf

import numpy as np

from warpsmith.backend.base import Output
from warpsmith.draft.base import Prices, ScoredTree


def marginals(output: Output) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and log-probabilities [depth, k] from rows of `Want(tokens="top")`."""
    assert output.top_ids is not None
    assert output.top_logits is not None
    assert output.logsumexp is not None
    return output.top_ids, output.top_logits.astype(np.float64) - output.logsumexp[:, None]


def worth_verifying(prices: Prices | None, nodes: int, score: float) -> bool:
    """Whether a path of this log-probability could pay as one more node beside `nodes`, if drafts are too modest."""
    return prices is None or score >= prices.least[nodes - 1]


def best_tree(
    root: int,
    ids: np.ndarray,
    log_probs: np.ndarray,
    nodes: int,
    *,
    chain_seed: bool = False,
    prices: Prices | None = None,
) -> ScoredTree:
    """The `nodes` likeliest paths below `root`, likeliest first; of equals the one of smaller ranks.

    `ids` and `log_probs` are [depth, k]: for each depth the k likeliest tokens, best first, with their log-probability
    over the whole vocabulary. With `chain_seed` the likeliest token of every depth goes in first, which helps where
    a draft's probabilities are flatter than they should be. With `prices` it ends where further nodes cannot pay.
    """
    depth, width = ids.shape
    choices = ids.tolist()
    beliefs = np.where(np.isnan(log_probs), -inf, log_probs).astype(np.float64).tolist()
    tokens, parents, scores = [root], [-1], [0.0]
    ranks: list[tuple[int, ...]] = [()]  # of the tokens along the path to each node
    heap: list[tuple[float, tuple[int, ...], int]] = []  # (-score, ranks, parent)

    def consider(parent: int, rank: int) -> None:
        level = len(ranks[parent])
        if level < depth and rank < width and beliefs[level][rank] > -inf:
            heapq.heappush(heap, (-(scores[parent] + beliefs[level][rank]), (*ranks[parent], rank), parent))

    def take(parent: int, rank: int) -> int:
        level = len(ranks[parent])
        tokens.append(choices[level][rank])
        parents.append(parent)
        scores.append(scores[parent] + beliefs[level][rank])
        ranks.append((*ranks[parent], rank))
        consider(parent, rank + 1)
        return len(tokens) - 1

    if chain_seed:
        tip = 0
        while tip < min(depth, nodes) and beliefs[tip][0] > -inf:
            tip = take(tip, 0)
    else:
        consider(0, 0)
    while heap and len(tokens) <= nodes:
        score, path, parent = heapq.heappop(heap)
        if not worth_verifying(prices, len(tokens), -score):
            break
        consider(take(parent, path[-1]), 0)
    return ScoredTree(np.array(tokens), np.array(parents), np.array(scores))


def best_chain(root: int, ids: np.ndarray, log_probs: np.ndarray, nodes: int) -> ScoredTree:
    """The likeliest token of each depth, one below the other: what a tree is compared with."""
    return best_tree(root, ids[:, :1], log_probs[:, :1], nodes)
