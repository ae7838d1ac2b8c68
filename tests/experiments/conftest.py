"""One tiny pretrained model for the tests of a file; files that need another have a fixture of their own."""

import pytest

import specjax
from tests.pretrained.tiny_model import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return specjax.load(folder)
