# SPDX-License-Identifier: Apache-2.0
"""Reads a user's data into float32 columns."""
