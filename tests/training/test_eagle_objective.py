"""The objectives against plain loops over chains, and a language in which a wrong shift cannot be hidden."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import generate
from specjax.drafters.eagle import Eagle
from specjax.models import LanguageModel, TransformerConfig
from specjax.models.eagle_layer import EagleConfig, split_params
from specjax.models.transformer import apply
from specjax.sampling import Sampling
from specjax.training.eagle_objective import Eagle1Distillation, Eagle3Distillation, overlap_by_depth
from specjax.training.fit import Schedule, fit
from specjax.training.objectives import Objective
from specjax.training.state import OptimizerConfig
from tests.drafters.families import spread

DOUBLE = dict(dtype="float64", param_dtype="float64")
TARGET = TransformerConfig(7, 8, 3, 2, d_ff=16, context_length=16, tied_head=True, **DOUBLE)
EAGLE1 = EagleConfig(TARGET)
EAGLE3 = EagleConfig(TARGET, version=3)
REDUCED = EagleConfig(TARGET, version=3, draft_vocab=4)
KEPT = [5, 0, 6, 2]
KEY = jax.random.key(0)
FIRST = Eagle1Distillation(EAGLE1, feature_noise=0.0)
THIRD = Eagle3Distillation(EAGLE3, steps=3)
CUT = Eagle3Distillation(REDUCED, steps=2)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def target():
    with jax.enable_x64(True):
        return spread(LanguageModel.init(TARGET, jax.random.key(1)).params, 0.4, 2)


@functools.cache
def drafter_params(model):
    """(trained, fixed), made once for each drafter."""
    ids = jnp.array(KEPT) if model.draft_vocab else None
    return split_params(spread(model.init_params(jax.random.key(3), None, ids), 0.2, 4))


def case(objective, target):
    """(trained parameters, frozen) of an objective's drafter."""
    trained, fixed = drafter_params(objective.drafter)
    return trained, {**target, **fixed}


def batch(rows=3, width=8, seed=0):
    return {"tokens": np.random.default_rng(seed).integers(0, 7, (rows, width)).astype(np.int32)}


def log_softmax(x):
    return x - np.logaddexp.reduce(x, -1, keepdims=True)


def by_hand(objective, trained, frozen, tokens, steps):
    """{(row, start): [(smooth L1, KL, overlap) of each step]}, one chain and one whole forward at a time.

    The target sees no more than the text up to the position whose law it gives; a chain lists its pairs one by one.
    """
    model = objective.drafter
    target = {name: x for name, x in frozen.items() if name != "draft_to_target"}
    ids = KEPT if model.draft_vocab else list(range(TARGET.vocab_size))
    rows, width = tokens.shape

    @jax.jit
    def forward(text):
        logits, _, raw = apply(TARGET, target, text, feature_layers=model.feature_layers)
        return logits, model.start(trained, target, raw)

    @jax.jit
    def outputs(features, followers):
        out, _ = model.run(trained, target, features, followers, model.init_cache(rows, width))
        return out, model.draft_logits(trained, target, out)

    logits, start = {}, {}
    for i in range(width):
        seen = np.where(np.arange(width) <= i, tokens, 0)
        logits[i], start[i] = (np.asarray(x)[:, i] for x in forward(seen))
    found, nothing = {}, np.zeros((rows, TARGET.d_model))
    for i in range(width - 1 - steps):
        features = [start[j] for j in range(i + 1)]
        for step in range(1, steps + 1):
            last = len(features) - 1
            followers = np.zeros_like(tokens)
            followers[:, : last + 1] = tokens[:, 1 : last + 2]  # feature of j beside token j + 1
            padded = np.stack(features + [nothing] * (width - last - 1), 1)
            out, raw_q = (np.asarray(x)[:, last] for x in outputs(padded, followers))
            log_q, whole = log_softmax(raw_q), log_softmax(logits[i + step])[:, ids]
            log_p, gap = log_softmax(whole), np.abs(out - start[i + step])
            features.append(out)
            smooth = np.where(gap < 1, gap**2 / 2, gap - 0.5).mean(-1)
            kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
            overlap = np.minimum(np.exp(whole), np.exp(log_q)).sum(-1)
            for row in range(rows):
                found.setdefault((row, i), []).append((smooth[row], kl[row], overlap[row]))
    return found


@pytest.mark.parametrize("objective, steps", [(FIRST, 1), (THIRD, 3), (CUT, 2)])
def test_losses_and_metrics_are_those_of_chains_by_hand(objective, steps, target):
    """A mask sits on the token that is predicted: here on some tokens of row 0, on none of row 1, on all of row 2."""
    trained, frozen = case(objective, target)
    data = batch()
    mask = np.zeros(data["tokens"].shape, bool)
    mask[0, [0, 3, 4, 5]], mask[2] = True, True
    chains = by_hand(objective, trained, frozen, data["tokens"], steps)
    counted = {(row, i): x for (row, i), x in chains.items() if mask[row, i + 2 : i + 2 + steps].all()}
    assert 0 < len([1 for row, _ in counted if row == 0]) < 4 and len(counted) < len(chains)
    compute = jax.jit(objective.loss)
    for given, wanted in ((np.ones_like(mask), chains), (mask, counted)):
        masked = {**data, "mask": given}
        loss, metrics = compute(trained, masked, KEY, frozen)
        smooth, kl, overlap = np.mean(list(wanted.values()), 0).T
        assert metrics["positions"] == len(wanted)
        np.testing.assert_allclose([metrics[f"overlap_{s}"] for s in range(1, steps + 1)], overlap, atol=1e-9)
        if objective is FIRST:
            np.testing.assert_allclose([metrics["regression"], metrics["divergence"]], [smooth[0], kl[0]], atol=1e-9)
            np.testing.assert_allclose(loss, smooth[0] + 0.1 * kl[0], atol=1e-9)
        else:
            weights = 0.8 ** np.arange(steps)
            np.testing.assert_allclose(loss, (weights * kl).sum() / weights.sum(), atol=1e-9)


@pytest.mark.parametrize("objective", [FIRST, THIRD, CUT])
def test_gradients_reach_all_of_the_drafter_and_nothing_of_the_target(objective, target):
    trained, frozen = case(objective, target)
    fixed = {name: x for name, x in frozen.items() if name not in target}

    @jax.jit
    def gradients(trained, target):
        loss = lambda trained, target: objective.loss(trained, batch(), KEY, {**target, **fixed})[0]  # noqa: E731
        return jax.grad(loss, (0, 1))(trained, target)

    mine, its = gradients(trained, target)
    assert all(np.any(x) for x in jax.tree.leaves(mine)) and not any(np.any(x) for x in jax.tree.leaves(its))


@pytest.mark.parametrize("objective", [FIRST, THIRD])
def test_padding_and_empty_masks_count_nothing(objective, target):
    trained, frozen = case(objective, target)
    compute = jax.jit(jax.value_and_grad(objective.loss, has_aux=True))
    data, mask = batch(), np.ones((3, 8), bool)
    mask[1, 6:] = False
    (loss, _), gradient = compute(trained, {**data, "mask": mask}, KEY, frozen)
    other = {"tokens": np.where(mask, data["tokens"], 3).astype(np.int32), "mask": mask}
    (same, _), same_gradient = compute(trained, other, KEY, frozen)
    assert loss == pytest.approx(float(same), abs=1e-12)
    chex.assert_trees_all_close(gradient, same_gradient, atol=1e-12)
    (loss, metrics), gradient = compute(trained, {**data, "mask": np.zeros((3, 8), bool)}, KEY, frozen)
    assert loss == 0 and metrics["positions"] == 0
    assert not any(np.any(x) or np.any(np.isnan(x)) for x in jax.tree.leaves(gradient))


def test_feature_noise_depends_on_the_key(target):
    trained, frozen = case(FIRST, target)
    noisy = dataclasses.replace(FIRST, feature_noise=0.1)
    compute = jax.jit(noisy.loss)
    values = [float(compute(trained, batch(), jax.random.key(i), frozen)[0]) for i in (0, 0, 1)]
    still = float(jax.jit(FIRST.loss)(trained, batch(), KEY, frozen)[0])
    assert values[0] == values[1] != values[2] and values[0] != still


# A language in which the next token is one of two that only the last token tells: a drafter that is given the wrong
# token beside a feature, or is judged by the wrong law, cannot agree with it. The target is that language exactly.
SIZE = 8
LANGUAGE = TransformerConfig(SIZE, SIZE, 1, 2, d_ff=8, context_length=64, tied_head=False)
OPTIONS = np.array([[1, 2], [3, 4], [5, 6], [7, 0], [1, 5], [2, 7], [3, 0], [4, 6]])


def language():
    params = jax.tree.map(jnp.zeros_like, LanguageModel.init(LANGUAGE, KEY).params)
    head = np.zeros((SIZE, SIZE), np.float32)
    for t in range(SIZE):
        head[t, OPTIONS[t]] = 4.0  # the norm makes the one-hot embedding sqrt(8) long
    params["embedding"]["embedding"] = jnp.eye(SIZE)
    params["final_norm"] = jax.tree.map(jnp.ones_like, params["final_norm"])
    params["head"]["kernel"] = jnp.asarray(head)
    return LanguageModel(LANGUAGE, params)


def sentences(rows, width, seed):
    rng = np.random.default_rng(seed)
    text = [rng.integers(0, SIZE, rows)]
    for _ in range(width - 1):
        text.append(OPTIONS[text[-1], rng.integers(0, 2, rows)])
    return {"tokens": np.stack(text, 1).astype(np.int32)}


@pytest.mark.parametrize("version", [1, 3])
def test_what_training_calls_right_is_accepted_in_decoding(version):
    """A token rule accepts as often as the laws overlap; 0.85 at every depth is out of reach with any wrong shift."""
    with jax.enable_x64(False):
        speaker, model = language(), EagleConfig(LANGUAGE, version)
        objective = Eagle1Distillation(model, law_weight=1.0) if version == 1 else Eagle3Distillation(model)
        data = [sentences(16, 28, seed) for seed in range(200)]
        optimizer = OptimizerConfig(learning_rate=0.02, total_steps=200, weight_decay=0.0)
        params = model.init_params(jax.random.key(4), speaker.params)
        trained = fit(objective, params, data, optimizer, Schedule(200, log_every=100), frozen=speaker.params)
        params = trained.state.params
        held_out = jax.jit(overlap_by_depth, static_argnums=(0, 4))(model, params, sentences(32, 28, 999),
                                                                    speaker.params, 3)  # fmt: skip
        prompts = sentences(8, 6, 1000)["tokens"]
        result = generate(speaker, prompts, max_new_tokens=24, drafter=Eagle(model, 3), drafter_params=params,
                          verifier="token", sampling=Sampling.of(1.0))  # fmt: skip
    rates = result.counts.acceptances.sum(0) / result.counts.attempts.sum(0)
    assert min(rates) > 0.85, rates
    for depth, rate in enumerate(rates, start=1):
        assert held_out[f"overlap_{depth}"] == pytest.approx(rate, abs=0.1)


def test_the_language_punishes_a_wrong_shift():
    """The most that a drafter could reach without the token behind its feature: each of the two continuations has one
    of two, so at best it overlaps by about one half."""
    reach = []
    for t in range(SIZE):
        laws = np.zeros((2, SIZE))
        for branch, token in enumerate(OPTIONS[t]):
            laws[branch, OPTIONS[token]] = 0.5
        reach.append(np.minimum(laws, laws.mean(0)).sum(-1).mean())
    assert np.mean(reach) < 0.6


def test_objectives_are_static_and_count_their_flops():
    assert hash(FIRST) == hash(dataclasses.replace(FIRST)) and isinstance(FIRST, Objective)
    assert isinstance(THIRD, Objective)
    one, two, three = (Eagle3Distillation(EAGLE3, steps=steps).flops(16) for steps in (1, 2, 3))
    assert three - two == two - one > 0
    assert FIRST.flops(16) > 3 * 2 * 2 * 8 * 8


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Eagle1Distillation(EAGLE3), "trains version 1 of EAGLE; the drafter is version 3"),
        (lambda: Eagle3Distillation(EAGLE1), "trains version 3 of EAGLE; the drafter is version 1"),
        (lambda: Eagle1Distillation(EAGLE1, "kl"), "divergence must be one of.*'kl'"),
        (lambda: Eagle1Distillation(EAGLE1, law_weight=-1.0), "law_weight must be a finite number >= 0; got -1.0"),
        (lambda: Eagle3Distillation(EAGLE3, steps=0), "steps must be at least 1; got 0"),
        (lambda: Eagle3Distillation(EAGLE3, decay=0.0), "decay must be in"),
    ],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_batches_are_named(target):
    trained, frozen = case(THIRD, target)
    with pytest.raises(ValueError, match=r"rows, at least 5\] for 3 steps; got shape \(3, 4\)"):
        THIRD.loss(trained, batch(width=4), KEY, frozen)
    with pytest.raises(ValueError, match="mask must have the shape"):
        THIRD.loss(trained, {**batch(), "mask": np.ones((3, 7), bool)}, KEY, frozen)
    with pytest.raises(ValueError, match="a reduced vocabulary needs its ids"):
        CUT.loss(case(CUT, target)[0], batch(), KEY, target)
