"""The estimators keep the contract of scikit-learn: all its checks, but for those that are named here with a reason."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn")

from gpytorch.kernels import LinearKernel
from sklearn.utils.estimator_checks import parametrize_with_checks

from gpytorch_tkrr.sklearn import HilbertRegressor, TKRRClassifier, TKRRRegressor

pytestmark = pytest.mark.usefixtures("short_races")

SMALL = {"rank": 2, "num_basis": 4, "num_draws": 4, "num_warmup": 6, "random_state": 0}

WEIGHTS = (
    "a weight divides the noise variance of its row, whose size is learned from the number of rows: a weight of two is "
    "not two rows. Besides, repeated rows get random numbers of their own."
)


INPUTS = "the check has more inputs than the three that the default kernel takes; with a LinearKernel it passes."

COPIES = "the check compares a kernel object with its copy by joblib's hash, which differs for any torch module."


def expected_failures(estimator):
    failures = {
        "check_sample_weight_equivalence_on_dense_data": WEIGHTS,
        "check_sample_weight_equivalence_on_sparse_data": WEIGHTS,
    }
    if isinstance(estimator, HilbertRegressor):
        if estimator.kernel is not None:
            return {**failures, "check_estimators_overwrite_params": COPIES}
        names = ("n_features_in_after_fitting", "positive_only_tag_during_fit", "estimators_dtypes", "dtype_object")
        names += (
            "regressors_train",
            "regressor_data_not_an_array",
            "regressors_no_decision_function",
            "regressors_int",
        )
        return {**failures, **{f"check_{name}": INPUTS for name in names}}
    return failures


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.TKRRWarning")  # short chains on a handful of rows
@parametrize_with_checks(
    [TKRRRegressor(**SMALL), TKRRClassifier(**SMALL), HilbertRegressor(LinearKernel(), num_steps=2)],
    expected_failed_checks=expected_failures,
)
def test_estimator(estimator, check, request):
    expected_failure = request.node.get_closest_marker("xfail")
    if expected_failure is not None:  # it would prove nothing, whether it fails or not
        pytest.skip(expected_failure.kwargs["reason"])
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.TKRRWarning")
@parametrize_with_checks(
    [
        TKRRRegressor(rank=2, num_basis=4, method="als", random_state=0),
        TKRRClassifier(rank=2, num_basis=4, method="als", random_state=0),
        HilbertRegressor(num_steps=1, tol=0.05),
    ],
    expected_failed_checks=expected_failures,
)
def test_estimator_slowly(estimator, check):
    check(estimator)
