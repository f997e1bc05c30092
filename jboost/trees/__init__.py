# SPDX-License-Identifier: Apache-2.0
"""Grows trees from derivatives and fits their leaf values."""
