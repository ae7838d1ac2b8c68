"""One generation, round by round: what was drafted, with which p and q, what was accepted, what was emitted."""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import Origin
from specjax.decoding.round import Inputs, decode_round
from specjax.decoding.run import Run
from specjax.decoding.state import Decoder, State
from specjax.models import LanguageModel
from specjax.protocol import Proposal, Verdict, Verifier, node_laws, token_probabilities

ACCEPTED, REJECTED, BEHIND = "accepted", "rejected", "behind a rejection"


@dataclasses.dataclass(frozen=True)
class DraftedNode:
    """One drafted token that could have been accepted.

    Attributes:
        token: its id.
        node, parent: its number in the proposal, from 1, and its parent's; 0 is the token before the draft.
        depth: place in the draft, from 1.
        p: the target's law of it, after temperature, filters and penalties.
        q: the law it was drawn from; 1 for a token that was chosen.
        fate: ACCEPTED, REJECTED, or BEHIND: never tried or not kept, because of what happened before it.
    """

    token: int
    node: int
    parent: int
    depth: int
    p: float
    q: float
    fate: str

    @property
    def acceptance(self) -> float:
        """min(1, p/q): the probability with which the token rule accepts it when it comes to it."""
        return 0.0 if self.p == 0 else min(1.0, self.p / self.q)


@dataclasses.dataclass(frozen=True)
class EmittedToken:
    """One token that the user received: its id, its origin, and the target's log-probability (temperature 1)."""

    token: int
    origin: Origin
    logprob: float


@dataclasses.dataclass(frozen=True)
class TracedRound:
    """One target call: the valid drafts in the order of their numbers, and what was emitted."""

    drafted: tuple[DraftedNode, ...]
    emitted: tuple[EmittedToken, ...]

    @property
    def accepted(self) -> tuple[DraftedNode, ...]:
        """The accepted path, from the root down."""
        return tuple(node for node in self.drafted if node.fate == ACCEPTED)


@dataclasses.dataclass(frozen=True)
class Trace:
    """All rounds of one row.

    Attributes:
        prompt: ids of the prompt.
        rounds: in order.
        finish: why it ended.
        drafter, verifier: names of the family and of the rule.
        temperature: of the target.
    """

    prompt: tuple[int, ...]
    rounds: tuple[TracedRound, ...]
    finish: str
    drafter: str
    verifier: str
    temperature: float

    @property
    def emitted(self) -> tuple[EmittedToken, ...]:
        """The text, token by token."""
        return tuple(token for one in self.rounds for token in one.emitted)


def record_trace(target: LanguageModel, prompt, **options) -> Trace:
    """Decodes one prompt like `generate` with these options, and keeps what every round drafted and decided.

    The rounds are those of the loop itself, run one at a time; with the same options `generate` emits the same text.
    Any drafter and rule; for a tree the accepted path is marked.

    Args:
        target: the model.
        prompt: its ids.
        **options: of `generate`.

    Raises:
        ValueError: what `generate` raises.
    """
    run = Run.start(target, [prompt], **options)
    rounds = []
    while not run.finished:
        begin = int(run.state.length[0])
        run.state, seen = _traced_round(run.decoder, run.inputs, run.state)
        rounds.append((begin, jax.tree.map(lambda leaf: leaf[0], jax.device_get(seen))))
    result = run.result()
    begins = [begin - result.prompt_lengths[0] for begin, _ in rounds] + [len(result.tokens[0])]
    emitted = [
        EmittedToken(int(token), Origin(int(origin)), float(logprob))
        for token, origin, logprob in zip(result.tokens[0], result.origins[0], result.logprobs[0], strict=True)
    ]
    traced = tuple(
        TracedRound(_nodes(seen), tuple(emitted[begins[i] : begins[i + 1]])) for i, (_, seen) in enumerate(rounds)
    )
    return Trace(
        prompt=tuple(int(token) for token in np.asarray(prompt)),
        rounds=traced,
        finish=result.finish[0],
        drafter=type(run.decoder.drafter).__name__,
        verifier=run.decoder.verifier.name,
        temperature=float(run.inputs.sampling.temperature[0]),
    )


@dataclasses.dataclass(frozen=True)
class _Witness:
    """A rule, and what it was called with: arrays of the trace in which it is called, and only valid there."""

    rule: Verifier
    seen: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    name, lossless, stream, siblings, greedy_only, trees = (
        property(operator.attrgetter(f"rule.{attribute}"))
        for attribute in ("name", "lossless", "stream", "siblings", "greedy_only", "trees")
    )

    def verify(self, p, proposal: Proposal, noise) -> Verdict:
        verdict = self.rule.verify(p, proposal, noise)
        parents, depths = jnp.asarray(proposal.node_parents), jnp.asarray(proposal.node_depths)[:, 1:]
        batch = proposal.tokens.shape[0]
        self.seen.update(
            tokens=proposal.tokens,
            valid=proposal.valid,
            parents=jnp.broadcast_to(parents, (batch, *parents.shape[1:])),
            depths=jnp.broadcast_to(depths, (batch, *depths.shape[1:])),
            p=token_probabilities(node_laws(p, proposal), jnp.where(proposal.valid, proposal.tokens, 0)),
            num_accepted=verdict.num_accepted,
            path=verdict.path,
        )
        if proposal.law is not None:
            self.seen["q"] = token_probabilities(proposal.law, jnp.where(proposal.valid, proposal.tokens, 0))
        return verdict


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _traced_round(decoder: Decoder, inputs: Inputs, state: State):
    """The next round and what its verifier saw. The state is donated."""
    witness = _Witness(decoder.verifier)
    state = decode_round(dataclasses.replace(decoder, verifier=witness), inputs, state)
    return state, witness.seen


def _nodes(seen: dict[str, np.ndarray]) -> tuple[DraftedNode, ...]:
    """The valid nodes of one row's round."""
    path = [int(node) for node in seen["path"][: int(seen["num_accepted"])]]
    kept_child = {int(seen["parents"][node - 1]): node for node in path}
    q = seen.get("q", np.ones(len(seen["tokens"])))
    nodes = []
    for i in np.flatnonzero(seen["valid"]):
        number, parent = int(i) + 1, int(seen["parents"][i])
        if number in path:
            fate = ACCEPTED
        else:
            reached = parent in (0, *path)
            fate = REJECTED if reached and number < kept_child.get(parent, number + 1) else BEHIND
        nodes.append(
            DraftedNode(
                int(seen["tokens"][i]), number, parent, int(seen["depths"][i]), float(seen["p"][i]), float(q[i]), fate
            )
        )
    return tuple(nodes)
