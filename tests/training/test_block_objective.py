"""The block objective against a slow loop, its masks, and what training on it does to decoding."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import generate
from specjax.drafters import BlockDrafter
from specjax.models import LanguageModel, TransformerConfig
from specjax.models.transformer import apply
from specjax.sampling import Sampling
from specjax.training.block_objective import BlockDistillation, choose_anchors
from specjax.training.fit import Schedule, fit
from specjax.training.objectives import NextToken, Objective
from specjax.training.state import OptimizerConfig
from specjax.training.step import gradient

VOCAB, GAMMA, KEY = 7, 3, jax.random.key(0)
TARGET = TransformerConfig(VOCAB, 16, 2, 2, num_kv_heads=1, d_ff=32, context_length=64)
DRAFTER = BlockDrafter(TARGET, 1, (1, 2), GAMMA)
OBJECTIVE = BlockDistillation(DRAFTER, anchors=4, decay=2.0)
compute = jax.jit(jax.value_and_grad(BlockDistillation.loss, argnums=1, has_aux=True), static_argnums=0)


@pytest.fixture(scope="module")
def target():
    return jax.tree.map(lambda x: 3 * x, LanguageModel.init(TARGET, jax.random.key(1)).params)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: 2 * x, DRAFTER.init_params(jax.random.key(2)))


def batch(rows=3, width=9, mask=None):
    data = {"tokens": np.random.default_rng(0).integers(0, VOCAB, (rows, width)).astype(np.int32)}
    return data if mask is None else {**data, "mask": mask}


def ragged():
    mask = np.ones((3, 9), bool)
    mask[0, :4] = mask[1, 6:] = mask[2] = False
    return mask


@jax.jit
def block_laws(params, target, text, anchor):
    features = apply(TARGET, target, text, feature_layers=(1, 2))[2]
    return jax.nn.softmax(DRAFTER.logits(params, target, features, text, anchor)[0, 0])


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("mask", [None, ragged()], ids=["whole", "ragged"])
def test_loss_and_metrics_are_those_of_a_slow_loop(target, params, key, mask):
    """One block at a time, from a text cut off at its anchor, as in decoding."""
    data = batch(mask=mask)
    (loss, metrics), _ = compute(OBJECTIVE, params, data, key, target)
    tokens, counts = data["tokens"], np.ones((3, 9), bool) if mask is None else mask
    anchors = np.asarray(choose_anchors(jnp.asarray(counts[:, 1:]), 4, key))
    p = np.asarray(jax.nn.softmax(apply(TARGET, target, jnp.asarray(tokens))[0]), np.float64)
    weights = np.exp(-np.arange(GAMMA) / 2.0)
    weights /= weights.mean()
    total, distances, overlaps = 0.0, [], [[] for _ in range(GAMMA)]
    for row in range(3):
        for anchor in anchors[row]:
            text = np.where(np.arange(9) <= anchor, tokens[row], 0)
            q = np.asarray(block_laws(params, target, jnp.asarray(text)[None], jnp.array([[anchor]])), np.float64)
            for d in range(1, GAMMA + 1):  # the token at anchor + d, whose law is behind the one before it
                if anchor + d < 9 and counts[row, anchor + d]:
                    law = p[row, anchor + d - 1]
                    distances.append((law * np.log(law / q[d - 1])).sum())
                    overlaps[d - 1].append(np.minimum(law, q[d - 1]).sum())
                    total += weights[d - 1] * distances[-1]
    assert metrics["positions"] == len(distances) > 12
    assert loss == pytest.approx(total / len(distances), rel=1e-4)
    assert metrics["divergence"] == pytest.approx(np.mean(distances), rel=1e-4)
    for d in range(GAMMA):
        assert metrics[f"overlap_{d + 1}"] == pytest.approx(np.mean(overlaps[d]), rel=1e-4)
    assert np.ptp([np.mean(o) for o in overlaps]) > 1e-3  # depths can be told apart


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "total_variation"])
def test_an_empty_mask_gives_no_nan_and_no_gradient(name, target, params):
    objective = BlockDistillation(DRAFTER, name, anchors=3)
    (loss, metrics), grads = compute(objective, params, batch(mask=np.zeros((3, 9), bool)), KEY, target)
    assert loss == 0 and metrics["positions"] == 0 and not any(np.any(g) for g in jax.tree.leaves(grads))
    (loss, metrics), grads = compute(objective, params, batch(mask=ragged()), KEY, target)
    chex.assert_tree_all_finite((loss, metrics, grads))
    assert all(np.any(g) for g in jax.tree.leaves(grads))  # the mask's embedding included


def test_texts_shorter_than_a_block_and_more_anchors_than_positions(target, params):
    (loss, metrics), grads = compute(OBJECTIVE, params, batch(width=3), KEY, target)
    assert metrics["positions"] == 3 * (2 + 1) and metrics["overlap_3"] == 0 and loss > 0
    chex.assert_tree_all_finite(grads)


def test_the_target_gets_no_gradient(target, params):
    grads = jax.jit(jax.grad(lambda frozen: OBJECTIVE.loss(params, batch(), KEY, frozen)[0]))(target)
    assert not any(np.any(g) for g in jax.tree.leaves(grads))


def test_microbatches_give_the_gradient_of_the_whole_batch(target, params):
    """Whatever each of them counts; without a key, so that the anchors are the same ones."""
    mask = np.concatenate([ragged(), np.ones((1, 9), bool)])
    data = {"tokens": batch(4)["tokens"], "mask": mask}

    class Evenly(BlockDistillation):
        def loss(self, params, batch, key, frozen=None):
            return super().loss(params, batch, None, frozen)

    objective = Evenly(DRAFTER, anchors=4)
    accumulated = jax.jit(gradient, static_argnums=(0, 5))
    whole, parts = (accumulated(objective, params, data, KEY, target, n) for n in (1, 2))
    assert whole[0][0] == pytest.approx(float(parts[0][0]), rel=1e-5)
    chex.assert_trees_all_close(whole[1], parts[1], rtol=1e-3, atol=1e-6)


def test_anchors_differ_lie_where_the_mask_is_and_follow_the_key():
    mask = jnp.asarray(ragged()[:, 1:])
    for key in (None, KEY):
        anchors = np.asarray(choose_anchors(mask, 4, key))
        assert anchors.shape == (3, 4) and all(len(set(row)) == 4 for row in anchors)
        assert all(mask[row, a] for row in (0, 1) for a in anchors[row])  # row 2 has none that count
    assert choose_anchors(jnp.ones((1, 9), bool), 3).tolist() == [[0, 3, 6]]
    drawn = [choose_anchors(jnp.ones((1, 9), bool), 3, jax.random.key(i)).tolist()[0] for i in range(200)]
    share = np.bincount(np.ravel(drawn), minlength=9) / 200
    assert abs(share - 1 / 3).max() < 0.15  # 4.5 standard deviations: 6e-5 for nine positions


def walks(count, rows=16, width=25):
    """Texts that walk round the vocabulary upwards or downwards: a token alone does not tell what follows it."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        start, direction = rng.integers(0, VOCAB, (rows, 1)), rng.choice([-1, 1], (rows, 1))
        yield {"tokens": ((start + direction * np.arange(width)) % VOCAB).astype(np.int32)}


@pytest.mark.slow
def test_what_it_learns_is_what_decoding_needs():
    """Were training and decoding one position apart in features, tokens or laws, next to nothing would be accepted."""
    settings = lambda steps: OptimizerConfig(learning_rate=0.01, total_steps=steps, weight_decay=0.0)  # noqa: E731
    start = LanguageModel.init(TARGET, jax.random.key(3))
    target = fit(NextToken(TARGET), start.params, list(walks(120)), settings(120), Schedule(120, log_every=20))
    assert target.history[-1]["cross_entropy"] < 0.25  # the first step of a walk cannot be known
    objective = BlockDistillation(DRAFTER, anchors=8)
    drafter = fit(
        objective,
        DRAFTER.init_params(jax.random.key(4)),
        list(walks(250)),
        settings(250),
        Schedule(250, log_every=25),
        frozen=target.state.params,
    )
    _, metrics = objective.loss(drafter.state.params, next(walks(1)), None, target.state.params)
    assert min(metrics[f"overlap_{d}"] for d in range(1, GAMMA + 1)) > 0.8
    result = generate(
        start.replace(params=target.state.params),
        [[2, 3, 4], [6, 5, 4, 3], [0, 6]],
        max_new_tokens=28,
        drafter=DRAFTER,
        drafter_params=drafter.state.params,
        sampling=Sampling.of(0.0),
    )
    assert result.tokens[0][:4].tolist() == [5, 6, 0, 1] and result.tokens[1][:4].tolist() == [2, 1, 0, 6]
    assert result.lengths.sum() / result.counts.rounds.sum() > 0.9 * (GAMMA + 1)


def test_objective_is_static_and_counts_its_flops():
    assert isinstance(OBJECTIVE, Objective) and hash(OBJECTIVE) == hash(
        BlockDistillation(DRAFTER, anchors=4, decay=2.0)
    )
    more = [BlockDistillation(DRAFTER, anchors=n).flops(64) for n in (4, 8, 16)]
    assert more[2] - more[1] == pytest.approx(2 * (more[1] - more[0]), abs=2)
    assert BlockDistillation(DRAFTER, anchors=99).flops(64) == BlockDistillation(DRAFTER, anchors=64).flops(64)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"divergence": "kl"}, "divergence must be one of.*'kl'"),
        ({"anchors": 0}, "anchors must be at least 1; got 0"),
        ({"decay": 0.0}, "decay must be a positive number of tokens; got 0.0"),
        ({"decay": float("nan")}, "decay must be a positive number of tokens; got nan"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        BlockDistillation(DRAFTER, **options)
