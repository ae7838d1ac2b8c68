"""A smaller language model of its own that drafts a chain, token by token (Leviathan et al. 2023, Chen et al. 2023)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.arguments import check_draft_length, check_target_vocab_size
from specjax.models import KVCache, TransformerConfig, init_cache
from specjax.models.transformer import apply, check_params
from specjax.protocol import IID, Proposal
from specjax.sampling import Sampling
from specjax.topology import Topology


@dataclasses.dataclass(frozen=True)
class Independent:
    """Drafts γ tokens autoregressively with its own cache.

    A round leaves the cache at most one position short: when everything was accepted, the last drafted token was never
    run. The first step of the next round therefore always runs the two last committed tokens, which costs little more
    than one and needs no branch per row:

        tokens      ... a  b  r      r is pending
        cache       ... a [b]        [b] is missing after a bonus, and recomputed to the same values otherwise
        first step         b  r  ->  the law of the first draft, at r

    Attributes:
        model: the drafter's architecture.
        draft_length: γ >= 1.
        target_vocab_size: of a target with the same tokenizer whose vocabulary is padded to another size than the
            model's (None: to the same).
    """

    model: TransformerConfig
    draft_length: int
    target_vocab_size: int | None = dataclasses.field(default=None, kw_only=True)

    siblings = IID
    feature_layers = ()
    target = None

    def __post_init__(self):
        check_draft_length(self.draft_length)
        check_target_vocab_size(self.target_vocab_size)

    @property
    def topology(self) -> Topology:
        return Topology.chain(self.draft_length)

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.draft_length + 1,)

    @property
    def context_length(self) -> int:
        return self.model.context_length

    @property
    def vocab_size(self) -> int:
        return self.target_vocab_size or self.model.vocab_size

    def check_params(self, params) -> None:
        check_params(self.model, params, "drafter")

    def init(self, params, context) -> KVCache:
        return read_prompt(self, params, context, self.draft_length)

    def propose(self, params, state: KVCache, context, noise):
        def step(carry, source):
            token, cache = carry
            token, law, cache = self.step(params, token, cache, context.sampling, source)
            return (token, cache), (token, law)

        sources = noise.draft(self.draft_length)
        *first, cache = self.first_step(params, state, context, jax.tree.map(lambda x: x[0], sources))
        (_, cache), rest = jax.lax.scan(step, (first[0], cache), jax.tree.map(lambda x: x[1:], sources))
        tokens, law = jax.tree.map(
            lambda one, more: jnp.concatenate([one[:, None], more.swapaxes(0, 1)], 1), tuple(first), rest
        )
        return Proposal(tokens, law, jnp.ones(tokens.shape, bool), self.topology), cache, context.target_cache

    def first_step(self, params, state: KVCache, context, source):
        """(first draft [B], its law, cache)."""
        logits, cache = read_last_two(self, params, context, state)
        return *self.choose(logits, context.sampling, source), cache

    def step(self, params, token: Int[Array, "B"], cache: KVCache, sampling: Sampling, source):
        """(next draft [B], its law, cache)."""
        logits, cache = read(self, params, token[:, None], cache)
        return *self.choose(logits[:, 0], sampling, source), cache

    def choose(self, logits: Float[Array, "B V"], sampling: Sampling, source):
        """(token [B], the law it was drawn from; None at temperature 0)."""
        return sampling.choose(logits, source)

    def commit(self, params, state: KVCache, committed) -> KVCache:
        return state  # the next propose says itself from which position on it overwrites


def read(drafter: Any, params, tokens: Int[Array, "B T"], cache: KVCache, **kwargs) -> tuple[Any, KVCache]:
    """(logits over the target's vocabulary, cache) of a drafter's `model`; keyword arguments are those of `apply`.

    Of vocabularies padded to different sizes the longer one's last tokens occur in no text: they are never drafted, and
    read as the drafter's last one.
    """
    model, wanted = drafter.model, drafter.vocab_size
    logits, cache, _ = apply(model, params, jnp.minimum(tokens, model.vocab_size - 1), cache, **kwargs)
    missing = [(0, 0)] * (logits.ndim - 1) + [(0, max(wanted - model.vocab_size, 0))]
    return jnp.pad(logits[..., :wanted], missing, constant_values=-jnp.inf), cache


def read_prompt(drafter: Any, params, context, drafted_slots: int) -> KVCache:
    """The drafter's cache after all but the last token of the prompt, with room for what a round drafts."""
    batch = context.tokens.shape[0]
    cache = init_cache(drafter.model, batch, context.buffer_length + drafted_slots)
    _, cache = read(drafter, params, context.tokens, cache, logits_at=jnp.zeros((batch, 0), jnp.int32))
    return cache.rollback(context.length - 1)


def read_last_two(drafter: Any, params, context, cache: KVCache) -> tuple[Float[Array, "B V"], KVCache]:
    """Logits behind the pending token, from one forward over the two last committed tokens, and the cache with both."""
    start = jnp.maximum(context.length - 2, 0)
    pair = jnp.take_along_axis(context.tokens, start[:, None] + jnp.arange(2), 1)
    pending = context.length - 1 - start
    logits, cache = read(drafter, params, pair, cache.rollback(start), logits_at=pending[:, None])
    return logits[:, 0], cache.rollback(context.length)
