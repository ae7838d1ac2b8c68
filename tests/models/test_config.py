"""Configs: what is filled in, what is refused, and that equal ones are one static argument."""

import dataclasses

import jax.numpy as jnp
import pytest

from specjax.models import TransformerConfig

SMALL = dict(vocab_size=5, d_model=8, num_layers=1, num_heads=2)


def test_defaults_follow_from_the_other_fields():
    config = TransformerConfig(**SMALL)
    assert (config.num_kv_heads, config.head_dim, config.d_ff, config.rotary_dim) == (2, 4, 32, 4)
    config = TransformerConfig(**SMALL, num_kv_heads=1, head_dim=16, d_ff=3, rotary_fraction=0.5)
    assert (config.num_kv_heads, config.head_dim, config.d_ff, config.rotary_dim) == (1, 16, 3, 8)


def test_spellings_of_a_dtype_are_one_config():
    spellings = ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")]
    assert len({TransformerConfig(**SMALL, dtype=d, param_dtype=d) for d in spellings}) == 1


def test_sliding_layers_are_the_same_however_they_are_given():
    make = lambda **fields: TransformerConfig(**(SMALL | dict(num_layers=3) | fields))  # noqa: E731
    assert make(sliding_window=4).sliding_layers == (0, 1, 2)
    assert make(sliding_window=4) == make(sliding_window=4, sliding_layers=[2, 0, 1, 1])
    some = make(sliding_window=4, sliding_layers=(1,))
    assert [some.slides(i) for i in range(3)] == [False, True, False]
    none = make(sliding_window=4, sliding_layers=())
    assert none == make()
    for config in (some, none):
        assert dataclasses.replace(config, dropout=0.0) == config  # filled-in fields must not be read anew


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TransformerConfig(**SMALL).d_model = 3


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(vocab_size=0), "vocab_size must be at least 1; got 0"),
        (dict(num_layers=0), "num_layers must be at least 1; got 0"),
        (dict(context_length=0), "context_length must be at least 1; got 0"),
        (dict(num_heads=3), "d_model 8 must be a multiple of num_heads 3"),
        (dict(num_heads=4, num_kv_heads=3), "num_heads 4 must be a multiple of num_kv_heads 3"),
        (dict(num_kv_heads=0), "num_heads 2 must be a multiple of num_kv_heads 0"),
        (dict(norm="batchnorm"), "norm must be one of rmsnorm, layernorm; got 'batchnorm'"),
        (dict(norm_position="sideways"), "norm_position must be one of"),
        (dict(positions="alibi"), "positions must be one of"),
        (dict(mlp="tanh"), "mlp must be one of"),
        (dict(dropout=1.0), r"dropout must be in \[0, 1\); got 1.0"),
        (dict(dropout=-0.1), r"dropout must be in \[0, 1\)"),
        (dict(head_dim=3), "must be an even number >= 2"),
        (dict(rotary_fraction=0.25), "must be an even number >= 2"),
        (dict(d_model=9, num_heads=3, positions="sinusoidal"), "even d_model; got 9"),
        (dict(norm="layernorm", norm_offset=1.0), "norm_offset 1.0 is for norm 'rmsnorm'; got 'layernorm'"),
        (dict(sliding_window=0), "sliding_window must be at least 1, or None; got 0"),
        (dict(sliding_layers=(0,)), r"sliding_layers must be blocks from 0 to 0, with a sliding_window; got \(0,\)"),
        (dict(sliding_window=3, sliding_layers=(0, 1)), r"blocks from 0 to 0, with a sliding_window; got \(0, 1\)"),
        (dict(sliding_window=3, sliding_layers=(-1,)), r"blocks from 0 to 0, with a sliding_window; got \(-1,\)"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**(SMALL | change))
