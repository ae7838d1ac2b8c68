"""Penalties in the loop: the law of every path - chain, trees, target-only, any temperature - is the penalised one."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from specjax.decoding import generate
from specjax.decoding.forward import target_forward
from specjax.decoding.prefill import prefill
from specjax.decoding.round import drafting_context, mask_proposal, target_laws
from specjax.decoding.run import Run, decode
from specjax.keys import Noise, Stream, row_keys
from specjax.models.transformer import apply
from specjax.penalties import Penalties
from specjax.sampling import Sampling
from tests.drafters.families import FAMILIES, make_target
from tests.test_penalties import VALUES, penalised

GREEDY = Sampling.of(0.0)
PROMPTS = [[3, 3, 1], [1, 2, 3, 4, 5, 6, 7], [9, 0, 9, 0], [4]]
LIMITS, SEEDS, STOP_IDS = [14, 12, 16, 13], [40, 41, 42, 43], [2, 9]
WIDTH = 40  # of the padded texts of the references


def sometimes(*names):
    """Cases of the same kind as those that always run."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@functools.cache
def world(vocab_size=11):
    with jax.enable_x64(True):
        return make_target(vocab_size)


def row_values(row):
    return {name: values[row] for name, values in VALUES.items()}


def softmax(logits):
    law = np.exp(logits - logits.max(-1, keepdims=True))
    return law / law.sum(-1, keepdims=True)


_forward = jax.jit(apply, static_argnums=0)


def raw_logits(texts, vocab_size=11):
    """[len(texts), V]: the target's logits behind each text, by plain forwards."""
    padded = np.stack([np.pad(np.array(text, np.int32), (0, WIDTH - len(text))) for text in texts])
    logits = np.asarray(_forward(world(vocab_size).config, world(vocab_size).params, padded)[0])
    return logits[np.arange(len(texts)), [len(text) - 1 for text in texts]]


def run(name=None, rows=range(4), **options):
    pick = lambda values: [values[i] for i in rows]  # noqa: E731
    values = {key: pick(of_rows) for key, of_rows in VALUES.items()}
    defaults = dict(max_new_tokens=pick(LIMITS), seed=pick(SEEDS), stop_ids=STOP_IDS, buffer_length=32,
                    penalties=Penalties.of(**values))  # fmt: skip
    drafting = {}
    if name is not None:
        drafting = dict(zip(("drafter", "drafter_params"), family(name), strict=True))
    return generate(world(), pick(PROMPTS), **defaults | drafting | options)


@functools.cache
def family(name, vocab_size=11):
    with jax.enable_x64(True):
        return FAMILIES[name](world(vocab_size))


def lists(generation):
    return [row.tolist() for row in generation.tokens]


@pytest.mark.parametrize("name", ["eagle_dynamic", *sometimes("independent", "independent_tree", "lookahead")])
def test_laws_at_the_nodes_of_real_rounds(name):
    """Chain, static and dynamic tree, and passengers: p at the root and every valid node, of whole decoding runs."""
    drafter, params = family(name)
    penalties = Penalties.of(**VALUES)
    call = Run.start(world(), PROMPTS, max_new_tokens=LIMITS, stop_ids=STOP_IDS, penalties=penalties, seed=SEEDS,
                     drafter=drafter, drafter_params=params, buffer_length=32)  # fmt: skip

    @jax.jit
    def look(inputs, state):
        noise = Noise(state.row_keys, state.length, call.decoder.verifier.stream)
        context = drafting_context(call.decoder, inputs, state)
        proposal, _, cache = drafter.propose(inputs.drafter_params, state.draft_state, context, noise)
        proposal = mask_proposal(proposal, state, inputs)
        cache = cache.rollback(state.length - 1)
        logits, _, _ = target_forward(world().config, inputs.target_params, state.pending, proposal, cache)
        return proposal, jnp.asarray(proposal.node_ancestors), target_laws(inputs, state, proposal, logits)

    nodes_seen = 0
    while not call.finished:
        proposal, ancestors, p = jax.device_get(look(call.inputs, call.state))
        ancestors = np.broadcast_to(ancestors, (4, *ancestors.shape[1:]))
        tokens, lengths, live = jax.device_get((call.state.tokens, call.state.length, call.state.live))
        places, texts = [], []
        for row in np.flatnonzero(live):
            for node in [0, *(1 + np.flatnonzero(proposal.valid[row]))]:
                path = [proposal.tokens[row, i - 1] for i in np.flatnonzero(ancestors[row, node]) if i]
                places.append((row, node))
                texts.append([*tokens[row, : lengths[row]], *path])
        nodes_seen += sum(node > 0 for _, node in places)
        padded = texts + [[0]] * (4 * p.shape[1] - len(texts))  # one shape
        for (row, node), text, logits in zip(places, texts, raw_logits(padded), strict=False):
            begin = len(PROMPTS[row])
            law = softmax(penalised(logits, text[:begin], text[begin:], STOP_IDS, **row_values(row)))
            np.testing.assert_allclose(p[row, node], law, atol=1e-9)
        call.advance(1)
    assert nodes_seen > 30


@functools.cache
def greedy_texts():
    """A plain Python loop, without a cache."""
    texts = []
    for row, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
        new = []
        while len(new) < limit and not (new and new[-1] in STOP_IDS):
            logits = raw_logits([[*prompt, *new]])[0]
            new.append(int(np.argmax(penalised(logits, prompt, new, STOP_IDS, **row_values(row)))))
        texts.append(new)
    return texts


PATHS = [None, "independent", "independent_tree", *sometimes("eagle_dynamic", "lookahead", "ngram", "early_exit")]


@pytest.mark.parametrize("name", PATHS)
def test_text_at_temperature_zero_is_that_of_a_plain_loop(name):
    result = run(name, sampling=GREEDY, verifier="greedy")
    assert lists(result) == greedy_texts()
    assert name is None or result.counts.accepted.sum() > 0
    for prompt, tokens, logprobs in zip(PROMPTS, result.tokens, result.logprobs, strict=True):
        text = [*prompt, *tokens]  # reported log-probabilities know no penalties
        raw = raw_logits([text[: len(prompt) + i] for i in range(len(tokens))])
        expected = np.asarray(jax.nn.log_softmax(raw))[np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(logprobs, expected, atol=1e-9)
    assert lists(run(name, sampling=GREEDY, verifier="greedy", penalties=None)) != greedy_texts()


@functools.cache
def coupled_texts():
    return lists(run(verifier="coupled"))


def test_target_only_text_at_temperature_one_is_that_of_a_plain_loop():
    keys = row_keys(SEEDS, 4)
    for row, text in enumerate(coupled_texts()):
        for at, token in enumerate(text):
            length = len(PROMPTS[row]) + at
            noise = Noise(keys[row : row + 1], jnp.array([length]), Stream.POSITION).gumbel(jnp.array([0]), 11)[0, 0]
            logits = raw_logits([[*PROMPTS[row], *text[:at]]])[0]
            law = penalised(logits, PROMPTS[row], text[:at], STOP_IDS, **row_values(row))
            assert token == np.argmax(law + np.asarray(noise))


@pytest.mark.parametrize("name", ["independent_tree", *sometimes("independent", "eagle_dynamic", "lookahead", "ngram")])
def test_the_coupled_text_is_the_targets_at_temperature_one(name):
    assert lists(run(name, verifier="coupled")) == coupled_texts()


ROW_CASES = [("independent", "block"), pytest.param("independent_tree", "traversal", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name, rule", ROW_CASES)
def test_a_row_does_not_know_its_neighbours_and_one_trace_serves_all_values(name, rule):
    together = run(name, verifier=rule)
    for row in range(4):
        alone = run(name, [row], verifier=rule)
        assert alone.tokens[0].tolist() == together.tokens[row].tolist()
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[row], atol=1e-9)
    before = prefill._cache_size(), decode._cache_size()
    run(name, [2], verifier=rule, penalties=Penalties.of(1.25, 0.5, 2, 1, [3, 4]))
    run(name, [1], verifier=rule, penalties=Penalties.of(1, [0], 0.0, 0, [[6]]), stop_ids=())
    assert (prefill._cache_size(), decode._cache_size()) == before


def test_without_penalties_nothing_is_carried():
    plain, none_on = (
        Run.start(world(), [[1, 2]], max_new_tokens=4, penalties=given, buffer_length=32)
        for given in (None, Penalties.of())
    )
    assert plain.state.history is plain.inputs.penalties is none_on.state.history is none_on.inputs.penalties is None
    bans = Run.start(world(), [[1, 2]], max_new_tokens=4, penalties=Penalties.of(banned_ids=[1]), buffer_length=32)
    assert bans.state.history is None  # nothing to count


def enumerate_texts(penalties, stop_ids, prompt, tokens, vocab_size, temperature):
    """{text: probability} of the first `tokens` new ones, by the definition; a stop id ends a text."""
    finished, growing = {}, {(): 1.0}
    for _ in range(tokens):
        logits = raw_logits([[*prompt, *text] for text in growing], vocab_size)
        grown = {}
        for (text, probability), row in zip(growing.items(), logits, strict=True):
            law = softmax(penalised(row, prompt, list(text), stop_ids, **penalties) / temperature)
            grown |= {(*text, x): probability * law[x] for x in range(vocab_size) if law[x]}
        finished |= {text: p for text, p in grown.items() if text[-1] in stop_ids}
        growing = {text: p for text, p in grown.items() if text[-1] not in stop_ids}
    return finished | growing


SAMPLES, FALSE_ALARM = 12_000, 1e-4  # per case
LAW_CASES = [("independent", "token"), ("independent", "block"), ("independent_tree", "multi_round"),
             ("independent_tree_iid", "traversal"), ("eagle_dynamic", "traversal"), ("early_exit", "token"),
             (None, "token")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name, rule", LAW_CASES)
def test_the_law_of_the_first_tokens_by_enumeration(name, rule):
    """Chi-square at a fixed seed; and the law without penalties is refused."""
    values = dict(repetition=1.5, presence=0.5, frequency=0.25, min_new_tokens=1, banned_ids=[])
    prompt, stop_ids, tokens, vocab, temperature = [1, 0, 1], [2], 3, 3, 2.0
    drafting = {} if name is None else dict(zip(("drafter", "drafter_params"), family(name, vocab), strict=True))
    result = generate(world(vocab), [prompt] * SAMPLES, max_new_tokens=tokens + 2, stop_ids=stop_ids, verifier=rule,
                      penalties=Penalties.of(**values), sampling=Sampling.of(temperature), seed=2026,
                      buffer_length=16, **drafting)  # fmt: skip
    seen = Counter(tuple(row[:tokens]) for row in lists(result))

    def p_value(values):
        expected = enumerate_texts(values, stop_ids, prompt, tokens, vocab, temperature)
        assert np.isclose(sum(expected.values()), 1) and set(seen) <= set(expected)
        cells = [(seen[text], SAMPLES * p) for text, p in expected.items()]
        rare = [cell for cell in cells if cell[1] < 10]  # counted as one
        cells = [cell for cell in cells if cell[1] >= 10] + ([tuple(np.sum(rare, 0))] if rare else [])
        assert min(expected for _, expected in cells) > 5 and len(cells) > 8
        return chi2.sf(sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1)

    assert p_value(values) > FALSE_ALARM
    assert p_value(values | dict(repetition=1.0)) < FALSE_ALARM
    assert p_value(values | dict(frequency=0.0)) < FALSE_ALARM


CALLS = [
    (dict(penalties=1.2), "penalties must be a Penalties, such as Penalties.of.*; got 1.2"),
    (dict(penalties=Penalties.of([1.5, 1.5, 1.5])), "repetition has 3 values for a batch of 2"),
    (dict(penalties=Penalties.of(banned_ids=[[1]])), "banned_ids has 1 values for a batch of 2"),
    (dict(penalties=Penalties.of(banned_ids=[11])), "banned_ids must be from 0 to 10, the target's vocabulary; got 11"),
    (dict(penalties=Penalties.of(banned_ids=range(11))), "row 0: 11 of 11 tokens are banned, so that none is left"),
    (dict(penalties=Penalties.of(banned_ids=[[], range(11)])), "row 1: 11 of 11 tokens are banned"),
    (dict(penalties=Penalties.of(min_new_tokens=[0, 1], banned_ids=range(10)), stop_ids=[10, 3]),
     "row 1: 10 of 11 tokens are banned and, before min_new_tokens, the other 1 as stop ids"),
    (dict(penalties=Penalties.of(min_new_tokens=5)), "row 0: min_new_tokens 5 exceeds max_new_tokens 4"),
]  # fmt: skip


@pytest.mark.parametrize("options, message", CALLS, ids=range(len(CALLS)))
def test_bad_calls(options, message):
    before = prefill._cache_size(), decode._cache_size()
    with pytest.raises(ValueError, match=message) as caught:
        Run.start(world(), [[1], [2]], max_new_tokens=4, **options)
    assert "\n" not in str(caught.value)
    assert (prefill._cache_size(), decode._cache_size()) == before


