"""Pretrained models from disk or the hub, as targets and as drafters."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.data.chat_template import load_chat_template
from specjax.data.pretrained_tokenizer import PretrainedTokenizer, load_pretrained_tokenizer
from specjax.drafters import Independent
from specjax.pretrained.model import Pretrained
from specjax.weights import load_weights
from specjax.weights.checksums import check_sha256
from specjax.weights.hub import locate


def load(
    path: str | os.PathLike,
    dtype: Any = None,
    revision: str | None = None,
    *,
    sha256: Mapping[str, str] | None = None,
) -> Pretrained:
    """A model with its tokenizer and chat template.

    Args:
        path: a Hugging Face folder, a .gguf file, or the name of a model on the hub.
        dtype: of weights and activations (default: that of a Hugging Face folder; float32 for a .gguf file).
        revision: of a model on the hub.
        sha256: digests, in hexadecimal, that the model's files must have, by file name.

    Raises:
        ValueError: nothing there, or something that is not such a model; one line that names it.
    """
    located = locate(path, revision)
    check_sha256(located, sha256 or {})
    tokenizer = load_pretrained_tokenizer(located)
    model = load_weights(located, dtype)
    return Pretrained(
        model=model,
        tokenizer=tokenizer,
        chat_template=load_chat_template(located),
        stop_ids=tuple(sorted(tokenizer.eos_ids)),
        name=(Path(path).name or located.resolve().name).removesuffix(".gguf"),
    )


def independent_drafter(
    path: str | os.PathLike, target: Pretrained, draft_length: int, dtype: Any = None
) -> tuple[Independent, Any]:
    """(drafter, parameters): a smaller pretrained model that drafts for a target with the same tokenizer.

    Their vocabularies may be padded to different sizes, as those of Qwen2.5 0.5B and 7B are.

    Args:
        path, dtype: as for `load` (default dtype: the target's).
        target: the model it drafts for.
        draft_length: γ >= 1.

    Raises:
        ValueError: another tokenizer.
    """
    drafter = load(path, target.model.config.dtype if dtype is None else dtype)
    check_same_tokenizer(drafter, target)
    own, padded = drafter.model.config, target.model.config.vocab_size
    return Independent(own, draft_length, target_vocab_size=padded), drafter.model.params


def check_same_tokenizer(drafter: Pretrained, target: Pretrained) -> None:
    """Raises ValueError when an id does not mean the same to both.

    Tokens that were added behind the vocabulary do not count where one of the two has no weights for them: it neither
    reads nor writes them.
    """
    one, other = drafter.tokenizer, target.tokenizer
    if one.fingerprint == other.fingerprint:
        return
    shared = min(drafter.model.config.vocab_size, target.model.config.vocab_size)
    longest = max(one.vocab_size, other.vocab_size)
    ids = (i for i in range(longest) if i < shared or _ordinary(one, i) or _ordinary(other, i))
    differing = next((i for i in ids if one.meaning(i) != other.meaning(i)), None)
    if differing is None:
        return
    what = f"token {differing} is {_named(one, differing)} there and {_named(other, differing)} here"
    raise ValueError(
        f"{drafter.name} cannot draft for {target.name}: it has another tokenizer ({what}); take a draft model of the "
        "same family"
    )


def _ordinary(tokenizer: PretrainedTokenizer, i: int) -> bool:
    return tokenizer.meaning(i) is not None and i not in tokenizer.added_ids


def _named(tokenizer: PretrainedTokenizer, i: int) -> str:
    meaning = tokenizer.meaning(i)
    return "missing" if meaning is None else repr(meaning)
