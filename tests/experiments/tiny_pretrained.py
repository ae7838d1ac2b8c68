"""A pretrained model of a few thousand parameters as a folder on disk: bytes for tokens, ChatML for a template."""

import json

import jax
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specjax.models import LanguageModel, TransformerConfig
from specjax.weights import save_huggingface

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_folder(folder, seed: int = 0, num_layers: int = 1, context: int = 512):
    """A Llama of random weights with the tokenizer beside them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    config = TransformerConfig(
        258, 16, num_layers, 2, num_kv_heads=1, d_ff=32, context_length=context, tied_head=False
    )
    model = LanguageModel.init(config, jax.random.key(seed))
    leaves, tree = jax.tree.flatten(model.params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    params = [x + 0.3 * jax.random.normal(key, x.shape, x.dtype) for x, key in zip(leaves, keys, strict=True)]
    save_huggingface(folder, model.replace(params=jax.tree.unflatten(tree, params)), "LlamaForCausalLM")
    return folder
