"""Prompts made from source code: explain, complete or document this function.

    from documents          ast                       three prompts per function
    Lib/textwrap.py   ──►   def dedent(text): ...  ──►  explain     the whole function
                                                        complete    its header and docstring, or its first half
                                                        document    the function without its docstring

With the standard library's files as documents (`text.StandardLibrary`) they need no download, and with the corpus's own
split no function that is asked about while measuring was seen in training, in a prompt or as plain text.
"""

import ast
import dataclasses
import re
import textwrap
import warnings
from collections.abc import Sequence

import numpy as np

from specjax.data.prompts import Prompt
from specjax.data.text import Document

REQUESTS = {
    "explain": (
        "Explain what this Python function does.",
        "What does the following Python function do? Explain it step by step.",
        "Describe this Python function, its arguments and what it returns.",
    ),
    "complete": (
        "Complete this Python function.",
        "Finish the implementation of this Python function.",
        "Write the rest of this Python function.",
    ),
    "document": (
        "Write a docstring for this Python function.",
        "Rewrite this Python function with a docstring and comments.",
        "Document this Python function.",
    ),
}


@dataclasses.dataclass(frozen=True)
class Function:
    """One function of a document, dedented.

    Attributes:
        name: document, line and name.
        source: the document's name.
        lines: all of it, decorators included.
        header: how many lines come before the first statement that is no docstring.
        docstring: (first, end) of the docstring's lines, or None.
    """

    name: str
    source: str
    lines: tuple[str, ...]
    header: int
    docstring: tuple[int, int] | None

    @property
    def whole(self) -> str:
        return "\n".join(self.lines)

    @property
    def beginning(self) -> str:
        """Header and docstring; without a docstring, the first half."""
        return "\n".join(self.lines[: self.header if self.docstring else max(self.header, len(self.lines) // 2)])

    @property
    def undocumented(self) -> str:
        first, end = self.docstring or (0, 0)
        return "\n".join(self.lines[:first] + self.lines[end:])


def find_functions(document: Document, min_body: int = 3) -> list[Function]:
    """The functions and methods of a document, in order, with bodies of at least `min_body` lines under their header.

    A document that is not valid Python has none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in the source that is read
            tree = ast.parse(document.text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines, functions = _source_lines(document.text), []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        documented = ast.get_docstring(node, clean=False) is not None
        first = node.body[1:2] if documented else node.body[:1]
        if not first or node.body[0].lineno == node.lineno:
            continue  # nothing but a docstring, or all on one line
        opening = node.body[0].lineno - 1 - begin, node.body[0].end_lineno - begin
        header = opening[1] if documented else opening[0]
        source = textwrap.dedent("\n".join(lines[begin : node.end_lineno])).split("\n")
        if len(source) - header >= min_body:
            functions.append(
                Function(
                    name=f"{document.name}:{node.lineno}:{node.name}",
                    source=document.name,
                    lines=tuple(source),
                    header=header,
                    docstring=opening if documented else None,
                )
            )
    return sorted(functions, key=lambda function: int(function.name.split(":")[-2]))


def _source_lines(text: str) -> list[str]:
    """Lines as Python counts them, which str.splitlines() does not: it cuts at form feeds, U+2028 and others as well.

    A form feed ends the indentation before it, so a line that begins with one goes on without it.
    """
    return [re.sub(r"^[ \t\f]*\f", "", line) for line in re.split(r"\r\n|\r|\n", text)]


def function_prompts(
    documents: Sequence[Document],
    seed: int,
    count: int | None = None,
    kinds: Sequence[str] = tuple(REQUESTS),
    max_chars: int = 1000,
) -> list[Prompt]:
    """Prompts about the functions of the documents, shuffled by the seed.

    Args:
        documents: Python sources.
        seed: of the order and of the wording.
        count: how many at most (None: all).
        kinds: names in REQUESTS.
        max_chars: longest code in a prompt.

    Raises:
        ValueError: an unknown kind, a number outside its range, or no function that fits.
    """
    unknown = [kind for kind in kinds if kind not in REQUESTS]
    if unknown or not kinds:
        raise ValueError(f"kinds must be some of {', '.join(REQUESTS)}; got {', '.join(unknown) or 'none'}")
    if max_chars < 1 or seed < 0 or (count is not None and count < 1):
        raise ValueError(f"max_chars and count must be at least 1, seed at least 0; got {max_chars}, {count}, {seed}")
    code = {"explain": "whole", "complete": "beginning", "document": "undocumented"}
    found = [
        (function, kind, getattr(function, code[kind]))
        for document in documents
        for function in find_functions(document)
        for kind in kinds
        if len(function.whole) <= max_chars
    ]
    if not found:
        raise ValueError(
            f"no function of at most {max_chars} characters in {len(documents)} documents; raise max_chars"
        )
    rng = np.random.default_rng(seed)
    prompts = []
    for index in rng.permutation(len(found))[:count]:
        function, kind, text = found[index]
        request = REQUESTS[kind][rng.integers(len(REQUESTS[kind]))]
        content = f"{request}\n\n```python\n{text}\n```"
        prompts.append(Prompt(f"{function.name}:{kind}", (("user", content),), function.source, kind))
    return prompts
