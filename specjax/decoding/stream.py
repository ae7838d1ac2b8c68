"""The same rounds, handing over newly committed tokens while they run."""

from collections.abc import Iterator

import numpy as np

from specjax.decoding.generation import Generation
from specjax.decoding.run import Run
from specjax.models import LanguageModel


def stream(
    target: LanguageModel, prompts, *, rounds_per_yield: int = 1, **options
) -> Iterator[tuple[list[np.ndarray], Generation]]:
    """Generate, yielding after every `rounds_per_yield` rounds.

    Args and errors are those of `generate`; the text is the same, token for token. Errors come at once, not at the
    first `next`.

    Yields:
        (per row, the tokens committed since the last yield; the Generation so far, its `finish` saying "running" for
        rows that go on)
    """
    _check_rounds(rounds_per_yield)
    return stream_run(Run.start(target, prompts, **options), rounds_per_yield)


def stream_run(run: Run, rounds_per_yield: int = 1) -> Iterator[tuple[list[np.ndarray], Generation]]:
    """What `stream` yields, of a run that is still there afterwards: to be the `previous` of the next one."""
    _check_rounds(rounds_per_yield)
    return _steps(run, rounds_per_yield)


def _check_rounds(rounds_per_yield: int) -> None:
    if rounds_per_yield < 1:
        raise ValueError(f"rounds_per_yield must be at least 1; got {rounds_per_yield}")


def _steps(run: Run, rounds_per_yield: int):
    seen = np.zeros(len(run.prompt_lengths), int)
    while not run.finished:
        run.advance(rounds_per_yield)
        so_far = run.result()
        yield [row[n:] for row, n in zip(so_far.tokens, seen, strict=True)], so_far
        seen = so_far.lengths
