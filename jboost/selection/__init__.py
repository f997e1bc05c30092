# SPDX-License-Identifier: Apache-2.0
"""Cross-validation and sweeps."""
