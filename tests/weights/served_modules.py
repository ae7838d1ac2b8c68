"""What vLLM computes from a speculator's folder, in numpy and from its documents alone: config.json and the tensors.

The target's side comes as arrays: what enters each of its blocks, its embedding, its final norm's output, its head.
"""

import json

import numpy as np
from safetensors.numpy import load_file


class Folder:
    """A saved speculator, read without the library that wrote it."""

    def __init__(self, path):
        self.config = json.loads((path / "config.json").read_text())
        self.tensors = {k: v.astype(np.float64) for k, v in load_file(path / "model.safetensors").items()}
        self.layer = self.config.get("transformer_layer_config")

    def linear(self, name, x):
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def norm(self, name, x):
        scale = self.tensors[f"{name}.weight"]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.layer["rms_norm_eps"]) * scale

    def heads(self, name, x, count):
        out = self.linear(f"{name}_proj", x).reshape(len(x), count, self.layer["head_dim"])
        per_head = f"{name}_norm"
        return self.norm(per_head, out) if f"{per_head}.weight" in self.tensors else out

    def attention(self, name, x, positions, visible, context=None, context_positions=()):
        """Attention of x over `context` (if any) followed by itself."""
        q = rotate(self.heads(f"{name}.q", x, self.layer["num_attention_heads"]), positions, self.layer)
        seen = x if context is None else np.concatenate([context, x])
        places = np.concatenate([context_positions, positions])
        kv_heads = self.layer["num_key_value_heads"]
        k = rotate(self.heads(f"{name}.k", seen, kv_heads), places, self.layer)
        v = self.linear(f"{name}.v_proj", seen).reshape(len(seen), kv_heads, -1)
        group = q.shape[1] // kv_heads
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
        weights = softmax(np.where(visible, scores, -np.inf))
        return self.linear(f"{name}.o_proj", np.einsum("hts,shd->thd", weights, v).reshape(len(x), -1))

    def mlp(self, name, x):
        return self.linear(
            f"{name}.down_proj", silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        )


def eagle3_combine(folder, block_inputs):
    """fc over the hidden states that enter the blocks of these ids, collected low to high."""
    ids = sorted(set(folder.config["eagle_aux_hidden_state_layer_ids"]))
    return folder.linear("fc", np.concatenate([block_inputs[i] for i in ids], -1))


def eagle3(folder, features, embedded, vocab_size):
    """(logits over the target's vocabulary, what goes on as the next pair's feature) of T pairs."""
    config = folder.config
    assert not any(config[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"))
    x = [folder.norm("layers.0.input_layernorm", embedded), folder.norm("layers.0.hidden_norm", features)]
    places = np.arange(len(features))
    causal = places[:, None] >= places
    x = features + folder.attention("layers.0.self_attn", np.concatenate(x, -1), places, causal)
    x = x + folder.mlp("layers.0.mlp", folder.norm("layers.0.post_attention_layernorm", x))
    drafted = folder.linear("lm_head", folder.norm("norm", x))
    logits = np.full((len(x), vocab_size), -np.inf)
    logits[:, np.arange(config["draft_vocab_size"]) + folder.tensors.get("d2t", np.zeros(1)).astype(int)] = drafted
    return logits, x


def eagle1(folder, features, embedded):
    """What goes into the target's head, and on as the next pair's feature, of T pairs."""
    assert not folder.config["layernorms"] and not folder.config["fusion_bias"]  # so no norm before attention either
    x = folder.linear("fusion_fc", np.concatenate([embedded, features], -1))
    places = np.arange(len(x))
    x = x + folder.attention("transformer.self_attn", x, places, places[:, None] >= places)
    return x + folder.mlp("transformer.mlp", folder.norm("transformer.post_attention_layernorm", x))


def dflash(folder, block_inputs, token, head):
    """[γ, V] logits of the tokens behind `token`, which stands behind S positions with hidden states."""
    config, table = folder.config, folder.tensors["embed_tokens.weight"]
    hidden = np.concatenate([block_inputs[i] for i in sorted(set(config["aux_hidden_state_layer_ids"]))], -1)
    context = folder.norm("hidden_norm", folder.linear("fc", hidden))
    x = table[[token] + [config["mask_token_id"]] * (config["block_size"] - 1)]
    before = np.arange(len(hidden))
    positions = len(hidden) + np.arange(len(x))
    for i in range(folder.layer["num_hidden_layers"]):
        assert folder.layer["layer_types"][i] == "full_attention"
        normed = folder.norm(f"layers.{i}.input_layernorm", x)
        x = x + folder.attention(f"layers.{i}.self_attn", normed, positions, True, context, before)
        x = x + folder.mlp(f"layers.{i}.mlp", folder.norm(f"layers.{i}.post_attention_layernorm", x))
    return folder.norm("norm", x)[1:] @ head


def medusa(folder, normalised):
    """[K, T, V] logits of all heads from the hidden states behind the target's final norm."""
    config, logits = folder.config, []
    for k in range(config["num_heads"]):
        x = normalised
        for i in range(config["num_hidden_layers"]):
            x = x + silu(folder.linear(f"blocks.{k}.layers.{i}", x))
        logits.append(folder.linear("lm_head" if config["original_lm_head"] else f"lm_heads.{k}", x))
    return np.stack(logits)


def rotate(x, positions, layer):
    """First half of each head rotated with the second (the layout of Hugging Face), with Llama 3's scaling if asked."""
    half = x.shape[-1] // 2
    frequencies = layer["rope_theta"] ** -(np.arange(half) / half)
    scaling = layer["rope_scaling"]
    if scaling is not None:
        assert scaling["rope_type"] == "llama3"
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = np.clip((turns - low) / (high - low), 0, 1)
        frequencies = keep * frequencies + (1 - keep) * frequencies / scaling["factor"]
    angles = (positions[:, None] * frequencies)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], -1
    )


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)
