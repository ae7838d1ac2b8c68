"""What every drafter family owes, in one ragged batch in float64 and over every rule that takes it."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from specjax.decoding import Origin, generate
from specjax.decoding.checks import check_pair
from specjax.decoding.prefill import prefill
from specjax.decoding.run import Run, decode
from specjax.drafters import DRAFTERS
from specjax.models.transformer import apply
from specjax.protocol import Drafter
from specjax.sampling import Sampling
from specjax.verifiers import VERIFIERS
from specjax.verifiers.enumeration import texts
from tests.decoding.tiny_pair import LIMITS, PROMPTS
from tests.drafters.families import FAMILIES, make_target

ROWS = 5
BUFFER = 64  # the context of the tiny targets
SEEDS = list(range(40, 40 + ROWS))
GREEDY, SAMPLED = Sampling.of(0.0), Sampling.of(1.0)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@functools.cache
def world(vocab_size):
    with jax.enable_x64(True):
        return make_target(vocab_size)


@functools.cache
def family(name, vocab_size=11):
    with jax.enable_x64(True):
        return FAMILIES[name](world(vocab_size))


@functools.cache
def lossless_rules(name, sampling_kind):
    """Names of the lossless rules that take this family, as the loop's own check decides."""
    drafter, params = family(name)
    sampling = {"greedy": GREEDY, "sampled": SAMPLED}[sampling_kind]
    taken = []
    for rule, make in VERIFIERS.items():
        try:
            with jax.enable_x64(True):
                check_pair(world(11), drafter, params, make(), sampling, sampling)
        except ValueError as error:
            assert "takes" in str(error) or "at temperature 0 only" in str(error), error
            continue
        if make().lossless:
            taken.append(rule)
    return taken


@functools.cache
def target_only(greedy, limits, seeds=tuple(SEEDS)):
    sampling = GREEDY if greedy else SAMPLED
    return generate(world(11), PROMPTS[:ROWS], max_new_tokens=list(limits), buffer_length=BUFFER, sampling=sampling,
                    verifier="coupled", seed=list(seeds))  # fmt: skip


def run(name, verifier, sampling, rows=range(ROWS), **options):
    drafter, params = family(name)
    pick = lambda values: [values[i] for i in rows]  # noqa: E731
    options = {"max_new_tokens": pick(LIMITS), "seed": pick(SEEDS), "buffer_length": BUFFER} | options
    return generate(world(11), pick(PROMPTS), drafter=drafter, drafter_params=params, verifier=verifier,
                    sampling=sampling, **options)  # fmt: skip


def lists(generation):
    return [row.tolist() for row in generation.tokens]


def check_books(result, limits):
    counts = result.counts
    for i, limit in enumerate(limits):
        origins = result.origins[i]
        assert 1 <= len(origins) == counts.emitted[i] <= limit
        assert (origins == Origin.DRAFTED).sum() == counts.accepted[i] == counts.acceptances[i].sum()
        assert (counts.acceptances[i] <= counts.attempts[i]).all() and (np.diff(counts.attempts[i]) <= 0).all()
        assert counts.accepted[i] <= counts.drafted[i]
        assert (counts.overlap_sum[i] >= 0).all() and (counts.overlap_sum[i] <= counts.attempts[i] + 1e-4).all()


def test_every_family_is_here():
    made = {type(family(name)[0]) for name in FAMILIES}
    assert {make for name, make in DRAFTERS.items() if name != "empty"} <= made


@pytest.mark.parametrize("name", FAMILIES)
def test_it_satisfies_the_protocol(name):
    drafter, params = family(name)
    assert isinstance(drafter, Drafter) and hash(drafter) == hash(dataclasses.replace(drafter))
    assert drafter.topology.max_depth == drafter.draft_length
    assert drafter.widths[-1] == drafter.topology.num_nodes + 1 and list(drafter.widths) == sorted(drafter.widths)
    drafter.check_params(params)
    if params is None:
        params = {"something": jnp.zeros(3)}
        with pytest.raises(ValueError):
            drafter.check_params(params)
    else:
        with pytest.raises(ValueError):
            drafter.check_params(None)
        leaves, tree = jax.tree.flatten(params)
        with pytest.raises(ValueError):
            drafter.check_params(jax.tree.unflatten(tree, [jnp.zeros((*x.shape, 2), x.dtype) for x in leaves]))


@pytest.mark.parametrize("name", FAMILIES)
def test_text_at_temperature_zero_is_the_targets(name):
    """Prompts of one token and more, limits of one token and more, a text that fills the context."""
    limits = [*LIMITS[: ROWS - 1], BUFFER - len(PROMPTS[ROWS - 1])]
    result = run(name, "greedy", GREEDY, max_new_tokens=limits)
    plain = target_only(True, tuple(limits))
    assert lists(result) == lists(plain)
    check_books(result, limits)
    assert result.counts.drafted.sum() > 0
    for ours, theirs in zip(result.logprobs, plain.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stop_token_ends_the_text_wherever_it_falls(name):
    """A token that the text really holds, declared a stop: inside an accepted run, first in it, or after it."""
    whole = lists(target_only(True, tuple(LIMITS[:ROWS])))
    for stop in sorted({row[len(row) // 2] for row in whole}):
        result = run(name, "greedy", GREEDY, stop_ids=[stop])
        assert lists(result) == [row[: row.index(stop) + 1] if stop in row else row for row in whole]
        assert result.finish == ["stop" if stop in row else "length" for row in whole]
        check_books(result, LIMITS[:ROWS])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_coupled_text_is_the_targets_at_temperature_one(name):
    """Whatever was drafted, and whatever the limit: 1, 2, 3 and more tokens."""
    kept = 0
    for first, limits in ((40, LIMITS[:ROWS]), (140, [1] * ROWS), (240, [2] * ROWS), (340, [3, 17, 4, 9, 30])):
        seeds = list(range(first, first + ROWS))
        result = run(name, "coupled", SAMPLED, seed=seeds, max_new_tokens=limits)
        assert lists(result) == lists(target_only(False, tuple(limits), tuple(seeds)))
        kept += result.counts.accepted.sum()
    assert kept > 0  # so texts went through accepted drafts


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_does_not_know_its_neighbours_and_one_trace_serves_all(name):
    """By the rule that looks at most: a row alone, with other prompts before it in the same program, is itself."""
    rule = next(rule for rule in ("traversal", "block") if rule in lossless_rules(name, "sampled"))
    together = run(name, rule, SAMPLED)
    check_books(together, LIMITS[:ROWS])
    before = None
    for row in range(ROWS):
        apart = run(name, rule, SAMPLED, [row])
        assert apart.tokens[0].tolist() == together.tokens[row].tolist()
        assert apart.counts.attempts[0].tolist() == together.counts.attempts[row].tolist()
        np.testing.assert_allclose(apart.logprobs[0], together.logprobs[row], atol=1e-9)
        traces = decode._cache_size(), prefill._cache_size()
        assert before in (None, traces)  # other lengths, limits and keys: the same programs
        before = traces
    run(name, rule, Sampling.of(0.6), [2])
    assert before == (decode._cache_size(), prefill._cache_size())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loop_copies_no_cache_and_calls_no_host(name):
    drafter, params = family(name)
    rule = next(rule for rule in ("traversal", "block") if rule in lossless_rules(name, "sampled"))
    call = Run.start(world(11), [[1, 2, 3]], max_new_tokens=6, drafter=drafter, drafter_params=params, verifier=rule,
                     sampling=SAMPLED, buffer_length=BUFFER)  # fmt: skip
    hlo = decode.lower(call.decoder, call.inputs, call.state, np.int32(9)).compile().as_text()
    assert not re.search(r"callback|infeed|outfeed|host_compute", hlo)
    assert not cache_copies(hlo, {math.prod(x.shape) for x in call.state.target_cache.keys})


def cache_copies(hlo, sizes):
    """Copies and transposes of that many elements outside the entry computation."""
    found, entry = [], False
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            entry = line.startswith("ENTRY")
        match = re.search(r"= \w+\[([\d,]*)\]\S* (copy|transpose)\(", line)
        if match and not entry and math.prod(int(n) for n in match[1].split(",") if n) in sizes:
            found.append(line.strip())
    return found


# The law of the first three emitted tokens, by chi-square at a fixed seed: false alarm rate 1e-4 per pair. Rows at
# temperature 0 in the same batch must be the target's greedy text.
VOCAB, TOKENS, SAMPLES, COLD, FALSE_ALARM = 3, 3, 12_000, 8, 1e-4
LAW_PROMPT = [1, 2, 0, 1]
CHAIN_RULES = ("token", "block", "coupled")  # on a chain the others are one of these: tests/verifiers shows it


@functools.cache
def enumerated_law():
    target, continuations = world(VOCAB), texts(VOCAB, TOKENS)
    whole = np.concatenate([np.tile(LAW_PROMPT, (len(continuations), 1)), continuations], 1)
    logits = jax.jit(apply, static_argnums=0)(target.config, target.params, whole)[0]
    law = np.asarray(jax.nn.softmax(logits[:, len(LAW_PROMPT) - 1 : -1]))
    law = np.take_along_axis(law, continuations[..., None], 2)[..., 0].prod(-1)
    assert np.isclose(law.sum(), 1, atol=1e-9)
    return law


@functools.cache
def greedy_continuation(tokens):
    return generate(world(VOCAB), [LAW_PROMPT], max_new_tokens=tokens, sampling=GREEDY).tokens[0].tolist()


def pairs():
    for name in FAMILIES:
        rules = lossless_rules(name, "sampled")
        chain = family(name)[0].topology.is_chain
        yield from ((name, rule) for rule in rules if not chain or rule in CHAIN_RULES)


@pytest.mark.slow
@pytest.mark.parametrize("name, rule", pairs())
def test_the_law_of_the_first_tokens_is_the_targets(name, rule):
    drafter, params = family(name, VOCAB)
    result = generate(
        world(VOCAB), [LAW_PROMPT] * (SAMPLES + COLD), max_new_tokens=TOKENS + 2, drafter=drafter,
        drafter_params=params, verifier=rule, seed=2026, buffer_length=16,
        sampling=Sampling.of(np.repeat([1.0, 0.0], [SAMPLES, COLD])),
    )  # fmt: skip
    assert lists(result)[SAMPLES:] == [greedy_continuation(TOKENS + 2)] * COLD
    number = np.stack(result.tokens)[:SAMPLES, :TOKENS] @ VOCAB ** np.arange(TOKENS)[::-1]
    observed = np.bincount(number, minlength=VOCAB**TOKENS)
    expected = enumerated_law() * SAMPLES
    assert expected.min() > 5
    assert chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1) > FALSE_ALARM
