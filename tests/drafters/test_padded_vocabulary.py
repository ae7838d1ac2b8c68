"""One tokenizer, two sizes of padding: a drafter whose table has more or fewer rows than the target's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import generate
from specjax.drafters import Adaptive, Independent, IndependentTree
from specjax.models import LanguageModel, TransformerConfig
from specjax.sampling import Sampling
from specjax.topology import Topology
from tests.drafters.families import make_target, spread

V = 11  # of the target
DOUBLE = dict(dtype="float64", param_dtype="float64")
FORMS = {
    "chain": lambda model, **own: Independent(model, 3, **own),
    "tree": lambda model, **own: IndependentTree(model, Topology.from_shape((2, 2)), **own),
    "adaptive": lambda model, **own: Adaptive(model, 4, stop_below=0.2, **own),
}


CASES = [
    ("chain", dict(temperature=0)),
    ("chain", dict(temperature=[0, 1.3, 0.5])),
    ("tree", dict(top_p=0.9)),
    ("adaptive", dict(temperature=0)),
    ("adaptive", dict(temperature=[0, 1.3, 0.5])),
]


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def target(float64):
    return make_target(V)


def drafter_of(vocab_size):
    config = TransformerConfig(
        vocab_size, 8, 1, 2, d_ff=16, context_length=64, tied_head=False, head_bias=True, **DOUBLE
    )
    return spread(LanguageModel.init(config, jax.random.key(4)), 0.5, 5)


def resized(model: LanguageModel, size: int) -> LanguageModel:
    """The same model with a table of the target's size, made by hand: missing tokens look like the last, and have a
    logit of -inf; tokens too many are cut off."""
    own = model.config.vocab_size
    table, head = model.params["embedding"]["embedding"], model.params["head"]
    more, kept = max(size - own, 0), min(size, own)
    params = model.params | {
        "embedding": {"embedding": jnp.concatenate([table[:kept], jnp.repeat(table[own - 1 :], more, 0)])},
        "head": {
            "kernel": jnp.pad(head["kernel"][:, :kept], ((0, 0), (0, more))),
            "bias": jnp.pad(head["bias"][:kept], (0, more), constant_values=-jnp.inf),
        },
    }
    return LanguageModel(dataclasses.replace(model.config, vocab_size=size), params)


def run(target, drafter, params, sampling, prompts):
    options = dict(max_new_tokens=24, sampling=sampling, seed=3)
    return generate(target, prompts, drafter=drafter, drafter_params=params, verifier="traversal", **options)


@pytest.mark.parametrize("own", [8, 15])
@pytest.mark.parametrize(("form", "sampling"), CASES)
def test_drafts_are_those_of_a_model_padded_to_the_targets_size(target, form, own, sampling):
    small, make = drafter_of(own), FORMS[form]
    wide = resized(small, V)
    prompts = [[1, 10, 9], [3], [8, 10, 2, 0, 10]]  # ids that a vocabulary of 8 has not, too
    sampling = Sampling.of(**sampling)
    ours = run(target, make(small.config, target_vocab_size=V), small.params, sampling, prompts)
    theirs = run(target, make(wide.config), wide.params, sampling, prompts)
    for name in ("drafted", "accepted", "rounds"):
        np.testing.assert_array_equal(getattr(ours.counts, name), getattr(theirs.counts, name))
    assert [row.tolist() for row in ours.tokens] == [row.tolist() for row in theirs.tokens]
    assert ours.counts.accepted.sum() > 0
    assert max(max(row) for row in ours.tokens) > 7  # the target goes on saying what the smaller one cannot draft


@pytest.mark.parametrize("own", [8, 15])
def test_greedy_text_is_target_only_text(target, own):
    small, prompts = drafter_of(own), [[1, 10, 9], [3]]
    drafter = Independent(small.config, 3, target_vocab_size=V)
    drafted = run(target, drafter, small.params, Sampling.of(0), prompts)
    plain = generate(target, prompts, max_new_tokens=24, sampling=Sampling.of(0), seed=3)
    assert [row.tolist() for row in drafted.tokens] == [row.tolist() for row in plain.tokens]


def test_without_its_target_the_size_is_refused_and_the_remedy_named(target):
    small = drafter_of(8)
    with pytest.raises(ValueError, match=r"has 8 tokens and the target's 11.*takes target_vocab_size=11"):
        run(target, Independent(small.config, 3), small.params, Sampling.of(0), [[1]])
    with pytest.raises(ValueError, match="target_vocab_size must be at least 1; got 0"):
        Independent(small.config, 3, target_vocab_size=0)
