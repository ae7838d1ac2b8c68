"""A conversation: every turn continues the cache of the one before, as far as their tokens agree."""

from typing import Any

import jax

from specjax.decoding.state import shared_context
from specjax.pretrained.arguments import as_integer, as_stop_strings
from specjax.pretrained.drafters import with_params
from specjax.pretrained.fitting import bucket
from specjax.pretrained.text_run import TextGeneration, TextStream, text_seeds


class Chat:
    """Several turns with one model.

    The prompt of a turn is the chat template over all messages so far. What its first tokens have in common with the
    text of the turn before is not run again. A turn that was left early, by Ctrl-C for one, keeps what was emitted as
    its answer; one that was left before its first token is forgotten.

    Args:
        pretrained: a `Pretrained`.
        system: the system message, or None.
        max_new_tokens: limit of each answer; less where the context ends first.
        drafter: as in `Pretrained.generate`.
        seed: turn t takes the noise of text t in a batch with this seed.
        **options: further ones of `Pretrained.generate`.

    Raises:
        ValueError: the model has no chat template, or an option is wrong.
    """

    def __init__(
        self,
        pretrained: Any,
        system: str | None = None,
        *,
        max_new_tokens: int = 256,
        drafter: Any = None,
        seed: int = 0,
        **options,
    ):
        if pretrained.chat_template is None:
            raise ValueError(f"{pretrained.name} has no chat template, so it cannot chat; give it a text to continue")
        if as_integer("max_new_tokens", max_new_tokens) < 1:
            raise ValueError(f"max_new_tokens must be at least 1; got {max_new_tokens}")
        as_stop_strings(options.get("stop", ()))
        self._pretrained, self._limit, self._seed, self._options = pretrained, max_new_tokens, seed, options
        self._drafter = with_params(drafter, pretrained.model)
        self._context = shared_context(pretrained.model.config, self._drafter[0])
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._past: list[tuple[str, TextGeneration]] = []
        self._open: tuple[str, TextStream] | None = None
        self._run, self._buffer_length, self._started = None, 0, 0

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far."""
        turns = self._past if self._open is None else [*self._past, (self._open[0], self._open[1].result())]
        said = [(text, answer.text) for text, answer in turns if len(answer.tokens)]
        pairs = [({"role": "user", "content": a}, {"role": "assistant", "content": b}) for a, b in said]
        return self._system + [message for pair in pairs for message in pair]

    def stream(self, text: str, rounds_per_piece: int = 1) -> TextStream:
        """The answer to a message, as it comes.

        Raises:
            ValueError: the conversation no longer fits into the context, or the template refuses it. Nothing is changed
                then.
        """
        prompt = self._pretrained.prompt_ids([*self.messages, {"role": "user", "content": text}])
        if len(prompt) >= self._context:
            raise ValueError(
                f"the conversation takes {len(prompt)} tokens and must stay below the context of {self._context}; "
                "reset it, or say less"
            )
        limit = min(self._limit, self._context - len(prompt))
        self._settle()
        previous, self._run = self._run, None  # whatever goes wrong from here on leaves no half-used cache behind
        if len(prompt) + limit > self._buffer_length:
            self._buffer_length = bucket(len(prompt) + limit, self._context)
        run = self._pretrained.start(
            [prompt],
            max_new_tokens=limit,
            drafter=self._drafter,
            seeds=text_seeds(self._seed, 1, first=self._started),
            continues=[False],
            buffer_length=self._buffer_length,
            previous=previous,
            **self._options,
        )
        self._started += 1
        self._open = text, TextStream(run, rounds_per_piece)
        return self._open[1]

    def reply(self, text: str) -> TextGeneration:
        """The whole answer to a message."""
        stream = self.stream(text, rounds_per_piece=2**31 - 1)
        for _ in stream:
            pass
        return stream.result()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._settle()
        self._past = []

    def _settle(self) -> None:
        """Close the last turn and keep its cache for the next."""
        if self._open is None:
            return
        text, stream = self._open
        self._past.append((text, stream.result()))
        self._open, self._run = None, stream.close()
        # Closed before, or stopped by Ctrl-C in the midst of a hand-over: the next turn reads everything again.
        if self._run is not None and any(array.is_deleted() for array in jax.tree.leaves(self._run.state)):
            self._run = None
