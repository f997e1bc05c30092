# SPDX-License-Identifier: Apache-2.0
"""Calls of kernels, by operation; an operation means the same on all platforms."""
