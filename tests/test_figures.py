# SPDX-License-Identifier: Apache-2.0
"""Measured figures on the pages come from results of scripts (docs/make_figures.py)."""

import re
from pathlib import Path

import make_figures
import pytest

ROOT = Path(__file__).parent.parent
PAGES = make_figures.list_pages()
KNOWN = make_figures.read_figures()
UNITS = "%|ms|µs|ns|MB|GB|MiB|GiB|microseconds|seconds?|minutes?|times"
FIGURE = re.compile(
    rf"(?<![\w.])\d[\d,]*\.\d+(?!\w|\.\d)|\b\d[\d,.]*(?: ?(?:{UNITS}))(?!\w)"
)
# Numbers that nobody measured: settings stand in backticks, versions after a name.
NAMES = (
    "Python|JAX|NumPy|XGBoost|LightGBM|CatBoost|SHAP|Spark|PySpark|CUDA|Optuna|MLflow"
    "|Biases|Equinox|Flax|License|jaxlib|libtpu|optax|scikit-learn|section|theorem"
)
OTHERS = re.compile(
    rf"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)|\b(?:{NAMES}) [\d.]+\b",
    re.S | re.M,
)


def name(page):
    return page.stem


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_show_what_was_measured(page):
    text = page.read_text()
    assert make_figures.write_figures(text, KNOWN) == text
    for cell in make_figures.CELL.finditer(text):  # there it would end a paragraph
        assert text[cell.start() - 1] != "\n", cell[0]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_figure_is_without_a_source(page):
    text = make_figures.TABLE.sub("", page.read_text())
    text = OTHERS.sub("", make_figures.CELL.sub("", text))
    assert FIGURE.findall(text) == []


def test_a_figure_without_a_source_is_found():
    for text in (
        "takes 1.12 of it",
        "| a | 0.41 |",
        "5 ms",
        "20 % worse",
        "3 times",
        "Is 1.2",
    ):
        assert FIGURE.search(OTHERS.sub("", text)), text


@pytest.mark.parametrize("result", KNOWN)
def test_figures_say_how_they_were_measured(result):
    figures = KNOWN[result]
    script = figures["command"].split()[1]
    assert (ROOT / script).is_file()
    assert re.match(r"\d{4}-\d\d-\d\d", figures["date"])
    assert figures["device"]
    assert {*figures["tables"]} == make_figures.list_asked(result)
