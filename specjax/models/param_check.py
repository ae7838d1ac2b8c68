"""Parameters compared with what a module expects, before anything is compiled."""

from typing import Any

import jax


def check_params_against(expected: Any, params: Any, owner: str, remedy: str = "") -> None:
    """Compares names, shapes and dtypes.

    Args:
        expected: the tree of `ShapeDtypeStruct` that `jax.eval_shape` of an initialisation gives.
        params: what was handed over.
        owner: whose parameters they are, for the message: "the drafter".
        remedy: what the message ends with.

    Raises:
        ValueError: naming the first difference, what was expected and what came.
    """
    wanted, given = _in_words(expected), _in_words(params)
    for name in [*wanted, *given]:
        if name not in given:
            raise ValueError(f"{owner}'s parameters lack {name}, {wanted[name]}{remedy}")
        if name not in wanted:
            raise ValueError(f"{owner}'s parameters hold {name}, which its config does not know{remedy}")
        if wanted[name] != given[name]:
            raise ValueError(f"{owner}'s {name} must be {wanted[name]}; got {given[name]}{remedy}")


def _in_words(tree) -> dict[str, str]:
    """Dtype and shape of every leaf by its path."""
    words = lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__  # noqa: E731
    return {jax.tree_util.keystr(k, simple=True, separator="/"): words(x) for k, x in jax.tree.leaves_with_path(tree)}
