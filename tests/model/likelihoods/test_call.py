"""GPyTorch's call: `likelihood(model(x))` is what the likelihood returns for any other model with that Gaussian f."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    StudentTLikelihood,
)

import gpytorch_tkrr as tkrr

NUM = 60


def inputs():
    return torch.rand(NUM, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def real(x):
    return torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(
        NUM, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


CASES = {
    "gaussian": (GaussianLikelihood, real, MultivariateNormal),
    "fixed noise": (lambda: FixedNoiseGaussianLikelihood(torch.full((NUM,), 0.01).double()), real, MultivariateNormal),
    "student": (StudentTLikelihood, real, torch.distributions.StudentT),
    "bernoulli": (BernoulliLikelihood, lambda x: (real(x) > 0).double(), torch.distributions.Bernoulli),
    "counts": (
        tkrr.NegativeBinomialLikelihood,
        lambda x: torch.poisson(real(x).exp()),
        torch.distributions.NegativeBinomial,
    ),
    "censored": (lambda: tkrr.CensoredLikelihood(high=0.8), lambda x: real(x).clamp(max=0.8), MultivariateNormal),
    "ordinal": (
        lambda: tkrr.OrdinalLikelihood(3),
        lambda x: torch.bucketize(real(x), torch.tensor([-0.5, 0.5]).double()),
        torch.distributions.Categorical,
    ),
    "by inputs": (tkrr.HeteroskedasticLikelihood, real, MultivariateNormal),
}


@pytest.mark.parametrize("name", list(CASES))
def test_the_call_returns_what_it_returns_for_other_models(name):
    make, targets, kind = CASES[name]
    x = inputs()
    model = tkrr.TKRR(x, targets(x), make().double(), rank=2, num_basis=5)
    tkrr.fit_gibbs(model, num_draws=10, num_warmup=10, seed=0)
    likelihood, f = model.likelihood, model.eval()(x)
    jitter = 1e-6 * torch.eye(NUM, dtype=torch.float64)
    same = MultivariateNormal(f.mean.detach(), f.covariance_matrix.detach() + jitter)  # as of an ApproximateGP
    extra = (x,) if name == "by inputs" else ()
    with torch.no_grad(), gpytorch.settings.num_likelihood_samples(4000):
        torch.manual_seed(0)
        ours, theirs = likelihood(f, *extra), likelihood(same, *extra)
        assert isinstance(ours, kind) and type(ours) is type(theirs)
        assert ours.batch_shape == theirs.batch_shape and ours.event_shape == theirs.event_shape
        for each in ("mean", "variance", "probs"):
            if hasattr(ours, each) and bool(torch.isfinite(getattr(theirs, each)).all()):
                one, other = getattr(ours, each), getattr(theirs, each)
                if len(ours.batch_shape) > 1:  # samples of f
                    one, other = one.mean(0), other.mean(0)
                torch.testing.assert_close(one, other, rtol=0.1, atol=0.05)
        draw = ours.sample()
        assert draw.shape == theirs.sample().shape
