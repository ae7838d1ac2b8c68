"""Generation: prefill, then the whole decoding in one jitted `lax.while_loop`."""

import dataclasses
import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.checks import as_limits, as_prompts, as_stop_ids, check_context, check_pair
from specjax.decoding.round import Inputs, decode_round
from specjax.decoding.state import Counts, Decoder, Finish, State
from specjax.drafters import Empty
from specjax.keys import row_keys
from specjax.models import LanguageModel, init_cache
from specjax.models.transformer import apply
from specjax.protocol import Context, Drafter, Verifier
from specjax.sampling import Sampling
from specjax.verifiers import VERIFIERS

Ids = Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of a call, on the host.

    Attributes:
        tokens: per row, the new tokens (without the prompt, with the stop token that ended it).
        logprobs: per row, the target's log-probabilities of them (temperature 1, no filters).
        origins: per row, the Origin of each.
        prompt_lengths: [B].
        finish: per row, "stop" or "length" ("running" in what a stream yields).
        counts: Counts of numpy arrays.
        prefill_seconds, decode_seconds: wall clock of both phases, compilation included where there was one.
    """

    tokens: list[np.ndarray]
    logprobs: list[np.ndarray]
    origins: list[np.ndarray]
    prompt_lengths: np.ndarray
    finish: list[str]
    counts: Counts
    prefill_seconds: float
    decode_seconds: float

    @property
    def lengths(self) -> np.ndarray:
        """[B] new tokens per row."""
        return np.array([len(row) for row in self.tokens])


def generate(
    target: LanguageModel,
    prompts: Sequence[Ids] | np.ndarray,
    *,
    max_new_tokens: int | Ids,
    drafter: Drafter | None = None,
    drafter_params=None,
    verifier: str | Verifier | None = None,
    sampling: Sampling | None = None,
    draft_sampling: Sampling | None = None,
    stop_ids: Ids = (),
    seed: int | Ids = 0,
    buffer_length: int | None = None,
) -> Generation:
    """Continue every prompt, drafting with `drafter` and keeping the target's law.

    Args:
        target: the model whose law is kept.
        prompts: B token sequences of any lengths >= 1.
        max_new_tokens: limit, for all rows or one per row.
        drafter, drafter_params: what proposes; None decodes target-only through the same loop.
        verifier: a rule or its name in `VERIFIERS` (default: "token", for trees "multi_round"; "coupled" without a
            drafter, so that the coupled rule repeats the target-only text of a seed token for token. The other rules
            keep the law, not the text).
        sampling: how the target's logits become a law (default: temperature 1).
        draft_sampling: the drafter's own (default: the target's).
        stop_ids: ids that end a row; the stop token itself is emitted.
        seed: one integer, or one per row; a row's text depends on its own prompt, key and limit alone. (On the round
            stream the limit counts: where it cuts a draft short, the round ends in a bonus instead of a judged draft.)
        buffer_length: tokens that fit into a row's buffers (default: the next power of two, at most the context).
            One compiled program serves all calls of one buffer length, one bucket of prompt lengths and one batch size.

    Raises:
        ValueError: anything wrong with the arguments, in one line and before compilation.
    """
    run = Run.start(
        target,
        prompts,
        max_new_tokens=max_new_tokens,
        drafter=drafter,
        drafter_params=drafter_params,
        verifier=verifier,
        sampling=sampling,
        draft_sampling=draft_sampling,
        stop_ids=stop_ids,
        seed=seed,
        buffer_length=buffer_length,
    )
    run.advance()
    return run.result()


class Run:
    """A call in progress: its state stays on the device and is handed on from step to step."""

    def __init__(
        self, decoder: Decoder, inputs: Inputs, state: State, prompt_lengths: np.ndarray, prefill_seconds: float
    ):
        self.decoder, self.inputs, self.state = decoder, inputs, state
        self.prompt_lengths, self.prefill_seconds, self.decode_seconds = prompt_lengths, prefill_seconds, 0.0

    @classmethod
    def start(
        cls,
        target: LanguageModel,
        prompts,
        *,
        max_new_tokens,
        drafter=None,
        drafter_params=None,
        verifier=None,
        sampling=None,
        draft_sampling=None,
        stop_ids=(),
        seed=0,
        buffer_length=None,
    ) -> "Run":
        """Check everything, then prefill. Arguments are those of `generate`."""
        drafter = Empty() if drafter is None else drafter
        if verifier is None:
            verifier = "token" if drafter.topology.is_chain else "multi_round"
            verifier = "coupled" if drafter == Empty() else verifier
        if isinstance(verifier, str):
            if verifier not in VERIFIERS:
                raise ValueError(f"unknown verifier {verifier!r}; known are {', '.join(VERIFIERS)}")
            verifier = VERIFIERS[verifier]()
        for name, given in (("sampling", sampling), ("draft_sampling", draft_sampling)):
            if not isinstance(given, Sampling | None):
                raise ValueError(f"{name} must be a Sampling, such as Sampling.of(temperature=0.7); got {given!r}")
        sampling = Sampling.of() if sampling is None else sampling
        draft_sampling = sampling if draft_sampling is None else draft_sampling
        prompts = as_prompts(prompts, target.config.vocab_size)
        batch, lengths = len(prompts), np.array([len(p) for p in prompts], np.int32)
        sampling, draft_sampling = sampling.per_row(batch), draft_sampling.per_row(batch)
        limits = as_limits(max_new_tokens, batch)
        decoder = check_pair(target, drafter, drafter_params, verifier, sampling, draft_sampling)
        check_context(decoder, lengths, limits)
        width, buffer_length = bucket_shapes(decoder, lengths, limits, buffer_length)
        inputs = Inputs(
            target_params=target.params,
            drafter_params=drafter_params,
            sampling=sampling,
            draft_sampling=draft_sampling,
            stop_ids=jnp.asarray(as_stop_ids(stop_ids, target.config.vocab_size)),
        )
        padded = np.stack([np.pad(p, (0, width - len(p))) for p in prompts])
        keys = row_keys(seed, batch)
        begin = time.perf_counter()
        ends = (lengths + limits).astype(np.int32)
        state = jax.block_until_ready(prefill(decoder, buffer_length, inputs, padded, lengths, ends, keys))
        return cls(decoder, inputs, state, lengths, time.perf_counter() - begin)

    def advance(self, max_rounds: int = np.iinfo(np.int32).max) -> None:
        """Run until every row has finished, or for at most `max_rounds` rounds."""
        begin = time.perf_counter()
        self.state = jax.block_until_ready(decode(self.decoder, self.inputs, self.state, np.int32(max_rounds)))
        self.decode_seconds += time.perf_counter() - begin

    @property
    def finished(self) -> bool:
        return not np.any(np.asarray(self.state.live))

    def result(self) -> Generation:
        """What has been emitted so far."""
        state = jax.device_get(self.state.replace(target_cache=None, draft_state=None, row_keys=None))
        rows = [slice(begin, end) for begin, end in zip(self.prompt_lengths, state.length, strict=True)]
        per_row = lambda buffer: [buffer[i, row] for i, row in enumerate(rows)]  # noqa: E731
        return Generation(
            tokens=per_row(state.tokens),
            logprobs=per_row(state.logprobs),
            origins=per_row(state.origins),
            prompt_lengths=self.prompt_lengths,
            finish=[Finish(f).name.lower() for f in state.finish],
            counts=state.counts,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
        )


def bucket_shapes(
    decoder: Decoder, lengths: np.ndarray, limits: np.ndarray, buffer_length: int | None
) -> tuple[int, int]:
    """(padded prompt width P, buffer length L): powers of two, so that few programs serve all prompts.

    Raises:
        ValueError: a `buffer_length` that is too small, or larger than a context.
    """
    contexts = [c for c in (decoder.target.context_length, decoder.drafter.context_length) if c is not None]
    needed, context = int((lengths + limits).max()), min(contexts)
    width = min(_power_of_two(int(lengths.max())), context)
    if buffer_length is None:
        return width, min(max(_power_of_two(needed), width), context)
    if not needed <= buffer_length <= context:
        raise ValueError(
            f"buffer_length {buffer_length} must be between {needed}, which this call needs, and {context}"
        )
    return min(width, buffer_length), buffer_length


def _power_of_two(n: int) -> int:
    return 1 << max(4, (n - 1).bit_length())


@functools.partial(jax.jit, static_argnums=(0, 1))
def prefill(decoder: Decoder, buffer_length: int, inputs: Inputs, prompts, lengths, limits, keys) -> State:
    """The state after the prompts [B, P]: all but each row's last token have been run through both models."""
    batch, width = prompts.shape
    depth = decoder.drafter.topology.max_depth
    nodes = decoder.drafter.topology.num_nodes + 1
    cache = init_cache(decoder.target, batch, buffer_length + nodes)
    _, cache, features = apply(
        decoder.target,
        inputs.target_params,
        prompts,
        cache,
        feature_layers=decoder.drafter.feature_layers,
        logits_at=jnp.zeros((batch, 0), jnp.int32),
    )
    cache = cache.rollback(lengths - 1)
    context = Context(
        tokens=prompts,
        length=lengths,
        sampling=inputs.draft_sampling,
        features=features,
        target_params=inputs.target_params,
        target_cache=cache,
        buffer_length=buffer_length,
    )
    slots = buffer_length + depth + 1
    wide = jnp.promote_types(decoder.target.dtype, jnp.float32)
    return State(
        tokens=jnp.pad(prompts, ((0, 0), (0, slots - width))),
        logprobs=jnp.zeros((batch, slots), wide),
        origins=jnp.zeros((batch, slots), jnp.int8),
        length=lengths,
        limit=limits,
        finish=jnp.zeros(batch, jnp.int32),
        row_keys=keys,
        target_cache=cache,
        draft_state=decoder.drafter.init(inputs.drafter_params, context),
        counts=Counts.zeros(batch, depth),
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def decode(decoder: Decoder, inputs: Inputs, state: State, max_rounds) -> State:
    """Rounds until every row has finished, or `max_rounds` of them. The state is donated: its buffers are reused."""

    def body(carry):
        rounds, state = carry
        return rounds + 1, decode_round(decoder, inputs, state)

    return jax.lax.while_loop(
        lambda carry: (carry[0] < max_rounds) & jnp.any(carry[1].live), body, (jnp.int32(0), state)
    )[1]
