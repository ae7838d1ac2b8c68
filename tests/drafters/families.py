"""A tiny instance of every drafter family, for the tests that every family must pass (test_every_family.py).

An entry is a function of the target that returns (drafter, parameters). It is called with targets of different
vocabularies (11 and 3 tokens), both of 3 layers, so it takes sizes from `target.config` and keeps to float64 as the
target does. Parameters need no training; but they should be spread out enough that drafts are sometimes right and
sometimes wrong (`spread` adds noise to what `init_params` gives). A family with several forms (chain, static tree,
dynamic tree) has one entry for each.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters import Adaptive, BlockDrafter, EarlyExit, Hydra, Independent, IndependentTree, Medusa
from specjax.drafters.corpus_index import build_corpus_index
from specjax.drafters.eagle import Eagle
from specjax.drafters.eagle_dynamic import EagleDynamic
from specjax.drafters.eagle_suffix import EagleSuffix
from specjax.drafters.eagle_tree import EagleTree
from specjax.drafters.lookahead import Lookahead
from specjax.drafters.ngram import NGram
from specjax.drafters.suffix import Suffix
from specjax.models import LanguageModel, TransformerConfig
from specjax.models.eagle_layer import EagleConfig
from specjax.protocol import FIXED, IID, WITHOUT_REPLACEMENT, Drafter
from specjax.topology import Topology

DOUBLE = dict(dtype="float64", param_dtype="float64")
BUSHY = Topology.from_paths([(0, 0, 0), (0, 1), (1, 0)])  # 6 nodes: unequal branching, three deep


def target_config(vocab_size: int) -> TransformerConfig:
    return TransformerConfig(vocab_size, 8, 3, 2, num_kv_heads=1, d_ff=16, context_length=64, tied_head=False, **DOUBLE)


def make_target(vocab_size: int) -> LanguageModel:
    """A target whose text depends on all that came before, and repeats itself seldom."""
    return spread(LanguageModel.init(target_config(vocab_size), jax.random.key(1)), 0.5, 3)


def spread(tree: Any, by: float, seed: int) -> Any:
    """The same tree with normal noise of that size on every floating array."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    floating = lambda x: np.issubdtype(np.dtype(x.dtype), np.floating)  # noqa: E731
    moved = [
        x + by * jax.random.normal(k, x.shape, x.dtype) if floating(x) else x for x, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, moved)


def independent_model(target: LanguageModel) -> LanguageModel:
    """A drafter that shares the target's ends: it often agrees without being equal."""
    config = TransformerConfig(target.config.vocab_size, 8, 1, 2, d_ff=16, context_length=64, tied_head=False, **DOUBLE)
    model = LanguageModel.init(config, jax.random.key(2))
    model.params.update({name: x for name, x in target.params.items() if not name.startswith("layer_")})
    return spread(model, 0.25, 4)


def independent(target: LanguageModel) -> tuple[Drafter, Any]:
    model = independent_model(target)
    return Independent(model.config, 3), model.params


def adaptive(target: LanguageModel) -> tuple[Drafter, Any]:
    model = independent_model(target)
    return Adaptive(model.config, 5, stop_below=0.5), model.params


def independent_tree(target: LanguageModel) -> tuple[Drafter, Any]:
    model = independent_model(target)
    return IndependentTree(model.config, BUSHY, WITHOUT_REPLACEMENT), model.params


def independent_tree_iid(target: LanguageModel) -> tuple[Drafter, Any]:
    model = independent_model(target)
    return IndependentTree(model.config, Topology.from_shape((2, 2)), IID), model.params


def block(target: LanguageModel) -> tuple[Drafter, Any]:
    drafter = BlockDrafter(target.config, 2, (0, 1, 3), 3)
    return drafter, spread(drafter.init_params(jax.random.key(5)), 0.4, 6)


def early_exit(target: LanguageModel) -> tuple[Drafter, Any]:
    return EarlyExit(target.config, 2, 3), None


def early_exit_trained(target: LanguageModel) -> tuple[Drafter, Any]:
    drafter = EarlyExit(target.config, 1, 3, trained_exit=True)
    return drafter, spread(drafter.init_params(jax.random.key(7)), 0.3, 8)


def lookahead(target: LanguageModel) -> tuple[Drafter, Any]:
    return Lookahead(window=3, ngram=4, candidates=2, pool_size=16), None


def ngram(target: LanguageModel) -> tuple[Drafter, Any]:
    return NGram(3, max_match=2), None


def ngram_wrapped(target: LanguageModel) -> tuple[Drafter, Any]:
    return NGram(3, max_match=2, choice="most_frequent", wrap=True), None


def suffix(target: LanguageModel) -> tuple[Drafter, Any]:
    return Suffix(4), None


def suffix_with_corpus(target: LanguageModel) -> tuple[Drafter, Any]:
    vocab = target.config.vocab_size
    corpus = build_corpus_index(np.random.default_rng(9).integers(0, vocab, 200))
    return Suffix(3, max_match=5, min_score=0.3, vocab_size=vocab), corpus


def medusa(target: LanguageModel) -> tuple[Drafter, Any]:
    drafter = Medusa(target.config, Topology.chain(3))
    return drafter, spread(drafter.init_params(jax.random.key(5)), 0.4, 6)


def medusa_tree(target: LanguageModel) -> tuple[Drafter, Any]:
    drafter = Medusa(target.config, BUSHY, FIXED, hidden_width=8, own_output=True)
    return drafter, spread(drafter.init_params(jax.random.key(5), target.params), 0.4, 6)


def hydra(target: LanguageModel) -> tuple[Drafter, Any]:
    drafter = Hydra(target.config, Topology.chain(3), num_blocks=2)
    return drafter, spread(drafter.init_params(jax.random.key(5)), 0.4, 6)


def hydra_tree(target: LanguageModel) -> tuple[Drafter, Any]:
    drafter = Hydra(target.config, BUSHY, WITHOUT_REPLACEMENT)
    return drafter, spread(drafter.init_params(jax.random.key(5)), 0.4, 6)


def eagle(target: LanguageModel) -> tuple[Drafter, Any]:
    drafter = Eagle(EagleConfig(target.config), 3)
    return drafter, spread(drafter.init_params(jax.random.key(5)), 0.2, 6)


def eagle_reduced(target: LanguageModel) -> tuple[Drafter, Any]:
    """EAGLE-3 with two thirds of the vocabulary."""
    vocab = target.config.vocab_size
    drafter = Eagle(EagleConfig(target.config, version=3, draft_vocab=2 * vocab // 3), 3)
    ids = jnp.arange(vocab - 1, vocab - 1 - 2 * vocab // 3, -1)
    return drafter, spread(drafter.init_params(jax.random.key(5), target.params, ids), 0.2, 6)


def eagle_tree(target: LanguageModel) -> tuple[Drafter, Any]:
    drafter = EagleTree(EagleConfig(target.config, version=3), BUSHY, WITHOUT_REPLACEMENT)
    return drafter, spread(drafter.init_params(jax.random.key(5), target.params), 0.2, 6)


def eagle_dynamic(target: LanguageModel) -> tuple[Drafter, Any]:
    drafter = EagleDynamic(EagleConfig(target.config), num_nodes=6, max_depth=3, beam=2)
    return drafter, spread(drafter.init_params(jax.random.key(5)), 0.2, 6)


def eagle_suffix(target: LanguageModel) -> tuple[Drafter, Any]:
    """Copies in about every second round."""
    drafter = EagleSuffix(EagleConfig(target.config), Suffix(4, max_match=3), steps=2, min_expected=1.0)
    return drafter, spread(drafter.init_params(jax.random.key(5)), 0.2, 6)


FAMILIES: dict[str, Callable[[LanguageModel], tuple[Drafter, Any]]] = {
    "adaptive": adaptive,
    "block": block,
    "eagle": eagle,
    "eagle_dynamic": eagle_dynamic,
    "eagle_reduced": eagle_reduced,
    "eagle_suffix": eagle_suffix,
    "eagle_tree": eagle_tree,
    "early_exit": early_exit,
    "early_exit_trained": early_exit_trained,
    "hydra": hydra,
    "hydra_tree": hydra_tree,
    "independent": independent,
    "independent_tree": independent_tree,
    "independent_tree_iid": independent_tree_iid,
    "lookahead": lookahead,
    "medusa": medusa,
    "medusa_tree": medusa_tree,
    "ngram": ngram,
    "ngram_wrapped": ngram_wrapped,
    "suffix": suffix,
    "suffix_with_corpus": suffix_with_corpus,
}
