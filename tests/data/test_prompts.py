"""Lines of prompt files: what is read from them, what is broken, and on which side of a split they fall."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specjax.data.prompts import ROLES, SHAPES, Prompt, PromptFiles, read_prompt, refused_prompt, split_prompts
from specjax.data.text import Document, load_corpus

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
READ = {
    "prompt": ({"prompt": "Hi"}, (("user", "Hi"),), ()),
    "prompt of messages": ({"prompt": [{"role": "user", "content": "Hi"}]}, (("user", "Hi"),), ()),
    "messages": (
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": PARTS},
                      {"role": "assistant", "content": "no"}]},
        (("system", "S"), ("user", "ab")), (),
    ),
    "turns": ({"turns": ["one", "two", "three"]}, (("user", "one"),), ("two", "three")),
    "conversations": (
        {"id": 1, "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"},
                                    {"from": "human", "value": "r"}, {"from": "gpt", "value": "b"}]},
        (("user", "q"), ("assistant", "a"), ("user", "r")), (),
    ),
    "conversations in the other form": (
        {"conversations": [{"role": "developer", "content": "S"}, {"role": "user", "content": PARTS}]},
        (("system", "S"), ("user", "ab")), (),
    ),
    "messages in the other form": ({"messages": [{"from": "human", "value": "q"}]}, (("user", "q"),), ()),
    "a form whose columns are null": (
        {"messages": [{"role": None, "content": None, "from": "human", "value": "q"}]}, (("user", "q"),), (),
    ),
    "null columns": ({"messages": None, "conversations": None, "turns": None, "prompt": "hi"}, (("user", "hi"),), ()),
    "an empty system message": (
        {"messages": [{"role": "system", "content": " "}, {"role": "system", "content": []},
                      {"role": "user", "content": "q"}]},
        (("user", "q"),), (),
    ),
    "anything behind the last question": (
        {"messages": [{"role": "user", "content": "q"}, {"role": "tool", "content": None}, {"role": ["user"]}, 3,
                      {"role": "assistant", "content": ""}]},
        (("user", "q"),), (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_the_fields_shapes_are_read_up_to_the_last_question(name):
    record, messages, follow_ups = READ[name]
    prompt = read_prompt(json.dumps(record | {"category": "math"}), "x:1")
    assert (prompt.messages, prompt.follow_ups, prompt.kind) == (messages, follow_ups, "math")
    assert prompt.chat[-1] == {"role": "user", "content": messages[-1][1]}


@pytest.mark.parametrize("speaker", ROLES)
def test_the_speakers_of_the_usual_exports_are_known(speaker):
    turns = [{"from": "human", "value": "q"}, {"from": speaker, "value": "a"}, {"from": "user", "value": "r"}]
    prompt = read_prompt(json.dumps({"conversations": turns}), "x:1")
    assert prompt.messages[1] == (ROLES[speaker], "a") and len(prompt.messages) == 3


def test_speakers_by_role():
    usual = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
             "model": "assistant", "developer": "system"}  # fmt: skip
    assert usual | {role: role for role in ("user", "assistant", "system")} == ROLES


BROKEN = {
    b'{"prompt": "a"': "not JSON",
    b"[1]": "a JSON list where one JSON object is expected",
    b'{"text": "a"}': "no prompt under any of messages, .* fields of this line: 'text'",
    b'{"prompt": ""}': "'prompt' is empty",
    b'{"prompt": 3}': "'prompt' must be a list of messages; got a JSON number",
    b'{"prompt": "\xff"}': r"not UTF-8 \(byte 12 of the line\)",
    b'{"prompt": "\\ud800"}': "half of a surrogate pair",
    b'{"turns": []}': "'turns' must be a list of questions",
    b'{"turns": ["a", 1]}': "turn 2 must be text",
    b'{"messages": [{"role": "user"}]}': "message 1 of 'messages' must have 'role' and 'content'",
    b'{"messages": [{"role": "robot", "content": "a"}]}': "is from 'robot'; known are",
    b'{"messages": [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]}': "'tool'; known are user, hu",
    b'{"messages": [{"role": ["user"], "content": "a"}]}': "'role' of message 1 of 'messages' must .* JSON list",
    b'{"messages": [{"role": {}, "content": "a"}, {"role": "user", "content": "b"}]}': "must .* JSON object",
    b'{"conversations": [{"from": 7, "value": "a"}]}': "'from' of message 1 of 'conversations' must be .* JSON number",
    b'{"messages": [{"role": null, "content": "a"}]}': "'role' of message 1 .* got null",
    b'{"messages": [null, {"role": "user", "content": "a"}]}': "message 1 of 'messages' must have 'role' and 'content'",
    b'{"messages": [{"role": "user", "content": null}]}': "message 1 of 'messages' must be text; got null",
    b'{"messages": [{"role": "user", "content": {}}]}': "must be text; got a JSON object",
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}': "must be text; got a JSON list",
    b'{"messages": [{"role": "assistant", "content": ""}, {"role": "user", "content": "a"}]}': "message 1 .* is empty",
    b'{"messages": null}': "no prompt under any of .* fields of this line: 'messages'",
    b'{"messages": true}': "'messages' must be a list of messages; got true",
    b'{"turns": {"a": 1}}': "'turns' must be a list of questions",
    b'{"turns": [null]}': "turn 1 must be text; got null",
    b'{"prompt": "a", "category": "\\udc00"}': "'category' holds half of a surrogate pair",
    b"1" + b"0" * 5000: "a JSON number where one JSON object is expected",
    b"[" * 100_000: "not JSON",
    b'{"messages": [{"role": "system", "content": "a"}]}': "no message of a user",
    b'{"conversations": [{"text": "a"}]}': "must have 'from' and 'value'",
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_named_and_stops_or_is_left_out(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "first"}\n\n' + line + b'\n{"prompt": "last\xe2\x80\xa8"}\n')
    with pytest.raises(ValueError, match=f"p.jsonl, line 3: .*{BROKEN[line]}.*on_broken='skip'"):
        PromptFiles(str(path)).read()
    prompts, broken = PromptFiles(str(tmp_path), on_broken="skip").read()
    assert [prompt.name for prompt in prompts] == ["p.jsonl:1", "p.jsonl:4"]  # U+2028 ends no line
    assert len(broken) == 1 and "line 3" in broken[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(list(ROLES))
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": NAMES | JSON, "content": JSON, "from": NAMES | JSON, "value": JSON, "type": st.just("text")}
)
PROMPT = st.text(max_size=3) | st.lists(MESSAGE | JSON, max_size=4) | JSON
LINES = st.fixed_dictionaries({}, optional={shape: PROMPT for shape in (*SHAPES, "category")})


@settings(max_examples=500)
@given(LINES | JSON)
@example({"messages": [{"role": [], "content": "a"}]})
def test_any_json_is_a_prompt_or_broken_and_nothing_else(value):
    try:
        prompt = read_prompt(json.dumps(value), "x:1")
    except ValueError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert prompt.messages[-1][0] == "user" and {role for role, _ in prompt.messages} <= set(ROLES.values())
        texts = [content for _, content in prompt.messages] + list(prompt.follow_ups)
        assert all(text.strip() and text.encode() for text in texts) and prompt.kind.encode() is not None


@given(st.binary(max_size=20).map(lambda data: b'{"prompt": "' + data) | st.binary(max_size=4))
def test_any_bytes_are_a_prompt_or_broken(line):
    try:
        read_prompt(line, "x:1")
    except ValueError as error:
        assert len(str(error).splitlines()) == 1


def test_a_refused_prompt_stops_or_is_left_out():
    assert refused_prompt("p:3", ValueError("no"), "skip") == "p:3: no"
    with pytest.raises(ValueError, match="^p:3: no; change this prompt, or go on .* on_broken='skip'$"):
        refused_prompt("p:3", "no", "stop")


def test_files_without_prompts_and_wrong_settings_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n\n")
    with pytest.raises(ValueError, match="holds no prompts .* 1 lines are broken, the first: .*line 1"):
        PromptFiles(str(tmp_path), on_broken="skip").read()
    with pytest.raises(ValueError, match="no file or folder"):
        PromptFiles(str(tmp_path / "none")).read()
    with pytest.raises(ValueError, match="on_broken must be 'stop' or 'skip'; got 'maybe'"):
        PromptFiles("x", on_broken="maybe")


def numbered(count, per_source):
    return [Prompt(f"p{i}", (("user", f"question {i}"),), f"file{i // per_source}") for i in range(count)]


def test_a_split_keeps_sources_together_and_drops_copies():
    prompts = numbered(400, 4)
    train, held_out = split_prompts([*prompts, *prompts], 0.2)
    assert sorted(train + held_out, key=prompts.index) == prompts
    assert not {prompt.source for prompt in train} & {prompt.source for prompt in held_out}
    assert 0.1 < len(held_out) / 400 < 0.3
    assert split_prompts(prompts[::-1][:40] + prompts, 0.2)[1] != [] and train == [p for p in prompts if p in train]
    assert {p for p in split_prompts(prompts[100:], 0.2)[1]} == {p for p in held_out if p in prompts[100:]}
    for share, message in ((0.0, "in \\(0, 1\\)"), (1e-9, "0 held out; add prompts")):
        with pytest.raises(ValueError, match=message):
            split_prompts(prompts, share)


def test_a_document_and_the_prompts_about_it_are_on_one_side():
    """So that a drafter that also trains on documents has seen none of those that the held-out prompts are about."""
    documents = [Document(f"module_{number}.py", f"text {number}") for number in range(300)]
    corpus = load_corpus(SimpleNamespace(documents=lambda: documents), 0.2)
    prompts = [Prompt(f"{d.name}:f", (("user", d.text),), d.name) for d in documents]
    sides = split_prompts(prompts, 0.2)
    for prompts_there, documents_there in zip(sides, (corpus.train, corpus.held_out), strict=True):
        assert [prompt.source for prompt in prompts_there] == [document.name for document in documents_there]
