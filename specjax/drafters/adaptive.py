"""A smaller language model that stops drafting where it becomes unsure (compare Kangaroo, arXiv 2404.18911)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.independent import Independent
from specjax.models import KVCache
from specjax.protocol import Proposal
from specjax.sampling import Sampling, draw, first_max


@dataclasses.dataclass(frozen=True)
class Adaptive(Independent):
    """`Independent`, but a row's draft ends behind the first token with a probability below `stop_below`.

    That token is kept: dropping it because of its own probability would bias the law, while everything behind it may
    depend on it. When all live rows have stopped, neither drafter nor target runs further: the drafting is a loop of
    as many steps as the longest draft needs, and the verify takes the narrowest of three widths that holds it.

    Attributes:
        model, draft_length, target_vocab_size: as for `Independent`; the draft length is the longest.
        stop_below: in [0, 1]; compared with the token's probability under the drafter's law (at temperature 0, under
            its softmax). 0 never stops.
    """

    stop_below: float = 0.4

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.stop_below <= 1:
            raise ValueError(f"stop_below must be in [0, 1]; got {self.stop_below}")

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted({2, self.draft_length // 2 + 2, self.draft_length + 1}))

    def choose(self, logits: Float[Array, "B V"], sampling: Sampling, source):
        """(token [B], (its law or None, its probability [B]))."""
        if sampling.greedy:
            token, law = first_max(logits), None
            seen = jax.nn.softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
        else:
            law = seen = sampling.law(logits)
            token = draw(law, source)
        return token, (law, jnp.take_along_axis(seen, token[:, None], 1)[:, 0])

    def propose(self, params, state: KVCache, context, noise):
        sources = noise.draft(self.draft_length)
        token, (law, probability), cache = self.first_step(
            params, state, context, jax.tree.map(lambda x: x[0], sources)
        )
        batch, depth = token.shape[0], self.draft_length
        widen = lambda x: jnp.zeros((batch, depth, *x.shape[1:]), x.dtype).at[:, 0].set(x)  # noqa: E731
        tokens, laws = widen(token), jax.tree.map(widen, law)
        length = jnp.ones(batch, jnp.int32)  # of each row's draft
        going = (probability >= self.stop_below) & context.live

        def more(carry):
            step, _, _, _, going, _ = carry
            return (step < depth) & jnp.any(going)

        def body(carry):
            step, tokens, laws, length, going, cache = carry
            source = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, step, 0, keepdims=False), sources)
            last = jax.lax.dynamic_index_in_dim(tokens, step - 1, 1, keepdims=False)
            token, (law, probability), cache = self.step(params, last, cache, context.sampling, source)
            tokens = self._put(tokens, token, step)
            laws = jax.tree.map(lambda all_, one: self._put(all_, one, step), laws, law)
            return step + 1, tokens, laws, length + going, going & (probability >= self.stop_below), cache

        carry = jnp.int32(1), tokens, laws, length, going, cache
        _, tokens, laws, length, _, cache = jax.lax.while_loop(more, body, carry)
        valid = jnp.arange(depth) < length[:, None]
        return Proposal(tokens, laws, valid, self.topology), cache, context.target_cache

    @staticmethod
    def _put(buffer: Float[Array, "B D *v"] | Int[Array, "B D"], new, step):
        return jax.lax.dynamic_update_slice_in_dim(buffer, new[:, None].astype(buffer.dtype), step, 1)
