"""A call in progress, from step to step, and from one turn of a chat to the next."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.checks import check_type
from specjax.decoding.generation import Generation
from specjax.decoding.prefill import Features, bucket_shapes, prefill, resume, reusable
from specjax.decoding.request import Request, Resolved
from specjax.decoding.round import Inputs, decode_round
from specjax.decoding.state import Decoder, Finish, State
from specjax.keys import row_keys
from specjax.models import LanguageModel


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def decode(decoder: Decoder, inputs: Inputs, state: State, max_rounds) -> State:
    """Rounds until every row has finished, or `max_rounds` of them. The state is donated: its buffers are reused."""

    def body(carry):
        rounds, state = carry
        return rounds + 1, decode_round(decoder, inputs, state)

    return jax.lax.while_loop(
        lambda carry: (carry[0] < max_rounds) & jnp.any(carry[1].live), body, (jnp.int32(0), state)
    )[1]


class Run:
    """A call in progress: its state stays on the device and is handed on from step to step.

    Attributes:
        decoder, inputs: what is the same in all rounds.
        state: of the last round; None once a later run has taken it over.
        prompt_lengths: [B].
        features: [B, P, F] the prompts' features, for a later run; None for a drafter that wants none.
        stop_strings: names of the strings that `state.stop` counts from 1.
        reused: [B] prompt tokens that were not read again.
        prefill_seconds, decode_seconds: wall clock so far.
    """

    def __init__(
        self,
        decoder: Decoder,
        inputs: Inputs,
        state: State,
        prompt_lengths: np.ndarray,
        prefill_seconds: float,
        *,
        features: Features = None,
        stop_strings: tuple[str, ...] = (),
        reused: np.ndarray | None = None,
    ):
        self.decoder, self.inputs, self.state = decoder, inputs, state
        self.prompt_lengths, self.features, self.stop_strings = prompt_lengths, features, stop_strings
        self.reused = np.zeros_like(prompt_lengths) if reused is None else reused
        self.prefill_seconds, self.decode_seconds = prefill_seconds, 0.0

    @classmethod
    def start(cls, target: LanguageModel, prompts, **options) -> "Run":
        """Check everything, then prefill. Arguments and errors are those of `generate`."""
        request = Request.of(options)
        call = request.resolve(target, prompts)
        previous, batch = request.previous, len(call.prompts)
        check_type("previous", previous, cls, "Run.start(...)")
        buffer_length = request.buffer_length
        if previous is not None:
            previous._check_unused()
            needed = (call.lengths + call.limits).max()
            if buffer_length is None and needed <= previous.buffer_length <= call.decoder.context_length:
                buffer_length = previous.buffer_length
        width, buffer_length = bucket_shapes(call.decoder, call.lengths, call.limits, buffer_length)
        keys = row_keys(request.seed, batch)
        reused, rest = np.zeros(batch, np.int32), width
        if previous is not None and previous._fits(call, buffer_length):
            reused, rest = reusable(call.prompts, *previous._readable(), buffer_length)

        begin = time.perf_counter()
        ends = (call.lengths + call.limits).astype(np.int32)
        arguments = call.padded(width), call.lengths, ends, keys
        state = None if previous is None else previous.state
        if previous is not None:
            previous.state = None
        if reused.any():
            state, features = resume(
                call.decoder, buffer_length, rest, call.inputs, state.target_cache, previous.features, reused,
                *arguments,
            )  # fmt: skip
        else:
            state = None  # its memory, before the new cache takes as much again
            state, features = prefill(call.decoder, buffer_length, call.inputs, *arguments)
        jax.block_until_ready(state)
        return cls(
            call.decoder,
            call.inputs,
            state,
            call.lengths,
            time.perf_counter() - begin,
            features=features,
            stop_strings=() if request.stop_strings is None else request.stop_strings.strings,
            reused=reused,
        )

    @property
    def buffer_length(self) -> int:
        """L, tokens that fit into a row's buffers."""
        return self.state.tokens.shape[1] - self.decoder.drafter.draft_length - 1

    @property
    def finished(self) -> bool:
        self._check_unused()
        return not np.any(np.asarray(self.state.live))

    def advance(self, max_rounds: int = np.iinfo(np.int32).max) -> None:
        """Run until every row has finished, or for at most `max_rounds` rounds.

        An interrupt while it waits leaves a whole state behind: that of the rounds which were asked for.
        """
        self._check_unused()
        begin = time.perf_counter()
        try:
            self.state = decode(self.decoder, self.inputs, self.state, np.int32(max_rounds))
            jax.block_until_ready(self.state)
        finally:
            self.decode_seconds += time.perf_counter() - begin

    def result(self) -> Generation:
        """What has been generated so far."""
        self._check_unused()
        state = jax.device_get(
            self.state.replace(target_cache=None, draft_state=None, row_keys=None, history=None)
        )
        rows = list(zip(self.prompt_lengths, state.length, strict=True))
        per_row = lambda values: [values[i, begin:end] for i, (begin, end) in enumerate(rows)]  # noqa: E731
        ended_by = np.zeros(len(rows), int) if state.stop is None else state.stop.string
        return Generation(
            tokens=per_row(state.tokens),
            logprobs=per_row(state.logprobs),
            origins=per_row(state.origins),
            prompt_lengths=self.prompt_lengths,
            finish=[Finish(f).name.lower() for f in state.finish],
            stop_string=[self.stop_strings[number - 1] if number else None for number in ended_by],
            counts=state.counts,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            reused=self.reused,
        )

    def _check_unused(self) -> None:
        if self.state is None:
            raise ValueError("this run was given as `previous` and is used up; go on with the run that took it over")

    def _fits(self, call: Resolved, buffer_length: int) -> bool:
        """Whether the new call can go on with this run's cache: the same program, and the very same target."""
        ours, theirs = (jax.tree.leaves(inputs.target_params) for inputs in (self.inputs, call.inputs))
        return (
            self.decoder == call.decoder
            and self.buffer_length == buffer_length
            and len(self.prompt_lengths) == len(call.prompts)
            and all(a is b for a, b in zip(ours, theirs, strict=True))
        )

    def _readable(self) -> tuple[list[np.ndarray], np.ndarray]:
        """(per row the committed tokens, how many positions of them a later run can take over [B])."""
        tokens, lengths = jax.device_get((self.state.tokens, self.state.length))
        reach = lengths - 1
        if self.features is not None:
            # The last prompt token was pending: whether its features were read depends on the padding.
            reach = np.minimum(reach, self.prompt_lengths - 1)
        return [row[:length] for row, length in zip(tokens, lengths, strict=True)], reach
