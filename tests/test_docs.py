# SPDX-License-Identifier: Apache-2.0
"""What the pages and the README show runs, and their links lead somewhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import matplotlib
import pytest
from public_names import SUBMODULES, find_public_functions, find_public_names

import jboost as jb

matplotlib.use("Agg")

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
CACHE = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


def name(page):
    return page.stem


@pytest.fixture
def plain_settings():
    """JAX as its users have it; where it keeps programs is one of the examples."""
    before = {option: getattr(jax.config, option) for option in CACHE}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    for option, value in before.items():
        jax.config.update(option, value)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=name
)
def test_examples_run(page, plain_settings, tmp_path, monkeypatch):
    """The blocks of a page, one after the other; each one's line numbers are right."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    text, names = page.read_text(), {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        lines = text[: block.start(1)].count("\n")
        program = compile("\n" * lines + block[1], str(page), "exec")
        try:
            exec(program, names)
        except ImportError as error:  # of what is not installed along with jboost
            pytest.skip(str(error))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_read_well_in_the_repository(page):
    """Not only as built by Sphinx: no raw roles, and every picture is there."""
    text = page.read_text()
    assert not re.search(r"\{(func|class|mod|meth|attr|ref|doc)\}`", text)
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (page.parent / picture).is_file(), picture


def test_every_public_function_has_an_example():
    functions = find_public_functions()
    assert len(functions) > 40
    for name, function in functions.items():
        assert ">>>" in (function.__doc__ or ""), name


def test_the_reference_has_every_public_name():
    pages = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    listed = re.findall(
        r"^\.\. auto(?:function|class|exception):: ([\w.]+)$", pages, re.M
    )
    listed = {name.removeprefix("jboost.") for name in listed}
    assert sorted({*find_public_names()} - listed) == []
    modules = {name for name in jb.__all__ if isinstance(getattr(jb, name), ModuleType)}
    for module in modules - {*SUBMODULES}:
        pattern = rf"(auto|current)module:: jboost\.{module}\n"
        assert re.search(pattern, pages), module


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        if not target.startswith("pictures/"):  # are drawn when the pages are built
            assert (page.parent / target).exists(), target


def test_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "docs", "built"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"MPLBACKEND": "agg"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "built" / "index.html").exists()
