import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import TransformerConfig
from specjax.models.prediction_heads import PredictionHead

CONFIG = TransformerConfig(7, 6, 1, 2, head_dim=4, head_bias=True)
FEATURE = jax.random.normal(jax.random.key(0), (2, 3, 6))
PATH = jax.random.normal(jax.random.key(1), (2, 3, 4, 6))


def moved(params):
    return jax.tree.map(lambda x: x + 0.5 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype), params)


@pytest.mark.parametrize("hidden_width", [None, 5])
@pytest.mark.parametrize("path", [None, PATH], ids=["alone", "path"])
def test_an_untrained_head_hands_the_feature_on_and_can_learn(hidden_width, path):
    module = PredictionHead(CONFIG, num_blocks=2, hidden_width=hidden_width)
    params = module.init(jax.random.key(2), FEATURE, path)
    np.testing.assert_array_equal(module.apply(params, FEATURE, path), FEATURE)
    gradient = jax.grad(lambda params: jnp.sum(jnp.sin(module.apply(params, FEATURE, path))))(params)["params"]
    zero = "update" if hidden_width is None else "down"  # what keeps an untrained head from saying anything
    learning = [gradient[f"block_{i}"][zero] for i in range(2)] + ([gradient["mix"]] if path is not None else [])
    assert all(np.any(matrix["kernel"]) for matrix in learning)


def test_every_position_is_served_alone_and_every_token_of_the_path_counts():
    module = PredictionHead(CONFIG)
    params = moved(module.init(jax.random.key(2), FEATURE, PATH))
    jacobian = jax.jacobian(lambda path: module.apply(params, FEATURE, path))(PATH)  # [2, 3, 6, 2, 3, 4, 6]
    strength = np.abs(jacobian).sum((2, 6))  # [2, 3, 2, 3, 4]
    same = np.eye(6).reshape(2, 3, 2, 3)[..., None] > 0
    assert np.all((strength > 0) == np.broadcast_to(same, strength.shape))


def test_a_head_of_its_own_output_returns_logits_in_the_dtype_of_the_config():
    config = dataclasses.replace(CONFIG, dtype="bfloat16", param_dtype="float32")
    module = PredictionHead(config, own_output=True)
    params = module.init(jax.random.key(2), FEATURE)
    out = module.apply(params, FEATURE)
    assert out.shape == (2, 3, 7) and out.dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert "bias" in params["params"]["output"]
