# SPDX-License-Identifier: Apache-2.0
"""Models of other libraries, read and written; predictions that run without jboost."""
