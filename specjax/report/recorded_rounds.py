"""Rounds of real decoding on file: p, q and the drafts, so that rules can be compared later without a model."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.forward import target_forward
from specjax.decoding.round import Inputs, drafting_context, mask_proposal, target_laws
from specjax.decoding.run import Run
from specjax.decoding.state import Decoder, State
from specjax.keys import Noise
from specjax.protocol import Proposal
from specjax.topology import Topology


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedRounds:
    """R rounds, of all rows of a call, on the host.

    Attributes:
        p: [R, N + 1, V] the target's laws behind the root and the nodes.
        law: [R, N, V] the laws the nodes were drawn from, or None when they were chosen.
        tokens, valid: [R, N].
        prompt: [R] which prompt each round belongs to, for intervals over prompts.
        topology: static.
        siblings: how the children of a node relate.
    """

    p: np.ndarray
    law: np.ndarray | None
    tokens: np.ndarray
    valid: np.ndarray
    prompt: np.ndarray
    topology: Topology
    siblings: str

    def proposal(self, nodes: np.ndarray | None = None) -> Proposal:
        """The drafts of all rounds; `nodes` [N] booleans keeps only some of them (with all their ancestors).

        Raises:
            ValueError: a node without its parent.
        """
        valid = self.valid
        if nodes is not None:
            orphan = [n + 1 for n, parent in enumerate(self.topology.parents) if nodes[n] and parent and
                      not nodes[parent - 1]]  # fmt: skip
            if orphan:
                raise ValueError(f"node {orphan[0]} is kept without its parent; keep whole paths from the root")
            valid = valid & nodes
        law = None if self.law is None else jnp.asarray(self.law)
        return Proposal(jnp.asarray(self.tokens), law, jnp.asarray(valid), self.topology, self.siblings)

    def save(self, path) -> None:
        """One .npz file."""
        arrays = {"p": self.p, "tokens": self.tokens, "valid": self.valid, "prompt": self.prompt}
        if self.law is not None:
            arrays["law"] = self.law
        np.savez(path, parents=np.array(self.topology.parents, int), siblings=np.array(self.siblings), **arrays)

    @classmethod
    def load(cls, path) -> "RecordedRounds":
        """What `save` wrote.

        Raises:
            ValueError: no such file, or not one of ours.
        """
        try:
            with np.load(Path(path)) as file:
                arrays = dict(file)
            topology = Topology(tuple(int(parent) for parent in arrays.pop("parents")))
            siblings = str(arrays.pop("siblings"))
            return cls(law=arrays.pop("law", None), topology=topology, siblings=siblings, **arrays)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no recorded rounds: {error}") from None


def record_rounds(target, prompts, **options) -> RecordedRounds:
    """Decodes like `generate` with these options and keeps p, q and the drafts of every round of every live row.

    Raises:
        ValueError: what `generate` raises; a drafter whose tree changes from round to round, or with passengers.
    """
    run = Run.start(target, prompts, **options)
    topology, rounds = run.decoder.drafter.topology, []
    if not topology.is_static or topology.passengers or not topology.num_nodes:
        raise ValueError("rounds are recorded for drafters with a static topology of candidates, at least one")
    while not run.finished:
        proposal, p = jax.device_get(_look(run.decoder, run.inputs, run.state))
        live = np.flatnonzero(np.asarray(run.state.live))
        rounds.append((p[live], None if proposal.law is None else proposal.law[live], proposal.tokens[live],
                       proposal.valid[live], live))  # fmt: skip
        run.advance(1)
    p, law, tokens, valid, prompt = zip(*rounds, strict=True)
    join = np.concatenate
    return RecordedRounds(
        join(p), None if law[0] is None else join(law), join(tokens), join(valid), join(prompt), topology,
        proposal.siblings,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def _look(decoder: Decoder, inputs: Inputs, state: State):
    """The round that comes next, not committed: its masked proposal and the target's laws."""
    noise = Noise(state.row_keys, state.length, decoder.verifier.stream)
    proposal, _, cache = decoder.drafter.propose(
        inputs.drafter_params, state.draft_state, drafting_context(decoder, inputs, state), noise
    )
    proposal = mask_proposal(proposal, state, inputs)
    cache = cache.rollback(state.length - 1)
    logits, _, _ = target_forward(decoder.target, inputs.target_params, state.pending, proposal, cache)
    return proposal.replace(hidden=None), target_laws(inputs, state, proposal, logits)
