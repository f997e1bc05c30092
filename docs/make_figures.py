# SPDX-License-Identifier: Apache-2.0
"""Writes measured figures into the pages: ``python docs/make_figures.py [RESULT ...]``.

Scripts of ``experiments`` write tables of what they measured, with command, date and
device, under "figures" of their results. This one keeps the tables that pages ask for
of the results that it is given, as ``docs/figures/NAME.json``, and writes into
README.md and the pages

- the table between a line ``<!-- figures: NAME; TABLE -->`` and the next
  ``<!-- end -->``, with its source below it;
- the cell that a comment ``<!-- NAME; TABLE; ROW; COLUMN -->`` asks for behind it.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
FIGURES = DOCS / "figures"
TABLE = re.compile(
    r"(^<!-- figures: (\w+); (\w+) -->\n)(.*?)(^<!-- end -->$)", re.M | re.S
)
CELL = re.compile(r"(<!-- (\w+); (\w+); ([^;]+); ([^;]+) -->)([\d.,]*\d)?")


def list_pages() -> list[Path]:
    """Returns the pages that may show figures."""
    return [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


def read_figures() -> dict[str, dict[str, Any]]:
    """Returns what scripts have measured, by the names of their results."""
    return {path.stem: json.loads(path.read_text()) for path in FIGURES.glob("*.json")}


def write_figures(page: str, known: dict[str, dict[str, Any]]) -> str:
    """Returns a page with its figures as they were measured.

    Raises:
      KeyError: a page asks for what is not there.
    """

    def write_table(match):
        begin, name, table, _, end = match.groups()
        heads, *rows = known[name]["tables"][table]
        lines = [heads, ["---"] * len(heads), *rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{begin}\n{text}\n\n{_describe_source(known[name])}\n{end}"

    def write_cell(match):
        asked, name, table, row, column, _ = match.groups()
        heads, *rows = known[name]["tables"][table]
        cells = {cells[0]: cells for cells in rows}[row]
        return asked + dict(zip(heads, cells, strict=True))[column]

    return CELL.sub(write_cell, TABLE.sub(write_table, page))


def list_asked(name: str) -> set[str]:
    """Returns the tables of a result that pages ask for, whole or in part."""
    return {
        match[3]
        for page in list_pages()
        for pattern in (TABLE, CELL)
        for match in pattern.finditer(page.read_text())
        if match[2] == name
    }


def keep(result: Path) -> None:
    """Keeps the figures of a result that pages ask for, a row on a line."""
    figures = json.loads(result.read_text())["figures"]
    asked = list_asked(result.stem)
    tables = {k: rows for k, rows in figures.pop("tables").items() if k in asked}
    text = json.dumps({**figures, "tables": {}}, indent=1).removesuffix("{}\n}")
    parts = [
        f'  "{name}": [\n'
        + ",\n".join(f"   {json.dumps(row, ensure_ascii=False)}" for row in rows)
        + "\n  ]"
        for name, rows in tables.items()
    ]
    text += "{\n" + ",\n".join(parts) + "\n }\n}\n"
    (FIGURES / result.name).write_text(text)


def _describe_source(figures):
    return (
        f"Measured by `{figures['command']}` on {figures['date']}, {figures['device']}."
    )


def main() -> None:
    """Keeps the results that the command line names, and writes all pages."""
    for name in sys.argv[1:]:
        keep(Path(name))
    known = read_figures()
    for page in list_pages():
        page.write_text(write_figures(page.read_text(), known))


if __name__ == "__main__":
    main()
