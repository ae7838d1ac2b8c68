"""A path comes first; what the hub cannot give ends in one line. No test asks the network."""

import fnmatch
import pathlib
import types

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from specjax.weights import locate

FILES = [
    *("config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors"),
    *("model.safetensors.index.json", "tokenizer.json", "chat_template.jinja"),
    *("consolidated.safetensors", "original/consolidated.00.pth", "pytorch_model.bin", "adapter.safetensors"),
]


def refused(kind):
    return kind("two\nlines", response=types.SimpleNamespace(headers={}, request=None))


def test_a_path_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("the hub was asked"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "model.gguf").touch()
    assert locate("owner/name").resolve() == tmp_path / "owner" / "name"
    assert locate(tmp_path / "model.gguf") == tmp_path / "model.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/owner") == tmp_path / "owner"


def test_an_id_is_downloaded(tmp_path, monkeypatch):
    calls = []

    def download(name, *, revision, allow_patterns):
        calls.append((name, revision))
        fetched = [file for file in FILES if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns)]
        assert fetched == FILES[: FILES.index("consolidated.safetensors")]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("owner/name-1.5_b") == locate("owner/name-1.5_b", "v1") == tmp_path
    assert calls == [("owner/name-1.5_b", None), ("owner/name-1.5_b", "v1")]


@pytest.mark.parametrize("name", ["no-such-folder", "a/b/c", "./owner/name", "/owner/name", "owner/", "../name", ""])
def test_what_is_no_id_is_a_missing_path(name, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("the hub was asked"))
    monkeypatch.chdir(tmp_path)
    if name:
        with pytest.raises(ValueError, match=f"there is no {name}, and it is not an id of the Hugging Face hub"):
            locate(name)


@pytest.mark.parametrize("name", ["~nosuchuser/x", "~nosuchuser", "a" * 300])
def test_what_cannot_be_looked_for_is_one_line(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("the hub was asked"))
    for path in (name, pathlib.Path(name)):
        with pytest.raises(ValueError, match=f"^{name} ") as caught:
            locate(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error, message",
    [
        (refused(GatedRepoError), "only to accounts that accepted its licence"),
        (refused(RevisionNotFoundError), "it has no revision 'v9'"),
        (refused(RepositoryNotFoundError), "the hub has no such model, or it is private"),
        (LocalEntryNotFoundError("no\nnetwork"), "the Hugging Face hub: no network"),
        (ConnectionError("refused\nagain"), "the Hugging Face hub: refused again"),
        (TimeoutError(), "the Hugging Face hub: TimeoutError"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_what_the_hub_cannot_give_is_one_line(error, message, monkeypatch):
    def download(*arguments, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=message) as caught:
        locate("owner/name", "v9")
    assert "\n" not in str(caught.value) and "owner/name" in str(caught.value)


def test_without_a_network(monkeypatch, tmp_path):
    """The hub's own client, told to stay offline, with nothing in its cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="there is no path owner/name, and it cannot be had") as caught:
        locate("owner/name")
    assert "\n" not in str(caught.value)
