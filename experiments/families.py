"""Every drafter family as an experiment needs it: how it is trained, and the forms in which it then drafts.

One function per family. It takes the config's settings for the family and the trained target, and says what is trained
(`objective`, `initial`), what is read beside it (`frozen`), and which drafters the result is decoded with (`forms`): a
chain, one that also copies, a static tree, a tree chosen anew in every round.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from experiments.training_stage import Text
from specjax.drafters import (
    Adaptive,
    BlockDrafter,
    Eagle,
    EagleDynamic,
    EagleSuffix,
    EagleTree,
    EarlyExit,
    Hydra,
    Independent,
    IndependentTree,
    Lookahead,
    Medusa,
    NGram,
    Suffix,
)
from specjax.drafters.corpus_index import build_corpus_index
from specjax.drafters.optimal_tree import optimal_tree
from specjax.drafters.rank_rates import measure_rank_rates
from specjax.models import LanguageModel, TransformerConfig
from specjax.models.eagle_layer import (
    VOCABULARY,
    EagleConfig,
    measure_feature_scale,
    most_frequent,
    split_params,
)
from specjax.protocol import FIXED, WITHOUT_REPLACEMENT, Drafter
from specjax.sampling import Sampling
from specjax.topology import Topology
from specjax.training.block_objective import BlockDistillation
from specjax.training.eagle_objective import Eagle1Distillation, Eagle3Distillation
from specjax.training.early_exit_objective import ExitDistillation
from specjax.training.head_objectives import HeadDistillation
from specjax.training.objectives import Distillation


@dataclasses.dataclass(frozen=True)
class Family:
    """One family, ready to be trained and decoded.

    Attributes:
        chain: the drafter that is measured while training, and the first form.
        trees: further forms by name, from the trained parameters.
        objective: what is trained, or None for a family without parameters.
        initial: initial parameters from a key; for a family without training, its parameters (None, or an index).
        fixed: further parameters of the drafter, which are not trained.
    """

    chain: Drafter
    trees: Callable[[Any], Mapping[str, Drafter]]
    objective: Any
    initial: Callable[[Any], Any]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def whole(self, params):
        """All of the drafter's parameters, from the trained ones."""
        return {**params, **self.fixed} if self.fixed else params

    def forms(self, params) -> dict[str, Drafter]:
        """All drafters by the name of their form."""
        first = "chain" if self.chain.topology.is_chain else "window"
        return {first: self.chain, **self.trees(params)}


def independent(settings: ConfigDict, target: LanguageModel, text: Text) -> Family:
    """A small language model of its own."""
    model = TransformerConfig(vocab_size=target.config.vocab_size, **settings.model.to_dict())
    tree = Topology.from_shape(settings.tree)
    return Family(
        Independent(model, settings.draft_length),
        lambda params: {
            "adaptive chain": Adaptive(model, settings.longest, settings.stop_below),
            "tree": IndependentTree(model, tree, WITHOUT_REPLACEMENT),
        },
        Distillation(model, target.config),
        lambda key: LanguageModel.init(model, key).params,
    )


def early_exit(settings: ConfigDict, target: LanguageModel, text: Text) -> Family:
    """The target's own first layers, with a small trained adapter before the target's norm and head."""
    drafter = EarlyExit(target.config, settings.exit_layer, settings.draft_length, trained_exit=True)
    return Family(
        drafter, lambda params: {}, ExitDistillation(drafter), lambda key: drafter.init_params(key, target.params)
    )


def medusa(settings: ConfigDict, target: LanguageModel, text: Text) -> Family:
    return _heads(Medusa, settings, target, text)


def hydra(settings: ConfigDict, target: LanguageModel, text: Text) -> Family:
    return _heads(Hydra, settings, target, text)


def _heads(make, settings: ConfigDict, target: LanguageModel, text: Text) -> Family:
    """Heads on the last hidden state; the best tree is that for the rates on held-out text at temperature 1."""
    sizes = dict(num_heads=settings.draft_length, num_blocks=settings.num_blocks)
    chain = make(target.config, Topology.chain(settings.draft_length), **sizes)

    def trees(params):
        texts = jnp.asarray(text.prompts(settings.rate_texts, settings.rate_length, settings.seed))
        rates = measure_rank_rates(
            chain, params, target.params, texts, num_ranks=settings.num_ranks, sampling=Sampling.of(1.0)
        )
        best = optimal_tree(rates, settings.num_nodes)
        return {
            "best tree": make(target.config, best, FIXED, **sizes),
            "tree": make(target.config, Topology.from_shape(settings.tree), WITHOUT_REPLACEMENT, **sizes),
        }

    return Family(
        chain, trees, HeadDistillation(chain), lambda key: chain.init_params(key, target.params)
    )


def eagle(settings: ConfigDict, target: LanguageModel, text: Text) -> Family:
    """Version 1; its dynamic tree is EAGLE-2."""
    model = EagleConfig(target.config, 1, d_ff=settings.d_ff, input_norm=settings.get("input_norm", True))
    return _eagle(settings, model, Eagle1Distillation(model, law_weight=settings.law_weight), target)


def eagle3(settings: ConfigDict, target: LanguageModel, text: Text) -> Family:
    """With `draft_vocab` in the settings, over that many tokens, the most frequent ones of the training text."""
    size, layers, width = settings.get("draft_vocab"), tuple(settings.feature_layers), 128
    some = text.train.tokens[: 16 * width]
    some = some[: len(some) // width * width].reshape(-1, width) if len(some) >= width else some[None]
    scale = measure_feature_scale(target.config, target.params, jnp.asarray(some), layers)
    model = EagleConfig(target.config, 3, layers, d_ff=settings.d_ff, draft_vocab=size, feature_scale=scale)
    ids = None if size is None else most_frequent(text.train.tokens, size, target.config.vocab_size)
    return _eagle(settings, model, Eagle3Distillation(model, steps=settings.steps_ahead), target, ids)


def _eagle(settings: ConfigDict, model: EagleConfig, objective, target: LanguageModel, ids=None) -> Family:
    chain = Eagle(model, settings.draft_length)
    others = {
        "copying": EagleSuffix.of(chain),
        "tree": EagleTree(model, Topology.from_shape(settings.tree), WITHOUT_REPLACEMENT),
        "dynamic tree": EagleDynamic(model, settings.num_nodes, settings.max_depth, settings.beam),
    }
    return Family(
        chain,
        lambda params: others,
        objective,
        lambda key: split_params(model.init_params(key, target.params, ids))[0],
        {} if ids is None else {VOCABULARY: ids},
    )


def block(settings: ConfigDict, target: LanguageModel, text: Text) -> Family:
    """One bidirectional pass for the whole draft."""
    drafter = BlockDrafter(
        target.config, settings.num_layers, tuple(settings.feature_layers), settings.draft_length,
        qk_norm=settings.get("qk_norm"),
    )  # fmt: skip
    return Family(drafter, lambda params: {}, BlockDistillation(drafter, anchors=settings.anchors), drafter.init_params)


def ngram(settings: ConfigDict, target: LanguageModel, text: Text) -> Family:
    return _untrained(NGram(settings.draft_length, settings.max_match), None)


def suffix(settings: ConfigDict, target: LanguageModel, text: Text) -> Family:
    """With an index of the first `corpus_tokens` training tokens."""
    index = build_corpus_index(text.train.tokens[: settings.corpus_tokens])
    return _untrained(Suffix(settings.draft_length, settings.max_match, vocab_size=target.config.vocab_size), index)


def lookahead(settings: ConfigDict, target: LanguageModel, text: Text) -> Family:
    return _untrained(Lookahead(settings.window, settings.ngram, settings.candidates), None)


def _untrained(drafter: Drafter, params) -> Family:
    return Family(drafter, lambda params: {}, None, lambda key: params)


FAMILIES = {
    "independent": independent,
    "early_exit": early_exit,
    "medusa": medusa,
    "hydra": hydra,
    "eagle": eagle,
    "eagle3": eagle3,
    "block": block,
    "ngram": ngram,
    "suffix": suffix,
    "lookahead": lookahead,
}
