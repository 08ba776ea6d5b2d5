"""Whether columns are warped is decided by each fit."""

import gpytorch
import pytest
import torch

import gpytorch_tkrr as tkrr


def make_data(kind, num_rows=700):
    """A lognormal column whose logarithm matters, or matters nearly linearly."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(num_rows, 2, generator=generator, dtype=torch.float64)
    z = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    x[:, 0] = (1.5 * z).exp()
    f = torch.sin(3 * z) if kind == "crowded" else x[:, 0] / 10
    return x, f + x[:, 1] + 0.1 * torch.randn(num_rows, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "warp", "columns"), [("crowded", None, [0]), ("linear", None, None), ("crowded", False, None)]
)
def test_a_column_is_warped_where_rows_held_out_say_so(kind, warp, columns):
    x, y = make_data(kind)
    model = tkrr.TKRR(x[:600], y[:600], gpytorch.likelihoods.GaussianLikelihood(), rank=6, warp=warp)
    assert model.warp is None
    tkrr.fit_gibbs(model, seed=0, num_warmup=20, num_draws=10)
    assert (None if model.warp is None else model.warp.columns.tolist()) == columns
    if columns:
        error = (model.predict(torch.minimum(x[600:], x[:600].amax(0))).mean - y[600:]).square().mean().sqrt()
        assert error < 0.3 * y.std()
        other = tkrr.TKRR(None, None, gpytorch.likelihoods.GaussianLikelihood())
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other.eval()(x[:5]).mean, model.eval()(x[:5]).mean)


def test_a_stream_and_a_resumed_fit_decide_the_same(tmp_path):
    x, y = make_data("crowded")
    fits = []
    for memory in (1 << 30, 0):
        model = tkrr.TKRR(None, None, gpytorch.likelihoods.GaussianLikelihood(), rank=4)
        path = tmp_path / f"{memory}.pt"
        fit = {"data": (x, y), "seed": 0, "num_warmup": 8, "num_draws": 4, "memory": memory, "checkpoint": path}
        tkrr.fit_gibbs(model, **fit)
        fits.append(model)
        again = tkrr.TKRR(None, None, gpytorch.likelihoods.GaussianLikelihood(), rank=4)
        tkrr.fit_gibbs(again, **fit)  # from the end of the first
        assert again.warp.columns.tolist() == [0]
        assert all(map(torch.equal, again.posterior.factors, model.posterior.factors))
    for left, right in zip(fits[0].posterior.factors, fits[1].posterior.factors, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-8)
