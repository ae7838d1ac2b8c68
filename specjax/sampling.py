"""From logits to a law, and from a law to a token. Every law in the system is made here."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.keys import Source


@struct.dataclass
class Sampling:
    """How logits become a law: temperature, then top-k, top-p and min-p, renormalising after each.

    Build it with `Sampling.of`, which checks the values. The numbers are arrays, one for all rows or one per row, so
    that changing them does not retrace; which filters are on, and whether rows are greedy, is static.

    Attributes:
        temperature: 0 means the one-hot law of the first largest logit, not a small number.
        top_k: keep tokens at least as probable as the k-th most probable one (ties at the edge stay); V keeps all.
        top_p: keep the most probable tokens until their mass reaches top_p (ties at the edge stay); 1 keeps all.
        min_p: keep tokens with at least min_p times the largest probability; 0 keeps all.
        kind: "greedy" (every row at temperature 0), "sampled" (none) or "mixed".
    """

    temperature: Float[Array, "*B"]
    top_k: Int[Array, "*B"] | None = None
    top_p: Float[Array, "*B"] | None = None
    min_p: Float[Array, "*B"] | None = None
    kind: str = struct.field(pytree_node=False, default="sampled")

    @classmethod
    def of(cls, temperature=1.0, top_k=None, top_p=None, min_p=None) -> "Sampling":
        """Checked construction from Python numbers or one number per row.

        Raises:
            ValueError: a value outside its range; the message names it.
        """

        def checked(name, value, dtype, ok, rule):
            if value is None:
                return None
            try:
                array = np.asarray(value)
                numeric = array.dtype.kind in "iuf"
                fits = numeric and array.ndim <= 1 and array.size and np.all(np.isfinite(array)) and np.all(ok(array))
            except (TypeError, ValueError):
                fits = False
            if not fits:
                raise ValueError(f"{name} must be {rule}; got {value!r}")
            return jnp.asarray(array, dtype)

        if temperature is None:
            raise ValueError("temperature must be a number >= 0; got None")
        temperature = checked("temperature", temperature, jnp.float32, lambda t: t >= 0, "a finite number >= 0")
        zero = np.asarray(temperature == 0)
        return cls(
            temperature=temperature,
            top_k=checked(
                "top_k", top_k, jnp.int32, lambda k: (1 <= k) & (k < 2**31) & (k == k // 1), "an integer >= 1 or None"
            ),
            top_p=checked("top_p", top_p, jnp.float32, lambda p: (p > 0) & (p <= 1), "in (0, 1] or None"),
            min_p=checked("min_p", min_p, jnp.float32, lambda p: (p >= 0) & (p <= 1), "in [0, 1] or None"),
            kind="greedy" if zero.all() else "mixed" if zero.any() else "sampled",
        )

    @property
    def greedy(self) -> bool:
        """Whether every row's law is one-hot, known while tracing."""
        return self.kind == "greedy"

    def per_row(self, batch: int) -> "Sampling":
        """The same with one value per row, so that scalars and arrays share a trace.

        Raises:
            ValueError: a value comes once per row, but not for this many rows.
        """
        values = {}
        for name in ("temperature", "top_k", "top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and value.shape not in ((), (batch,)):
                raise ValueError(f"{name} has {value.shape[0]} values for a batch of {batch}; give one, or one per row")
            values[name] = None if value is None else jnp.broadcast_to(value, (batch,))
        return self.replace(**values)

    def law(self, logits: Float[Array, "B *M V"]) -> Float[Array, "B *M V"]:
        """The law of each row, in float32 or the dtype of the logits if that is wider."""
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        if self.greedy:
            return _one_hot_of_max(logits)
        temperature = self._per_row(self.temperature, logits)
        safe = jnp.where(temperature == 0, 1, jnp.maximum(temperature, 1e-30))  # logits / safe stay finite
        law = jax.nn.softmax(logits / safe)
        if self.top_k is not None:
            k = self._per_row(self.top_k, logits)
            law = _keep(law, _largest_threshold(law, lambda kept: jnp.sum(kept, -1, keepdims=True) >= k))
        if self.top_p is not None:
            top_p = self._per_row(self.top_p, logits)
            reached = lambda kept: jnp.sum(jnp.where(kept, law, 0), -1, keepdims=True) >= top_p  # noqa: E731
            law = jnp.where(top_p < 1, _keep(law, _largest_threshold(law, reached)), law)
        if self.min_p is not None:
            law = _keep(law, self._per_row(self.min_p, logits) * jnp.max(law, -1, keepdims=True))
        if self.kind == "mixed":
            law = jnp.where(temperature == 0, _one_hot_of_max(logits), law)
        return law

    def choose(self, logits: Float[Array, "B V"], source: Source) -> tuple[Int[Array, "B"], Float[Array, "B V"] | None]:
        """One token per row and the law it was drawn from; at temperature 0 the best token, and None for its law."""
        if self.greedy:
            return first_max(logits), None
        law = self.law(logits)
        return draw(law, source), law

    @staticmethod
    def _per_row(value, logits):
        value = value.astype(logits.dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value
        return value.reshape(value.shape + (1,) * (logits.ndim - value.ndim)) if value.ndim else value


def first_max(values: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """Index of the first largest value; XLA's argmax is several times slower on CPU."""
    ids = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return jnp.min(jnp.where(values == jnp.max(values, -1, keepdims=True), ids, values.shape[-1]), -1)


def top_tokens(values: Float[Array, "*B V"], k: int) -> Int[Array, "*B k"]:
    """The k tokens of the largest values, in order, ties by index: k maxima, which for small k beat a sort."""
    ids = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)

    def step(left, _):
        best = first_max(left)
        return jnp.where(ids == best[..., None], -jnp.inf, left), best

    return jnp.moveaxis(jax.lax.scan(step, values, length=k)[1], 0, -1)


def draw(law: Float[Array, "B V"], source: Source) -> Int[Array, "B"]:
    """One token per row: by inverse CDF from a uniform, or as the argmax of log law plus Gumbel noise from a key."""
    if source.uniform is not None:
        return inverse_cdf(law, source.uniform)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, law.shape[-1:]))(source.key)
    return gumbel_max(law, noise)


def gumbel_max(law: Float[Array, "*B V"], noise: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """The Gumbel-max trick: argmax of log law + noise; a token outside the support is never chosen."""
    return first_max(jnp.log(law) + noise)


def inverse_cdf(law: Float[Array, "B V"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """The token whose slice of the CDF holds `uniform` in [0, 1); a token of probability 0 is never returned.

    Two levels, a block of the vocabulary and a token in it, so that no running sum over the whole vocabulary is made.
    The law need not be normalised.
    """
    batch, vocab = law.shape
    width = 1 << max(0, (vocab - 1).bit_length() // 2)
    blocks = jnp.pad(law, ((0, 0), (0, -vocab % width))).reshape(batch, -1, width)
    mass = jnp.sum(blocks, -1)
    cdf = jnp.cumsum(mass, -1)
    target = uniform.astype(law.dtype) * cdf[:, -1]
    block = _first_beyond(cdf, mass, target)
    before = jnp.where(block > 0, jnp.take_along_axis(cdf, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0)
    inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
    return block * width + _first_beyond(jnp.cumsum(inside, -1), inside, target - before)


def _first_beyond(cdf, mass, target):
    """First index of positive mass whose CDF exceeds the target; the last of positive mass when rounding hides it."""
    ids = jnp.arange(cdf.shape[-1], dtype=jnp.int32)
    first = jnp.min(jnp.where((cdf > target[:, None]) & (mass > 0), ids, ids.size), -1)
    last = jnp.max(jnp.where(mass > 0, ids, 0), -1)
    return jnp.minimum(first, last)


def _one_hot_of_max(logits):
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return (ids == first_max(logits)[..., None]).astype(logits.dtype)


def _keep(law, threshold):
    kept = jnp.where(law >= threshold, law, 0)
    return kept / jnp.sum(kept, -1, keepdims=True)


def _largest_threshold(law, enough):
    """The largest t for which `enough(law >= t)` holds; `enough` must hold at t = 0 and be monotone.

    Bisection over the bit patterns of the floats, which are ordered like the non-negative numbers they stand for:
    exact, with one masked sum per bit instead of a sort of the vocabulary.
    """
    integer = jnp.int64 if law.dtype == jnp.float64 else jnp.int32
    as_float = lambda bits: jax.lax.bitcast_convert_type(bits, law.dtype)  # noqa: E731
    top = jax.lax.bitcast_convert_type(jnp.max(law, -1, keepdims=True), integer)

    def halve(_, bounds):
        low, high = bounds  # enough holds at low and not above high
        middle = low + (high - low + 1) // 2
        holds = enough(law >= as_float(middle))
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle - 1)

    steps = 63 if integer == jnp.int64 else 31
    return as_float(jax.lax.fori_loop(0, steps, halve, (jnp.zeros_like(top), top))[0])
