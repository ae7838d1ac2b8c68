"""One pair of models for all tests of this folder, in float64, so that rows and widths can be compared exactly."""

import jax
import pytest

from tests.decoding.tiny_pair import Pair


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def pair():
    return Pair()
