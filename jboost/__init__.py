# SPDX-License-Identifier: Apache-2.0
"""Gradient boosting for any differentiable loss, as pure functions on JAX arrays.

``__init__.pyi`` lists the public names; the modules that define them are imported on
first use.
"""

from typing import Any

import lazy_loader

# Must run before JAX starts its threads and before the process forks.
from jboost.entry.importing import make_attribute_error, read_version

_find, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_SUBMODULES = (
    "cart", "explanation", "interchange", "parts", "sketches", "streams", "survival"
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports a public name on first use."""
    if name == "__version__":
        return read_version()
    try:
        return _find(name)
    except AttributeError:
        if name.startswith("_") or name in _SUBMODULES:
            raise
    homes = [f"jboost.{home}" for home in _SUBMODULES if name in dir(_find(home))]
    if not homes:
        raise make_attribute_error("jboost", name)
    hint = f"it is {homes[0]}.{name}"
    raise AttributeError(f"jboost has no attribute {name!r}; {hint}", name=name)
