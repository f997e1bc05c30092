# SPDX-License-Identifier: Apache-2.0
"""What the package promises: the names at its top and in its public submodules."""

import inspect

import jboost as jb

SUBMODULES = (
    "cart", "explanation", "interchange", "parts", "sketches", "streams", "survival",
)  # fmt: skip


def find_public_names():
    """Returns {"fit": ..., "cart.fit_tree": ...}: all public names but modules."""
    homes = {"": jb} | {f"{name}.": getattr(jb, name) for name in SUBMODULES}
    names = {
        prefix + name: getattr(home, name)
        for prefix, home in homes.items()
        for name in home.__all__
    }
    tops = {name: thing for name, thing in names.items() if "." not in name}
    # A name at the top is listed there only.
    return {
        name: thing
        for name, thing in names.items()
        if not inspect.ismodule(thing)
        and ("." not in name or name.split(".")[1] not in tops)
    }


def find_public_functions():
    """Returns those of them that are functions."""
    names = find_public_names()
    return {name: thing for name, thing in names.items() if inspect.isfunction(thing)}
