"""How well drafters predict a target, on the same held-out text for all: no clock, no stopping."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from experiments.families import Family
from experiments.training_stage import Text
from specjax.decoding.run import Run
from specjax.drafters.eagle_pairs import EagleDrafter
from specjax.models import LanguageModel
from specjax.models.eagle_layer import EagleConfig
from specjax.report import metrics
from specjax.report.metrics import CountTable
from specjax.sampling import Sampling
from specjax.training.eagle_objective import overlap_by_depth
from specjax.training.objectives import Batch
from specjax.training.rollouts import HeldOutLoss


def measure_quality(
    config: ConfigDict, text: Text, target: LanguageModel, name: str, family: Family, params
) -> dict:
    """One record: a round from each of many held-out prefixes of the corpus, the same for all; drafts are sampled."""
    quality = config.quality
    prompts = text.prompts(quality.prefixes, quality.prefix_length, config.seed + 6)
    drafter = family.chain
    run = Run.start(
        target,
        prompts,
        max_new_tokens=drafter.draft_length + 1,
        drafter=drafter,
        drafter_params=params,
        sampling=Sampling.of(1.0),
        seed=config.seed,
    )
    run.advance(1)
    counts = CountTable.of(run.result().counts)
    depths = min(quality.depths, drafter.draft_length)
    attempts, overlap = counts.attempts.sum(0), counts.overlap_sum.sum(0)
    by_depth = {f"overlap_{d + 1}": metrics.ratio(overlap[d], attempts[d]) for d in range(depths)}
    missing = {f"overlap_{d + 1}": None for d in range(depths, quality.depths)}
    share = metrics.ratio(attempts[0], len(prompts))
    return {"drafter": name, "proposed": share, "block_efficiency": metrics.block_efficiency(counts),
            **by_depth, **missing, **along_corpus(config, text, target, family, params)}  # fmt: skip


def along_corpus(
    config: ConfigDict, text: Text, target: LanguageModel, family: Family, params
) -> dict[str, float | None]:
    """`along_texts` of held-out text of the corpus."""
    batch = {"tokens": jnp.asarray(text.prompts(config.quality.texts, config.quality.text_length, config.seed + 7))}
    return along_texts(target.params, family, params, [batch], config.quality.depths)


def along_texts(
    target_params, family: Family, params, batches: Sequence[Batch], depths: int
) -> dict[str, float | None]:
    """Σ min(p, q) at each depth where the drafted tokens are the text's own, so that all depths and families are
    measured on the same texts; `overlap_d` is of each family's own drafts that were accepted so far.

    A language model and an exit read the whole text, so for them the depth makes no difference.
    """
    names = [f"along_text_{d}" for d in range(1, depths + 1)]
    if family.objective is None:
        return dict.fromkeys(names)
    eagle = isinstance(family.chain, EagleDrafter)
    objective = _EagleOverlap(family.chain.model, depths) if eagle else family.objective
    values = dict(HeldOutLoss(objective, batches, target_params)(params))
    found = [values.get(f"held_out/overlap_{d}", values.get("held_out/overlap")) for d in range(1, depths + 1)]
    return dict(zip(names, found, strict=True))


@dataclasses.dataclass(frozen=True)
class _EagleOverlap:
    """As an objective: metrics at all depths, whatever number of steps was trained."""

    drafter: EagleConfig
    steps: int

    def loss(self, params, batch, key, frozen) -> tuple[Any, dict]:
        return jnp.float32(0), overlap_by_depth(self.drafter, params, batch, frozen, self.steps)
