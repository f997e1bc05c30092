# SPDX-License-Identifier: Apache-2.0
"""Caches values computed from an object for as long as the object lives."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

_MOST_VALUES = 8  # values kept for one object


class IdentityCache:
    """Values computed from objects, found by the object's identity.

    The objects are held weakly: with an object its values are released. NumPy arrays,
    which may change in place, and objects without weak references are not cached.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], dict[Hashable, Any]]] = {}

    def recall(self, owner: Any, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns the value cached for this owner and key, or calls ``make`` for it."""
        if isinstance(owner, np.ndarray):
            return make()
        number = id(owner)
        entry = self._entries.get(number)
        if entry is None or entry[0]() is not owner:
            try:
                reference = weakref.ref(owner, lambda _: self._release(number))
            except TypeError:
                return make()
            entry = self._entries[number] = reference, {}
        values = entry[1]
        if key not in values:
            made = make()
            if len(values) >= _MOST_VALUES:
                values.clear()
            values[key] = made
        return values[key]

    def _release(self, number):
        entry = self._entries.get(number)
        # Another object may have taken the place, and the number, of the dead one.
        if entry is not None and entry[0]() is None:
            del self._entries[number]
