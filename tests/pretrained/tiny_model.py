"""A Llama of a few thousand random parameters in a folder, with a byte-level BPE tokenizer and a chat template."""

import json

import jax
import jax.numpy as jnp
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from specjax.data.pretrained_tokenizer import load_pretrained_tokenizer
from specjax.models import LanguageModel, TransformerConfig
from specjax.weights import save_huggingface

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]  # ids 0 to 3
BEGIN = "<|begin|>"  # id 4, where there is one
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = ["the cat sat on the mat, the dog ate the cat", "def add(a, b):\n    return a + b\n", "für Öl: ß 日本語 🙂"]
CONTEXT = 256


def write_tokenizer(folder, bos: bool = False, merges: int = 40) -> int:
    """tokenizer.json and tokenizer_config.json; returns the number of tokens."""
    special = [*SPECIAL, BEGIN] if bos else SPECIAL
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = len(special) + len(alphabet) + merges
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 5, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    if bos:
        about |= {"bos_token": BEGIN, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return tokenizer.get_vocab_size()


def write_model(
    folder, seed: int = 0, num_layers: int = 2, context_length: int = CONTEXT, padding: int = 0, **tokenizer
) -> None:
    """A model folder as Hugging Face has them. Loud weights and a head of its own, so that texts have some variety.

    `padding`: rows of the table and the head that no token uses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = TransformerConfig(
        vocab_size=write_tokenizer(folder, **tokenizer) + padding,
        d_model=16,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=1,
        d_ff=32,
        context_length=context_length,
        tied_head=False,
    )
    model = LanguageModel.init(config, jax.random.key(seed))
    params = jax.tree.map(lambda x: x * 3 if x.ndim == 2 else x, model.params)
    params["embedding"] = model.params["embedding"]
    often = jnp.array([_printable(text) for text in load_pretrained_tokenizer(folder).token_bytes] + [False] * padding)
    params["head"] = {"kernel": model.params["head"]["kernel"] * jnp.where(often, 3, 1)}
    save_huggingface(folder, model.replace(params=params), "LlamaForCausalLM")


def _printable(token: bytes) -> bool:
    """Not a part of a character, a control character or a special token; these come too, but seldom."""
    text = token.decode("utf-8", "replace")
    return text != "" and "\ufffd" not in text and text.replace("\n", "").isprintable()
