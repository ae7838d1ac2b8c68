"""Makes tests/weights/fixtures: tiny random models of every architecture with the logits that transformers gives.

    python tests/weights/make_fixtures.py

Only who changes the fixtures needs this, with torch and transformers 5 installed. Every folder is what
`save_pretrained` writes (configs in the spelling of transformers 5), and logits.npz: `tokens` [2, 24] and `logits`
[2, 24, V] in float32. The weights are of visible size, windows are shorter than the text, and scaled rotary positions
change the logits, so that anything misread shows.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FOLDER = Path(__file__).parent / "fixtures"
VOCAB, ROWS, TEXT = 64, 2, 24
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=100.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
GEMMA = dict(
    num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=3, head_dim=10, query_pre_attn_scalar=7,
    sliding_window=5, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters={
        "full_attention": dict(rope_type="linear", rope_theta=1000.0, factor=2.0),
        "sliding_attention": dict(rope_type="default", rope_theta=50.0),
    },
)  # fmt: skip
MODELS = {
    "llama3": (LlamaForCausalLM, LlamaConfig, dict(head_dim=8, rope_parameters=LLAMA3, tie_word_embeddings=False)),
    "llama_biased": (
        LlamaForCausalLM,
        LlamaConfig,
        dict(
            attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3, num_key_value_heads=4,
            rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=3.0),
        ),
    ),
    "smollm2": (LlamaForCausalLM, LlamaConfig, dict(tie_word_embeddings=True, num_key_value_heads=1)),
    "mistral": (MistralForCausalLM, MistralConfig, dict(sliding_window=5)),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config,
        dict(use_sliding_window=True, sliding_window=6, max_window_layers=1, num_hidden_layers=3),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(head_dim=12, attention_bias=True, tie_word_embeddings=True)),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, GEMMA),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config,
        dict(n_embd=15, n_head=3, n_layer=2, n_positions=32, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2),
    ),
}  # fmt: skip
SHARDED, BFLOAT16 = {"qwen3"}, {"smollm2"}


@torch.no_grad()
def make(name: str, seed: int) -> None:
    model_class, config_class, options = MODELS[name]
    shape = {} if config_class is GPT2Config else SHAPE
    torch.manual_seed(seed)
    model = model_class(config_class(**(shape | options), attn_implementation="eager")).eval()
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.copy_(parameter + 0.3 * noise if parameter.ndim == 1 else 0.3 * noise)
        if name in BFLOAT16:
            parameter.copy_(parameter.to(torch.bfloat16).float())
    tokens = np.random.default_rng(seed).integers(VOCAB, size=(ROWS, TEXT))
    logits = model(torch.from_numpy(tokens)).logits.numpy()
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    model = model.to(torch.bfloat16) if name in BFLOAT16 else model
    model.save_pretrained(folder, max_shard_size="16KB" if name in SHARDED else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "logits.npz", tokens=tokens.astype(np.int32), logits=logits.astype(np.float32))
    print(f"{name}: logits of standard deviation {logits.std():.2f}, {sorted(f.name for f in folder.iterdir())}")


if __name__ == "__main__":
    for seed, name in enumerate(MODELS):
        make(name, seed)
