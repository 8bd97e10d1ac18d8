"""The project stays small: lines of code of all of `src`, lines of each file."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

SOURCES = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Lines that hold code: no docstrings, comments, or blank lines."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def test_code_lines_are_counted() -> None:
    """A docstring, a comment and a blank line are no code; a statement over two lines is two."""
    assert (
        code_lines('"""Doc.\n\nMore."""\n\n# comment\nx = (\n    1)\n\n\ndef f():\n    """Doc."""\n    return x\n') == 4
    )


def test_src_stays_within_its_budget() -> None:
    """docs/decisions/0010, 0011, 0016 and 0021: 18,000 lines of code, the test kit's 2,500 apart, and no file over 500
    lines of any kind."""
    texts = {path: path.read_text() for path in SOURCES}
    kit = sum(code_lines(text) for path, text in texts.items() if path.parent.name == "testing")
    assert kit < 2_500
    assert sum(map(code_lines, texts.values())) - kit < 18_000
    assert {path.name: len(text.splitlines()) for path, text in texts.items() if len(text.splitlines()) > 500} == {}
