"""Which experts a router chooses when its scores are not known: balanced, one expert hot, or drawn at random.

Every rank answers alike, so that what one rank sends is what another expects, and a layer that is run again in
backward chooses again what it chose.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Routing:
    """``hot``: load of the first expert as a multiple of the mean (1: balanced). ``sampled``: each token draws its
    experts at random, all equally likely, with ``seed``."""

    hot: float = 1.0
    sampled: bool = False
    seed: int = 0

    def describe(self) -> str:
        """The assumption in words."""
        if self.sampled:
            return "drawn at random for each token"
        return "all chosen equally often" if self.hot == 1 else f"the first one {self.hot:g} times as often as the mean"

    def choose(self, tokens: int, experts: int, k: int, layer: str = "") -> np.ndarray:
        """Experts of each token, [tokens, k] int64, distinct within a token. Each ``layer`` draws for itself.

        No expert can have more than all tokens: experts / k times the mean.
        """
        if self.sampled and k < experts:
            seed = random.Random(f"{self.seed} {layer} {tokens} {experts} {k}").getrandbits(64)
            scores = np.random.default_rng(seed).random((tokens, experts), dtype=np.float32)
            return np.argpartition(scores, k, axis=1)[:, :k].astype(np.int64)
        if self.hot == 1 or k >= experts:
            return (np.arange(tokens * k) % max(experts, 1)).reshape(tokens, k)
        return _one_hot_expert(tokens, experts, k, min(tokens, round(self.hot * tokens * k / experts)))


def _one_hot_expert(tokens: int, experts: int, k: int, hot: int) -> np.ndarray:
    """``hot`` tokens, spread evenly, choose expert 0 and k - 1 others, the rest k others; the others come in turn."""
    token = np.arange(tokens)
    is_hot = (token * hot) // tokens != ((token + 1) * hot) // tokens
    others = k - is_hot.astype(np.int64)
    before = np.cumsum(others) - others
    place = np.arange(k)[None, :] - is_hot[:, None]
    chosen = (before[:, None] + place) % (experts - 1) + 1
    chosen[is_hot, 0] = 0
    return chosen


BALANCED = Routing()
