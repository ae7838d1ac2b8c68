"""Prompt lookup: what followed when the last few tokens occurred before (Saxena, Prompt Lookup Decoding, 2023)."""

import dataclasses

import jax.numpy as jnp

from specjax.drafters.arguments import check_draft_length, check_matches
from specjax.drafters.matching import VOTERS, latest, match_lengths, vote
from specjax.protocol import FIXED, Proposal
from specjax.topology import Topology

CHOICES = ("latest", "most_frequent")


@dataclasses.dataclass(frozen=True)
class NGram:
    """Copies the text behind an earlier occurrence of the last n tokens, for the largest n that has one.

        a b c d e f  x  b c d          the last three tokens occurred before; drafted: e f x b c d

    The draft ends where the text does. Where nothing matches, nothing is proposed, and a round in which no row proposes
    costs one plain step. Deterministic, so q is one-hot. No parameters, no state.

    Attributes:
        draft_length: γ >= 1.
        max_match: largest n, at least `min_match`. The cost of a proposal is `max_match` comparisons per buffer slot.
        min_match: smallest n, at least 1.
        choice: which of several occurrences of the same n tokens: the "latest", or the latest of those followed by the
            "most_frequent" token (the 64 latest occurrences vote, a tie goes to the later one).
        wrap: go on past the end of the text into the draft itself, as if the text repeated itself from the occurrence
            on; a run of one token is then continued by γ of them instead of one.

    Raises:
        ValueError: a number outside its range, or an unknown choice.
    """

    draft_length: int
    max_match: int = 3
    min_match: int = 1
    choice: str = "latest"
    wrap: bool = False

    siblings = FIXED
    feature_layers = ()
    context_length = None
    vocab_size = None
    target = None

    def __post_init__(self):
        check_draft_length(self.draft_length)
        check_matches(self.min_match, self.max_match)
        if self.choice not in CHOICES:
            raise ValueError(f"choice must be {' or '.join(CHOICES)}; got {self.choice!r}")

    @property
    def topology(self) -> Topology:
        return Topology.chain(self.draft_length)

    @property
    def widths(self) -> tuple[int, ...]:
        return (1, self.draft_length + 1)

    def check_params(self, params) -> None:
        if params is not None:
            raise ValueError("the n-gram drafter takes no parameters; give drafter_params=None")

    def init(self, params, context):
        return None

    def propose(self, params, state, context, noise):
        lengths = match_lengths(context.tokens, context.length, self.max_match)
        best = jnp.maximum(jnp.max(lengths, -1, keepdims=True), self.min_match)
        if self.choice == "latest":
            begin = latest(lengths == best, 1)
        else:
            begin = latest(lengths == best, VOTERS)
            winner, _, _ = vote(jnp.take_along_axis(context.tokens, jnp.maximum(begin, 0), 1), begin >= 0)
            begin = jnp.take_along_axis(begin, winner[:, None], 1)
        found, begin = begin >= 0, jnp.maximum(begin, 0)
        steps = jnp.arange(self.draft_length)
        end = context.length[:, None]
        # An occurrence lies before the end of the text, so that the period is at least 1.
        source = begin + (steps % (end - begin) if self.wrap else steps)
        valid = found & (source < end)
        tokens = jnp.take_along_axis(context.tokens, jnp.where(valid, source, 0), 1)
        return Proposal(tokens, None, valid, self.topology, FIXED), state, context.target_cache

    def commit(self, params, state, committed):
        return state
