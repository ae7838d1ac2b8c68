"""How much text a model and its drafter can hold, and the buffer lengths that calls share."""

from collections.abc import Sequence

from specjax.decoding.state import shared_context
from specjax.models import TransformerConfig
from specjax.protocol import Drafter

SHORTEST_BUFFER = 64


def bucket(needed: int, context: int) -> int:
    """Buffer length for so many tokens: a power of two, so that few programs serve all lengths, or the context."""
    return min(max(SHORTEST_BUFFER, 1 << (needed - 1).bit_length()), context)


def why_too_long(
    name: str,
    prompt: Sequence[int],
    max_new_tokens: int,
    target: TransformerConfig,
    drafter: Drafter,
    which: str = "the prompt",
) -> str | None:
    """The numbers and the remedy, in one line that calls the prompt `which`, if it cannot be continued; else None."""
    context = shared_context(target, drafter)
    whose = f"{name}'s context" if context == target.context_length else "the drafter's context"
    if len(prompt) >= context:
        return f"{which} takes {len(prompt)} tokens and {whose} is {context}; shorten it to {context - 1} or fewer"
    if len(prompt) + max_new_tokens > context:
        return (
            f"{which} takes {len(prompt)} tokens; with max_new_tokens {max_new_tokens} that exceeds {whose} of "
            f"{context}: lower max_new_tokens to {context - len(prompt)}, or shorten the prompt"
        )
    return None


def check_fits(
    name: str, prompts: Sequence[Sequence[int]], max_new_tokens: int, target: TransformerConfig, drafter: Drafter
) -> None:
    """Raises ValueError, naming the numbers and the remedy, for a limit below 1 or a text that would be too long."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1; got {max_new_tokens}")
    for number, prompt in enumerate(prompts):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        reason = why_too_long(name, prompt, max_new_tokens, target, drafter, which)
        if reason is not None:
            raise ValueError(reason)
