# SPDX-License-Identifier: Apache-2.0
"""The public names of a release, their parameters and attributes, stay.

``data/version-0.2.0/names.json`` was written once, by ``write`` below. A name may leave
a later version only as docs/reliability.md says; then it leaves the file, too.
"""

import inspect
import json
from functools import partial
from operator import attrgetter
from pathlib import Path

import pytest
from public_names import find_public_names

import jboost as jb

FILE = Path(__file__).parent / "data" / "version-0.2.0" / "names.json"
MODULES = ("distributions", "losses", "metrics", "plotting", "recipes", "sklearn")
PROMISED = json.loads(FILE.read_text())
ORDERED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def find_names():
    """All public names, those of modules at the top included."""
    names = dict(find_public_names())
    for module in MODULES:
        home = getattr(jb, module)
        listed = getattr(home, "__all__", None) or [
            name
            for name, thing in vars(home).items()
            if getattr(thing, "__module__", None) == home.__name__
        ]
        names |= {
            f"{module}.{name}": getattr(home, name)
            for name in listed
            if name[0] != "_" and not inspect.ismodule(getattr(home, name))
        }
    return names


def describe(thing):
    """Returns the parameters and the attributes that users rely on."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        parameters = []
    described = dict(
        ordered=[p.name for p in parameters if p.kind in ORDERED],
        named=sorted(p.name for p in parameters if p.kind is p.KEYWORD_ONLY),
        required=[p.name for p in parameters if p.default is p.empty],
    )
    if inspect.isclass(thing):
        members = {*dir(thing), *getattr(thing, "__annotations__", {})}
        common = {*dir(tuple), *dir(ValueError)}
        described["attributes"] = sorted(
            name for name in members - common if name[0] != "_"
        )
    return described


@pytest.mark.parametrize("name", PROMISED)
def test_names_keep_their_parameters(name):
    promised, found = PROMISED[name], describe(attrgetter(name)(jb))
    count = len(promised["ordered"])
    assert found["ordered"][:count] == promised["ordered"]
    accepted = {*found["ordered"], *found["named"]}
    assert accepted >= {*promised["named"]}
    # Calls that were complete are still complete.
    assert {*found["required"]} <= {*promised["required"]}
    assert {*found.get("attributes", ())} >= {*promised.get("attributes", ())}


def test_descriptions_see_what_breaks_calls():
    def before(x, y, *, depth=1):
        return x, y, depth

    def after(y, x, *, depth, rate=1):
        return x, y, depth, rate

    old, new = describe(before), describe(after)
    assert new["ordered"] != old["ordered"]
    assert {*new["required"]} - {*old["required"]} == {"depth"}
    assert "depth" not in describe(partial(before, 1, 2))["required"]


def write(path):
    """Writes the names of this version."""
    described = {name: describe(thing) for name, thing in find_names().items()}
    path.write_text(json.dumps(described).replace("}, ", "},\n") + "\n")
