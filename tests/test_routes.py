# SPDX-License-Identifier: Apache-2.0
"""Every feature of training meets every route: the same model, or a refusal by name.

tests/routes.py has the cases, the routes and the refusals.
"""

import pytest
from routes import CASES, DIFFERENT, REFUSED, ROUTES, choose_cells, find_features, meet


@pytest.mark.parametrize(("case", "route"), choose_cells())
def test_a_route_trains_the_model_of_fit(case, route):
    meet(case, route)


def test_every_case_meets_a_route_and_every_exception_a_case():
    assert {case for case, _ in choose_cells()} == {*CASES}
    features = set().union(*map(find_features, CASES))
    pairs = {(each, route) for each in features | {*CASES} for route in ROUTES}
    assert {*REFUSED} | DIFFERENT <= pairs
