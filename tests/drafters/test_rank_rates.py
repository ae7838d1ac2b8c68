import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import generate
from specjax.drafters import Hydra, Medusa
from specjax.drafters.optimal_tree import expected_accepted
from specjax.drafters.rank_rates import measure_rank_rates
from specjax.models.transformer import apply
from specjax.sampling import Sampling
from specjax.topology import Topology
from tests.decoding.tiny_pair import models
from tests.drafters import cyclic_target
from tests.drafters.test_heads import TARGET, VOCAB, random_heads


@pytest.mark.parametrize("family", [Medusa, Hydra])
def test_heads_that_know_the_language_are_right_at_rank_zero(family):
    drafter = family(cyclic_target.CONFIG, Topology.chain(3))
    params, language = cyclic_target.knowing_heads(drafter), cyclic_target.target()
    rates = measure_rank_rates(drafter, params, language.params, cyclic_target.texts(), num_ranks=3)
    np.testing.assert_array_equal(rates, [[1, 0, 0]] * 3)
    result = generate(
        language, [[1, 2]], max_new_tokens=12, drafter=drafter, drafter_params=params, sampling=Sampling.of(0.0)
    )
    accepted = result.counts.accepted.sum() / result.counts.rounds.sum()
    assert expected_accepted(drafter.topology, rates) == pytest.approx(accepted)


@pytest.mark.parametrize("family", [Medusa, Hydra])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rates_are_those_of_a_slow_count(family, temperature):
    with jax.enable_x64(True):
        target, drafter = models()[0], family(TARGET, Topology.chain(2))
        params = random_heads(drafter)
        tokens = np.random.default_rng(0).integers(0, VOCAB, (3, 9)).astype(np.int32)
        mask = np.ones((3, 9), bool)
        mask[0, 6:] = False
        mask[1] = False
        sampling = Sampling.of(temperature)
        rates = measure_rank_rates(
            drafter, params, target.params, tokens, num_ranks=VOCAB, sampling=sampling, mask=mask
        )
        inputs = jnp.asarray(tokens[:, :-1])
        logits, _, features = apply(TARGET, target.params, inputs, feature_layers=(1,))
        p = np.asarray(sampling.law(logits))
        heads = [
            np.asarray(x) for x in drafter.teacher_forced(params, target.params, features, jnp.asarray(tokens[:, :-1]))
        ]
        slow, count = np.zeros((2, VOCAB)), 0
        for row in range(3):
            for s in range(6):  # head 2 at position 5 is judged by position 7, the last one
                if not (mask[row, s + 2] and mask[row, s + 3]):
                    continue
                count += 1
                for k in (1, 2):
                    slow[k - 1] += p[row, s + k][np.argsort(-heads[k - 1][row, s])]
        assert count == 3 + 6
        np.testing.assert_allclose(rates, slow / count, atol=1e-9)
        np.testing.assert_allclose(rates.sum(1), 1, atol=1e-9)  # all ranks together


def test_nothing_to_count_is_an_error():
    drafter = Medusa(cyclic_target.CONFIG, Topology.chain(2))
    params, language = cyclic_target.knowing_heads(drafter), cyclic_target.target()
    with pytest.raises(ValueError, match="no position of .* has 3 unmasked ones behind it"):
        texts = cyclic_target.texts()
        measure_rank_rates(drafter, params, language.params, texts, num_ranks=2, mask=np.zeros(texts.shape, bool))
    with pytest.raises(ValueError, match="num_ranks must be 1 to 7, the vocabulary; got 8"):
        measure_rank_rates(drafter, params, language.params, cyclic_target.texts(), num_ranks=8)
