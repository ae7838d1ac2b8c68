"""What the parts of a round cost, each measured alone in one jitted loop on the real state of a real call.

    draft      propose + commit of the drafter
    verify     target forward of w tokens, their laws and the rule's verdict, for any width w
    ideal      draft and verify together, and nothing else: no buffers, counts, log-probabilities or stopping

A loop's input changes from turn to turn, so that XLA cannot move a part of it out of the loop.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.decoding.generate import Run
from specjax.decoding.round import Inputs, drafting_context
from specjax.decoding.state import Decoder, State
from specjax.keys import Noise
from specjax.models.transformer import apply
from specjax.protocol import Committed, Proposal, Topology


def probes(run: Run, widths: tuple[int, ...], turns: int) -> dict[str, Callable[[], jax.Array]]:
    """Thunks that repeat one part `turns` times, for `timing.interleave`: "draft", "ideal" and "verify w" per width.

    A drafter without depth has only "verify" thunks.
    """
    arguments = run.decoder, turns
    thunks = {}
    if run.decoder.drafter.draft_length:
        thunks["draft"] = lambda: _draft(*arguments, run.inputs, run.state)
        thunks["ideal"] = lambda: _ideal(*arguments, run.inputs, run.state)
    for width in widths:
        thunks[f"verify {width}"] = functools.partial(_verify, *arguments, width, run.inputs, run.state)
    return thunks


def _noise(decoder: Decoder, state: State, turn) -> Noise:
    return Noise(state.row_keys, state.length + turn, decoder.verifier.stream)


def _with_pending(state: State, token) -> State:
    rows = jnp.arange(token.shape[0])
    return state.replace(tokens=state.tokens.at[rows, state.length - 1].set(token))


def _propose(decoder: Decoder, inputs: Inputs, state: State, turn):
    """A proposal and the state after it, as if one token of it had been committed."""
    context = drafting_context(decoder, inputs, state)
    noise = _noise(decoder, state, turn)
    proposal, draft_state, cache = decoder.drafter.propose(inputs.drafter_params, state.draft_state, context, noise)
    depth = proposal.topology.max_depth
    committed = Committed(jnp.pad(proposal.tokens[:, :depth], ((0, 0), (0, 1))), None, jnp.ones_like(state.length))
    draft_state = decoder.drafter.commit(inputs.drafter_params, draft_state, committed)
    return proposal, state.replace(draft_state=draft_state, target_cache=cache)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draft(decoder: Decoder, turns: int, inputs: Inputs, state: State):
    def body(turn, carry):
        state, _ = carry
        proposal, state = _propose(decoder, inputs, state, turn)
        return _with_pending(state, proposal.tokens[:, 0]), (proposal.tokens, proposal.law)

    proposal, state = _propose(decoder, inputs, state, 0)
    return jax.lax.fori_loop(0, turns, body, (state, (proposal.tokens, proposal.law)))[1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ideal(decoder: Decoder, turns: int, inputs: Inputs, state: State):
    def body(turn, state):
        proposal, state = _propose(decoder, inputs, state, turn)
        verdict, cache = _judge(decoder, inputs, state, state.pending, proposal, turn)
        return _with_pending(state.replace(target_cache=cache), verdict.next_token)

    return jax.lax.fori_loop(0, turns, body, state).tokens


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _verify(decoder: Decoder, turns: int, width: int, inputs: Inputs, state: State):
    batch, vocab = state.length.shape[0], decoder.target.vocab_size
    shape = batch, width - 1
    law = None if inputs.draft_sampling.greedy or width == 1 else jnp.full((*shape, vocab), 1 / vocab, jnp.float32)

    def body(turn, carry):
        nodes, cache = carry
        proposal = Proposal(nodes[:, 1:], law, jnp.ones(shape, bool), Topology.chain(width - 1))
        verdict, cache = _judge(decoder, inputs, state.replace(target_cache=cache), nodes[:, 0], proposal, turn)
        return (nodes + verdict.next_token[:, None] + 1) % vocab, cache

    nodes = jnp.broadcast_to(state.pending[:, None], (batch, width))
    return jax.lax.fori_loop(0, turns, body, (nodes, state.target_cache))[0]


def _judge(decoder: Decoder, inputs: Inputs, state: State, pending, proposal: Proposal, turn):
    nodes = jnp.concatenate([pending[:, None], proposal.tokens], 1)
    cache = state.target_cache.rollback(state.length - 1)
    logits, cache, _ = apply(decoder.target, inputs.target_params, nodes, cache)
    p = inputs.sampling.law(logits)
    return decoder.verifier.verify(p, proposal, _noise(decoder, state, turn)), cache.rollback(state.length - 1)
