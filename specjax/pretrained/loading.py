"""Pretrained models from disk or the hub, as targets and as drafters."""

import json
import os
from pathlib import Path
from typing import Any

from specjax.data.chat_template import load_chat_template
from specjax.data.pretrained_tokenizer import PretrainedTokenizer, load_pretrained_tokenizer
from specjax.drafters import Independent
from specjax.pretrained.model import Pretrained
from specjax.weights import load_weights
from specjax.weights.hub import locate


def load(path: str | os.PathLike, dtype: Any = None, revision: str | None = None) -> Pretrained:
    """A model with its tokenizer and chat template.

    Args:
        path: a Hugging Face folder, a .gguf file, or the name of a model on the hub.
        dtype: of weights and activations (default: that of a Hugging Face folder; float32 for a .gguf file).
        revision: of a model on the hub.

    Raises:
        ValueError: nothing there, or something that is not such a model; one line that names it.
    """
    located = locate(path, revision)
    tokenizer = load_pretrained_tokenizer(located)
    model = load_weights(located, dtype)
    return Pretrained(
        model=model,
        tokenizer=tokenizer,
        chat_template=load_chat_template(located),
        stop_ids=_stop_ids(located, tokenizer, model.config.vocab_size),
        name=Path(path).name.removesuffix(".gguf"),
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
    """Raises ValueError when an id does not mean the same to both."""
    one, other = drafter.tokenizer, target.tokenizer
    if one.fingerprint == other.fingerprint:
        return
    pairs = zip(one.token_bytes, other.token_bytes, strict=False)
    differing = next((i for i, (a, b) in enumerate(pairs) if a != b or _special(one, i) != _special(other, i)), None)
    what = f"{one.vocab_size} tokens against {other.vocab_size}"
    if differing is not None:
        a, b = (tokenizer.token_bytes[differing] or _special(tokenizer, differing) for tokenizer in (one, other))
        what = f"token {differing} is {a!r} there and {b!r} here"
    raise ValueError(
        f"{drafter.name} cannot draft for {target.name}: it has another tokenizer ({what}); take a draft model of the "
        "same family"
    )


def _special(tokenizer: PretrainedTokenizer, i: int) -> str | None:
    return tokenizer.special_texts.get(i)


def _stop_ids(path: Path, tokenizer: PretrainedTokenizer, vocab_size: int) -> tuple[int, ...]:
    """What the tokenizer knows as ends of text, and what config.json adds to them."""
    further = _read_json(path / "config.json").get("eos_token_id") if path.is_dir() else None
    ends = {*tokenizer.eos_ids, *(further if isinstance(further, list) else [further])}
    return tuple(sorted(i for i in ends if isinstance(i, int) and 0 <= i < vocab_size))


def _read_json(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({' '.join(str(error).split())})") from None
    return content if isinstance(content, dict) else {}
