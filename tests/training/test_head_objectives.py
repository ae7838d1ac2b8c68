import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import Hydra, Medusa
from specjax.models import LanguageModel, TransformerConfig
from specjax.models.transformer import apply
from specjax.topology import Topology
from specjax.training import losses
from specjax.training.fit import Schedule, fit
from specjax.training.head_objectives import HeadDistillation, JointHeads
from specjax.training.objectives import NextToken, Objective
from specjax.training.state import OptimizerConfig
from specjax.training.step import gradient
from tests.drafters import cyclic_target
from tests.drafters.families import spread

TARGET = TransformerConfig(vocab_size=11, d_model=8, num_layers=2, num_heads=2, d_ff=16, context_length=16)
KEY = jax.random.key(0)
FAMILIES = [Medusa, Hydra]


def drafter_of(family, heads=2, target=TARGET):
    return family(target, Topology.chain(heads))


@pytest.fixture(scope="module")
def target():
    return spread(LanguageModel.init(TARGET, jax.random.key(1)).params, 0.3, 2)


def heads_of(drafter):
    return spread(drafter.init_params(jax.random.key(3)), 0.5, 4)


def batch(rows=3, width=9, seed=0):
    return {"tokens": np.random.default_rng(seed).integers(0, 11, (rows, width)).astype(np.int32)}


def slow(objective, params, target, tokens, mask):
    """(mean loss, mean overlap per head, positions), one position, one head and one text at a time."""
    drafter, distances, overlaps = objective.drafter, [], []
    all_logits, _, all_features = apply(TARGET, target, jnp.asarray(tokens), feature_layers=(2,))
    for i, (row, kept) in enumerate(zip(tokens, mask, strict=True)):
        text, logits, features = jnp.asarray(row[None]), all_logits[i : i + 1], all_features[i : i + 1]
        for s in range(len(row)):
            if s + 3 >= len(row) or not (kept[s + 2] and kept[s + 3]):
                continue
            scale = target["final_norm"]["scale"]
            f = features[0, s] / jnp.sqrt(jnp.mean(features[0, s] ** 2) + TARGET.norm_eps) * scale
            position = []
            for k in (1, 2):
                path = text[0, s + 1 : s + 1 + k]
                log_q = losses.log_law(drafter.output(target, drafter.representation(params, target, k, f, path)))
                log_p = losses.log_law(logits[0, s + k])
                if objective.divergence == "cross_entropy":
                    distance = -log_q[row[s + k + 1]]
                else:
                    distance = losses.DIVERGENCES[objective.divergence](log_p, log_q)
                position.append(objective.decay**k * float(distance))
                overlaps.append(float(jnp.sum(jnp.minimum(jnp.exp(log_p), jnp.exp(log_q)))))
            distances.append(sum(position))
    return np.mean(distances), np.mean(np.reshape(overlaps, (-1, 2)), 0), len(distances)


@pytest.mark.parametrize("divergence", ["forward_kl", "cross_entropy"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shifts_norm_and_mask_are_those_of_a_slow_loop(family, divergence, target):
    drafter = drafter_of(family)
    objective, params, data = HeadDistillation(drafter, divergence, decay=0.7), heads_of(drafter), batch()
    mask = np.ones((3, 9), bool)
    mask[0, 5:], mask[1, :4], mask[2, 3] = False, False, False  # padding, a prompt, a hole
    loss, metrics = objective.loss(params, {**data, "mask": mask}, KEY, target)
    expected, overlaps, positions = slow(objective, params, target, data["tokens"], mask)
    assert metrics["positions"] == positions == 2 + 4 + 4
    assert loss == metrics["loss"] == pytest.approx(expected, rel=1e-4)
    assert [metrics["overlap_1"], metrics["overlap_2"]] == pytest.approx(overlaps.tolist(), rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_that_know_the_language_cost_little_and_misplaced_ones_much(family):
    drafter = drafter_of(family, 3, cyclic_target.CONFIG)
    language, params = cyclic_target.target().params, cyclic_target.knowing_heads(drafter)
    data = {"tokens": cyclic_target.texts()}
    loss, metrics = HeadDistillation(drafter, "cross_entropy").loss(params, data, KEY, language)
    assert metrics["overlap_3"] > 0.99 and loss < 0.1
    wrong = jax.tree.map(lambda x: jnp.roll(x, 1, -1), params)
    loss, metrics = HeadDistillation(drafter, "cross_entropy").loss(wrong, data, KEY, language)
    assert metrics["overlap_3"] < 0.1 and loss > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_heads_learn_from_a_frozen_target(family, target):
    drafter = drafter_of(family)
    objective, params = HeadDistillation(drafter), heads_of(drafter)
    to_target = jax.grad(lambda frozen: objective.loss(params, batch(), KEY, frozen)[0])(target)
    assert not any(np.any(g) for g in jax.tree.leaves(to_target))
    to_heads = jax.grad(lambda params: objective.loss(params, batch(), KEY, target)[0])(params)
    assert all(np.any(g) for g in jax.tree.leaves(to_heads))


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_does_not_count(family, target):
    drafter = drafter_of(family)
    objective, params, data = HeadDistillation(drafter), heads_of(drafter), batch()
    mask = np.ones((3, 9), bool)
    mask[:, 6:] = False
    compute = jax.jit(jax.value_and_grad(objective.loss, has_aux=True))
    short = compute(params, {"tokens": data["tokens"][:, :6]}, KEY, target)
    chex.assert_trees_all_close(compute(params, {**data, "mask": mask}, KEY, target), short, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("joint", [False, True])
def test_an_empty_mask_gives_no_nan_and_no_gradient(joint, target):
    drafter = drafter_of(Hydra)
    params, frozen = heads_of(drafter), target
    objective = JointHeads(drafter) if joint else HeadDistillation(drafter)
    params = {"target": target, "heads": params} if joint else params
    data = {**batch(), "mask": np.zeros((3, 9), bool)}
    (loss, metrics), grads = jax.jit(jax.value_and_grad(objective.loss, has_aux=True))(params, data, KEY, frozen)
    assert loss == 0 and metrics["positions"] == 0
    assert not any(np.any(g) for g in jax.tree.leaves(grads))


def test_microbatches_add_up_under_a_ragged_mask(target):
    drafter = drafter_of(Medusa)
    mask = np.ones((4, 9), bool)
    mask[0, 5:], mask[3] = False, False
    data = {**batch(rows=4), "mask": mask}
    heads, compute = heads_of(drafter), jax.jit(gradient, static_argnums=(0, 5))
    for objective, params in [
        (HeadDistillation(drafter), heads),
        (JointHeads(drafter), {"target": target, "heads": heads}),
    ]:
        (whole, _), whole_gradient = compute(objective, params, data, KEY, target, 1)
        (parts, _), parts_gradient = compute(objective, params, data, KEY, target, 2)
        assert parts == pytest.approx(float(whole), rel=1e-5)
        chex.assert_trees_all_close(parts_gradient, whole_gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_joint_training_is_next_token_training_plus_the_heads(family, target):
    drafter = drafter_of(family)
    params = {"target": target, "heads": heads_of(drafter)}
    loss, metrics = JointHeads(drafter, heads_weight=0.3).loss(params, batch(), KEY)
    heads, of_heads = HeadDistillation(drafter).loss(params["heads"], batch(), KEY, target)
    next_token, _ = NextToken(TARGET).loss(target, batch(), KEY)
    labels, counted = 3 * 8, 3 * 6
    assert metrics["positions"] == labels and of_heads["positions"] == counted
    assert loss == pytest.approx(float(next_token + 0.3 * heads * counted / labels), rel=1e-5)
    assert metrics["cross_entropy"] == pytest.approx(float(next_token), rel=1e-5)
    same = jax.grad(lambda heads: HeadDistillation(drafter).loss(heads, batch(), KEY, target)[0])(params["heads"])
    objective = JointHeads(drafter, heads_weight=1.0)
    joint = jax.grad(lambda heads: objective.loss({**params, "heads": heads}, batch(), KEY)[0])
    scaled = jax.tree.map(lambda g: g * counted / labels, same)
    chex.assert_trees_all_close(joint(params["heads"]), scaled, rtol=1e-3, atol=1e-6)


def test_the_heads_pull_at_the_features_but_not_at_the_law_they_are_compared_with():
    """With output matrices of their own, the target's head is reached through the law alone, the blocks by features."""
    config = dataclasses.replace(TARGET, tied_head=False)
    drafter = Medusa(config, Topology.chain(2), own_output=True)
    params = {"target": LanguageModel.init(config, jax.random.key(1)).params, "heads": heads_of(drafter)}

    def to_target(weight):
        objective = JointHeads(drafter, heads_weight=weight)
        return jax.jit(jax.grad(lambda params: objective.loss(params, batch(), KEY)[0]))(params)["target"]

    one, two = to_target(0.5), to_target(1.0)
    chex.assert_trees_all_close(one["head"], two["head"], rtol=1e-6)
    assert np.abs(one["layer_1"]["mlp"]["up"]["kernel"] - two["layer_1"]["mlp"]["up"]["kernel"]).max() > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_untrained_heads_learn_a_cyclic_language(family):
    drafter = drafter_of(family, 2, cyclic_target.CONFIG)
    data = [{"tokens": cyclic_target.texts(rows=7, seed=seed)} for seed in range(60)]
    optimizer = OptimizerConfig(learning_rate=0.1, total_steps=60, weight_decay=0.0)
    result = fit(
        HeadDistillation(drafter),
        drafter.init_params(KEY),
        data,
        optimizer,
        Schedule(60, log_every=1),
        frozen=cyclic_target.target().params,
    )
    first, last = result.history[0], result.history[-1]
    assert first["overlap_1"] < 0.1 and first["overlap_2"] < 0.1  # an untrained head is one token behind, or two
    assert last["overlap_1"] > 0.9 and last["overlap_2"] > 0.9


def test_flops_count_the_matrices():
    shared, own = Medusa(TARGET, Topology.chain(2)), Medusa(TARGET, Topology.chain(2), own_output=True)
    square, output = 8 * 8, 8 * 11
    frozen = HeadDistillation(shared).flops(8) - NextToken(TARGET).flops(8) / 3
    assert frozen == pytest.approx(2 * (6 * square + 4 * output))
    assert HeadDistillation(own).flops(8) - HeadDistillation(shared).flops(8) == 2 * 2 * output
    assert JointHeads(shared).flops(8) - NextToken(TARGET).flops(8) == 2 * 6 * (square + output)
    assert isinstance(HeadDistillation(shared), Objective) and isinstance(JointHeads(shared), Objective)
    assert hash(HeadDistillation(shared)) == hash(HeadDistillation(Medusa(TARGET, Topology.chain(2))))


def test_bad_settings_and_batches_are_named(target):
    drafter = drafter_of(Medusa)
    with pytest.raises(ValueError, match="divergence must be one of .*cross_entropy; got 'kl'"):
        HeadDistillation(drafter, "kl")
    with pytest.raises(ValueError, match="decay must be a positive number; got 0"):
        HeadDistillation(drafter, decay=0)
    with pytest.raises(ValueError, match="heads_weight must be a positive number; got -1"):
        JointHeads(drafter, heads_weight=-1)
    with pytest.raises(ValueError, match=r"rows, at least 4\] for 2 heads; got shape \(3, 3\)"):
        HeadDistillation(drafter).loss(heads_of(drafter), batch(width=3), KEY, target)
    with pytest.raises(ValueError, match="mask must have the shape"):
        HeadDistillation(drafter).loss(heads_of(drafter), {**batch(), "mask": np.ones((3, 8), bool)}, KEY, target)
