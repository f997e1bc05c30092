# SPDX-License-Identifier: Apache-2.0
"""What a model's scores come from: importances, SHAP values, dependence."""
