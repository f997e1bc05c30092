# SPDX-License-Identifier: Apache-2.0
"""The experiments' command lines, and what they say of times below noise."""

import ast
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "experiments"
PARTS = ("benchmark_report", "benchmark_timing", "benchmark_worker", "experiment_tools")
SCRIPTS = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in PARTS)


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """Scripts find each other, and no test finds them afterwards."""
    monkeypatch.syspath_prepend(FOLDER)
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if (FOLDER / f"{name}.py").exists():
            del sys.modules[name]


def run(monkeypatch, script, *arguments):
    """Calls the script's main function; returns the exit status."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script).main()
    return ended.value.code


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_the_script_does_and_where_it_writes(
    script, monkeypatch, capsys
):
    assert run(monkeypatch, script, "--help") == 0
    said = capsys.readouterr().out
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{script}.py").read_text()))
    assert docstring is not None and docstring.splitlines()[0] in said
    assert "--out DIR" in said
    assert not any(word in said for word in ("--output", "--results", "--json"))


def test_documentation_lists_every_script():
    page = (FOLDER.parent / "docs/experiments.md").read_text()
    assert [name for name in SCRIPTS if f"- `{name}.py`" not in page] == []


def test_scripts_use_the_public_package_only():
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            inner = [name for name in names if name.startswith("jboost.")]
            assert inner == [], path.name


@pytest.mark.parametrize("script", ["compare_libraries", "categories"])
def test_unknown_tables_are_answered_with_the_known_ones(
    script, monkeypatch, capsys, tmp_path
):
    table = tmp_path / "abalone" / "meta.json"
    table.parent.mkdir()
    table.touch()
    arguments = ["--tables", tmp_path, "--out", tmp_path]
    assert run(monkeypatch, script, *arguments, "--only", "nosuch") == 2
    said = capsys.readouterr().err
    assert "abalone" in said and "nosuch" in said and "adult" not in said
    assert run(monkeypatch, script, "--tables", tmp_path / "empty") == 2
    assert "abalone" in capsys.readouterr().err


def test_slopes_above_noise_are_positive_in_every_turn():
    """Whatever the readings are, and slopes far above their spread are found."""
    from experiment_tools import find_slope

    rng = np.random.default_rng(0)
    found = 0
    for tree in (0.0, 0.01, 1.0):
        for _ in range(200):
            few = 5 + 0.05 * rng.random(4)
            many = 5 + 10 * tree + 0.05 * rng.random(4)
            slope = find_slope(few, many, 10)
            assert slope.value == pytest.approx((np.median(many) - np.median(few)) / 10)
            if slope.measured is None:
                assert tree < 1
            else:
                assert tree > 0 and np.subtract.outer(many, few).min() > 0
                found += 1
    assert found > 200


def make_turns(libraries, cost):
    """Readings of one sparse run each, in which xgboost takes no time at all."""
    turns = []
    for density, entries in ((0.01, 100), (0.1, 1000)):
        for library in libraries:
            tree = 0 if library == "xgboost" else cost * entries
            many = [3.0 + 10 * tree, 2.9 + 10 * tree]
            turns.append(
                dict(library=library, density=density, entries=entries, few=[3.0, 3.1],
                     many=many, first=3.0, predict=1.0, megabytes=1.0, mse=1.0)
            )  # fmt: skip
    return turns


def test_sparse_says_what_is_below_noise_and_draws_the_rest(tmp_path, capsys):
    sparse = importlib.import_module("sparse")
    turns = make_turns(sparse.LIBRARIES, 0.01)
    summary = [row for d in (0.01, 0.1) for row in sparse.summarize(turns, d, 10)]
    sparse.print_table(summary)
    table = capsys.readouterr().out.splitlines()
    rows = [line for line in table if "xgboost" in line]
    assert len(rows) == 2 and all("below noise" in line for line in rows)
    assert "-0." not in "".join(table)
    for row in summary:
        alone = row["library"] == "xgboost"
        assert (row["per_tree"] is None) == (row["ratio"] is None) == alone
        if not alone:
            assert row["ratio"] == 1
    drawn = {}
    sparse.save_figure = lambda figure, path: drawn.update(
        {line.get_label(): line.get_ydata() for line in figure.axes[0].get_lines()}
    )
    sparse.draw(summary, tmp_path / "sparse.png")
    labels = {label.split()[0]: label for label in drawn}
    assert "below noise at 1.00%, 10.00%" in labels["xgboost"]
    assert [len(drawn[labels[name]]) for name in sparse.LIBRARIES] == [2, 0, 2]
    assert "below noise beside xgboost" in sparse.conclude(summary)


def test_importance_keeps_columns_of_text(tmp_path, monkeypatch, capsys):
    importance = importlib.import_module("importance")
    path = tmp_path / "table.csv"
    path.write_text(
        "town,rooms,y\n" + "Rome,1,2\nParis,2,3\nRome,,1\n" * 2 + "Bonn,1,\n"
    )
    x, y = importance.read_table(path, "y")
    assert [*x.columns] == ["town", "rooms"] and len(x) == len(y) == 6
    assert "town" in capsys.readouterr().out
    for target in ("town", "z"):
        with pytest.raises(SystemExit, match=f"--target .*'{target}'"):
            importance.read_table(path, target)
