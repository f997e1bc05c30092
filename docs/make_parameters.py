# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/parameters.md: ``python docs/make_parameters.py``.

Between a line ``<!-- parameters: name, ... -->`` and the next ``<!-- end -->`` stands a
table of the hyperparameters that ``jboost.boosting.settings`` declares for this
section, then of the arguments of ``jb.fit`` that the line names, with their docstring.
"""

import inspect
import re
from pathlib import Path

import jboost as jb
from jboost.boosting.settings import FitSettings, declared
from jboost.entry.arguments import names_elsewhere

PAGE = Path(__file__).parent / "parameters.md"
HEAD = "| parameter | default | elsewhere | meaning |\n|---|---|---|---|\n"
_PART = re.compile(
    r"(^## (.+?)\n.*?^<!-- parameters:([^\n]*?) ?-->\n)(.*?)(^<!-- end -->)",
    re.M | re.S,
)
_ENTRY = re.compile(r"^( +)(\w+): (.*?)(?=^\1\w+: |^ *$)", re.M | re.S)


def write_tables(page: str) -> str:
    """Returns the page with its tables as the package declares them."""
    return _PART.sub(_write_part, page)


def list_sections() -> dict[str, list[str]]:
    """Returns {section: the names of its arguments} in the order of the page."""
    declarations = declared(FitSettings).items()
    return {
        section: [name for name, each in declarations if each.section == section]
        + re.findall(r"\w+", others)
        for _, section, others, _, _ in _PART.findall(PAGE.read_text())
    }


def _write_part(part):
    begin, section, others, _, end = part.groups()
    settings = {
        name: each for name, each in declared(FitSettings).items()
        if each.section == section
    }  # fmt: skip
    known = inspect.signature(jb.fit).parameters
    entries = _ENTRY.findall(jb.fit.__doc__.partition("Args:")[2])
    written = {name: text for _, name, text in entries}
    meanings = {name: _as_markdown(each.meaning) for name, each in settings.items()}
    for name in re.findall(r"\w+", others):
        meanings[name] = _as_markdown(written[name])
    rows = [
        f"| `{name}` | `{known[name].default!r}` | {_list_elsewhere(name)} | {each} |"
        for name, each in meanings.items()
    ]
    details = [
        f"- **`{name}`**: {each.details}" for name, each in settings.items()
        if each.details
    ]  # fmt: skip
    lists = "\n" + "\n".join(details) + "\n" if details else ""
    return begin + HEAD + "\n".join(rows) + "\n" + lists + end


def _as_markdown(text):
    text = " ".join(text.split()).removesuffix(".").replace("``", "`")
    text = re.sub(r":\w+:`jboost\.(.+?)`", r"`jb.\1`", text)
    return text.replace("|", r"\|")


def _list_elsewhere(name):
    return ", ".join(f"`{each}`" for each in names_elsewhere(name)) or "-"


if __name__ == "__main__":
    PAGE.write_text(write_tables(PAGE.read_text()))
