"""What published config.json files mean, in both spellings, and what is refused; configs and tensors out again."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import traverse_util

from specjax.models import LinearRotaryScaling, RotaryScaling, Transformer, TransformerConfig
from specjax.weights.architectures import ARCHITECTURES, config_from_huggingface, config_to_huggingface
from specjax.weights.tensor_names import full_name, is_derived, tensors_of

FOLDERS = sorted(path.parent for path in (Path(__file__).parent / "fixtures").glob("*/config.json"))
LLAMA = dict(
    architectures=["LlamaForCausalLM"], vocab_size=32_000, hidden_size=4096, intermediate_size=11_008,
    num_hidden_layers=32, num_attention_heads=32, max_position_embeddings=4096, rms_norm_eps=1e-5,
)  # fmt: skip
LLAMA3_ROPE = dict(
    factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192, rope_type="llama3"
)
PUBLISHED = {
    "Llama 2 7B": (LLAMA | dict(num_key_value_heads=32, rope_scaling=None), 6_738_415_616, {}),
    "Llama 3.2 1B": (
        LLAMA
        | dict(
            vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_key_value_heads=8,
            head_dim=64, max_position_embeddings=131_072, rope_scaling=LLAMA3_ROPE, rope_theta=500_000.0,
            tie_word_embeddings=True,
        ),
        1_235_814_400,
        dict(rotary_base=500_000.0, rotary_scaling=RotaryScaling(32.0, 1.0, 4.0, 8192), norm_eps=1e-5),
    ),
    "SmolLM2 135M": (
        LLAMA
        | dict(
            vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=8192, rope_theta=100_000, tie_word_embeddings=True,
        ),
        134_515_008,
        dict(rotary_base=100_000.0, head_dim=64, context_length=8192),
    ),
    "Mistral 7B v0.1": (
        LLAMA
        | dict(
            architectures=["MistralForCausalLM"], num_key_value_heads=8, intermediate_size=14_336, sliding_window=4096
        ),
        7_241_732_096,
        dict(sliding_window=4096, sliding_layers=tuple(range(32))),
    ),
    "Qwen2.5 0.5B": (
        dict(
            architectures=["Qwen2ForCausalLM"], vocab_size=151_936, hidden_size=896, intermediate_size=4864,
            num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32_768,
            max_window_layers=24, use_sliding_window=False, sliding_window=32_768, rope_theta=1_000_000.0,
            tie_word_embeddings=True,
        ),
        494_032_768,
        dict(sliding_window=None, qkv_bias=True, attention_bias=False),
    ),
    "Qwen3 0.6B": (
        dict(
            architectures=["Qwen3ForCausalLM"], vocab_size=151_936, hidden_size=1024, intermediate_size=3072,
            num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, attention_bias=False,
            max_position_embeddings=40_960, sliding_window=None, rope_theta=1_000_000, tie_word_embeddings=True,
        ),
        596_049_920,
        dict(qk_norm=True, qkv_bias=False, head_dim=128),
    ),
    "Gemma 3 1B": (
        dict(
            architectures=["Gemma3ForCausalLM"], vocab_size=262_144, hidden_size=1152, intermediate_size=6912,
            num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
            query_pre_attn_scalar=256, rope_local_base_freq=10_000, rope_scaling=None, rope_theta=1_000_000,
            sliding_window=512, sliding_window_pattern=6, hidden_activation="gelu_pytorch_tanh",
        ),
        999_885_952,
        dict(
            sliding_window=512, sliding_layers=tuple(i for i in range(26) if i % 6 != 5), sliding_rotary_base=10_000.0,
            rotary_base=1_000_000.0, embedding_scale=1152**0.5, attention_scale=1 / 16, norm_offset=1.0, tied_head=True,
        ),
    ),
    "GPT-2": (
        dict(
            architectures=["GPT2LMHeadModel"], vocab_size=50_257, n_embd=768, n_layer=12, n_head=12, n_positions=1024,
            n_ctx=1024, layer_norm_epsilon=1e-5, activation_function="gelu_new",
        ),
        124_439_808,
        dict(d_ff=3072, positions="learned", norm="layernorm", tied_head=True),
    ),
}  # fmt: skip


def shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    tree = jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()}


def published(name: str, **changes) -> dict:
    return PUBLISHED[name][0] | changes


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_the_published_number_of_parameters(name):
    about, count, expected = PUBLISHED[name]
    config = config_from_huggingface(about, "bfloat16")
    assert {field: getattr(config, field) for field in expected} == expected
    assert config.dtype == config.param_dtype == jnp.bfloat16
    config = dataclasses.replace(config, num_layers=2, sliding_layers=None)  # layers are alike
    sizes = {path: math.prod(shape) for path, shape in shapes(config).items()}
    layer = sum(size for path, size in sizes.items() if path.startswith("layer_1/"))
    assert sum(sizes.values()) + layer * (config_from_huggingface(about).num_layers - 2) == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_written_reads_the_same(name):
    config = config_from_huggingface(PUBLISHED[name][0], "bfloat16")
    written = json.loads(json.dumps(config_to_huggingface(config, PUBLISHED[name][0]["architectures"][0])))
    assert config_from_huggingface(written, "bfloat16") == config and written["torch_dtype"] == "bfloat16"


def test_the_two_spellings_of_rotary_positions_are_one_config():
    new = published("Llama 3.2 1B", rope_parameters=LLAMA3_ROPE | dict(rope_theta=500_000.0))
    del new["rope_theta"], new["rope_scaling"]
    assert config_from_huggingface(new) == config_from_huggingface(published("Llama 3.2 1B"))
    plain = published("SmolLM2 135M", rope_parameters=dict(rope_theta=100_000, rope_type="default"))
    del plain["rope_theta"]
    assert config_from_huggingface(plain) == config_from_huggingface(published("SmolLM2 135M"))

    gemma = published("Gemma 3 1B", rope_scaling=dict(rope_type="linear", factor=8.0))
    nested = {
        "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1_000_000),
        "sliding_attention": dict(rope_type="default", rope_theta=10_000),
    }
    new = {k: v for k, v in gemma.items() if not k.startswith("rope_")} | dict(rope_parameters=nested)
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(26)]
    del new["sliding_window_pattern"]
    assert config_from_huggingface(new | dict(layer_types=kinds)) == config_from_huggingface(gemma)
    assert config_from_huggingface(gemma).rotary_scaling == LinearRotaryScaling(8.0)
    # The oldest spelling of a type.
    old = published("Llama 2 7B", rope_scaling={"type": "linear", "factor": 2.0})
    assert config_from_huggingface(old).rotary_scaling == LinearRotaryScaling(2.0)


def test_absent_keys_have_the_values_of_their_architecture():
    config = config_from_huggingface(LLAMA)
    assert (config.num_kv_heads, config.rotary_base, config.tied_head) == (32, 10_000.0, False)
    assert config_from_huggingface({**LLAMA, "architectures": None, "model_type": "llama"}) == config
    mistral = config_from_huggingface(LLAMA | dict(architectures=["MistralForCausalLM"]))
    assert (mistral.num_kv_heads, mistral.sliding_window) == (8, 4096)
    gemma = config_from_huggingface({k: v for k, v in published("Gemma 3 1B").items() if k != "sliding_window_pattern"})
    assert gemma == config_from_huggingface(published("Gemma 3 1B"))


def test_windows_of_qwen2():
    on = dict(use_sliding_window=True, sliding_window=64)
    config = config_from_huggingface(published("Qwen2.5 0.5B", **on, max_window_layers=20))
    assert (config.sliding_window, config.sliding_layers) == (64, (20, 21, 22, 23))
    assert config_from_huggingface(published("Qwen2.5 0.5B", **on, max_window_layers=24)).sliding_window is None
    kinds = ["sliding_attention", "full_attention"] * 12
    config = config_from_huggingface(published("Qwen2.5 0.5B", **on, layer_types=kinds))
    assert config.sliding_layers == tuple(range(0, 24, 2))
    written = config_to_huggingface(config, "Qwen2ForCausalLM")
    assert config_from_huggingface(written) == config and written["layer_types"] == kinds


@pytest.mark.parametrize(
    "about, message",
    [
        (dict(architectures=["T5Model"]), "architecture 'T5Model' is not supported; known are LlamaForCausalLM"),
        (dict(architectures=["Gemma3ForConditionalGeneration"]), "'Gemma3ForConditionalGeneration' is not supported"),
        (dict(model_type="mamba"), "architecture 'mamba' is not supported"),
        ({}, "architecture None is not supported"),
        (dict(architectures=["LlamaForCausalLM"]), "config.json of LlamaForCausalLM lacks vocab_size"),
        (LLAMA | dict(hidden_size="4096"), "hidden_size must be an integer of at least 1; got '4096'"),
        (LLAMA | dict(num_hidden_layers=0), "num_hidden_layers must be an integer of at least 1; got 0"),
        (LLAMA | dict(rms_norm_eps=None), "rms_norm_eps must be a positive number; got None"),
        (LLAMA | dict(hidden_act="relu"), "hidden_act 'relu' is not supported; known are silu"),
        (LLAMA | dict(num_key_value_heads=5), "num_heads 32 must be a multiple of num_kv_heads 5"),
        (LLAMA | dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "type 'yarn' are not supported; known are def"),
        (LLAMA | dict(rope_scaling=dict(type="dynamic", factor=2.0)), "rotary positions of type 'dynamic'"),
        (LLAMA | dict(rope_parameters=dict(rope_type="longrope")), "rotary positions of type 'longrope'"),
        (LLAMA | dict(rope_scaling=dict(type="linear")), "factor must be a positive number; got None"),
        (LLAMA | dict(rope_scaling="linear"), "rope_scaling must be an object; got 'linear'"),
        (LLAMA | dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not supported"),
        (LLAMA | dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor 0.5 is not supported"),
        (LLAMA | dict(quantization_config=dict(quant_method="awq")), "quantization_config .* is not supported"),
        (published("Mistral 7B v0.1", layer_types=["full_attention"] * 32), "whose layers differ in their windows"),
        (published("Qwen2.5 0.5B", layer_types=["sliding_attention"] * 24), "slide, but there is no sliding_window"),
        (published("Qwen2.5 0.5B", layer_types="full_attention"), "for each of 24 layers; got full_attention"),
        (published("Qwen2.5 0.5B", layer_types=["full_attention"]), "for each of 24 layers"),
        (published("Qwen2.5 0.5B", layer_types=["chunked_attention"] * 24), "layer_types must name"),
        (published("Gemma 3 1B", final_logit_softcapping=30.0), "final_logit_softcapping 30.0 is not supported"),
        (published("Gemma 3 1B", use_bidirectional_attention=True), "use_bidirectional_attention True"),
        (published("Gemma 3 1B", rope_parameters=dict(sliding_attention=dict(rope_type="linear", factor=2.0))),
         "scaled rotary positions in its sliding layers"),
        (published("GPT-2", activation_function="relu"), "activation_function 'relu' is not supported"),
        (published("GPT-2", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx True"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(about, message):
    with pytest.raises(ValueError, match=message) as caught:
        config_from_huggingface(about)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change, architecture, message",
    [
        ({}, "OPTForCausalLM", "architecture 'OPTForCausalLM' is not supported"),
        (dict(norm="layernorm"), "LlamaForCausalLM", "LlamaForCausalLM cannot hold norm 'layernorm'; it would be 'rms"),
        (dict(norm_offset=1.0), "Qwen3ForCausalLM", "cannot hold norm_offset 1.0; it would be 0.0"),
        (dict(qk_norm=True), "MistralForCausalLM", "cannot hold qk_norm True"),
        (dict(attention_scale=0.3), "LlamaForCausalLM", "cannot hold attention_scale 0.3"),
        (dict(rotary_fraction=0.5), "LlamaForCausalLM", "cannot hold rotary_fraction 0.5"),
        (dict(sliding_window=4), "LlamaForCausalLM", "cannot hold sliding_window 4; it would be None"),
        (dict(sliding_window=4, sliding_layers=(1,)), "MistralForCausalLM", r"cannot hold sliding_layers \(1,\)"),
        (dict(sliding_window=4, sliding_rotary_base=7.0), "Qwen2ForCausalLM", "cannot hold sliding_rotary_base 7.0"),
        (dict(qkv_bias=True), "LlamaForCausalLM", "cannot hold qkv_bias True"),
        (dict(head_bias=True), "LlamaForCausalLM", "cannot hold head_bias True"),
        ({}, "GPT2LMHeadModel", "GPT2LMHeadModel cannot hold norm_eps|cannot hold norm 'rmsnorm'"),
    ],
)
def test_a_model_that_an_architecture_has_not_is_refused(change, architecture, message):
    config = TransformerConfig(vocab_size=5, d_model=8, num_layers=2, num_heads=2, **change)
    with pytest.raises(ValueError, match=message):
        config_to_huggingface(config, architecture)


def test_what_makes_no_difference_does_not_stop_a_config_from_being_written():
    config = TransformerConfig(vocab_size=5, d_model=8, num_layers=1, num_heads=2, dropout=0.1, remat=True)
    assert config_to_huggingface(config, "LlamaForCausalLM")["hidden_size"] == 8
    explicit = dataclasses.replace(config, attention_scale=0.5, sliding_rotary_base=3.0)
    assert config_to_huggingface(explicit, "LlamaForCausalLM") == config_to_huggingface(config, "LlamaForCausalLM")
    odd = dataclasses.replace(config_from_huggingface(published("GPT-2")), attention_scale=1.0)
    assert config_to_huggingface(odd, "GPT2LMHeadModel")["scale_attn_weights"] is False


def test_there_is_a_fixture_of_every_architecture():
    assert {json.loads((f / "config.json").read_text())["architectures"][0] for f in FOLDERS} == set(ARCHITECTURES)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
@pytest.mark.parametrize("tied", [True, False])
def test_the_tensors_hold_every_parameter_once(folder, tied):
    about = json.loads((folder / "config.json").read_text())
    config = dataclasses.replace(config_from_huggingface(about), tied_head=tied)
    tensors = tensors_of(config, about["architectures"][0])
    paths = [path for tensor in tensors for path in tensor.paths]
    assert sorted(paths) == sorted(shapes(config))
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert all(full_name(tensor.name, about["architectures"][0]) == tensor.name for tensor in tensors)
    assert not any(is_derived(tensor.name) for tensor in tensors)


def test_names_of_older_files():
    assert full_name("wte.weight", "GPT2LMHeadModel") == "transformer.wte.weight"
    assert full_name("h.0.attn.c_attn.bias", "GPT2LMHeadModel") == "transformer.h.0.attn.c_attn.bias"
    assert is_derived("transformer.h.11.attn.bias") and is_derived("h.0.attn.masked_bias")
    assert is_derived("model.layers.3.self_attn.rotary_emb.inv_freq")
