# SPDX-License-Identifier: Apache-2.0
"""Which implementation of the kernels is in force.

In: the argument ``implementation`` of a public function. Out: the same name, read
where a kernel is chosen; no function in between passes it on. Like
``jax.default_matmul_precision`` it belongs to a thread, and is part of the keys under
which JAX stores what it has traced and compiled.
"""

from contextlib import AbstractContextManager

import jax

_implementation = jax.make_user_context(None)


def use_implementation(name: str | None) -> AbstractContextManager[None]:
    """Puts an implementation in force within a ``with`` block; None for the best.

    JAX traces some functions after the block has been left: the rules of
    ``custom_jvp`` and ``custom_vmap``. What they need must be chosen before.
    """
    return _implementation(name)


def current_implementation() -> str | None:
    """The implementation in force."""
    return _implementation.value
