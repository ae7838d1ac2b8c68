"""Mixed precision: parameters, gradients' sums and laws stay as they are, the models compute in a narrower dtype."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.models import TransformerConfig

COMPUTE_DTYPES = ("float32", "bfloat16")


def computing_in(objective: Any, dtype: str | None) -> Any:
    """The objective with all its models computing in `dtype`; None leaves them as they are.

    The drafter and the target inside an objective are found wherever they stand in its fields. The models that are
    decoded later keep their own dtype: only the training step is changed.

    Raises:
        ValueError: a dtype that is not one of `COMPUTE_DTYPES`.
    """
    if dtype is None:
        return objective
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(f"compute_dtype must be one of {', '.join(COMPUTE_DTYPES)}, or None; got {dtype!r}")
    return _replace(objective, dtype)


def _replace(value: Any, dtype: str) -> Any:
    if isinstance(value, TransformerConfig):
        return dataclasses.replace(value, dtype=jnp.dtype(dtype))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    changed = {name: _replace(part, dtype) for name, part in fields.items()}
    changed = {name: part for name, part in changed.items() if part is not fields[name]}
    return dataclasses.replace(value, **changed) if changed else value
