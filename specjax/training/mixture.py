"""Where a step's texts come from: the corpus, the target's own samples, or the drafter's (on-policy).

DistillSpec (arXiv 2310.08461) and GKD (arXiv 2306.13649) train a share λ of the steps on texts that the drafter wrote
itself, where its mistakes are. Whole steps are mixed, not rows: the sampler always runs at one full batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key

from specjax.training.manifest import identify
from specjax.training.objectives import Batch

# A source turns the drafter's current parameters, a key and the corpus batch (for prompts) into a batch.
Source = Callable[[Any, Key[Array, ""], Batch], Batch]


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Replaces the corpus batch by a sampled one in a share of the steps; give it to `fit` as `prepare`.

    The choice depends on the step's key alone, so a resumed run makes the same one.

    Attributes:
        sources: (share of the steps, source) pairs; the steps that are left keep the corpus batch.

    Raises:
        ValueError: shares that are negative or add to more than 1.
    """

    sources: tuple[tuple[float, Source], ...]

    def __post_init__(self):
        shares = [share for share, _ in self.sources]
        if any(not 0 <= share <= 1 for share in shares) or sum(shares) > 1 + 1e-9:
            raise ValueError(f"shares of a mixture must be in [0, 1] and add to at most 1; got {shares}")

    def description(self) -> dict[str, Any]:
        """What tells this mixture from another, for the checkpoints of a run."""
        described = {"type": "Mixture"}
        for number, (share, source) in enumerate(self.sources, start=1):
            described[f"source_{number}"] = {"share": share, "source": identify(source)}
        return described

    def __call__(self, params: Any, key: Key[Array, ""], batch: Batch) -> Batch:
        """The batch of this step."""
        choose, sample = jax.random.split(key)
        u = float(jax.random.uniform(choose))
        for bound, (_, source) in zip(np.cumsum([share for share, _ in self.sources]), self.sources, strict=True):
            if u < bound:
                return source(params, sample, batch)
        return batch
