"""
BoTorch's tutorials, in a few lines each, with our models in the place of SingleTaskGP: as they are with few
observations, where they are exact, and in the form that they have with many.
"""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch

pytest.importorskip("botorch.models")  # not the folder of this name
from botorch.acquisition import (
    PosteriorMean,
    qKnowledgeGradient,
    qLogNoisyExpectedImprovement,
    qLowerBoundMaxValueEntropy,
    qMultiFidelityKnowledgeGradient,
)
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.acquisition.cost_aware import InverseCostWeightedUtility
from botorch.acquisition.fixed_feature import FixedFeatureAcquisitionFunction
from botorch.acquisition.multi_objective import logei
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.acquisition.objective import GenericMCObjective
from botorch.acquisition.utils import project_to_target_fidelity
from botorch.cross_validation import batch_cross_validation, gen_loo_cv_folds
from botorch.fit import fit_gpytorch_mll
from botorch.generation import MaxPosteriorSampling
from botorch.models import ModelListGP
from botorch.models.cost import AffineFidelityCostModel
from botorch.models.deterministic import GenericDeterministicModel
from botorch.models.transforms import Normalize, Standardize
from botorch.models.transforms.input import Warp
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import AugmentedHartmann, Hartmann
from botorch.test_functions.multi_objective import BraninCurrin
from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.botorch import HilbertGPModel, TKRRModel

#: Each model as it is with few observations and as it is with many, and what it is given to be so.
FORMS = {
    "HilbertGPModel, exact": (HilbertGPModel, {}),
    "HilbertGPModel": (HilbertGPModel, {"num_functions": 64}),
    "TKRRModel, exact": (TKRRModel, {}),
    "TKRRModel": (TKRRModel, {"rank": 4, "num_basis": 6}),
}
BUDGET = {"num_restarts": 2, "raw_samples": 8, "options": {"maxiter": 4, "batch_limit": 2}}

pytestmark = [
    pytest.mark.parametrize("form", FORMS),
    pytest.mark.filterwarnings("ignore::gpytorch_tkrr.errors.ApproximationWarning"),  # few functions on purpose
    pytest.mark.filterwarnings("ignore::gpytorch_tkrr.errors.OutOfDomainWarning"),
    pytest.mark.filterwarnings("ignore::gpytorch_tkrr.errors.SeparableKernelWarning"),
    pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning"),  # draws at many points
    pytest.mark.filterwarnings("ignore:Optimization failed"),  # four iterations
    pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.OptimizationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),  # torch, from within botorch
]


def make(form, x, y, *args, **kwargs):
    cls, own = FORMS[form]
    return cls(x, y, *args, **own, **kwargs)


def fit(model, mll_class=ExactMarginalLogLikelihood):
    fit_gpytorch_mll(mll_class(model.likelihood, model))
    return model


def unit_cube(num_dims):
    return torch.tensor([[0.0] * num_dims, [1.0] * num_dims], dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def check(candidate, num_dims, q=1):
    assert candidate.shape == (q, num_dims) and ((candidate >= 0) & (candidate <= 1)).all()


def test_closed_loop_with_constraints_and_noise(form):
    hartmann = Hartmann(6, negate=True).to(torch.float64)
    x = torch.rand(10, 6, dtype=torch.float64)
    for _ in range(2):
        noise = torch.full((len(x), 1), 0.05**2, dtype=torch.float64)
        objective = hartmann(x).unsqueeze(-1) + 0.05 * torch.randn(len(x), 1, dtype=torch.float64)
        constraint = x.sum(-1, keepdim=True) - 3
        if form == "HilbertGPModel":
            parts = [HilbertGPModel(x, y, noise, num_functions=200) for y in (objective, constraint)]
        else:
            parts = [make(form, x, y, noise) for y in (objective, constraint)]
        model = fit(ModelListGP(*parts), SumMarginalLogLikelihood)
        acquisition = qLogNoisyExpectedImprovement(
            model,
            X_baseline=x,
            sampler=SobolQMCNormalSampler(torch.Size([16])),
            objective=GenericMCObjective(lambda values, X=None: values[..., 0]),
            constraints=[lambda values: values[..., 1]],
        )
        candidate, _ = optimize_acqf(acquisition, unit_cube(6), q=2, **BUDGET)
        check(candidate, 6, q=2)
        x = torch.cat([x, candidate])


def test_noisy_hypervolume_improvement(form, monkeypatch):
    monkeypatch.setattr(logei, "_load_attempted", True, raising=False)  # else BoTorch compiles C++ for a minute
    problem = BraninCurrin(negate=True).to(torch.float64)
    x = torch.rand(10, 2, dtype=torch.float64)
    y = problem(problem.bounds[0] + x * (problem.bounds[1] - problem.bounds[0]))
    model = fit(ModelListGP(*(make(form, x, y[:, i : i + 1]) for i in range(2))), SumMarginalLogLikelihood)
    acquisition = qLogNoisyExpectedHypervolumeImprovement(
        model, ref_point=problem.ref_point.tolist(), X_baseline=x, prune_baseline=True,
        sampler=SobolQMCNormalSampler(torch.Size([16])),
    )  # fmt: skip
    candidate, _ = optimize_acqf(acquisition, unit_cube(2), q=2, sequential=True, **BUDGET)
    check(candidate, 2, q=2)


def test_thompson_sampling(form):
    x = torch.rand(20, 2, dtype=torch.float64)
    model = fit(make(form, x, torch.sin(5 * x).sum(-1, keepdim=True)))
    candidates = torch.rand(300, 2, dtype=torch.float64)
    with torch.no_grad():
        chosen = MaxPosteriorSampling(model, replacement=False)(candidates, num_samples=3)
    check(chosen, 2, q=3)


def test_trust_regions(form):
    """TuRBO sizes its region by the lengthscales of the kernel inside a ScaleKernel."""
    x = torch.rand(20, 3, dtype=torch.float64)
    y = torch.sin(5 * x[:, :1]) + x[:, 1:2]
    matern = gpytorch.kernels.MaternKernel(
        nu=2.5, ard_num_dims=3, lengthscale_constraint=gpytorch.constraints.Interval(0.05, 4.0)
    )
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.Interval(1e-8, 1e-3))
    model = fit(
        make(
            form, x, y, covar_module=gpytorch.kernels.ScaleKernel(matern), likelihood=likelihood, outcome_transform=None
        )
    )
    weights = model.covar_module.base_kernel.lengthscale.squeeze().detach()
    weights = weights / weights.mean() / (weights / weights.mean()).prod() ** (1 / 3)
    center = x[y.argmax()]
    lower, upper = (center - weights * 0.4).clamp(0, 1), (center + weights * 0.4).clamp(0, 1)
    with torch.no_grad():
        candidates = lower + (upper - lower) * torch.rand(100, 3, dtype=torch.float64)
        check(MaxPosteriorSampling(model, replacement=False)(candidates, num_samples=2), 3, q=2)


def test_one_shot_knowledge_gradient(form):
    x = torch.rand(12, 2, dtype=torch.float64)
    model = fit(make(form, x, torch.sin(5 * x).sum(-1, keepdim=True)))
    candidate, _ = optimize_acqf(qKnowledgeGradient(model, num_fantasies=3), unit_cube(2), q=2, **BUDGET)
    check(candidate, 2, q=2)


def test_max_value_entropy_search(form):
    x = torch.rand(12, 2, dtype=torch.float64)
    model = fit(make(form, x, torch.sin(5 * x).sum(-1, keepdim=True)))
    acquisition = qLowerBoundMaxValueEntropy(model, torch.rand(50, 2, dtype=torch.float64))
    candidate, _ = optimize_acqf(acquisition, unit_cube(2), q=1, **BUDGET)
    check(candidate, 2)


def test_cost_aware(form):
    """Costs have a model of their own, in logarithms; improvement is divided by what it costs."""
    x = torch.rand(15, 2, dtype=torch.float64)
    y, cost = torch.sin(5 * x).sum(-1, keepdim=True), (1 + x[:, :1]).log()
    model, log_cost = fit(make(form, x, y)), fit(make(form, x, cost))
    utility = InverseCostWeightedUtility(
        GenericDeterministicModel(lambda X: log_cost.posterior(X).mean.exp(), num_outputs=1), use_mean=True
    )
    improvement = LogExpectedImprovement(model, best_f=y.max())
    points = torch.rand(8, 1, 2, dtype=torch.float64)
    with torch.no_grad():
        values = improvement(points).exp().unsqueeze(0)
        weighted = utility(points, values)
    assert torch.allclose(weighted * (1 + points[..., 0, 0]), values, rtol=0.3)


def test_multi_fidelity(form):
    """The fidelity is one more input; the knowledge gradient is that of the mean at full fidelity."""
    problem = AugmentedHartmann(negate=True).to(torch.float64)
    x = torch.rand(12, 7, dtype=torch.float64)
    if form.startswith("HilbertGPModel"):  # up to six inputs: fidelity among them
        x = x[:, 1:]
        y = problem(torch.cat([torch.full((12, 1), 0.2, dtype=torch.float64), x], -1)).unsqueeze(-1)
    else:
        y = problem(x).unsqueeze(-1)
    model = fit(make(form, x, y))
    last = x.shape[-1] - 1
    cost = AffineFidelityCostModel(fidelity_weights={last: 1.0}, fixed_cost=5.0).to(x)
    final = FixedFeatureAcquisitionFunction(PosteriorMean(model), d=last + 1, columns=[last], values=[1.0])
    with torch.no_grad():
        best = final(torch.rand(16, 1, last, dtype=torch.float64)).max()
    acquisition = qMultiFidelityKnowledgeGradient(
        model, num_fantasies=2, current_value=best,
        cost_aware_utility=InverseCostWeightedUtility(cost_model=cost),
        project=lambda X: project_to_target_fidelity(X, target_fidelities={last: 1.0}, d=last + 1),
    )  # fmt: skip
    candidate, _ = optimize_acqf(acquisition, unit_cube(last + 1), q=1, **BUDGET)
    check(candidate, last + 1)


def test_warped_inputs(form):
    """The warp is trained with the exact process; a sampled model uses it as it is."""
    x = torch.rand(20, 2, dtype=torch.float64)
    y = torch.sin(8 * x[:, :1] ** 3) + x[:, 1:]
    warp = Warp(
        d=2, indices=[0, 1],
        concentration1_prior=gpytorch.priors.LogNormalPrior(0.0, 0.75**0.5),
        concentration0_prior=gpytorch.priors.LogNormalPrior(0.0, 0.75**0.5),
    )  # fmt: skip
    model = fit(make(form, x, y, input_transform=warp))
    if form.endswith("exact") or form == "HilbertGPModel":
        assert not torch.allclose(warp.concentration1, torch.ones_like(warp.concentration1))
    assert (model.posterior(x).mean - y).square().mean().sqrt() < 0.5 * y.std()


def test_batch_cross_validation(form):
    x = torch.rand(8, 2, dtype=torch.float64)
    y = torch.sin(5 * x).sum(-1, keepdim=True)
    folds = gen_loo_cv_folds(train_X=x, train_Y=y)
    cls, own = FORMS[form]

    def validate():
        return batch_cross_validation(
            model_cls=cls, mll_cls=ExactMarginalLogLikelihood, cv_folds=folds,
            model_init_kwargs={**own, "outcome_transform": Standardize(m=1, batch_shape=torch.Size([8])),
                               "input_transform": Normalize(d=2, batch_shape=torch.Size([8]))},
        )  # fmt: skip

    if form == "TKRRModel":
        with pytest.raises(tkrr.InputError, match="one model per batch"):
            validate()
        return
    errors = validate().posterior.mean - folds.test_Y
    assert math.sqrt(float(errors.square().mean())) < y.std()
