# SPDX-License-Identifier: Apache-2.0
"""Quantile sketches and summaries."""
