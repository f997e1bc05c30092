# SPDX-License-Identifier: Apache-2.0
"""Arithmetic that gives the same bits everywhere: sums, rounding, random bits."""
