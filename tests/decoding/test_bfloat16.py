"""The whole loop in bfloat16, target and drafter, parameters and activations: what must hold in spite of the rounding.

The measure is one plain forward of the finished text, without a cache: in bfloat16 and in float32, with the same
parameters. Its error bounds what the loop may do differently, whose forwards have other widths. Every family decodes
a batch whose rows are at temperature 0 and 1 by turns, and (marked slow) one that is at 0 throughout: another program.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Origin
from specjax.decoding.run import Run
from specjax.models import LanguageModel, TransformerConfig
from specjax.models.eagle_layer import EagleConfig
from specjax.models.transformer import apply
from specjax.sampling import Sampling
from specjax.verifiers import MultiRoundRule
from tests.decoding.tiny_pair import PROMPTS
from tests.drafters.families import FAMILIES, make_target

VOCAB, NEW_TOKENS, WIDTH = 11, 20, 32
CHOSEN = ["independent", "eagle_tree", "early_exit", "medusa", "block"]
TEMPERATURES = {"mixed": [0.0, 1.0] * 4, "greedy": [0.0] * 8}
# The loop's forwards round differently from the measured one.
SLACK = 1.5


def runs(names):
    """Every name with both batches."""
    slow = [pytest.param(name, "greedy", marks=pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name, batch", [(name, "mixed") for name in names] + slow)


def narrow(value):
    """The same description, or tree of arrays, in bfloat16."""
    if isinstance(value, TransformerConfig):
        return dataclasses.replace(value, dtype="bfloat16", param_dtype="bfloat16")
    if isinstance(value, dict):
        floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if floating(x) else x, value)
    models = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    models = {name: narrow(x) for name, x in models.items() if isinstance(x, TransformerConfig | EagleConfig)}
    return dataclasses.replace(value, **models)


@functools.cache
def target():
    with jax.enable_x64(True):
        model = make_target(VOCAB)
        return LanguageModel(narrow(model.config), narrow(model.params))


@functools.cache
def family(name):
    with jax.enable_x64(True):
        drafter, params = FAMILIES[name](make_target(VOCAB))
        return narrow(drafter), None if params is None else narrow(params)


@dataclasses.dataclass(frozen=True)
class WatchedRule(MultiRoundRule):
    """The rule for chains and trees, which hands out the laws that it judges by."""

    seen: tuple = dataclasses.field(default=(), compare=False)

    def verify(self, p, proposal, noise):
        jax.debug.callback(self.record, p, proposal.law, proposal.valid)
        return MultiRoundRule.verify(self, p, proposal, noise)

    def record(self, p, q, valid):
        self.seen[0].append((np.asarray(p), None if q is None else np.asarray(q), np.asarray(valid)))


@functools.cache
def decoded(name, batch):
    """(generation, the laws of every round, the last state) of a ragged batch; name None is target-only decoding."""
    drafter, params = (None, None) if name is None else family(name)
    rule = WatchedRule(seen=([],))
    run = Run.start(
        target(), PROMPTS, max_new_tokens=NEW_TOKENS, buffer_length=WIDTH, drafter=drafter, drafter_params=params,
        verifier=rule, sampling=Sampling.of(np.array(TEMPERATURES[batch])), seed=5,
    )  # fmt: skip
    run.advance()
    jax.effects_barrier()
    return run.result(), rule.seen[0], run.state


_forward = jax.jit(apply, static_argnums=0)


def forwards(tokens):
    """[T, V] logits of a text by one plain forward, in bfloat16 and in float32."""
    padded = jnp.zeros((1, WIDTH), jnp.int32).at[0, : len(tokens)].set(jnp.asarray(tokens))
    model, wide = target(), dataclasses.replace(target().config, dtype="float32", param_dtype="float32")
    params = jax.tree.map(lambda x: x.astype(jnp.float32), model.params)
    pair = _forward(model.config, model.params, padded)[0], _forward(wide, params, padded)[0]
    assert [x.dtype for x in pair] == [jnp.bfloat16, jnp.float32]
    return tuple(np.asarray(x[0, : len(tokens)], np.float64) for x in pair)


def along(generation):
    """Per row: its tokens, what each had for logits in bfloat16, and in float32."""
    for prompt, tokens in zip(PROMPTS, generation.tokens, strict=True):
        yield tokens, *(logits[len(prompt) - 1 : -1] for logits in forwards([*prompt, *tokens]))


@functools.cache
def rounding():
    """(largest error of the gap between the best two logits, of a log-probability) of one bfloat16 forward."""
    gap, logprob = 0.0, 0.0
    for tokens, rough, exact in along(decoded(None, "mixed")[0]):
        best = np.argsort(exact)[:, -2:]
        gaps = [np.diff(np.take_along_axis(logits, best, 1)) for logits in (rough, exact)]
        gap = max(gap, np.abs(gaps[0] - gaps[1]).max())
        logprob = max(logprob, np.abs(logprobs(rough, tokens) - logprobs(exact, tokens)).max())
    return gap, logprob


def logprobs(logits, tokens):
    return np.asarray(jax.nn.log_softmax(logits))[np.arange(len(tokens)), tokens]


def greedy_rows(batch):
    return [row for row, temperature in enumerate(TEMPERATURES[batch]) if temperature == 0]


def test_the_measure_tells_tokens_apart():
    gaps = np.concatenate([np.diff(np.sort(exact)[:, -2:])[:, 0] for _, _, exact in along(decoded(None, "mixed")[0])])
    assert np.mean(gaps > SLACK * rounding()[0]) > 0.6 and rounding()[0] > 0


@runs([None, *CHOSEN])
def test_the_greedy_text_is_the_best_of_the_target_up_to_near_ties(name, batch):
    found = list(along(decoded(name, batch)[0]))
    for row in greedy_rows(batch):
        tokens, _, exact = found[row]
        assert len(tokens) == NEW_TOKENS
        assert (exact.max(-1) - exact[np.arange(len(tokens)), tokens] <= SLACK * rounding()[0]).all()


@runs(CHOSEN)
def test_the_greedy_text_is_the_target_only_text_up_to_near_ties(name, batch):
    alone, result, rows = decoded(None, batch)[0], decoded(name, batch)[0], greedy_rows(batch)
    equal = 0
    for row in rows:
        ours, theirs = result.tokens[row], alone.tokens[row]
        differing = np.flatnonzero(ours != theirs)
        equal += differing[0] if len(differing) else len(ours)
        if len(differing):  # behind it the texts are two, each with its own best
            at = differing[0]
            exact = forwards([*PROMPTS[row], *ours[:at]])[1][-1]
            assert {ours[at], theirs[at]} == set(np.argsort(exact)[-2:]), (row, at)
            assert abs(exact[ours[at]] - exact[theirs[at]]) <= SLACK * rounding()[0], (row, at)
    assert equal > len(rows) * NEW_TOKENS / 2


@runs(CHOSEN)
def test_laws_are_laws_in_float32(name, batch):
    _, laws, _ = decoded(name, batch)
    assert len(laws) > 3 and any(valid.any() for _, _, valid in laws)
    for p, q, valid in laws:
        assert p.dtype == np.float32 and (p >= 0).all()
        np.testing.assert_allclose(p.sum(-1), 1, atol=2e-6)
        if q is not None:
            assert q.dtype == np.float32 and (q[valid] >= 0).all()
            np.testing.assert_allclose(q[valid].sum(-1), 1, atol=2e-6)
        assert q is not None or batch == "greedy"


@runs(CHOSEN)
def test_nothing_is_nan_and_the_caches_are_bfloat16(name, batch):
    result, _, state = decoded(name, batch)
    floats = [x for x in jax.tree.leaves(state.replace(row_keys=None)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in floats)
    assert {x.dtype for x in jax.tree.leaves(state.target_cache) if x.ndim == 4} == {jnp.dtype("bfloat16")}
    kinds = {x.dtype for x in jax.tree.leaves(state.draft_state) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert kinds <= {jnp.dtype("bfloat16")}
    assert any((row == Origin.DRAFTED).any() for row in result.origins)


@runs([None, *CHOSEN])
def test_reported_log_probabilities_are_near_those_of_float32(name, batch):
    result = decoded(name, batch)[0]
    for (tokens, _, exact), reported in zip(along(result), result.logprobs, strict=True):
        assert np.isfinite(reported).all()
        np.testing.assert_allclose(reported, logprobs(exact, tokens), atol=SLACK * rounding()[1])
    spread = np.concatenate(result.logprobs)
    assert np.ptp(spread) > 2 * SLACK * rounding()[1]
