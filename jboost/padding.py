# SPDX-License-Identifier: Apache-2.0
"""Few sizes for many: programs are compiled for sizes, so that sizes are rounded up.

In: how many. Out: how many with padding.
"""


def padded_size(size: int, least: int = 64) -> int:
    """The next of 8 sizes per octave: nearby sizes share compiled programs."""
    if size <= least:
        return least
    step = 1 << max(0, (size - 1).bit_length() - 4)
    return -(-size // step) * step
