"""The target's own first layers as the drafter: self-speculative decoding of LayerSkip (arXiv 2404.16710)."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.arguments import check_draft_length
from specjax.models import KVCache, TransformerConfig
from specjax.models.ends import head, normalise, untied_head
from specjax.models.layers import make_dense, make_norm
from specjax.models.param_check import check_params_against
from specjax.models.transformer import apply
from specjax.protocol import IID, Proposal
from specjax.topology import Topology


@dataclasses.dataclass(frozen=True)
class EarlyExit:
    """Drafts a chain with the target's first E layers, an exit behind them, and the target's own cache.

    Every drafted token, the last one included, passes the lower layers once, at drafting; its hidden state is kept,
    and the verify begins there, with the upper layers only:

        token           r     x1    x2    x3        root and γ = 3 drafted ones
        layers 1..E     ----->----->----->          γ + 1 passes of one token, into the target's cache
        exit            q1    q2    q3              γ laws
        layers E+1..L   [                  ]        one forward of γ + 1 tokens, from the hidden states

    So the drafter has neither a cache nor any other state, and what it costs is the exit and the narrower passes.

    The exit is one of three. With all, a draft's law is made from the hidden state h behind layer E:

        shared (default)                the target's final norm and head, of h; no parameters
        trained_exit                    the same, of h + A(norm(h)): a norm and a linear map of the drafter's own, which
                                        starts at zero, that is at the shared exit (the tuned lens, arXiv 2303.08112)
        trained_exit and own_head       a final norm and a head of the drafter's own, of h

    Attributes:
        target: the target's architecture.
        exit_layer: E, from 1 to L. With E = L and the shared exit every draft is the target's own choice and nothing is
            won: a check, not a setting.
        draft_length: γ >= 1.
        trained_exit: whether the exit has parameters.
        own_head: whether they are a norm and a head.

    Raises:
        ValueError: an exit layer or a draft length outside its range, or an own head without a trained exit.
    """

    target: TransformerConfig
    exit_layer: int
    draft_length: int
    trained_exit: bool = False
    own_head: bool = False

    siblings = IID
    feature_layers = ()
    context_length = None

    def __post_init__(self):
        if not 1 <= self.exit_layer <= self.target.num_layers:
            raise ValueError(
                f"exit_layer must be 1 to {self.target.num_layers}, the target's layers; got {self.exit_layer}"
            )
        check_draft_length(self.draft_length)
        if self.own_head and not self.trained_exit:
            raise ValueError("own_head is part of a trained exit; set trained_exit=True")

    @property
    def topology(self) -> Topology:
        return Topology.chain(self.draft_length)

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.draft_length + 1,)

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def init_params(self, key, target_params=None) -> dict | None:
        """Parameters of the exit, None for the shared one. An own head starts from the target's if that is given."""
        if not self.trained_exit:
            return None
        c = self.target
        hidden = jnp.zeros((1, c.d_model), c.dtype)
        if not self.own_head:
            return jax.jit(_Adapter(c).init)(key, hidden)["params"]
        params = jax.jit(_OwnHead(_untied(c)).init)(key, hidden)["params"]
        if target_params is None:
            return params
        ends = {name: target_params[name] for name in params if name != "head"}
        ends["head"] = untied_head(c, target_params)
        return params | jax.tree.map(jnp.array, ends)  # copies: a training step gives its parameters' buffers away

    def check_params(self, params) -> None:
        if not self.trained_exit:
            if params is not None:
                raise ValueError("a shared exit takes no parameters; give None, or set trained_exit=True")
            return
        check_params_against(_expected_params(self), params, "the trained exit", "; see EarlyExit.init_params")

    def logits(self, params, target_params, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """The exit's logits of what layer E gave."""
        c = self.target
        if self.own_head:
            return head(_untied(c), params, normalise(_untied(c), params, hidden))
        if self.trained_exit:
            hidden = hidden + _Adapter(c).apply({"params": params}, hidden)
        return head(c, target_params, normalise(c, target_params, hidden))

    def init(self, params, context) -> None:
        return None

    def propose(self, params, state, context, noise):
        exit_layer, sampling, whole = self.exit_layer, context.sampling, context.target_cache
        # The lower layers' cache alone, so that the loop over depths carries nothing else.
        cache = KVCache(whole.keys[:exit_layer], whole.values[:exit_layer], context.length - 1)

        def lower(token: Int[Array, "B"], cache: KVCache):
            """(hidden state [B, D] behind layer E, cache); no head."""
            nowhere = jnp.zeros((token.shape[0], 0), jnp.int32)
            _, cache, hidden = apply(
                self.target,
                context.target_params,
                token[:, None],
                cache,
                layers=(0, exit_layer),
                feature_layers=(exit_layer,),
                logits_at=nowhere,
            )
            return hidden[:, 0], cache

        def step(carry, source):
            token, cache = carry
            hidden, cache = lower(token, cache)
            token, law = sampling.choose(self.logits(params, context.target_params, hidden), source)
            return (token, cache), (hidden, token, law)

        (token, cache), drafted = jax.lax.scan(step, (context.pending, cache), noise.draft(self.draft_length))
        last, cache = lower(token, cache)
        hidden, tokens, law = jax.tree.map(lambda x: x.swapaxes(0, 1), drafted)
        proposal = Proposal(
            tokens,
            law,
            jnp.ones(tokens.shape, bool),
            self.topology,
            hidden=jnp.concatenate([hidden, last[:, None]], 1),
            first_layer=exit_layer,
        )
        merged = KVCache(cache.keys + whole.keys[exit_layer:], cache.values + whole.values[exit_layer:], cache.length)
        return proposal, None, merged

    def commit(self, params, state, committed) -> None:
        return None  # the loop rolls the shared cache back, and with it the lower layers


class _Adapter(nn.Module):
    """A(norm(h)), zero at the start."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        c = self.config
        return make_dense(c, c.d_model, True, "linear", zero=True)(make_norm(c, "norm")(hidden))


class _OwnHead(nn.Module):
    """What `ends.normalise` and `ends.head` read of an untied model; only ever initialised."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        c = self.config
        hidden = make_norm(c, "final_norm")(hidden) if c.final_norm else hidden
        return make_dense(c, c.vocab_size, c.head_bias, "head")(hidden)


def _untied(config: TransformerConfig) -> TransformerConfig:
    return dataclasses.replace(config, tied_head=False)


@functools.lru_cache(maxsize=64)
def _expected_params(drafter: EarlyExit):
    return jax.eval_shape(drafter.init_params, jax.random.key(0))
