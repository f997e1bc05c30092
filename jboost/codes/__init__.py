# SPDX-License-Identifier: Apache-2.0
"""Turns float32 columns into integer codes."""
