"""Suffix matching: the longest end of the text that occurred before, and what mostly followed there."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters.arguments import check_draft_length, check_matches
from specjax.drafters.corpus_index import check_corpus_index, longest_in_corpus, spread_over
from specjax.drafters.matching import VOTERS, latest, match_lengths, vote
from specjax.protocol import FIXED, Proposal
from specjax.topology import Topology


@dataclasses.dataclass(frozen=True)
class Suffix:
    """Drafts token by token the most frequent continuation of the longest end of the text that occurred before.

        ... b c d e ... b c d f ... b c d e ... b c d        after "b c d": e twice, f once; draft e, score 2/3
                  ^                       ^                  and go on with the two occurrences that e left

    Occurrences are sought in the row's own text and, given a corpus index (`build_corpus_index`) as parameters, in a
    fixed corpus. The source with the longer match decides; with equally long ones the counts of both are added. Each
    source sends at most 64 occurrences: the latest of the own text, an even sample of those in the corpus. The draft
    ends where no occurrence goes on, or before the token at which the product of the frequencies, an estimate of the
    probability that all up to it are right, falls below `min_score`. Where nothing matches, nothing is proposed.
    Deterministic, so q is one-hot, and dropping a token by its score leaves the law alone.

    Attributes:
        draft_length: γ >= 1, the most that is drafted.
        max_match: longest end that is sought, at least `min_match`; the cost in the own text is `max_match`
            comparisons per buffer slot, in the corpus max_match² per step of a binary search.
        min_match: shortest end that counts, at least 1.
        min_score: in [0, 1].
        vocab_size: the target's, against which a corpus's ids are checked; None without a corpus.

    Raises:
        ValueError: a number outside its range.

    Reference:
        Oliaro et al., SuffixDecoding, 2024 (arXiv 2411.04975), which keeps suffix trees instead.
    """

    draft_length: int
    max_match: int = 16
    min_match: int = 1
    min_score: float = 0.1
    vocab_size: int | None = None

    siblings = FIXED
    feature_layers = ()
    context_length = None
    target = None

    def __post_init__(self):
        check_draft_length(self.draft_length)
        check_matches(self.min_match, self.max_match)
        if not 0 <= self.min_score <= 1:
            raise ValueError(f"min_score must be in [0, 1]; got {self.min_score}")

    @property
    def topology(self) -> Topology:
        return Topology.chain(self.draft_length)

    @property
    def widths(self) -> tuple[int, ...]:
        """Scores end many drafts early, so a long one has a width for its first half."""
        half = (self.draft_length // 2 + 1,) if self.draft_length >= 4 else ()
        return (1, *half, self.draft_length + 1)

    def check_params(self, params) -> None:
        if (params is None) != (self.vocab_size is None):
            raise ValueError(
                "a suffix drafter takes a corpus index and vocab_size, or neither; "
                f"got vocab_size {self.vocab_size} and {'no' if params is None else 'an'} index"
            )
        if params is not None:
            check_corpus_index(params, self.vocab_size)

    def init(self, params, context):
        return None

    def propose(self, params, state, context, noise):
        tokens, valid, _ = self.continuation(params, context)
        return Proposal(tokens, None, valid, self.topology, FIXED), state, context.target_cache

    def continuation(self, params, context) -> tuple[Int[Array, "B N"], Bool[Array, "B N"], Float[Array, "B N"]]:
        """(tokens, which of them are drafted, their scores): what mostly followed, from the committed text alone."""
        read, voting = self._occurrences(params, context)
        score = jnp.ones(context.length.shape, jnp.float32)
        drafted = []
        for step in range(self.draft_length):
            following, exists = read(step)
            voting &= exists
            winner, votes, total = vote(following, voting)
            token = jnp.take_along_axis(following, winner[:, None], 1)
            score = score * votes / jnp.maximum(total, 1)
            keep = (total > 0) & (score >= self.min_score)
            voting &= (following == token) & keep[:, None]
            drafted.append((token[:, 0], keep, score))
        return tuple(jnp.stack(column, 1) for column in zip(*drafted, strict=True))

    def commit(self, params, state, committed):
        return state

    def _occurrences(self, index, context):
        """(read, voting [B, K]): `read(i)` gives the i-th token behind each occurrence, and whether there is one."""
        lengths = match_lengths(context.tokens, context.length, self.max_match)
        matched = jnp.max(lengths, -1)
        begin = latest((lengths == matched[:, None]) & (matched >= self.min_match)[:, None], VOTERS)

        def read_own(step: int) -> tuple[Int[Array, "B K"], Bool[Array, "B K"]]:
            at = jnp.maximum(begin, 0) + step
            exists = at < context.length[:, None]
            return jnp.take_along_axis(context.tokens, jnp.where(exists, at, 0), 1), exists

        if index is None:
            return read_own, begin >= 0
        corpus, order = index["tokens"], index["suffix_array"]
        size = corpus.shape[0]
        in_corpus, first, last = longest_in_corpus(index, context.tokens, context.length, self.max_match)
        places = spread_over(first, last, VOTERS)
        behind = order[jnp.maximum(places, 0)] + in_corpus[:, None]

        def read(step: int) -> tuple[Int[Array, "B K"], Bool[Array, "B K"]]:
            own, exists = read_own(step)
            at = behind + step
            token = corpus[jnp.minimum(at, size - 1)]
            return jnp.concatenate([own, token], 1), jnp.concatenate([exists, at < size], 1)

        own_counts = (begin >= 0) & (matched >= in_corpus)[:, None]
        corpus_counts = (places >= 0) & (in_corpus >= jnp.maximum(matched, self.min_match))[:, None]
        return read, jnp.concatenate([own_counts, corpus_counts], 1)
