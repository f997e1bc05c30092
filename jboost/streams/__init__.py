# SPDX-License-Identifier: Apache-2.0
"""Training on more data than memory holds."""
