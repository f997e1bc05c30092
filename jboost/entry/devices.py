# SPDX-License-Identifier: Apache-2.0
"""The platform that work runs on unless its arrays are elsewhere.

In: JAX's configuration. Out: the name of a platform.
"""

import jax
from jaxtyping import Array


def default_platform() -> str:
    """Returns the platform that NumPy arrays are put on.

    ``jax.default_backend()`` does not know of ``jax_default_device``.
    """
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def runs_on_cpu() -> bool:
    """Returns whether NumPy arrays are put on a CPU."""
    return default_platform() == "cpu"


def is_on_cpu(array: Array) -> bool:
    """Returns whether all of an array is on CPU devices."""
    return all(device.platform == "cpu" for device in array.devices())
