# SPDX-License-Identifier: Apache-2.0
"""Every feature of training meets every route: the same model, or a refusal by name.

``python tests/routes.py`` compares all cases on all routes.
"""

import pytest
from routes import CASES, REFUSED, ROUTES, choose_cells, find_features, meet


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "route"), choose_cells())
def test_a_route_trains_the_model_of_fit(case, route):
    meet(case, route)


def test_every_feature_meets_every_route():
    features = set().union(*map(find_features, CASES))
    met = {
        (feature, route) for case, route in choose_cells()
        for feature in find_features(case)
    }  # fmt: skip
    assert met == {(feature, route) for feature in features for route in ROUTES}
    assert {*REFUSED} <= met
