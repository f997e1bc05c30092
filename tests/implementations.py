# SPDX-License-Identifier: Apache-2.0
"""Which implementations run on the device that tests use."""

from jboost.entry.devices import default_platform
from jboost.kernels import cuda_ready, library


def list_implementations() -> tuple[str, ...]:
    """Returns "xla", and "cpu" or "cuda" where these kernels run."""
    platform = default_platform()
    if platform in cuda_ready.PLATFORMS:
        return ("xla", "cuda") if cuda_ready.are_ready() else ("xla",)
    return ("xla", "cpu") if library.available() else ("xla",)


IMPLEMENTATIONS = list_implementations()
