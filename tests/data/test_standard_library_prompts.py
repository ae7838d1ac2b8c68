"""Prompts about functions: which lines they are made of, and in which order they come."""

import ast
import textwrap

import pytest

from specjax.data.standard_library_prompts import REQUESTS, find_functions, function_prompts
from specjax.data.text import Document, StandardLibrary, load_corpus

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


FORM_FEED = '"""A file of pages."""\n\x0c\nimport os\n\n\x0cdef first(x):\n    y = x\n    z = y\n    return z\n'
METHOD = "class A:\n\x0c\n    def method(self):\n        a = 1\n \x0c\n        b = a\n    \x0c        return b\n"
INSIDE = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"  # str.splitlines() cuts at each of them, Python at none


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_are_counted_as_python_counts_them(end):
    noise = f'# {INSIDE}\nTEXT = "{INSIDE}"\n'
    body = f'    y = "{INSIDE}"  # {INSIDE}\n    z = y + x\n    return z'
    source = noise + f"def function(x):\n{body}\n" + noise
    (function,) = find_functions(Document("m.py", source.replace("\n", end)))
    assert function.whole == f"def function(x):\n{body}" and function.name == "m.py:3:function"
    plain = source.translate(dict.fromkeys(map(ord, INSIDE), "-"))
    (known,) = find_functions(Document("m.py", plain))
    assert (known.header, len(known.lines)) == (function.header, len(function.lines))


def test_form_feeds_do_not_shift_what_follows_them():
    (first,) = find_functions(Document("m.py", FORM_FEED))
    assert first.whole == "def first(x):\n    y = x\n    z = y\n    return z" and first.name.startswith("m.py:5:")
    (method,) = find_functions(Document("m.py", METHOD))
    assert method.whole == "def method(self):\n    a = 1\n\n    b = a\n    return b"
    ast.parse(method.whole)


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
