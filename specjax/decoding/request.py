"""What can be asked of a call, documented once; and the checks that turn it into a program's static part and inputs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.decoding.checks import (
    as_limits,
    as_prompts,
    as_stop_ids,
    check_context,
    check_pair,
    check_penalties,
    check_type,
)
from specjax.decoding.round import Inputs
from specjax.decoding.state import Decoder
from specjax.decoding.stop_strings import StopStrings
from specjax.drafters import Empty
from specjax.models import LanguageModel
from specjax.penalties import Penalties
from specjax.protocol import Drafter, Verifier
from specjax.sampling import Sampling
from specjax.verifiers import VERIFIERS

Ids = Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """The options of `generate`, `stream` and `Run.start`.

    Attributes:
        max_new_tokens: limit, for all rows or one per row.
        drafter, drafter_params: what proposes; None decodes target-only through the same loop.
        verifier: a rule or its name in `VERIFIERS` (default: "token", for trees "multi_round"; "coupled" without a
            drafter, so that the coupled rule repeats the target-only text of a seed token for token. The other rules
            keep the law, not the text).
        sampling: how the target's logits become a law (default: temperature 1).
        draft_sampling: the drafter's own (default: the target's).
        penalties: part of the target's law, over each token's own history (default: none).
        stop_ids: ids that end a row; the stop token itself is emitted.
        stop_strings: strings that end a row, with the token in which the first of them is completed. Only new text
            counts.
        seed: one integer, or one per row; a row's text depends on its own prompt, key and limit alone. (On the round
            stream the limit counts: where it cuts a draft short, the round ends in a bonus instead of a judged draft.)
        buffer_length: tokens that fit into a row's buffers (default: that of `previous` where it is enough, else the
            next power of two, at most the context). One compiled program serves all calls of one buffer length, one
            bucket of prompt lengths and one batch size.
        previous: an earlier `Run`, such as a chat's last turn, whose cache is taken over: what a row's prompt has in
            common with the earlier text of that row (its prompt and what was emitted) is not read by the target again.
            For a drafter with `feature_layers` only the earlier prompt counts, whose features are kept. It must have
            the same target, drafter, verifier, batch size and buffer length; otherwise the prompts are read whole, and
            `Generation.reused` says so. The text is the same either way, up to rounding. The earlier run is used up:
            take its `result` before.
    """

    max_new_tokens: int | Ids
    drafter: Drafter | None = None
    drafter_params: Any = None
    verifier: str | Verifier | None = None
    sampling: Sampling | None = None
    draft_sampling: Sampling | None = None
    penalties: Penalties | None = None
    stop_ids: Ids = ()
    stop_strings: StopStrings | None = None
    seed: int | Ids = 0
    buffer_length: int | None = None
    previous: Any = None

    @classmethod
    def of(cls, options: dict[str, Any]) -> "Request":
        """The options as a request.

        Raises:
            TypeError: an option that does not exist, or no `max_new_tokens`.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise TypeError(f"{name!r} is no option of a generation; there are {', '.join(known)}")
        if "max_new_tokens" not in options:
            raise TypeError("max_new_tokens is missing; say how many tokens a row may get")
        return cls(**options)

    def resolve(self, target: LanguageModel, prompts) -> "Resolved":
        """Check everything; nothing is compiled.

        Raises:
            ValueError: anything wrong, in one line.
        """
        drafter = Empty() if self.drafter is None else self.drafter
        if isinstance(drafter, type) or not isinstance(drafter, Drafter):
            raise ValueError(f"drafter must be an object such as NGram(8); got {drafter!r}")
        for name in ("sampling", "draft_sampling"):
            check_type(name, getattr(self, name), Sampling, "Sampling.of(temperature=0.7)")
        check_type("penalties", self.penalties, Penalties, "Penalties.of(repetition=1.2)")
        check_type("stop_strings", self.stop_strings, StopStrings, 'StopStrings(["\\n\\n"], tokenizer.token_bytes)')
        sampling = Sampling.of() if self.sampling is None else self.sampling
        draft_sampling = sampling if self.draft_sampling is None else self.draft_sampling
        verifier = self._rule(drafter, sampling)
        vocab = target.config.vocab_size
        prompts = as_prompts(prompts, vocab)
        batch, lengths = len(prompts), np.array([len(p) for p in prompts], np.int32)
        sampling, draft_sampling = sampling.per_row(batch), draft_sampling.per_row(batch)
        limits = as_limits(self.max_new_tokens, batch)
        stop_ids = as_stop_ids(self.stop_ids, vocab)
        penalties = None
        if self.penalties is not None and self.penalties.on:
            penalties = self.penalties.per_row(batch)
            check_penalties(penalties, stop_ids, limits, vocab)
        decoder = check_pair(target, drafter, self.drafter_params, verifier, sampling, draft_sampling)
        check_context(decoder, lengths, limits)
        inputs = Inputs(
            target_params=target.params,
            drafter_params=self.drafter_params,
            sampling=sampling,
            draft_sampling=draft_sampling,
            stop_ids=jnp.asarray(stop_ids),
            penalties=penalties,
            stop_tables=None if self.stop_strings is None else self.stop_strings.tables(vocab),
        )
        return Resolved(decoder, inputs, prompts, lengths, limits)

    def _rule(self, drafter: Drafter, sampling: Sampling) -> Verifier:
        verifier = self.verifier
        if verifier is None:
            verifier = "token" if drafter.topology.is_chain else "multi_round"
            if drafter == Empty():
                verifier = "greedy" if sampling.greedy else "coupled"  # the same text; greedy needs no noise
        if isinstance(verifier, str):
            if verifier not in VERIFIERS:
                raise ValueError(f"unknown verifier {verifier!r}; known are {', '.join(VERIFIERS)}")
            verifier = VERIFIERS[verifier]()
        if isinstance(verifier, type) or not isinstance(verifier, Verifier):
            raise ValueError(f"verifier must be a rule such as TokenRule(), or the name of one; got {verifier!r}")
        return verifier


@dataclasses.dataclass(frozen=True, eq=False)
class Resolved:
    """A checked request.

    Attributes:
        decoder: the static description.
        inputs: what stays the same over all rounds, with one value per row.
        prompts: per row, int32 ids.
        lengths: [B] of the prompts.
        limits: [B] new tokens allowed.
    """

    decoder: Decoder
    inputs: Inputs
    prompts: list[np.ndarray]
    lengths: np.ndarray
    limits: np.ndarray

    def padded(self, width: int) -> np.ndarray:
        """The prompts, [B, width]."""
        return np.stack([np.pad(prompt, (0, width - len(prompt))) for prompt in self.prompts])
