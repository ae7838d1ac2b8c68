"""A pretrained model with its tokenizer, as one thing that turns text into text."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax.data.chat_template import ChatTemplate
from specjax.data.pretrained_tokenizer import PretrainedTokenizer
from specjax.decoding import Run, StopStrings
from specjax.decoding.state import shared_context
from specjax.models import LanguageModel
from specjax.penalties import Penalties
from specjax.pretrained.arguments import as_integer, as_stop_strings
from specjax.pretrained.chat import Chat
from specjax.pretrained.drafters import with_params
from specjax.pretrained.fitting import bucket, check_fits
from specjax.pretrained.text_run import TextGeneration, TextRun, TextStream, text_seeds
from specjax.pretrained.visible_text import VisibleText
from specjax.protocol import Verifier
from specjax.sampling import Sampling


@dataclasses.dataclass(frozen=True, eq=False)
class Pretrained:
    """A model that reads and writes text; `load` makes one.

        model.generate(["def add(a, b):"], drafter=NGram(8))[0].text
        for piece in model.stream([{"role": "user", "content": "Hi"}]): print(piece.text, end="")
        chat = model.chat(system="Be brief."); chat.reply("Hi").text

    Attributes:
        model: the target.
        tokenizer: its tokenizer.
        chat_template: how messages become a prompt; None for a model that only continues text.
        stop_ids: ids that end a text; those that the model has no weights for never do, and are left out.
        name: what messages and reports call it.

    A tokenizer may have more tokens than the model where these were added behind its own vocabulary, as Gemma 3 has one
    for images and many a Llama one for padding. They are never emitted, and no prompt may hold them.

    Raises:
        ValueError: the tokenizer has an ordinary token that the model has no weights for.
    """

    model: LanguageModel
    tokenizer: PretrainedTokenizer
    chat_template: ChatTemplate | None = None
    stop_ids: tuple[int, ...] = ()
    name: str = "the model"
    _automata: dict = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self):
        tokenizer, vocab = self.tokenizer, self.model.config.vocab_size
        behind = (i for i in range(vocab, tokenizer.vocab_size) if tokenizer.meaning(i) is not None)
        ordinary = next((i for i in behind if i not in tokenizer.added_ids), None)
        if ordinary is not None:
            raise ValueError(
                f"{self.name}: the tokenizer has {tokenizer.vocab_size} tokens and the model {vocab}, so that token "
                f"{ordinary}, {tokenizer.meaning(ordinary)!r}, has no weights; give it the model's own"
            )
        object.__setattr__(self, "stop_ids", tuple(i for i in self.stop_ids if i < vocab))

    def prompt_ids(self, prompt: Any) -> list[int]:
        """Token ids of a text to be continued, or of a conversation that the model is to answer.

        A text gets the beginning-of-text token where the model expects one. Special tokens are those of the chat
        template; typed into a text or a message they stay text.

        Raises:
            ValueError: no token at all, one that the model has no weights for, messages without a chat template, or a
                template that refuses them.
        """
        ids, vocab = self._encode(prompt), self.model.config.vocab_size
        without = next((i for i in ids if i >= vocab), None)
        if without is not None:
            raise ValueError(
                f"the prompt holds {_written(self.tokenizer, without)!r}, token {without}, which {self.name} "
                f"has no weights for (its last token is {vocab - 1}); leave it out of the text or the chat template"
            )
        return ids

    def _encode(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            if self.chat_template is None:
                raise ValueError(
                    f"{self.name} has no chat template, so it takes no messages; give it a text to continue"
                )
            return self.chat_template.encode(prompt, self.tokenizer).tolist()
        ids, bos = self.tokenizer.encode(prompt).tolist(), self.tokenizer.bos_id
        if bos is not None and (self.tokenizer.add_bos or not ids):
            ids = [bos, *ids]
        if not ids:
            raise ValueError(
                f"the prompt is empty, and {self.name}'s tokenizer has no beginning-of-text token; give some text"
            )
        return ids

    def generate(
        self,
        texts: Any,
        *,
        max_new_tokens: int = 256,
        drafter: Any = None,
        verifier: str | Verifier | None = None,
        sampling: Any = None,
        draft_sampling: Any = None,
        penalties: Any = None,
        stop: str | Sequence[str] = (),
        seed: int | Sequence[int] = 0,
        batch_size: int = 8,
    ) -> list[TextGeneration]:
        """Continue every text, or answer every conversation.

        Args:
            texts: a list of any number of texts and conversations, of any lengths.
            max_new_tokens: limit for each of them.
            drafter: None, a drafter without parameters, a pair (drafter, parameters), or the folder of a saved one.
            verifier: a rule or its name (default: "greedy" at temperature 0, else that of `decoding.generate`).
            sampling: the target's Sampling (default: temperature 1); draft_sampling: the drafter's (default: the same).
            penalties: Penalties on tokens that occurred, and banned tokens.
            stop: strings that end a text; the text comes without them. One that is written like a special token, such
                as "<|im_end|>", is also that token; one that holds more than that is text alone.
            seed: one integer, or one per text. With one, text i takes noise of its own, made from the seed and i.
            batch_size: most texts decoded together. A text does not depend on it, but for rounding.

        Raises:
            ValueError: anything wrong with the arguments, in one line and before compilation.
        """
        runs = self.batches(
            texts,
            max_new_tokens=max_new_tokens,
            drafter=drafter,
            verifier=verifier,
            sampling=sampling,
            draft_sampling=draft_sampling,
            penalties=penalties,
            stop=stop,
            seed=seed,
            batch_size=batch_size,
        )
        results = []
        for run in runs:
            run.advance()
            results += run.results()
            run.close()
        return results

    def batches(
        self,
        texts: Any,
        *,
        max_new_tokens: int = 256,
        drafter: Any = None,
        sampling: Any = None,
        draft_sampling: Any = None,
        penalties: Any = None,
        seed: int | Sequence[int] = 0,
        batch_size: int = 8,
        **options,
    ):
        """An iterator over the batches of `generate`, each a prefilled TextRun to be advanced.

        Errors of the texts come at once, those of the other options with the first batch.
        """
        if isinstance(texts, str) or not isinstance(texts, Sequence) or any(isinstance(text, dict) for text in texts):
            raise ValueError(f"generate takes a list, of texts or of lists of messages; got {str(texts)[:80]}")
        max_new_tokens = as_integer("max_new_tokens", max_new_tokens)
        batch_size = as_integer("batch_size", batch_size)
        if not texts or batch_size < 1:
            raise ValueError(f"generate needs a text and a batch_size of at least 1; got {len(texts)} and {batch_size}")
        seeds, prompts = text_seeds(seed, len(texts)), [self.prompt_ids(text) for text in texts]
        drafter = with_params(drafter, self.model)
        check_fits(self.name, prompts, max_new_tokens, self.model.config, drafter[0])
        needed = max(map(len, prompts)) + max_new_tokens
        options |= dict(max_new_tokens=max_new_tokens, drafter=drafter)
        options |= dict(buffer_length=bucket(needed, shared_context(self.model.config, drafter[0])))
        laws = {"sampling": sampling, "draft_sampling": draft_sampling, "penalties": penalties}
        laws = {name: _per_row(name, value, len(texts)) for name, value in laws.items()}
        # Parts as equal as can be: two sizes at most, so two programs.
        parts = np.array_split(np.arange(len(texts)), math.ceil(len(texts) / batch_size))
        return (
            self.start(
                [prompts[i] for i in rows],
                seeds=[seeds[i] for i in rows],
                continues=[isinstance(texts[i], str) for i in rows],
                **{name: _rows_of(value, rows) for name, value in laws.items()},
                **options,
            )
            for rows in parts
        )

    def stream(
        self, text: Any, *, max_new_tokens: int = 256, seed: Any = 0, rounds_per_piece: int = 1, **options
    ) -> TextStream:
        """The text that `generate` would give, piece by piece.

        Options and errors are those of `generate`; errors come at once, not with the first piece.
        """
        (run,) = self.batches([text], max_new_tokens=max_new_tokens, seed=seed, **options)
        return TextStream(run, rounds_per_piece)

    def chat(self, system: str | None = None, **options) -> Chat:
        """A conversation whose turns keep the cache; options are those of `generate`."""
        return Chat(self, system, **options)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        seeds: Sequence[int],
        drafter: Any = None,
        verifier: str | Verifier | None = None,
        sampling: Any = None,
        stop: str | Sequence[str] = (),
        continues: Sequence[bool] | None = None,
        **options,
    ) -> TextRun:
        """A prefilled batch of token sequences, to be advanced: what all the others stand on.

        Args and errors are those of `generate`, further options those of `decoding.generate`; one seed per prompt.
        `continues` says of each whether its text goes on (default) or begins anew, as an answer does: some tokenizers
        then have a space too many.
        """
        stop = as_stop_strings(stop)
        options = self.decoding_options(drafter=drafter, verifier=verifier, sampling=sampling, stop=stop, **options)
        run = Run.start(self.model, prompts, max_new_tokens=max_new_tokens, seed=seeds, **options)
        continues = [True] * len(prompts) if continues is None else continues
        texts = [VisibleText(self.tokenizer, options["stop_ids"], stop, goes_on) for goes_on in continues]
        return TextRun(run, texts, self._stop_tokens(stop))

    def decoding_options(
        self,
        *,
        drafter: Any = None,
        verifier: str | Verifier | None = None,
        sampling: Any = None,
        stop: str | Sequence[str] = (),
        **options,
    ) -> dict[str, Any]:
        """Keyword arguments of `decoding.generate` from those of `generate`; further ones stay as they are."""
        stop = as_stop_strings(stop)
        drafter, params = with_params(drafter, self.model)
        sampling = Sampling.of() if sampling is None else sampling
        if verifier is None and isinstance(sampling, Sampling) and sampling.greedy:
            verifier = "greedy"
        return options | dict(
            drafter=drafter,
            drafter_params=params,
            verifier=verifier,
            sampling=sampling,
            stop_ids=tuple(dict.fromkeys([*self.stop_ids, *self._stop_tokens(stop)])),
            stop_strings=self._automaton(stop) if stop else None,
        )

    def _stop_tokens(self, stop: tuple[str, ...]) -> dict[int, str]:
        """The special tokens among stop strings, by id."""
        special, vocab = self.tokenizer.special_texts, self.model.config.vocab_size
        return {i: text for i, text in special.items() if text in stop and i < vocab} if stop else {}

    def _automaton(self, stop: tuple[str, ...]) -> StopStrings:
        """Its tables take a moment for a large vocabulary, so the last ones are kept."""
        if stop not in self._automata:
            self._automata.clear()
            self._automata[stop] = StopStrings(stop, self.tokenizer.token_bytes[: self.model.config.vocab_size])
        return self._automata[stop]


def _written(tokenizer: PretrainedTokenizer, i: int) -> str:
    return tokenizer.special_texts.get(i) or tokenizer.token_bytes[i].decode("utf-8", "replace")


def _per_row(name: str, value: Any, count: int) -> Any:
    """Sampling or Penalties with one value per text."""
    kind = Penalties if name == "penalties" else Sampling
    if not isinstance(value, kind | None):
        raise ValueError(f"{name} must be made by {kind.__name__}.of(...); got {value!r}")
    return None if value is None else value.per_row(count)


def _rows_of(per_row: Any, rows: np.ndarray) -> Any:
    """The entries of these rows; which rows are greedy stays a static fact of the whole."""
    return None if per_row is None else jax.tree.map(lambda values: values[rows], per_row)
