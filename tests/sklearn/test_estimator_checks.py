"""The estimators keep the contract of scikit-learn: all its checks, but for those that are named here with a reason."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn")

from sklearn.utils.estimator_checks import parametrize_with_checks

from gpytorch_tkrr.sklearn import HilbertRegressor, TKRRClassifier, TKRRRegressor

SMALL = {"rank": 2, "num_basis": 4, "num_draws": 4, "num_warmup": 6, "random_state": 0}

WEIGHTS = (
    "a weight divides the noise variance of its row, whose size is learned from the number of rows: a weight of two is "
    "not two rows. Besides, repeated rows get random numbers of their own."
)


def expected_failures(estimator):
    return {
        "check_sample_weight_equivalence_on_dense_data": WEIGHTS,
        "check_sample_weight_equivalence_on_sparse_data": WEIGHTS,
    }


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.TKRRWarning")  # short chains on a handful of rows
@parametrize_with_checks([TKRRRegressor(**SMALL), TKRRClassifier(**SMALL)], expected_failed_checks=expected_failures)
def test_estimator(estimator, check):
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.TKRRWarning")
@parametrize_with_checks(
    [
        TKRRRegressor(rank=2, num_basis=4, method="als", random_state=0),
        TKRRClassifier(rank=2, num_basis=4, method="als", random_state=0),
        HilbertRegressor(num_steps=5, tol=0.05),
    ],
    expected_failed_checks=expected_failures,
)
def test_estimator_slowly(estimator, check):
    check(estimator)
