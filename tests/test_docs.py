# SPDX-License-Identifier: Apache-2.0
"""Examples in the README and the pages run and print what the pages say.

Tables of parameters, losses and metrics are compared with the code.
"""

import doctest
import inspect
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from public_names import SUBMODULES, find_public_names

import jboost as jb

matplotlib.use("Agg")

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(\s+^```text\n(?P<printed>.*?)^```$)?", re.S | re.M
)
NUMBER = r"-?\d+\.?\d*(?:e[-+]?\d+)?"
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
def test_examples_run(page, plain_settings, tmp_path, monkeypatch, capsys):
    """Runs the blocks of a page in order, with the line numbers of the page.

    A block of text that follows is what the example prints; "..." stands for anything.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    text, names = page.read_text(), {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        lines = text[: block.start("code")].count("\n")
        program = compile("\n" * lines + block["code"], str(page), "exec")
        capsys.readouterr()
        try:
            exec(program, names)
        except ImportError as error:  # of what is not installed along with jboost
            pytest.skip(str(error))
        if block["printed"] is not None:
            assert_prints(block["printed"], capsys.readouterr().out)


def assert_prints(expected, printed):
    """Lines may be broken elsewhere; last bits of float32 depend on the processor."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    check = doctest.OutputChecker().check_output
    same = check(expected, printed, flags)
    if not same and "..." not in expected:
        texts = expected, printed
        around = [re.sub(rf" *{NUMBER} *", " # ", text) for text in texts]
        numbers = [np.array(re.findall(NUMBER, text), float) for text in texts]
        same = check(*around, flags) and np.allclose(*numbers, rtol=1e-5, atol=0)
    assert same, f"expected:\n{expected}\nprinted:\n{printed}"


def read_table(page, heading):
    """The cells of the tables of a page whose first column has this heading."""
    rows, inside = [], False
    for line in (ROOT / "docs" / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        inside = line.startswith("|") and (inside or cells[0] == heading)
        rows += [cells] if inside and not line.startswith("|---") else []
    return [row for row in rows if row[0] != heading]


def test_parameters_have_the_defaults_of_fit():
    rows = {row[0].strip("`"): row[1].strip("`") for row in read_table(
        "parameters.md", "parameter")}  # fmt: skip
    known = inspect.signature(jb.fit).parameters.values()
    defaults = {p.name: p.default for p in known if p.kind is p.KEYWORD_ONLY}
    assert {name: eval(rows[name], {"inf": float("inf")}) for name in rows} == defaults


def test_tables_of_losses_and_metrics_are_complete():
    listed = [row[0] for row in read_table("losses.md", "`jb.losses.`")]
    found = re.findall(r"`(\w+)", " ".join(listed))
    makers = {"make_adaptive_huber"} - {*jb.losses.LOSSES}
    assert {*found} - makers == {*jb.losses.LOSSES}
    listed = " ".join(row[0] for row in read_table("metrics.md", "name"))
    assert {*re.findall(r"`(\w+)`", listed)} == {*jb.metrics.METRICS}


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_read_well_in_the_repository(page):
    """Not only as built by Sphinx: no raw roles, and every picture is there."""
    text = page.read_text()
    assert not re.search(r"\{(func|class|mod|meth|attr|ref|doc)\}`", text)
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (page.parent / picture).is_file(), picture


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_on_pages_exist(page):
    for path in {*re.findall(r"\bjb\.(\w+(?:\.\w+)*)", page.read_text())}:
        thing = jb
        for part in path.split("."):
            # Fields of results exist on instances only.
            fields = getattr(thing, "__annotations__", {})
            assert hasattr(thing, part) or part in fields, f"jb.{path}"
            thing = getattr(thing, part, None)


def test_every_public_function_and_class_has_an_example():
    names = find_public_names()
    things = {name: thing for name, thing in names.items() if callable(thing)}
    assert len(things) > 100
    for name, thing in things.items():
        assert ">>>" in (thing.__doc__ or ""), name


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
    # Their pages name each loss.
    losses = {f"losses.{name}" for name in jb.losses.__all__ if name[0].islower()}
    assert sorted(losses - listed) == []


def test_references_in_docstrings_lead_to_public_names():
    """Pages link jb.fit, and the last parts of a name where these are unique."""
    public, found = find_public_names(), r":(?:func|class|exc):`~?([\w.]+)`"
    modules = {name for name in jb.__all__ if isinstance(getattr(jb, name), ModuleType)}
    listed = [*public] + [
        f"{module}.{name}" for module in modules for name in dir(getattr(jb, module))
    ]
    dead = {
        (name, target)
        for name, thing in public.items()
        for target in re.findall(found, thing.__doc__ or "")
        for short in [re.sub(r"^(jb|jboost)\.", "", target)]
        if short not in listed
        and len({full for full in listed if full.endswith(f".{short}")}) != 1
    }
    assert dead == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text())
    for target, anchor in links:
        if not target.startswith("pictures/"):  # are drawn when the pages are built
            assert (page.parent / target).exists(), target
        if anchor and "." not in anchor:  # with a dot it is a name in the reference
            headings = find_headings(page.parent / target if target else page)
            assert anchor in headings, f"{target}#{anchor}"


def find_headings(page):
    """The anchors that GitHub and Sphinx give to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return [re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings]


@pytest.mark.filterwarnings("ignore")  # those of Sphinx itself
def test_pages_build_without_a_warning(plain_settings, tmp_path, monkeypatch):
    """Reads all, draws the pictures and finds the targets of links; no page is written.

    It runs in this process, which has JAX already.
    """
    pytest.importorskip("sphinx")
    from sphinx.cmd.build import build_main

    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert build_main(["-W", "-q", "-b", "dummy", "docs", "built"]) == 0


def test_page_walks_the_way_of_fit():
    """Each function of the page's table is called first in the table's order."""
    page = (ROOT / "docs/how-it-works.md").read_text()
    steps = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| `(\w+)` \|", page, re.MULTILINE)
    assert len(steps) > 20
    package, called = ROOT / "jboost", {}

    def note(frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(package)):
            step = (str(Path(path).relative_to(package)), frame.f_code.co_name)
            called.setdefault(step, len(called))

    def loss(score, target):  # one that no other test has compiled
        return jnp.square(score - target) + 0.1234 * jnp.cosh(score - target)

    x = np.linspace(0, 1, 163 * 13, dtype=np.float32).reshape(163, 13)
    sys.setprofile(note)
    try:
        model, _ = jb.fit(x, x[:, 0], loss, num_rounds=2, max_depth=2, max_bins=37)
        jb.predict(model, x)
    finally:
        sys.setprofile(None)
    places = [called.get(step) for step in steps]
    assert None not in places, steps[places.index(None)]
    assert places == sorted(places), steps
