"""What the speculators format has not, and files that do not fit, are refused by name."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.drafters import BlockDrafter, Eagle, NGram
from specjax.drafters.eagle_pairs import EagleDrafter
from specjax.models.eagle_layer import EagleConfig
from specjax.weights.speculators import load_speculator, save_speculator
from tests.weights.speculator_cases import CASES, KEPT, LLAMA, MASK, REDUCED, SCALED, VOCAB, fails, saved, trained


def like(name, **changes):
    """That drafter for a target with other fields."""
    drafter = CASES[name]
    target = dataclasses.replace(drafter.target, **changes)
    if isinstance(drafter, EagleDrafter):
        return dataclasses.replace(drafter, model=dataclasses.replace(drafter.model, target=target))
    return dataclasses.replace(drafter, target=target)


@pytest.mark.parametrize(
    "match, drafter",
    [
        ("input_norm: version 1 can be saved without", Eagle(EagleConfig(LLAMA), 2)),
        ("cannot hold qk_norm True", like("eagle1", qk_norm=True)),
        ("feature_layers must be 3 layers", Eagle(EagleConfig(LLAMA, 3, (1, 2)), 2)),
        ("feature_layers must be 3 layers, low to high", Eagle(EagleConfig(LLAMA, 3, (2, 1, 3)), 2)),
        ("feature_layers must stand low to high", dataclasses.replace(CASES["block"], feature_layers=(2, 1))),
        ("cannot hold qk_norm False", BlockDrafter(LLAMA, 1, (1,), 2)),
        ("cannot hold mlp_bias True", like("block", mlp_bias=True)),
        ("cannot hold head_bias True", like("block", head_bias=True)),
        ("cannot hold head_bias True", like("eagle3", head_bias=True)),
        ("head_bias True", like("medusa", head_bias=True)),
        ("hidden_width 4", dataclasses.replace(CASES["medusa"], hidden_width=4)),
        ("cannot hold norm 'layernorm'", like("eagle3", norm="layernorm")),
        ("cannot hold norm_offset 1.0", like("eagle3", norm_offset=1.0)),
        ("cannot hold embedding_scale 4.0", like("eagle3", embedding_scale=4.0)),
        ("cannot hold rotary_fraction 0.5", like("eagle3", rotary_fraction=0.5)),
        ("cannot hold mlp 'geglu'", like("block", mlp="geglu")),
        ("cannot hold attention_scale 0.1", like("eagle3", attention_scale=0.1)),
        ("qk_norm together with qkv_bias", like("eagle3_qk_norm", qkv_bias=True)),
        ("NGram has no speculators layout", NGram(3)),
    ],
)  # fmt: skip
def test_what_the_format_has_not_is_refused_by_name(tmp_path, match, drafter):
    fails(match, save_speculator, tmp_path, drafter, None, "some/target", mask_token_id=MASK)
    assert not list(tmp_path.iterdir())


def test_saving_asks_for_what_the_file_must_hold(tmp_path):
    for name, table in (("block", "embed_tokens.weight"), ("medusa", "lm_head.weight")):
        params, _ = trained(CASES[name])
        fails(f"must hold {table}", save_speculator, tmp_path, CASES[name], params, "t", mask_token_id=MASK)
    fails("mask_token_id must be a token", save_speculator, tmp_path, CASES["block"], None, "t")
    fails("mask_token_id must be a token", save_speculator, tmp_path, CASES["block"], None, "t", mask_token_id=VOCAB)
    params, _ = trained(CASES["eagle3"])
    fails("the EAGLE drafter's", save_speculator, tmp_path, CASES["eagle3_reduced"], params, "t")
    drafter = CASES["eagle3_reduced"]
    shuffled = trained(drafter)[0] | {"draft_to_target": KEPT[::-1]}
    fails("draft_to_target must rise", save_speculator, tmp_path, drafter, shuffled, "t")


@pytest.mark.parametrize("name", ["eagle3", "block", "medusa"])
def test_another_target_is_noticed(tmp_path, name):
    saved(tmp_path, CASES[name])
    target = CASES[name].target
    for match, changes in {
        "hidden_size is 16 there and must be 32": dict(d_model=32),
        "vocab_size is 11 there and must be 12": dict(vocab_size=12),
        "num_hidden_layers is 4 there and must be 5": dict(num_layers=5),
    }.items():
        fails(match, load_speculator, tmp_path, dataclasses.replace(target, **changes))
    if name != "medusa":
        for match, changes in {
            "norm_eps": dict(norm_eps=1e-6),
            "rotary_base": dict(rotary_base=1e4),
            "rotary_scaling": dict(rotary_scaling=None),
            "d_ff": dict(d_ff=32),
            "num_kv_heads": dict(num_kv_heads=4),
            "bias": dict(qkv_bias=True),
        }.items():
            fails(match, load_speculator, tmp_path, dataclasses.replace(target, **changes))


@pytest.mark.parametrize(
    "name, match, changes",
    [
        ("eagle3", "'mlp' is not supported; known are eagle, eagle3", {"speculators_model_type": "mlp"}),
        ("eagle1", "layernorms must be false", {"layernorms": True}),
        ("eagle3", "norm_before_residual must be false", {"norm_before_residual": True}),
        ("eagle3", "norm_before_fc must be false", {"norm_before_fc": True}),
        ("eagle3", "feature_layers must be target layers", {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}),
        ("eagle3", "draft_vocab must be 1 to 11", {"draft_vocab_size": 12}),
        ("eagle3", "is incomplete", {"draft_vocab_size": "6"}),
        ("eagle3", "is incomplete", {"transformer_layer_config": None}),
        ("eagle3", "of Qwen3ForCausalLM, where", {"transformer_layer_config": {"model_type": "qwen3"}}),
        ("block", "sample_from_anchor True is not supported", {"sample_from_anchor": True}),
        ("block", "must be the target's, 11", {"draft_vocab_size": 6}),
        ("block", "mask_token_id must be a token", {"mask_token_id": 11}),
        ("block", "draft_length must be", {"block_size": 1}),
        ("medusa", "medusa_fc_bias are not supported", {"medusa_fc_bias": True}),
        ("medusa", "is incomplete", {"num_heads": None}),
    ],
)
def test_a_config_that_does_not_fit_is_named(tmp_path, name, match, changes):
    saved(tmp_path, CASES[name])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    layer = config.get("transformer_layer_config")
    config |= changes
    if isinstance(changes.get("transformer_layer_config"), dict):
        config["transformer_layer_config"] = layer | changes["transformer_layer_config"]
    file.write_text(json.dumps(config))
    fails(match, load_speculator, tmp_path, CASES[name].target)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    drafter = CASES["eagle3_reduced"]
    saved(tmp_path, drafter)
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    q = "layers.0.self_attn.q_proj.weight"
    for match, tensors in (
        (f"tensor {q} is missing", {k: v for k, v in good.items() if k != q}),
        ("tensor d2t is missing", {k: v for k, v in good.items() if k != "d2t"}),
        ("tensor layers.1.x is not one of", good | {"layers.1.x": good["norm.weight"]}),
        (r"fc.weight must be \[16, 48\]; got \[48, 16\]", good | {"fc.weight": good["fc.weight"].T.copy()}),
        ("d2t must have dtype I64; got I32", good | {"d2t": good["d2t"].astype(np.int32)}),
        ("norm.weight has dtype I64", good | {"norm.weight": good["norm.weight"].astype(np.int64)}),
        ("t2d does not name", good | {"d2t": good["d2t"] * 0}),
        ("must hold 6 different ids", {k: v for k, v in good.items() if k != "t2d"} | {"d2t": -np.arange(6)}),
    ):
        save_file(tensors, file)
        fails(match, load_speculator, tmp_path, drafter.target)
    save_file(good, file)
    file.write_bytes(file.read_bytes()[:-8])
    fails("damaged", load_speculator, tmp_path, drafter.target)
    (tmp_path / "config.json").write_text("{")
    fails("cannot be read as JSON", load_speculator, tmp_path, drafter.target)
    (tmp_path / "config.json").unlink()
    fails("there is no saved speculator", load_speculator, tmp_path, drafter.target)


def test_a_table_that_is_not_the_targets_is_refused(tmp_path):
    drafter = CASES["eagle3"]
    _, target_params = saved(tmp_path, drafter)
    file = tmp_path / "model.safetensors"
    table = np.array(target_params["embedding"]["embedding"])
    save_file(load_file(file) | {"embed_tokens.weight": table}, file)
    load_speculator(tmp_path, drafter.target, target_params=target_params)
    save_file(load_file(file) | {"embed_tokens.weight": table + 1}, file)
    fails("differs from the target's", load_speculator, tmp_path, drafter.target, target_params=target_params)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["specjax"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    fails("give target_params", load_speculator, tmp_path, drafter.target)


def test_a_block_head_without_a_table_takes_the_mask_from_the_target(tmp_path):
    drafter = CASES["block"]
    _, target_params = saved(tmp_path, drafter)
    file = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != "embed_tokens.weight"}, file)
    fails("give target_params", load_speculator, tmp_path, drafter.target)
    params = load_speculator(tmp_path, drafter.target, target_params=target_params)[1]
    np.testing.assert_array_equal(params["mask_embedding"], target_params["embedding"]["embedding"][MASK])


def test_a_feature_scale_comes_back_inside_the_fusion(tmp_path):
    params, _ = trained(SCALED)
    save_speculator(tmp_path, SCALED, params, "some/target")
    again, loaded = load_speculator(tmp_path, SCALED.target)
    assert again == REDUCED
    scale = np.repeat([2.0, 4.0, 8.0], SCALED.target.d_model)[:, None]
    np.testing.assert_array_equal(loaded["fusion"]["kernel"], params["fusion"]["kernel"] / scale)
