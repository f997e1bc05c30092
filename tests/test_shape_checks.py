# SPDX-License-Identifier: Apache-2.0
"""Annotated shapes are checked in all modules, without a list that someone keeps."""

import importlib
import pkgutil

import jax.numpy as jnp
import pytest
from beartype.roar import BeartypeCallHintViolation

import jboost as jb
from jboost.numerics.exact import choose_scale


def test_every_module_is_checked():
    modules = pkgutil.walk_packages(jb.__path__, "jboost.")
    names = {module.name for module in modules if not module.ispkg}
    names -= {name for name in names if name.startswith("jboost.entry.")}
    # Neither public modules and losses nor the library of kernels, which is no Python
    # module.
    names = {n for n in names if n.count(".") > 1 and ".losses." not in n}
    names = {name for name in names if not name.endswith("jboost_kernels")}
    assert len(names) > 90
    for name in names:
        loader = importlib.import_module(name).__spec__.loader
        assert type(loader).__module__ == "shape_checks", name


def test_wrong_shapes_are_found():
    choose_scale(jnp.ones((2, 5)), jnp.int32(5))
    with pytest.raises(BeartypeCallHintViolation, match="values"):
        choose_scale(jnp.ones(5), jnp.int32(5))
