# SPDX-License-Identifier: Apache-2.0
"""The traceable boosting loop."""
