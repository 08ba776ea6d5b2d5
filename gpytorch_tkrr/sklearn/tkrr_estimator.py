"""What regression and classification by CP weights share: the model before a fit, and the ways to fit it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from gpytorch.kernels import Kernel
from torch import Tensor

from ..errors import DomainError, InputError
from ..inference.als import fit_als
from ..inference.gibbs import fit_gibbs
from ..inference.results import ALSResult, GibbsResult
from ..model.tkrr import TKRR
from .table_estimator import TableEstimator, as_numpy

#: Ways to fit.
METHODS = ("gibbs", "als")

#: Sweeps of the warm-up where a chain goes on with more rows.
NUM_WARMUP = 25


class TKRREstimator(TableEstimator):
    """
    Parameters and fits of :class:`TKRRRegressor` and :class:`TKRRClassifier`.

    :param rank: R, the number of components. None: "gibbs" finds out how many are needed, "als" takes 10.
    :param num_basis: Sines per input; None for the model's own choice.
    :param method: "gibbs" draws weights and hyperparameters from their posterior; "als" finds one solution by
        alternating least squares, with approximate intervals.
    :param num_draws: Draws of each chain, with "gibbs"; None to choose them by the number of rows, see
        :func:`~gpytorch_tkrr.fit_gibbs`.
    :param num_warmup: Sweeps before them; None as for `num_draws`.
    :param num_chains: Independent chains; None as for `num_draws`.
    :param kernel: A separable GPyTorch kernel of the encoded inputs; None for :func:`~gpytorch_tkrr.anova_kernel`, in
        which a category is one mode.
    :param categorical: Names or numbers of columns that are categories although they hold numbers. Columns of text and
        of pandas' categorical type are categories anyway.
    :param missing: "integrate" for inputs that may be missing (NaN, None, an empty date): f is integrated over the
        distribution of their column among the training rows. None to refuse them. See :class:`~gpytorch_tkrr.TKRR`.
    :param random_state: Seed of all that is random.
    :param progress: Whether to show a progress bar.
    """

    rank: int | None
    num_basis: int | None
    method: str
    num_draws: int | None
    num_warmup: int | None
    num_chains: int | None
    categorical: Sequence[str | int] | None
    missing: Any
    random_state: Any
    kernel: Kernel | None
    progress: bool

    @property
    def num_parameters(self) -> int:
        """Weights of all components and hyperparameters; after "gibbs" those of one draw."""
        return sum(
            sum(mode.num_functions for mode in model.separate().modes) * model.rank
            + sum(parameter.numel() for parameter in model.parameters())
            for model in self.models()
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.allows_missing
        return tags

    @property
    def allows_missing(self) -> bool:
        return self.missing is not None

    def models(self) -> list[TKRR]:
        """The fitted models."""
        raise NotImplementedError

    def extrapolates(self, X: Any) -> np.ndarray:
        """
        Which rows lie outside the range of the training rows, or have a level that they did not have, `(n,)`.

        :param X: Inputs `(n, D)`.
        """
        x = self._rows(X)
        outside = as_numpy(self.models()[0].extrapolates(x))  # (n,), or (n, T) of several outputs
        return outside.reshape(len(x), -1).any(1) | self.columns_.is_unknown(as_numpy(x))

    def _check_parameters(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"method must be 'gibbs' or 'als'; got {self.method!r}.")
        if self.kernel is not None and not isinstance(self.kernel, Kernel):
            raise InputError(f"kernel must be a GPyTorch kernel; got a {type(self.kernel).__name__}.")

    def _input_options(self) -> dict[str, Any]:
        """The user's kernel, or which inputs are categories for the default one; what missing inputs mean."""
        if self.kernel is not None:
            return {"kernel": copy.deepcopy(self.kernel), "missing": self.missing}
        return {"categorical": tuple(self.columns_.categories), "missing": self.missing}

    def fit_model(self, model: TKRR, seed: int, *, data: Any = None, **options: Any) -> ALSResult | GibbsResult:
        """
        Fit a model by the chosen method.

        :param model: The model.
        :param seed: Seed of the fit.
        :param data: See :func:`~gpytorch_tkrr.fit_als`; by default the rows that the model holds.
        :param options: Further options of :func:`~gpytorch_tkrr.fit_als` and :func:`~gpytorch_tkrr.fit_gibbs`.
        """
        options = {"data": data, "seed": seed, "progress": self.progress, **options}
        result: ALSResult | GibbsResult
        if self.method == "als":
            result = fit_als(model, learn_hyperparameters=True, **options)
            if data is not None and not model.posterior.has_covariance:
                known = {name: options[name] for name in ("group", "memory") if name in options}
                model.compute_covariance(data=data, **known)
        else:
            result = fit_gibbs(
                model, num_draws=self.num_draws, num_warmup=self.num_warmup, num_chains=self.num_chains, **options
            )
        model.eval()
        return result

    def _refit_model(self, model: TKRR, x: Tensor, y: Tensor, seed: int) -> bool:
        """Append rows and go on from where the last fit ended; False where they lie outside the model's box."""
        assert model.domain is not None
        known = model.mode_inputs(x)
        if not bool((model.domain.contains(known) | known.isnan()).all()):
            return False
        try:
            if self.method == "als":
                fit_als(model, new_rows=(x, y), learn_hyperparameters=True, seed=seed, progress=self.progress)
            else:
                fit_gibbs(
                    model,
                    new_rows=(x, y),
                    num_draws=self.num_draws,
                    num_warmup=NUM_WARMUP if self.num_warmup is None else self.num_warmup // 2,
                    seed=seed,
                    progress=self.progress,
                )
        except DomainError:
            return False
        model.eval()
        return True


def weighted_data(model: TKRR, weights: Tensor | None) -> Any:
    """
    The rows of a model with their weights, as the fits take them; None where there are none.

    :param model: A model that holds its rows.
    :param weights: Row weights `(N,)`, or None for ones.
    """
    return None if weights is None else (*(model.train_inputs or ()), model.train_targets, weights)
