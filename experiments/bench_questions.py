"""Which prompts of a file a benchmark asks: the first of each category that the target can take."""

import dataclasses
from collections.abc import Sequence

from ml_collections import ConfigDict

from experiments.pretrained_setting import conversation_ids
from specjax.data.prompts import Prompt, PromptFiles, refused_prompt
from specjax.pretrained import Pretrained


def read_questions(config: ConfigDict) -> tuple[list[Prompt], list[dict]]:
    """All prompts of the wanted categories in the order of the file, and records of broken lines.

    Raises:
        ValueError: no such file, a broken line while `on_broken` is "stop", or a category that it does not hold.
    """
    prompts, broken = PromptFiles(config.questions, on_broken=config.on_broken).read()
    prompts = [dataclasses.replace(prompt, kind=prompt.kind or "no category") for prompt in prompts]
    known = list(dict.fromkeys(prompt.kind for prompt in prompts))
    unknown = [name for name in config.categories if name not in known]
    if unknown:
        raise ValueError(f"{config.questions} has no category {unknown[0]!r}; it has {', '.join(known)}")
    asked = [prompt for prompt in prompts if prompt.kind in (config.categories or known)]
    return asked, [{"prompt": None, "category": None, "reason": line} for line in broken]


def choose_questions(
    config: ConfigDict, target: Pretrained, prompts: Sequence[Prompt]
) -> tuple[list[Prompt], list[dict]]:
    """The first prompts of every category, and records of those before them that the target's template refuses.

    Raises:
        ValueError: a prompt is refused while `on_broken` is "stop", or none is left.
    """
    chosen, refused = [], []
    taken = dict.fromkeys((prompt.kind for prompt in prompts), 0)
    for prompt in prompts:
        if config.prompts_per_category and taken[prompt.kind] >= config.prompts_per_category:
            continue
        try:
            _encode(target, prompt, prompt.follow_ups if config.turns == "all" else ())
        except ValueError as error:
            reason = refused_prompt(prompt.name, error, config.on_broken)
            refused.append({"prompt": prompt.name, "category": prompt.kind, "reason": reason})
        else:
            taken[prompt.kind] += 1
            chosen.append(prompt)
    if not chosen:
        raise ValueError(f"{target.name} refuses all {len(refused)} prompts; the first: {refused[0]['reason']}")
    return chosen, refused


def with_answer(messages: Sequence[dict], answer: str, follow_up: str | None) -> list[dict]:
    """The conversation with an answer and what is asked next."""
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": follow_up}]


def _encode(target: Pretrained, prompt: Prompt, follow_ups: Sequence[str]) -> None:
    """Raises the ValueError of a template that refuses a turn; an answer that nobody has given yet is three dots."""
    messages = prompt.chat
    conversation_ids(target, messages)
    for follow_up in follow_ups:
        messages = with_answer(messages, "...", follow_up)
        conversation_ids(target, messages)
