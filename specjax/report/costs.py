"""What the parts of a round cost, each measured alone in one jitted loop on the real state of a real call.

    draft      propose + commit of the drafter
    verify     target forward of the drafter's own proposal, laws, verdict and compaction of the path
    verify w   the same for a chain of w tokens, for any width w
    ideal      draft and verify together, and nothing else: no buffers, counts, log-probabilities or stopping

A loop's input changes from turn to turn, so that XLA cannot move a part of it out of the loop.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.decoding.forward import target_forward
from specjax.decoding.round import Inputs, drafting_context, target_laws
from specjax.decoding.run import Run
from specjax.decoding.state import Decoder, State
from specjax.keys import Noise
from specjax.protocol import Committed, Proposal
from specjax.topology import Topology


def probes(run: Run, widths: tuple[int, ...], turns: int) -> dict[str, Callable[[], jax.Array]]:
    """Thunks that repeat one part `turns` times, for `timing.interleave`: those above by name.

    A drafter without depth has only "verify w" thunks.
    """
    arguments = run.decoder, turns
    thunks = {}
    if run.decoder.drafter.draft_length:
        thunks["draft"] = lambda: _draft(*arguments, run.inputs, run.state)
        thunks["ideal"] = lambda: _ideal(*arguments, run.inputs, run.state)
        thunks["verify"] = lambda: _verify(*arguments, None, run.inputs, run.state)
    for width in widths:
        thunks[f"verify {width}"] = functools.partial(_verify, *arguments, width, run.inputs, run.state)
    return thunks


def _noise(decoder: Decoder, state: State, turn) -> Noise:
    return Noise(state.row_keys, state.length + turn, decoder.verifier.stream)


def _with_pending(state: State, token) -> State:
    rows = jnp.arange(token.shape[0])
    return state.replace(tokens=state.tokens.at[rows, state.length - 1].set(token))


def _propose(decoder: Decoder, inputs: Inputs, state: State, turn):
    """A proposal and the state after it."""
    context = drafting_context(decoder, inputs, state)
    noise = _noise(decoder, state, turn)
    proposal, draft_state, cache = decoder.drafter.propose(inputs.drafter_params, state.draft_state, context, noise)
    return proposal, state.replace(draft_state=draft_state, target_cache=cache)


def _commit(decoder: Decoder, inputs: Inputs, state: State, proposal: Proposal, features) -> State:
    """The drafter's commit, as if the pending token alone had been emitted: the length must stay."""
    topology = proposal.topology
    shape = state.length.shape[0], topology.max_depth + 1
    committed = Committed(
        tokens=jnp.pad(proposal.tokens, ((0, 0), (0, 1)))[:, : shape[1]],
        features=None if features is None else features[:, : shape[1]],
        count=jnp.ones_like(state.length),
        nodes=jnp.zeros(shape, jnp.int32),
        passengers=proposal.tokens[:, -topology.passengers :] if topology.passengers else None,
    )
    return state.replace(draft_state=decoder.drafter.commit(inputs.drafter_params, state.draft_state, committed))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draft(decoder: Decoder, turns: int, inputs: Inputs, state: State):
    batch = state.length.shape[0]
    width = len(decoder.drafter.feature_layers) * decoder.target.d_model
    features = jnp.zeros((batch, decoder.drafter.topology.max_depth + 1, width), decoder.target.dtype)

    def body(turn, carry):
        state, _ = carry
        proposal, state = _propose(decoder, inputs, state, turn)
        state = _commit(decoder, inputs, state, proposal, features if width else None)
        return _with_pending(state, proposal.tokens[:, 0]), (proposal.tokens, proposal.law)

    proposal, state = _propose(decoder, inputs, state, 0)
    return jax.lax.fori_loop(0, turns, body, (state, (proposal.tokens, proposal.law)))[1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ideal(decoder: Decoder, turns: int, inputs: Inputs, state: State):
    def body(turn, state):
        proposal, state = _propose(decoder, inputs, state, turn)
        verdict, cache, features = _judge(decoder, inputs, state, state.pending, proposal, turn)
        state = _commit(decoder, inputs, state.replace(target_cache=cache), proposal, features)
        return _with_pending(state, verdict.next_token)

    return jax.lax.fori_loop(0, turns, body, state).tokens


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _verify(decoder: Decoder, turns: int, width: int | None, inputs: Inputs, state: State):
    vocab = decoder.target.vocab_size
    if width is None:
        proposal, state = _propose(decoder, inputs, state, 0)
    else:
        shape = state.length.shape[0], width - 1
        law = None if inputs.draft_sampling.greedy or width == 1 else jnp.full((*shape, vocab), 1 / vocab, jnp.float32)
        tokens = jnp.broadcast_to(state.pending[:, None], shape)
        proposal = Proposal(tokens, law, jnp.ones(shape, bool), Topology.chain(width - 1))

    def body(turn, carry):
        pending, tokens, cache = carry
        drafts = proposal.replace(tokens=tokens)
        verdict, cache, _ = _judge(decoder, inputs, state.replace(target_cache=cache), pending, drafts, turn)
        moved = verdict.next_token + 1
        return (pending + moved) % vocab, (tokens + moved[:, None]) % vocab, cache

    return jax.lax.fori_loop(0, turns, body, (state.pending, proposal.tokens, state.target_cache))[:2]


def _judge(decoder: Decoder, inputs: Inputs, state: State, pending, proposal: Proposal, turn):
    logits, cache, features = target_forward(
        decoder.target,
        inputs.target_params,
        pending,
        proposal,
        state.target_cache.rollback(state.length - 1),
        decoder.drafter.feature_layers,
    )
    p = target_laws(inputs, state, proposal, logits)
    verdict = decoder.verifier.verify(p, proposal, _noise(decoder, state, turn))
    if not proposal.topology.is_chain:
        cache = cache.compact(state.length - 1, verdict.path)
    return verdict, cache.rollback(state.length - 1), features
