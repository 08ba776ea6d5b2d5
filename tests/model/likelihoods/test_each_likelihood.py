"""What every likelihood must do: units, interrupted fits, ArviZ's log likelihood against SciPy, effects."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from gpytorch.likelihoods import StudentTLikelihood

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.model.likelihoods.skewed_noise import WIDTHS

NUM = 50
X = torch.rand(NUM, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.sin(6 * X[:, 0]) + 0.2 * torch.randn(NUM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CUTS = torch.tensor([-0.5, 0.5], dtype=torch.float64)

#: The likelihood and its targets.
CASES = {
    "student": (StudentTLikelihood, Y),
    "by inputs": (tkrr.HeteroskedasticLikelihood, Y),
    "by inputs, student": (lambda: tkrr.HeteroskedasticLikelihood(student=True), Y),
    "by inputs, skewed": (lambda: tkrr.HeteroskedasticLikelihood(skewed=True), Y),
    "counts": (tkrr.NegativeBinomialLikelihood, (3 * Y.exp()).round()),
    "ordinal": (lambda: tkrr.OrdinalLikelihood(3), torch.bucketize(Y, CUTS)),
    "censored": (lambda: tkrr.CensoredLikelihood(high=0.5), Y.clamp(max=0.5)),
}


def model_of(name, unit=1.0):
    make, y = CASES[name]
    return tkrr.TKRR(X, y if unit == 1 else unit * y, make().double(), rank=2, num_basis=5)


def fit(model, **options):
    return tkrr.fit_gibbs(model, num_draws=4, num_warmup=8, num_chains=1, seed=0, **options)


@pytest.mark.parametrize("unit", [1e6, 1e-6])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("student", "by"))])
def test_units_of_targets_do_not_matter(name, unit):
    one, other = model_of(name), model_of(name, unit)
    fit(one), fit(other)
    with torch.no_grad():
        expected, made = one.predict(X), other.predict(X)
        torch.testing.assert_close(made.mean / unit, expected.mean, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(made.noise.mean / unit, expected.noise.mean, rtol=1e-5, atol=1e-7)


def expected_log_likelihood(name, model):
    """By SciPy, `(S, NUM)`."""
    f, drawn = model.draws(X).detach().numpy(), model.posterior.parameters
    y, values = CASES[name][1].numpy(), {key: value.numpy() for key, value in drawn.items()}
    if name == "counts":
        r = values["dispersion"][:, None]
        return scipy.stats.nbinom(r, r / (r + np.exp(f))).logpmf(y)
    if name == "ordinal":
        bounds = np.pad(values["cutpoints"], ((0, 0), (1, 1)), constant_values=((0, 0), (-np.inf, np.inf)))
        return np.log(scipy.stats.norm.cdf(bounds[:, y + 1] - f) - scipy.stats.norm.cdf(bounds[:, y] - f))
    if name == "censored":
        normal = scipy.stats.norm(f, np.sqrt(values["noise"])[:, None])
        return np.where(y >= 0.5, normal.logsf(y), normal.logpdf(y))
    rows = model.observation.function_rows(X, drawn) if name.startswith("by") else {"factor": torch.ones(1)}
    scale = np.sqrt(values["noise"][:, None] * rows["factor"].detach().numpy())
    if name == "by inputs, skewed":
        skew = values["skew"][:, None]  # (S, 1, K)
        width = scale[..., None] * np.array(WIDTHS) * np.sqrt(1 + skew**2)
        density = scipy.stats.skewnorm(skew, f[..., None], width).pdf(y[:, None])
        return np.log((values["shares"][:, None] * density).sum(-1))
    if "deg_free" in values:
        return scipy.stats.t(values["deg_free"][:, None], f, scale).logpdf(y)
    return scipy.stats.norm(f, scale).logpdf(y)


@pytest.mark.parametrize("name", list(CASES))
def test_an_interrupted_fit_its_state_and_its_log_likelihood(name, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    saved, original, path = [], tkrr.Checkpoint.save, tmp_path / "fit.pt"

    def save(self, state, last):
        original(self, state, last=last)
        saved.append(1)
        if len(saved) == 10:
            raise Stop

    model, whole = model_of(name), model_of(name)
    with monkeypatch.context() as patch:
        patch.setattr(tkrr.Checkpoint, "save", save)
        with pytest.raises(Stop):
            fit(model, checkpoint=tkrr.Checkpoint(path, seconds=0))
    result = fit(model, checkpoint=path)
    fit(whole)
    torch.testing.assert_close(model.posterior.parameters, whole.posterior.parameters, rtol=0, atol=0)
    loaded = tkrr.TKRR(None, None, CASES[name][0]()).double()
    loaded.load_state_dict(model.state_dict())
    y = CASES[name][1]
    torch.testing.assert_close(loaded.predict(X).log_prob(y), model.predict(X).log_prob(y))
    indices = tkrr.sobol_indices(model)
    assert indices.total.shape == (4, 2) and bool((indices.total >= indices.first - 1e-9).all())
    expected = expected_log_likelihood(name, model)
    pytest.importorskip("arviz")
    found = result.to_arviz(seed=0)["log_likelihood"]["y"].values[0]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)
