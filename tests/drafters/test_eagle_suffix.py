"""In every round a row has the suffix's copy or the network's chain; the committed text alone makes the choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import generate
from specjax.decoding.round import drafting_context
from specjax.decoding.run import Run
from specjax.drafters import Eagle, EagleDynamic, EagleSuffix, Suffix
from specjax.keys import Noise, Stream
from specjax.protocol import Context
from specjax.sampling import Sampling
from tests.decoding.tiny_pair import LIMITS, PROMPTS
from tests.drafters.tiny_eagle import EAGLE1, REDUCED, TARGET, logits_along, params_of, rounds, softmax, target

GREEDY, WARM = Sampling.of(0.0), Sampling.of(2.0)
SUFFIX = Suffix(5, max_match=3, min_match=1)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("sampling, verifier", [(GREEDY, "greedy"), (WARM, "token")])
@pytest.mark.parametrize("model", [EAGLE1, pytest.param(REDUCED, marks=pytest.mark.slow)])
def test_each_row_copies_or_drafts(model, sampling, verifier):
    """Copies are those of the suffix alone, with a one-hot law; chains are those of a forward over the whole text, also
    after rounds in which other rows, or all of them, copied."""
    drafter = EagleSuffix(model, SUFFIX, steps=2, min_expected=1.5)
    copied = drafted = 0
    for state, _, proposal in rounds(drafter, sampling, verifier, PROMPTS[:3], LIMITS[:3]):
        context = Context(jnp.asarray(state.tokens), jnp.asarray(state.length), sampling)
        tokens, found, scores = SUFFIX.continuation(None, context)
        copies = np.asarray(found[:, 0] & ((scores * found).sum(-1) >= 1.5))
        live = np.asarray(state.finish == 0)
        for row, length in enumerate(state.length):
            if not live[row]:
                continue  # for finished rows alone the network is not run
            if copies[row]:
                assert proposal.valid[row].tolist() == found[row].tolist()
                real = np.asarray(found[row])
                assert proposal.tokens[row][real].tolist() == tokens[row][real].tolist()
                if proposal.law is not None:
                    np.testing.assert_array_equal(proposal.law[row].argmax(-1)[real], tokens[row][real])
                    np.testing.assert_array_equal(proposal.law[row].sum(-1), 1)
                copied += 1
                continue
            assert proposal.valid[row].tolist() == [length > 1] * 2 + [False] * 3
            if length > 1:
                logits = logits_along(model, [*state.tokens[row, :length], *proposal.tokens[row, :2]], length)[:-1]
                if proposal.law is None:
                    assert logits.argmax(-1).tolist() == proposal.tokens[row, :2].tolist()
                else:
                    np.testing.assert_allclose(proposal.law[row, :2], softmax(logits, 2.0), atol=1e-10)
                drafted += 1
    assert copied > 2 and drafted > 4


def test_a_row_that_never_copies_has_the_chain_and_its_text():
    """More is asked for than a copy can give: the same draws, acceptances and text as the chain's."""
    chain, joined = Eagle(EAGLE1, 3), EagleSuffix(EAGLE1, SUFFIX, steps=3, min_expected=6)
    one, other = (
        generate(target(), PROMPTS, drafter=drafter, drafter_params=params_of(EAGLE1), verifier="token", sampling=WARM,
                 max_new_tokens=LIMITS, buffer_length=32, seed=3)
        for drafter in (chain, joined)
    )  # fmt: skip
    for a, b in zip(one.tokens, other.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one.counts.accepted, other.counts.accepted)


def test_where_all_rows_copy_the_network_drafts_nothing():
    """A network whose head is NaN would be seen in the proposal of any round that ran it."""
    drafter = EagleSuffix(EAGLE1, SUFFIX, steps=2, min_expected=0.0)
    run = Run.start(target(), [[1, 2, 3, 1, 2, 3, 1, 2]], max_new_tokens=6, drafter=drafter,
                    drafter_params=params_of(EAGLE1), sampling=WARM, verifier="token", buffer_length=32)  # fmt: skip
    lowered = jax.jit(lambda inputs, state: _propose(run, drafter, inputs, state)).lower(run.inputs, run.state)
    text = lowered.as_text()
    assert "stablehlo.while" in text and "stablehlo.case" not in text and "stablehlo.if" not in text
    spoilt = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), run.inputs.target_params)
    proposal = _propose(run, drafter, run.inputs.replace(target_params=spoilt), run.state)
    assert proposal.tokens[0, :3].tolist() == [3, 1, 2]
    assert not np.isnan(proposal.law).any()
    different = run.state.replace(tokens=run.state.tokens.at[0, :8].set(jnp.arange(1, 9, dtype=jnp.int32)))
    assert np.isnan(_propose(run, drafter, run.inputs.replace(target_params=spoilt), different).law).any()


def _propose(run, drafter, inputs, state):
    noise = Noise(state.row_keys, state.length, Stream.ROUND)
    return drafter.propose(
        inputs.drafter_params, state.draft_state, drafting_context(run.decoder, inputs, state), noise
    )[0]


def test_a_chain_becomes_a_joined_drafter():
    joined = EagleSuffix.of(Eagle(EAGLE1, 4))
    assert (joined.steps, joined.draft_length, joined.widths) == (4, 10, (5, 11))
    longer = EagleSuffix.of(Eagle(EAGLE1, 12), min_expected=3.0)
    assert (longer.steps, longer.draft_length, longer.widths, longer.min_expected) == (12, 12, (13,), 3.0)
    with pytest.raises(ValueError, match="EAGLE chain; got EagleDynamic"):
        EagleSuffix.of(EagleDynamic(EAGLE1, num_nodes=4, max_depth=2, beam=2))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(steps=6), "at most the suffix's draft length 5; got 6"),
        (dict(steps=0), "draft_length must be"),
        (dict(min_expected=-1.0), "min_expected must be at least 0; got -1.0"),
        (dict(min_expected=float("nan")), "min_expected must be at least 0"),
        (dict(suffix=Suffix(5, vocab_size=TARGET.vocab_size)), "takes no corpus"),
    ],
)
def test_bad_values(options, message):
    with pytest.raises(ValueError, match=message):
        EagleSuffix(**dict(model=EAGLE1, suffix=SUFFIX, steps=2) | options)
