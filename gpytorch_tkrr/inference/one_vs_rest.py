"""Several classes, each against all others."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast

import gpytorch
import numpy as np
import torch
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor, nn
from torch.distributions import Categorical

from ..errors import InputError, NotFittedError
from ..model.rollback import rollback_on_error
from ..model.tkrr import TKRR
from .gibbs import fit_gibbs
from .results import GibbsResult

#: Classes in increasing order: numbers `(C,)`, or strings.
Classes = Tensor | tuple[str, ...]


class OneVsRest(gpytorch.Module):
    r"""
    Classification by one probit model :class:`~gpytorch_tkrr.TKRR` for each class, against all other classes.

    The model of class c gives :math:`p_c(x) = \frac1S \sum_s \Phi(f_{cs}(x))`. Were all models right, these would sum
    to one; what they miss of it is divided out:

    .. math:: P(y = c \mid x) = \frac{p_c(x)}{\sum_k p_k(x)}.

    The means over the draws are divided, not the draws: those of different classes are independent. Two classes need
    one model only, that of the second class.

    :param train_x: Training inputs `(N, D)`, or `(N,)` for one dimension; None for a model that loads a `state_dict`.
    :param labels: Class of each row `(N,)`: a tensor, an array or a list of numbers or strings.
    :param rank: R of each model; by default each finds out how many components it needs.
    :param model_options: Further options of :class:`~gpytorch_tkrr.TKRR`; each model gets a copy of its own.

    Example:
        >>> import torch
        >>> import gpytorch_tkrr as tkrr
        >>> x = torch.rand(150, 2, generator=torch.Generator().manual_seed(0))
        >>> labels = (3 * x[:, 0]).long()
        >>> model = tkrr.OneVsRest(x, labels, rank=2, num_basis=5)
        >>> results = model.fit(num_draws=10, num_warmup=10, seed=0)
        >>> model.class_probabilities(x).shape, model.predict(x[:5]).dtype
        (torch.Size([150, 3]), torch.int64)
    """

    def __init__(
        self,
        train_x: Tensor | None,
        labels: Tensor | np.ndarray | Sequence[Any] | None,
        *,
        rank: int | None = None,
        **model_options: Any,
    ):
        super().__init__()
        if (train_x is None) != (labels is None):
            raise InputError("Give both train_x and labels, or neither.")
        self.rank, self._options = rank, model_options
        self.classes: Classes = ()
        self.models = nn.ModuleList()
        if train_x is not None and labels is not None:
            self.classes, numbers = _distinct(labels)
            if len(numbers) != len(train_x):
                raise InputError(f"There are {len(numbers)} labels for {len(train_x)} training rows.")
            numbers = numbers.to(train_x.device)
            self.models.extend(
                self._new_model(train_x, (numbers == c).to(train_x.dtype)) for c in _modelled(self.classes)
            )

    def with_classes(self, classes: Classes) -> OneVsRest:
        """
        Give a model that was made without data its classes, each with a model that is still to be fitted.

        :param classes: In increasing order.
        """
        self.classes = classes
        self.models = nn.ModuleList(self._new_model(None, None) for _ in _modelled(classes))
        return self

    def _new_model(self, x: Tensor | None, y: Tensor | None) -> TKRR:
        return TKRR(x, y, BernoulliLikelihood(), rank=self.rank, **copy.deepcopy(self._options))

    def fit(
        self,
        *,
        num_draws: int | None = None,
        num_warmup: int | None = None,
        num_chains: int | None = None,
        seed: int | None = None,
        progress: bool = False,
        memory: int = 2 << 30,
    ) -> list[GibbsResult]:
        """
        Fit all models by :func:`~gpytorch_tkrr.fit_gibbs`, one after the other; the parameters are explained there.
        Where one fails or is interrupted, all stay as they were.

        :param seed: Seed of the first model; the following ones get the following numbers.
        :return: One result for each model.
        """
        with rollback_on_error(self):
            return [
                fit_gibbs(
                    model,
                    num_draws=num_draws,
                    num_warmup=num_warmup,
                    num_chains=num_chains,
                    seed=None if seed is None else seed + number,
                    progress=progress,
                    memory=memory,
                )
                for number, model in enumerate(self._known_models())
            ]

    def class_probabilities(self, x: Tensor) -> Tensor:
        """
        The probability of each class, in the order of `classes`.

        :param x: Inputs `(..., n, D)`, or `(n,)` for one dimension.
        :return: `(..., n, C)`; the last dimension sums to one.
        """
        p = torch.stack([model.class_probabilities(x) for model in self._known_models()], -1)  # (..., n, C or 1)
        if len(self.classes) == 2:
            return torch.cat([1 - p, p], -1)
        p = p.clamp(min=torch.finfo(p.dtype).tiny)  # far from all classes every p may underflow
        return p / p.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Categorical:
        """
        The distribution of the class number at each input, as a SoftmaxLikelihood gives it.

        :param x: Inputs `(..., n, D)`.
        """
        return Categorical(self.class_probabilities(x))

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor | list[str]:
        """
        The most probable class at each input, in the words of the training labels.

        :param x: Inputs `(n, D)`, or `(n,)` for one dimension.
        :return: `(n,)`.
        """
        numbers = self.class_probabilities(x).argmax(-1)
        if isinstance(self.classes, Tensor):
            return self.classes.to(numbers.device)[numbers]
        return [self.classes[number] for number in numbers.tolist()]

    def _known_models(self) -> list[TKRR]:
        if not len(self.models):
            raise NotFittedError("The model knows no classes. Give training data, or load a state_dict.")
        return list(cast("Iterable[TKRR]", self.models))

    def get_extra_state(self) -> dict[str, Any]:
        """The classes, for `state_dict`."""
        return {"classes": self.classes}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """
        Restore the classes from a `state_dict`.

        :param state: As returned by :meth:`get_extra_state`.
        """
        self.classes = state["classes"]

    def load_state_dict(self, state_dict: Any, strict: bool = True, **kwargs: Any) -> Any:
        """
        Load classes, parameters and posteriors; a model made without data takes its classes from there.

        :param state_dict: As returned by :meth:`state_dict`.
        :param strict: Whether all keys must match.
        """
        with rollback_on_error(self):
            if "_extra_state" in state_dict and len(self.models) == 0:
                self.with_classes(state_dict["_extra_state"]["classes"])
            for number, model in enumerate(self.models):  # each makes its kernel and its box
                prefix = f"models.{number}."
                part = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
                model.load_state_dict(part, strict=strict)
            return super().load_state_dict(state_dict, strict=strict, **kwargs)


def _modelled(classes: Classes) -> range:
    """Numbers of the classes that have a model: all of them, or the second of two."""
    return range(1, 2) if len(classes) == 2 else range(len(classes))


def _distinct(labels: Any) -> tuple[Classes, Tensor]:
    """The classes, and the number of the class of each row."""
    values = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    values = values.squeeze(1) if values.ndim == 2 and values.shape[1] == 1 else values
    if values.ndim != 1:
        raise InputError(f"Labels must have shape (N,), one class for each row; got {values.shape}.")
    if values.dtype.kind not in "iufbU":
        raise InputError(f"Labels must be numbers or strings; got {values.dtype}.")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        first = int((~np.isfinite(values)).argmax())
        raise InputError(f"The labels hold NaN or infinite values (the first is in row {first}). Drop these rows.")
    distinct, numbers = np.unique(values, return_inverse=True)
    if len(distinct) < 2:
        found = distinct.tolist()
        raise InputError(f"Classification takes at least two classes; all {len(values)} labels are of {found}.")
    is_text = values.dtype.kind == "U"
    return tuple(distinct.tolist()) if is_text else torch.from_numpy(distinct), torch.from_numpy(numbers)
