import ast
import json
import textwrap

import pytest

from specjax.data.prompts import Prompt, PromptFiles, read_prompt, split_prompts
from specjax.data.standard_library_prompts import REQUESTS, find_functions, function_prompts
from specjax.data.text import Document, StandardLibrary, load_corpus

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
SHAPES = {
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
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_the_fields_shapes_are_read_up_to_the_last_question(name):
    record, messages, follow_ups = SHAPES[name]
    prompt = read_prompt(json.dumps(record | {"category": "math"}), "x:1")
    assert (prompt.messages, prompt.follow_ups, prompt.kind) == (messages, follow_ups, "math")
    assert prompt.chat[-1] == {"role": "user", "content": messages[-1][1]}


BROKEN = {
    b'{"prompt": "a"': "not JSON",
    b"[1]": "a JSON list where one JSON object is expected",
    b'{"text": "a"}': "no prompt under any of messages, .* fields of this line: 'text'",
    b'{"prompt": ""}': "'prompt' is empty",
    b'{"prompt": 3}': "'prompt' must be a list of messages; got a int",
    b'{"prompt": "\xff"}': r"not UTF-8 \(byte 12 of the line\)",
    b'{"prompt": "\\ud800"}': "half of a surrogate pair",
    b'{"turns": []}': "'turns' must be a list of questions",
    b'{"turns": ["a", 1]}': "turn 2 must be text",
    b'{"messages": [{"role": "user"}]}': "message 1 of 'messages' must have 'role' and 'content'",
    b'{"messages": [{"role": "robot", "content": "a"}]}': "is from 'robot'; known are",
    b'{"messages": [{"role": "system", "content": "a"}]}': "no message of a user",
    b'{"conversations": [{"role": "user", "content": "a"}]}': "must have 'from' and 'value'",
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


SOURCE = '''
import functools

def one_line(): return 1

def only_docstring():
    """Nothing
    else."""

class A:
    @functools.cache
    @staticmethod
    def method(x, y):
        """Adds.

        More.
        """
        z = x + y
        z = z + 1
        return z

async def undocumented(items):
    total = 0
    for item in items:
        total += item
    return total
'''


def test_functions_are_found_with_their_parts():
    method, plain = find_functions(Document("m.py", SOURCE))
    assert (method.name, plain.name) == ("m.py:13:method", "m.py:22:undocumented")
    for function in (method, plain):
        ast.parse(function.whole), ast.parse(function.undocumented)
        assert function.whole.startswith(function.beginning) and len(function.beginning) < len(function.whole)
    assert method.whole.startswith('@functools.cache\n@staticmethod\ndef method(x, y):\n    """Adds.')
    assert method.beginning.rstrip().endswith('"""') and "Adds" not in method.undocumented
    assert method.undocumented == method.whole.replace(method.whole[method.whole.index('    """') :
                                                                    method.whole.index("    z = x")], "")  # fmt: skip
    assert plain.undocumented == plain.whole and plain.beginning.endswith("total = 0")
    assert find_functions(Document("bad.py", "def f(:\n")) == find_functions(Document("bad.py", "\0")) == []


def documents(count):
    return [Document(f"{i}.py", textwrap.dedent(f'''
        def function_{i}(x):
            """Adds {i}."""
            y = x + {i}
            z = y * 2
            return z
    ''')) for i in range(count)]  # fmt: skip


def test_prompts_show_the_right_code_in_an_order_made_by_the_seed():
    files = documents(20)
    prompts = function_prompts(files, seed=1)
    assert len(prompts) == 60 and prompts == function_prompts(files, seed=1)
    assert prompts[:10] == function_prompts(files, seed=1, count=10)
    assert [p.name for p in prompts] != [p.name for p in function_prompts(files, seed=2)]
    assert {p.name for p in prompts} == {p.name for p in function_prompts(files, seed=2)}
    for prompt in prompts:
        (content,) = (content for _, content in prompt.messages)
        number = prompt.source.removesuffix(".py")
        assert f"def function_{number}(x)" in content and content.split("\n")[0] in REQUESTS[prompt.kind]
        assert ("Adds" in content) == (prompt.kind != "document") and ("return z" in content) == (
            prompt.kind != "complete"
        )
    assert {p.kind for p in function_prompts(files, 0, kinds=("explain",))} == {"explain"}


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(kinds=("translate",)), "kinds must be some of explain, complete, document; got translate"),
        (dict(kinds=()), "got none"),
        (dict(max_chars=5), "no function of at most 5 characters in 2 documents; raise max_chars"),
        (dict(count=0), "must be at least 1"),
    ],
)
def test_wrong_settings_of_function_prompts_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        function_prompts(documents(2), 0, **change)


@pytest.mark.slow
def test_the_standard_library_gives_thousands_of_prompts_and_none_on_both_sides():
    corpus = load_corpus(StandardLibrary(), 0.05)
    train, held_out = (function_prompts(side, 0, max_chars=600) for side in (corpus.train, corpus.held_out))
    assert len(train) > 5000 and len(held_out) > 100
    assert not {p.source for p in train} & {p.source for p in held_out}
    assert all(len(p.messages[0][1]) < 800 for p in train)
