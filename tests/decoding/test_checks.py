"""Every wrong call ends in one clear line, before anything is compiled.

`generate` and `stream` both begin with `Run.start`, which is what is called here: their own signatures would stop a
value of a wrong type before it gets there, but only while the tests run.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import generate, stream
from specjax.decoding.checks import as_limits, as_stop_ids
from specjax.decoding.prefill import prefill
from specjax.decoding.run import Run, decode
from specjax.drafters import Empty, Independent, NGram
from specjax.models import LanguageModel
from specjax.sampling import Sampling
from specjax.topology import Topology
from specjax.verifiers import TokenRule
from tests.decoding.tiny_pair import DRAFTER, TARGET


@dataclasses.dataclass(frozen=True)
class TreeDrafter(Empty):
    topology = Topology((0, 0))
    draft_length = 1


@dataclasses.dataclass(frozen=True)
class WindowDrafter(Empty):
    topology = Topology((0, 0), passengers=1)
    draft_length = 1
    widths = (1, 3)


@dataclasses.dataclass(frozen=True)
class OddSiblings(Empty):
    siblings = "sorted"


def other(**changes):
    config = dataclasses.replace(DRAFTER, **changes)
    return dict(drafter=Independent(config, 3), drafter_params=LanguageModel.init(config, jax.random.key(0)).params)


def without(params, name):
    return {k: v for k, v in params.items() if k != name}


PROMPT_CASES = [
    (dict(prompts=[]), "prompts is empty"),
    (dict(prompts=[[1], []]), "prompt 1 is empty"),
    (dict(prompts=[[1.0, 2.0]]), "prompt 0 must hold integer token ids; got float64"),
    (dict(prompts=[[1], [3, 11]]), "prompt 1 holds token id 11; the target's vocabulary has ids 0 to 10"),
    (dict(prompts=[[-1]]), "prompt 0 holds token id -1"),
    (dict(prompts=[[[1, 2]]]), "prompt 0 must be a sequence of token ids"),
    (dict(prompts=["ab"]), "prompt 0 must"),
]
CASES = PROMPT_CASES + [
    (dict(max_new_tokens=0), "max_new_tokens must be an integer >= 1"),
    (dict(max_new_tokens=-3), "max_new_tokens must be"),
    (dict(max_new_tokens=2.0), "max_new_tokens must be"),
    (dict(max_new_tokens=None), "max_new_tokens must be"),
    (dict(max_new_tokens=[1, 2]), "max_new_tokens must be .*, or 1 of them, one per row"),
    (dict(max_new_tokens=63), "row 0: 2 prompt tokens [+] 63 new tokens exceed the target's context of 64.* to 62"),
    (dict(prompts=[[1] * 65]), "exceed the target's context of 64.* to 0"),
    (dict(buffer_length=5), "buffer_length 5 must be between 6, which this call needs, and 64"),
    (dict(buffer_length=65), "buffer_length 65 must be between"),
    (dict(max_new_tokens=2**31 - 1), "2147483647 new tokens exceed the target's context of 64.* to 62"),
    (dict(max_new_tokens=2**63 - 1), "max_new_tokens must be an integer >= 1 and < 2[*][*]31"),
    (dict(stop_ids=[11]), "stop_ids must be a list of token ids from 0 to 10"),
    (dict(stop_ids=[1.5]), "stop_ids must be a list of token ids"),
    (dict(stop_ids=5), "stop_ids must be a list of token ids"),
    (dict(sampling=0.7), "sampling must be a Sampling, such as Sampling.of.*; got 0.7"),
    (dict(stop_ids=[-1]), "stop_ids must be"),
    (dict(seed=0.5), "seed must be"),
    (dict(seed=[1, 2]), "seed must be"),
    (dict(verifier="tokne"), "unknown verifier 'tokne'; known are token, block, multi_round"),
    (dict(verifier="greedy"), "'greedy' keeps the target's law at temperature 0 only"),
    (dict(verifier="greedy", sampling=Sampling(jnp.zeros(1))), "temperature 0 only"),
    (dict(sampling=Sampling.of([0.5, 1.0])), "temperature has 2 values for a batch of 1"),
    (dict(draft_sampling=Sampling.of(top_k=[5, 6])), "top_k has 2 values for a batch of 1"),
    (dict(drafter_params={"a": 1}), "the empty drafter takes no parameters"),
    (dict(drafter=NGram), "drafter must be an object such as NGram.8.; got <class"),
    (dict(drafter="ngram"), "drafter must be an object such as NGram.8.; got 'ngram'"),
    (dict(verifier=TokenRule), "verifier must be a rule such as TokenRule.., or the name of one; got <class"),
    (dict(verifier=3), "verifier must be a rule such as TokenRule.., or the name of one; got 3"),
    (dict(drafter=TreeDrafter(), verifier="token"), "'token' takes chains only; .* a tree: use 'multi_round'"),
    (dict(drafter=WindowDrafter()), r"passengers run in every round, .* one width, 3; it names .1, 3"),
    (dict(drafter=OddSiblings()), "'token' takes siblings .*; this drafter proposes 'sorted'"),
]


@pytest.fixture(autouse=True)
def nothing_is_compiled(double_precision):
    before = prefill._cache_size(), decode._cache_size()
    yield
    assert (prefill._cache_size(), decode._cache_size()) == before


@pytest.mark.parametrize("change, message", CASES, ids=range(len(CASES)))
def test_arguments(pair, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        Run.start(pair.target, **(dict(prompts=[[1, 2]], max_new_tokens=4) | change))
    assert "\n" not in str(caught.value)


def test_options_that_do_not_exist(pair):
    with pytest.raises(TypeError, match="'max_tokens' is no option of a generation; there are max_new_tokens, drafter"):
        generate(pair.target, [[1]], max_tokens=3)
    with pytest.raises(TypeError, match="max_new_tokens is missing"):
        stream(pair.target, [[1]], seed=3)


@pytest.mark.parametrize("draft_length", [0, -1])
def test_a_draft_has_at_least_one_token(draft_length):
    with pytest.raises(ValueError, match=f"draft_length must be at least 1; got {draft_length}"):
        Independent(DRAFTER, draft_length)


def test_models_that_do_not_belong_together(pair):
    kernel = pair.drafter.params["head"]["kernel"]
    good = dict(drafter=Independent(DRAFTER, 3), drafter_params=pair.drafter.params)
    cases = [
        (other(vocab_size=12), "the drafter's vocabulary has 12 tokens and the target's 11"),
        (other(context_length=5), "row 0: 2 prompt tokens [+] 4 new tokens exceed the drafter's context of 5.* to 3"),
        (good | dict(drafter_params=None), "the drafter's parameters lack"),
        (good | dict(drafter_params=without(pair.drafter.params, "head")), "the drafter's parameters lack head/kernel"),
        (good | dict(drafter_params={**pair.drafter.params, "x": kernel}), "the drafter's parameters hold x"),
        (
            good | dict(drafter_params={**pair.drafter.params, "head": {"kernel": kernel.astype("float32")}}),
            r"the drafter's head/kernel must be float64\[8, 11\]; got float32\[8, 11\]",
        ),
        (good | dict(drafter_params=pair.target.params), "the drafter's .* must be float64"),
        (dict(target=pair.target.replace(params=without(pair.target.params, "embedding"))), "the target's .* lack"),
        (dict(target=LanguageModel(TARGET, None)), "the target's parameters lack"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            Run.start(**(dict(target=pair.target, prompts=[[1, 2]], max_new_tokens=4) | change))


def test_stop_ids_are_padded_to_few_shapes():
    assert [as_stop_ids(range(n), 40).shape for n in (0, 1, 8, 9)] == [(8,), (8,), (8,), (16,)]
    assert as_stop_ids([5], 40).tolist() == [5] + [-1] * 7


def test_limits_are_one_per_row():
    assert as_limits(3, 2).tolist() == [3, 3] and as_limits(np.array([3, 1]), 2).tolist() == [3, 1]
