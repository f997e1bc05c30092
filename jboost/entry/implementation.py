# SPDX-License-Identifier: Apache-2.0
"""Holds the current implementation of the kernels in a context.

In: the argument ``implementation`` of a public function. Out: the same name, read where
a kernel is chosen, without passing it through the functions in between. Like
``jax.default_matmul_precision``, it is local to a thread and part of the keys of JAX's
tracing and compilation caches.
"""

from contextlib import AbstractContextManager

import jax

_implementation = jax.make_user_context(None)


def use_implementation(name: str | None) -> AbstractContextManager[None]:
    """Sets the implementation within a ``with`` block; None means the best one.

    JAX may trace rules of ``custom_jvp`` and ``custom_vmap`` after the block has ended,
    so such rules must not read the implementation themselves.
    """
    return _implementation(name)


def current_implementation() -> str | None:
    """Returns the current implementation, None for the best one."""
    return _implementation.value
