"""One tiny model for all tests of this folder."""

import jaxtyping
import pytest

import specjax
from tests.pretrained.tiny_model import write_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained") / "tiny-llama"
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def model(folder):
    return specjax.load(folder)


@pytest.fixture
def unchecked(monkeypatch):
    """Calls as they are outside of these tests, where no annotation is checked."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
