"""One round: draft, verify with one padded target forward, commit."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.accounting import judged, log_probabilities
from specjax.decoding.forward import target_forward_in_widths
from specjax.decoding.state import Counts, Decoder, Finish, Origin, State
from specjax.decoding.stop_strings import StopProgress, StopTables
from specjax.keys import Noise
from specjax.penalties import Penalties
from specjax.protocol import Committed, Context, Proposal, Verdict
from specjax.sampling import Sampling, first_max


@struct.dataclass
class Inputs:
    """What stays the same over all rounds of a call.

    Attributes:
        target_params, drafter_params: parameters.
        sampling: the target's Sampling; draft_sampling: the drafter's.
        stop_ids: [S] ids that end a row, padded with -1.
        penalties: with one value per row; None for none.
        stop_tables: of the stop strings; None for none.
    """

    target_params: dict
    drafter_params: dict | None
    sampling: Sampling
    draft_sampling: Sampling
    stop_ids: Int[Array, "S"]
    penalties: Penalties | None = None
    stop_tables: StopTables | None = None


def decode_round(decoder: Decoder, inputs: Inputs, state: State) -> State:
    """Run one round for every live row; finished rows come back unchanged."""
    noise = Noise(state.row_keys, state.length, decoder.verifier.stream)
    proposal, draft_state, cache = decoder.drafter.propose(
        inputs.drafter_params, state.draft_state, drafting_context(decoder, inputs, state), noise
    )
    proposal = mask_proposal(proposal, state, inputs)

    logits, cache, features = target_forward_in_widths(
        decoder.target,
        inputs.target_params,
        state.pending,
        proposal,
        cache.rollback(state.length - 1),
        decoder.drafter.feature_layers,
        decoder.drafter.widths,
    )
    p = target_laws(inputs, state, proposal, logits)
    verdict = decoder.verifier.verify(p, proposal, noise)
    return commit(decoder, inputs, state, proposal, verdict, p, logits, cache, features, draft_state)


def drafting_context(decoder: Decoder, inputs: Inputs, state: State) -> Context:
    """What the drafter sees of the state."""
    return Context(
        tokens=state.tokens,
        length=state.length,
        sampling=inputs.draft_sampling,
        target_params=inputs.target_params,
        target_cache=state.target_cache,
        live=state.live,
        buffer_length=state.tokens.shape[1] - decoder.drafter.draft_length - 1,
    )


def mask_proposal(proposal: Proposal, state: State, inputs: Inputs) -> Proposal:
    """Invalidate passengers, nodes of finished rows, nodes past the row's limit, nodes behind a stop token or a
    completed stop string, and whatever hangs on an invalid node.

    A round emits one token more than it accepts, so a node may be at most `remaining - 1` deep. The limit lies within
    both models' contexts, hence so does every valid node.
    """
    topology, depths = proposal.topology, proposal.node_depths[:, 1:]
    above = proposal.node_ancestors[:, 1:, 1:] & ~np.eye(topology.num_nodes, dtype=bool)
    ends = is_stop(proposal.tokens, inputs.stop_ids)
    if inputs.stop_tables is not None:
        completed = inputs.stop_tables.at_nodes(
            state.stop.state, proposal.tokens, proposal.node_parents, topology.max_depth
        )
        ends |= (completed > 0) & strings_count(inputs, state.counts.emitted[:, None] + depths)
    stopped = jnp.any(ends[:, None] & above, -1)
    in_reach = depths <= (state.limit - state.length - 1)[:, None]
    candidate = np.arange(topology.num_nodes) < topology.num_nodes - topology.passengers
    valid = proposal.valid & candidate & state.live[:, None] & in_reach & ~stopped
    return proposal.replace(valid=valid & ~jnp.any(~valid[:, None] & above, -1))


def is_stop(tokens: Int[Array, "*n"], stop_ids: Int[Array, "S"]) -> Bool[Array, "*n"]:
    return jnp.any(tokens[..., None] == stop_ids, -1)


def strings_count(inputs: Inputs, number: Int[Array, "B T"]) -> Bool[Array, "B T"] | bool:
    """Whether a stop string that is completed in a row's `number`-th new token (from 1) ends the row."""
    if inputs.penalties is None or inputs.penalties.min_new_tokens is None:
        return True
    return number >= inputs.penalties.min_new_tokens[:, None]


def target_laws(
    inputs: Inputs, state: State, proposal: Proposal, logits: Float[Array, "B M V"]
) -> Float[Array, "B M V"]:
    """The target's laws behind the root and the nodes: penalties over each node's own ancestors, then Sampling."""
    if inputs.penalties is not None:
        logits = inputs.penalties.apply(
            logits, state.history, proposal.tokens, proposal.node_ancestors, state.counts.emitted, inputs.stop_ids
        )
    return inputs.sampling.law(logits)


def commit(
    decoder: Decoder,
    inputs: Inputs,
    state: State,
    proposal: Proposal,
    verdict: Verdict,
    p: Float[Array, "B M V"],
    logits: Float[Array, "B M V"],
    cache,
    features,
    draft_state,
) -> State:
    """Append what was accepted and the next token, up to and including the first that ends the row."""
    n = verdict.num_accepted.astype(jnp.int32)
    steps = jnp.arange(proposal.topology.max_depth + 1, dtype=jnp.int32)
    # sources[:, j] is the node whose law emitted the j-th token: the root, then the accepted path.
    sources = jnp.pad(verdict.path, ((0, 0), (1, 0)))
    sources = jnp.where(steps <= n[:, None], sources, 0)
    drafted = jnp.take_along_axis(jnp.pad(proposal.tokens, ((0, 0), (1, 0))), jnp.roll(sources, -1, 1), 1)
    emitted = jnp.where(steps == n[:, None], verdict.next_token[:, None], drafted)

    stops = is_stop(emitted, inputs.stop_ids) & (steps <= n[:, None])
    if inputs.stop_tables is not None:
        states, completed = inputs.stop_tables.along(state.stop.state, emitted)
        completed = jnp.where(strings_count(inputs, state.counts.emitted[:, None] + steps + 1), completed, 0)
        stops |= (completed > 0) & (steps <= n[:, None])
    stopped = jnp.any(stops, -1)
    count = jnp.where(stopped, jnp.argmax(stops, -1).astype(jnp.int32) + 1, n + 1)
    count = jnp.where(state.live, count, 0)
    length = state.length + count
    finish = jnp.where(stopped, Finish.STOP, jnp.where(length >= state.limit, Finish.LENGTH, Finish.RUNNING))
    finish = jnp.where(state.live, finish, state.finish).astype(jnp.int32)

    attempts, overlaps = judged(p, proposal, verdict)
    ending = jnp.where(jnp.any(attempts & (steps[1:] == n[:, None] + 1), -1), Origin.CORRECTION, Origin.BONUS)
    origins = jnp.where(steps == n[:, None], ending[:, None], Origin.DRAFTED)

    stop = state.stop
    if inputs.stop_tables is not None:
        last = jnp.maximum(count - 1, 0)[:, None]
        take = lambda new, old: jnp.where(state.live, jnp.take_along_axis(new, last, 1)[:, 0], old)  # noqa: E731
        stop = StopProgress(take(states, stop.state), take(completed, stop.string))

    append = jax.vmap(
        lambda buffer, new, at: jax.lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), at, 0)
    )
    committed = Committed(
        tokens=emitted,
        features=None if features is None else jnp.take_along_axis(features, sources[..., None], 1),
        count=count,
        nodes=sources,
        passengers=_passengers(logits, proposal),
    )
    if not proposal.topology.is_chain:
        cache = cache.compact(state.length - 1, sources[:, 1:])
    return State(
        tokens=append(state.tokens, emitted, state.length),
        logprobs=append(state.logprobs, log_probabilities(logits, sources, emitted), state.length),
        origins=append(state.origins, origins, state.length),
        length=length,
        limit=state.limit,
        finish=finish,
        row_keys=state.row_keys,
        target_cache=cache.rollback(length - 1),
        draft_state=decoder.drafter.commit(inputs.drafter_params, draft_state, committed),
        counts=Counts(
            rounds=state.counts.rounds + state.live,
            drafted=state.counts.drafted + jnp.sum(proposal.valid, -1, dtype=jnp.int32),
            accepted=state.counts.accepted + n,
            emitted=state.counts.emitted + count,
            attempts=state.counts.attempts + attempts,
            acceptances=state.counts.acceptances + (steps[1:] <= n[:, None]),
            overlap_sum=state.counts.overlap_sum + overlaps.astype(jnp.float32),
        ),
        history=None if state.history is None else state.history.add(emitted, count),
        stop=stop,
    )


def _passengers(logits: Float[Array, "B M V"], proposal: Proposal) -> Int[Array, "B P"] | None:
    """The target's most probable token behind each passenger."""
    count = proposal.topology.passengers
    return first_max(logits[:, -count:]) if count else None
