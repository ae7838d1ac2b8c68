"""How well drafters predict a target, on the same held-out text for all: no clock, no stopping."""

import functools

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from experiments.families import Family
from experiments.training_stage import Text
from specjax.decoding.run import Run
from specjax.drafters.eagle_pairs import EagleDrafter
from specjax.models import LanguageModel
from specjax.report import metrics
from specjax.report.metrics import CountTable
from specjax.sampling import Sampling
from specjax.training.eagle_objective import overlap_by_depth


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
            **by_depth, **missing, **along_the_text(config, text, target, family, params)}  # fmt: skip


def along_the_text(
    config: ConfigDict, text: Text, target: LanguageModel, family: Family, params
) -> dict[str, float | None]:
    """Σ min(p, q) at each depth where the drafted tokens are the text's own, so that all depths and families are
    measured on the same texts; `overlap_d` is of each family's own drafts that were accepted so far.

    A language model and an exit read the whole text, so for them the depth makes no difference.
    """
    depths = range(1, config.quality.depths + 1)
    if family.objective is None:
        return {f"along_text_{d}": None for d in depths}
    batch = {"tokens": jnp.asarray(text.prompts(config.quality.texts, config.quality.text_length, config.seed + 7))}
    if isinstance(family.chain, EagleDrafter):
        measure = functools.partial(overlap_by_depth, family.chain.model, steps=len(depths))
        values = jax.jit(measure)(params, batch, target.params)
    else:
        values = jax.jit(family.objective.loss)(params, batch, None, target.params)[1]
    values = {name: float(value) for name, value in values.items()}
    return {f"along_text_{d}": values.get(f"overlap_{d}", values.get("overlap")) for d in depths}
