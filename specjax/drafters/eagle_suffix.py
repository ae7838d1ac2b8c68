"""EAGLE for what is new and suffix matching for what repeats (the hybrid of SuffixDecoding, arXiv 2411.04975)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.drafters.arguments import check_draft_length
from specjax.drafters.eagle import Eagle, draft_chain
from specjax.drafters.eagle_pairs import EagleDrafter, Pairs
from specjax.drafters.suffix import Suffix
from specjax.protocol import IID, Drafter, Proposal
from specjax.topology import Topology


@dataclasses.dataclass(frozen=True)
class EagleSuffix(EagleDrafter):
    """Copies where the end of the text occurred before, and drafts a shorter chain by the network where it did not.

    What a copy would have accepted is estimated from the text alone: the sum of its tokens' scores, each the product of
    the frequencies up to it. From `min_expected` on a row copies. That looks at no draw of this round, so q is the
    network's law in one case and one-hot in the other, and the output law stays the target's. In a round in which all
    live rows copy, the network drafts nothing; it still reads what was committed.

    Attributes:
        model: the network, trained as for `Eagle`; parameters are its own.
        suffix: what copies, without a corpus; its draft length is γ, the longest draft.
        steps: tokens that the network drafts, 1 to γ.
        min_expected: tokens, >= 0; 0 copies wherever anything matches, more than γ never does.

    Raises:
        ValueError: a number outside its range, or a corpus.
    """

    suffix: Suffix = Suffix(10, min_match=3)
    steps: int = 4
    min_expected: float = 2.0

    siblings = IID

    def __post_init__(self):
        check_draft_length(self.steps)
        if self.steps > self.draft_length:
            raise ValueError(f"steps must be at most the suffix's draft length {self.draft_length}; got {self.steps}")
        if self.suffix.vocab_size is not None:
            raise ValueError("the suffix part of EagleSuffix takes no corpus; leave out its vocab_size")
        if not self.min_expected >= 0:
            raise ValueError(f"min_expected must be at least 0; got {self.min_expected}")

    @classmethod
    def of(cls, drafter: Drafter, **options) -> "EagleSuffix":
        """With the network of a chain drafter, its draft length being `steps`."""
        if not isinstance(drafter, Eagle):
            raise ValueError(f"copying is joined to an EAGLE chain; got {type(drafter).__name__}")
        suffix = options.pop("suffix", cls.suffix)
        if suffix.draft_length < drafter.draft_length:
            suffix = dataclasses.replace(suffix, draft_length=drafter.draft_length)
        return cls(drafter.model, suffix, drafter.draft_length, **options)

    @property
    def draft_length(self) -> int:
        return self.suffix.draft_length

    @property
    def topology(self) -> Topology:
        return Topology.chain(self.draft_length)

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted({self.steps + 1, self.draft_length + 1}))

    def propose(self, params, state: Pairs, context, noise):
        tokens, found, scores = self.suffix.continuation(None, context)
        copies = found[:, 0] & (jnp.sum(jnp.where(found, scores, 0), -1) >= self.min_expected)
        out, cache, some = self.catch_up(params, state, context.target_params)
        sources = jax.tree.map(lambda x: x[: self.steps], noise.draft(self.draft_length))

        def draft(cache):
            return draft_chain(self.model, params, context, out, cache, sources)

        def once(carry):
            return jnp.bool_(True), *draft(carry[-1])

        # A `while_loop` of at most one trip: a `cond` would copy the cache that it carries.
        new, law, _ = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(draft, cache))
        carry = jnp.all(copies | ~context.live), new, law, cache
        _, new, law, cache = jax.lax.while_loop(lambda carry: ~carry[0], once, carry)

        widen = lambda x: jnp.pad(x, ((0, 0), (0, self.draft_length - self.steps)) + ((0, 0),) * (x.ndim - 2))  # noqa: E731
        mine = copies[:, None]
        tokens = jnp.where(mine, tokens, widen(new))
        if law is not None:
            one_hot = jax.nn.one_hot(tokens, law.shape[-1], dtype=law.dtype)
            law = jnp.where(mine[..., None], one_hot, widen(law))
        valid = jnp.where(mine, found, some & (jnp.arange(self.draft_length) < self.steps))
        proposal = Proposal(tokens, law, valid, self.topology)
        return proposal, self.put_back(state, cache), context.target_cache
