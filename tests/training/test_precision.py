"""A narrower dtype in the training step: in every model of an objective, and in nothing that is kept."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specjax.drafters import BlockDrafter, EarlyExit, Hydra, Medusa
from specjax.models import LanguageModel, TransformerConfig
from specjax.models.eagle_layer import EagleConfig
from specjax.topology import Topology
from specjax.training.block_objective import BlockDistillation
from specjax.training.eagle_objective import Eagle1Distillation, Eagle3Distillation
from specjax.training.early_exit_objective import ExitDistillation
from specjax.training.head_objectives import HeadDistillation
from specjax.training.objectives import Distillation, NextToken
from specjax.training.precision import computing_in

TARGET = TransformerConfig(vocab_size=7, d_model=8, num_layers=3, num_heads=2, context_length=32)
SMALL = TransformerConfig(vocab_size=7, d_model=4, num_layers=1, num_heads=1, context_length=32)
OBJECTIVES = {
    "next_token": NextToken(TARGET),
    "distillation": Distillation(SMALL, TARGET),
    "exit": ExitDistillation(EarlyExit(TARGET, 1, 2, trained_exit=True)),
    "medusa": HeadDistillation(Medusa(TARGET, Topology.chain(2), num_heads=2, num_blocks=1)),
    "hydra": HeadDistillation(Hydra(TARGET, Topology.chain(2), num_heads=2, num_blocks=1)),
    "eagle": Eagle1Distillation(EagleConfig(TARGET, 1)),
    "eagle3": Eagle3Distillation(EagleConfig(TARGET, 3, (1, 2, 3)), steps=2),
    "block": BlockDistillation(BlockDrafter(TARGET, 1, (1, 2), 3), anchors=4),
}


def models(value) -> list[TransformerConfig]:
    """All model configs that a dataclass holds, at any depth."""
    if isinstance(value, TransformerConfig):
        return [value]
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return [model for field in fields for model in models(getattr(value, field.name))]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_model_of_an_objective_computes_in_the_dtype(name):
    objective = OBJECTIVES[name]
    narrow = computing_in(objective, "bfloat16")
    assert [m.dtype for m in models(narrow)] == [jnp.bfloat16] * len(models(objective))
    assert models(objective)
    assert all(m.param_dtype == jnp.float32 for m in models(narrow))
    assert computing_in(narrow, "float32") == objective
    assert computing_in(objective, None) is objective
    assert hash(narrow) != hash(objective)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="compute_dtype must be one of float32, bfloat16, or None; got 'int8'"):
        computing_in(OBJECTIVES["next_token"], "int8")


def initial(name, objective):
    """(trained parameters, frozen ones) of an objective of `OBJECTIVES`."""
    key, target = jax.random.key(0), LanguageModel.init(TARGET, jax.random.key(1)).params
    if name == "next_token":
        return target, None
    if name == "distillation":
        return LanguageModel.init(SMALL, key).params, target
    if name == "block":
        return objective.drafter.init_params(key), target
    return objective.drafter.init_params(key, target), target


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradients_stay_float32_and_near_those_of_float32(name):
    """bfloat16 has 8 bits: a loss of random models must agree to about 1 %, and gradients point the same way."""
    params, frozen = initial(name, OBJECTIVES[name])
    batch = {"tokens": jax.random.randint(jax.random.key(2), (2, 17), 0, 7)}
    found = {}
    for dtype in ("float32", "bfloat16"):
        objective = computing_in(OBJECTIVES[name], dtype)
        step = jax.value_and_grad(objective.loss, has_aux=True)
        (loss, _), gradients = jax.jit(step)(params, batch, jax.random.key(3), frozen)
        assert loss.dtype == jnp.float32
        assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(gradients))
        found[dtype] = loss, jnp.concatenate([g.ravel() for g in jax.tree.leaves(gradients)])
    (loss, wide), (rounded, narrow) = found["float32"], found["bfloat16"]
    assert abs(rounded - loss) < 0.02 * abs(loss) + 1e-3
    assert jnp.vdot(wide, narrow) > 0.98 * jnp.linalg.norm(wide) * jnp.linalg.norm(narrow)
