# SPDX-License-Identifier: Apache-2.0
"""Estimators with the interface of scikit-learn.

In: X and y of every kind that scikit-learn or :func:`jboost.fit` takes. Out: estimators
that work in pipelines, searches and cross-validation.

    from jboost.sklearn import JBoostClassifier

    classifier = JBoostClassifier(num_rounds=200).fit(X, y)
    classifier.predict_proba(X)
"""

try:
    import sklearn as _sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        "jboost.sklearn needs scikit-learn, which is not installed: "
        "pip install scikit-learn"
    ) from error

from jboost.sklearn.classifier import JBoostClassifier
from jboost.sklearn.estimators import JBoostSearchCV
from jboost.sklearn.ranker import JBoostRanker
from jboost.sklearn.regressor import JBoostDistribution, JBoostRegressor

__all__ = [
    "JBoostClassifier", "JBoostDistribution", "JBoostRanker", "JBoostRegressor",
    "JBoostSearchCV",
]  # fmt: skip
