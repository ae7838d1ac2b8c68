"""Generation in one call: prefill, then the whole decoding in one jitted `lax.while_loop`."""

from collections.abc import Sequence

import numpy as np

from specjax.decoding.generation import Generation
from specjax.decoding.request import Ids
from specjax.decoding.run import Run
from specjax.models import LanguageModel


def generate(target: LanguageModel, prompts: Sequence[Ids] | np.ndarray, **options) -> Generation:
    """Continue every prompt, drafting with `drafter` and keeping the target's law.

        generate(target, [[1, 2, 3]], max_new_tokens=64, drafter=drafter, drafter_params=params, seed=7)

    Args:
        target: the model whose law is kept.
        prompts: B token sequences of any lengths >= 1.
        options: the attributes of `Request`, of which `max_new_tokens` must be given: max_new_tokens, drafter,
            drafter_params, verifier, sampling, draft_sampling, penalties, stop_ids, stop_strings, seed, buffer_length,
            previous.

    Raises:
        ValueError: anything wrong with the arguments, in one line and before compilation.
        TypeError: an option that does not exist, or no `max_new_tokens`.
    """
    run = Run.start(target, prompts, **options)
    run.advance()
    return run.result()
