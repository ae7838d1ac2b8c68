"""Text sources and the split: the same everywhere, disjoint, complete; every fault in the text is one clear line."""

import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.data.text import Corpus, Document, JsonLines, StandardLibrary, TextFiles, load_corpus


class Listed:
    """A source of given documents."""

    def __init__(self, documents):
        self._documents = [Document(name, text) for name, text in documents]

    def documents(self):
        return list(self._documents)


def refused(source) -> str:
    with pytest.raises(ValueError) as error:
        source.documents()
    message = str(error.value)
    assert message and "\n" not in message
    return message


@pytest.fixture(scope="module")
def library() -> Corpus:
    return load_corpus(StandardLibrary())


def test_standard_library_is_source_code_without_tests_or_packages(library):
    documents = library.train + library.held_out
    names = {document.name for document in documents}
    assert {"dataclasses.py", "json/decoder.py", "collections/__init__.py"} <= names
    assert all(name.endswith(".py") for name in names)
    assert not [name for name in names if {"test", "tests", "idle_test", "site-packages"} & set(name.split("/"))]
    assert sum(len(document.text) for document in documents) > 5_000_000
    assert any("class JSONDecoder" in document.text for document in documents)


def test_standard_library_skips_what_is_asked(library):
    names = {document.name for document in StandardLibrary(skip=("json", "data*")).documents()}
    assert {"ast.py", "encodings/utf_8.py"} <= names
    assert not [name for name in names if name.startswith("json/")] and "dataclasses.py" not in names


def test_standard_library_splits_the_same_twice_and_near_the_fraction(library):
    assert load_corpus(StandardLibrary()) == library
    share = len(library.held_out) / (len(library.held_out) + len(library.train))
    assert 0.02 < share < 0.1  # 5 % of about 570 files, by hash


def test_files_that_are_no_text_are_left_out_of_the_library(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert [document.name for document in StandardLibrary().documents()] == ["good.py"]


named_texts = st.lists(
    st.tuples(st.text("abcdef/", min_size=1, max_size=6), st.text(min_size=1, max_size=20)),
    min_size=2, max_size=30, unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
)  # fmt: skip


@given(named_texts, st.floats(0.01, 0.99))
def test_split_is_a_partition_with_two_sides(documents, held_out):
    corpus = load_corpus(Listed(documents), held_out)
    assert corpus.train and corpus.held_out
    assert not set(corpus.train) & set(corpus.held_out)
    assert {(document.name, document.text) for document in corpus.train + corpus.held_out} == set(documents)


def test_a_file_keeps_its_side_when_others_come():
    documents = [(f"file{i}", f"text {i}") for i in range(400)]
    few, many = load_corpus(Listed(documents[:200]), 0.3), load_corpus(Listed(documents), 0.3)
    assert set(few.train) <= set(many.train) and set(few.held_out) <= set(many.held_out)


def test_equal_texts_do_not_stand_on_both_sides():
    documents = [(f"copy{i}", f"text {i % 10}") for i in range(100)]
    corpus = load_corpus(Listed(documents), 0.3)
    names = sorted(document.name for document in corpus.train + corpus.held_out)
    assert names == [f"copy{i}" for i in range(10)]


@pytest.mark.parametrize("text", ["ab", "a\nb\n" * 5, "word " * 50_000, "".join(f"line {i}\n" for i in range(9999))])
def test_a_single_document_is_cut_into_contiguous_pieces(text):
    corpus = load_corpus(Listed([("one", text)]), 0.1)
    pieces = sorted(corpus.train + corpus.held_out, key=lambda document: int(document.name.split("#")[1]))
    assert "".join(piece.text for piece in pieces) == text
    assert corpus.train and corpus.held_out and len(pieces) <= 101
    if "line" in text:
        assert all(piece.text.endswith("\n") for piece in pieces)


@given(named_texts, st.data())
def test_hash_changes_with_any_change(documents, data):
    before = load_corpus(Listed(documents)).hash
    assert load_corpus(Listed(documents)).hash == before
    i = data.draw(st.integers(0, len(documents) - 1))
    name, text = documents[i]
    for changed in ((name + "x", text), (name, text + "y")):
        others = documents[:i] + documents[i + 1 :]
        if changed[0] not in dict(others) and changed[1] not in {text for _, text in others}:
            assert load_corpus(Listed(documents[:i] + [changed] + documents[i + 1 :])).hash != before


def test_text_files_of_a_folder_by_pattern_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    files = {"z.txt": "z", "b/a.txt": "a\r\nä", "note.md": "no", "empty.txt": " \n", ".hidden.txt": "no"}
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode())
    assert TextFiles(str(tmp_path)).documents() == [Document("b/a.txt", "a\r\nä"), Document("z.txt", "z")]
    assert TextFiles(str(tmp_path / "note.md")).documents() == [Document("note.md", "no")]


def test_faulty_text_files_are_refused(tmp_path):
    assert "nowhere" in refused(TextFiles(str(tmp_path / "nowhere")))
    assert "'*.txt'" in refused(TextFiles(str(tmp_path)))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "latin.txt" in (message := refused(TextFiles(str(tmp_path)))) and "UTF-8" in message and "byte 3" in message


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_json_lines_round_trip(tmp_path_factory, texts, ascii_only, byte_order_mark):
    path = pathlib.Path(tmp_path_factory.mktemp("jsonl"), "data.jsonl")
    lines = [json.dumps({"id": 1, "body": text}, ensure_ascii=ascii_only) for text in texts]
    path.write_bytes(("\ufeff" * byte_order_mark + "\n\n".join(lines) + "\n").encode())
    documents = JsonLines(str(path), field="body").documents()
    assert [document.text for document in documents] == texts
    assert [document.name for document in documents] == [f"data.jsonl:{2 * i + 1}" for i in range(len(texts))]


@pytest.mark.parametrize(
    "line", ['{"text": "cut', '{"body": "x"}', '{"text": 3}', "[1]", '"text"', '{"text": "\\ud800"}', "[" * 9999]
)
def test_a_broken_line_is_named(tmp_path, line):
    (tmp_path / "data.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n")
    message = refused(JsonLines(str(tmp_path)))
    assert "data.jsonl" in message and "line 3" in message


@pytest.mark.parametrize("held_out", [0, 1, -0.1, 5])
def test_a_senseless_fraction_is_refused(held_out):
    with pytest.raises(ValueError, match="held_out"):
        load_corpus(Listed([("a", "a"), ("b", "b")]), held_out)


def test_one_character_cannot_be_split():
    with pytest.raises(ValueError, match="one character"):
        load_corpus(Listed([("a", "a")]))
