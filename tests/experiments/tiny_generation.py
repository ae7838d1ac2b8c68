"""A config of text generation with a tiny model, and what the Python interface gives for the same prompts."""

import json

from configs import generate as generate_config
from specjax.drafters import NGram
from specjax.sampling import Sampling

# Refuses a conversation that does not begin with the user, and a message that holds "forbidden".
REFUSING = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('begin with\n the user') }}{% endif %}"
    "{% for message in messages %}{% if 'forbidden' in message.content %}{{ raise_exception('no!') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}<|assistant|>"
)


def tiny(folder, **changes):
    config = generate_config.get_config()
    config.model, config.max_new_tokens = str(folder), 12
    config.drafter.draft_length = 3
    config.update(changes)
    return config


def from_the_api(model, prompts, **options):
    return model.generate(
        prompts, **({"max_new_tokens": 12, "sampling": Sampling.of(0), "drafter": NGram(3)} | options)
    )


def user(text):
    return {"role": "user", "content": text}


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def use_template(folder, template):
    """Gives the model in a folder another chat template."""
    about = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": template}))
