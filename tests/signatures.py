"""The check that conftest.py puts on every function of specjax: arguments and results must fit their annotations.

Constructors are left out. A pytree struct is rebuilt by JAX around shapes, axis numbers or plain objects, which its
annotations rightly do not allow; the functions that take and return structs are where a wrong array is caught.
"""

from collections.abc import Callable

from beartype import BeartypeConf, beartype

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as in PEP 484


def check(function: Callable) -> Callable:
    return function if function.__name__ == "__init__" else _check(function)
