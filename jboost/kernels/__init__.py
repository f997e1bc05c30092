# SPDX-License-Identifier: Apache-2.0
"""One file per operation and platform; each operation means the same in all of them."""
