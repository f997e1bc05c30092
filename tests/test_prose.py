# SPDX-License-Identifier: Apache-2.0
"""Docstrings and comments say what they mean in full sentences of plain English.

An entry of Args or Attributes starts with a noun phrase or a verb and can be read
without the line above it; a summary line names its object. Wordings that compress a
thought to a fragment are refused.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PREPOSITIONS = "of|for|by|to|from|in|on|at|with|as|that|where|likewise"
PATTERNS = {
    "an entry starts with a noun phrase or a verb": re.compile(
        rf"^ +(?:\*{{0,2}}[a-z_]\w*, )*\*{{0,2}}[a-z_]\w*: (?:{PREPOSITIONS})\b",
        re.MULTILINE,
    ),
    "name the thing instead of 'what ...'": re.compile(r"\b[Ww]hat\b"),
    "one sentence for each thought instead of 'whose'": re.compile(r"\b[Ww]hose\b"),
    "one sentence for each thought instead of 'of which'": re.compile(
        r"\b(?:of|by|to|in|for|from|with|at|on) which\b"
    ),
    "explain instead of 'Does what X does'": re.compile(r"\bDoes (?:what|the same)\b"),
    "say what is alike instead of 'likewise'": re.compile(r"\b[Ll]ikewise\b"),
    "give the number instead of 'so many'": re.compile(r"\b[Ss]o many\b"),
    "a comment beside code starts with a noun phrase or a verb": re.compile(
        r"^# (?:of|for|by|to|that|over) "
    ),
    "explain here instead of 'see ...' alone": re.compile(
        r"^ +[a-z_]\w*: see :func:", re.MULTILINE
    ),
}


def list_prose(source):
    """Yields each docstring, and each comment, with its first line."""
    tree = ast.parse(source)
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False):
            text = node.body[0].value
            # The code of an example is no prose.
            yield text.lineno, re.sub(r"(?m)^ *(?:>>>|\.\.\.).*$", "", text.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            beside = token.line.lstrip() != token.string + "\n"
            yield token.start[0], token.string if beside else " " + token.string


def find_fragments(source):
    """Lists (line, advice, wording) of a file."""
    return sorted(
        (line + text.count("\n", 0, match.start()), advice, match.group().strip())
        for line, text in list_prose(source)
        for advice, pattern in PATTERNS.items()
        for match in pattern.finditer(text)
    )


def test_no_fragments():
    listed = [
        f"{path.relative_to(ROOT)}:{line}: {wording!r}: {advice}"
        for path in sorted((ROOT / "jboost").rglob("*.py"))
        for line, advice, wording in find_fragments(path.read_text())
    ]
    assert not listed, "\n".join(listed)
