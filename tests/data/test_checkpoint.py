"""Fits that are stopped and go on."""

from __future__ import annotations

import hashlib
import io
import pickle
import re
import signal
import subprocess
import sys
import warnings
from contextlib import nullcontext

import gpytorch
import pytest
import torch

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.chains.chain import Chain
from gpytorch_tkrr.data.checkpoint import MAGIC, Checkpoint, difference


def make_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(150, 3, dtype=torch.float64, generator=generator)
    y = torch.sin(5 * x[:, 0]) * x[:, 1] + x[:, 2]
    return x, y + 0.1 * torch.randn(150, dtype=torch.float64, generator=generator)


def make_model(rank=3):
    x, y = make_data()
    return tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood().double(), rank=rank, num_basis=7)


def fit_als(max_sweeps, path=None, model=None, seconds=0.0, **kwargs):
    model = make_model() if model is None else model
    checkpoint = None if path is None else Checkpoint(path, seconds=seconds)
    options = {"rel_tol": 0.0, "seed": 0, **kwargs}
    return model, tkrr.fit_als(model, max_sweeps=max_sweeps, checkpoint=checkpoint, **options)


def assert_same(left, right):
    for a, b in zip(left.factors, right.factors, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("memory", [2 << 30, 0], ids=["kept", "streamed"])
@pytest.mark.parametrize("learn", [False, True])
def test_als_goes_on_bit_for_bit(tmp_path, memory, learn):
    path = tmp_path / "run.pt"
    expected, whole = fit_als(4, memory=memory, learn_hyperparameters=learn)
    fit_als(2, path, memory=memory, learn_hyperparameters=learn)
    model, result = fit_als(4, path, memory=memory, learn_hyperparameters=learn)
    assert_same(model, expected)
    assert result.objective == whole.objective and result.sweeps == 4
    again, result = fit_als(4, path, memory=memory, learn_hyperparameters=learn)  # nothing is left to do
    assert_same(again, expected)
    assert result.objective == whole.objective


def test_als_goes_on_after_a_restart(tmp_path):
    """Nothing is explained at such a strong penalty: every sweep ends with another start."""
    options = {"penalty": tkrr.FrobeniusPenalty(1e6)}
    expected, whole = fit_als(5, **options)
    fit_als(3, tmp_path / "run.pt", **options)
    model, result = fit_als(5, tmp_path / "run.pt", **options)
    assert result.objective == pytest.approx(whole.objective, rel=1e-12)
    torch.testing.assert_close(model.factors[0], expected.factors[0])


def test_a_converged_fit_is_not_taken_up_again(tmp_path):
    path = tmp_path / "run.pt"
    _, first = fit_als(50, path, rel_tol=1e-2)
    _, second = fit_als(50, path, rel_tol=1e-2)
    assert first.converged and second.converged and second.objective == first.objective


class Killed(Exception):
    pass


@pytest.mark.parametrize("classes", [False, True])
def test_gibbs_goes_on_bit_for_bit(tmp_path, monkeypatch, classes):
    """Stopped in the warm-up of the first chain, at its end and in the second; functions adapt in the warm-up."""
    x, y = make_data()
    sweep, count = Chain.sweep, 0

    def counted(*args):
        nonlocal count
        count += 1
        if count in stops:
            raise Killed
        sweep(*args)

    def fit(path=None):
        likelihood = (
            gpytorch.likelihoods.BernoulliLikelihood() if classes else gpytorch.likelihoods.GaussianLikelihood()
        )
        model = tkrr.TKRR(x, (y > 0.8).double() if classes else y, likelihood.double(), rank=3)
        checkpoint = None if path is None else Checkpoint(path, seconds=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tkrr.ConvergenceWarning)  # the chains are short
            tkrr.fit_gibbs(model, num_warmup=6, num_draws=4, num_chains=2, seed=0, checkpoint=checkpoint)
        return model

    stops = ()
    expected = fit()
    monkeypatch.setattr(Chain, "sweep", counted)
    stops = (4, 13, 18)  # calls that are interrupted count
    for _ in stops:
        with pytest.raises(Killed):
            fit(tmp_path / "run.pt")
    model = fit(tmp_path / "run.pt")
    assert count == 20 + len(stops)
    for left, right in zip(expected.posterior.factors, model.posterior.factors, strict=True):
        assert torch.equal(left, right)
    assert torch.equal(expected.posterior.noise, model.posterior.noise)
    for left, right in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    fit_als(1, path)
    content = path.read_bytes()

    def killed(*args):
        raise Killed

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(Killed):
        fit_als(2, path)
    assert path.read_bytes() == content


def test_a_full_disk_leaves_the_last_file(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    fit_als(1, path)
    content = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)  # the file has been written in part
        with pytest.raises(tkrr.CheckpointError, match="No space left"):
            fit_als(3, path)
    assert path.read_bytes() == content and [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    assert_same(fit_als(3, path)[0], fit_als(3)[0])


def test_time_between_writes(tmp_path):
    path = tmp_path / "run.pt"
    times = []

    class Recorded(Checkpoint):
        def _write(self, content):
            times.append(content["state"]["sweeps"])
            super()._write(content)

    for seconds, expected in ((0.0, [1, 2, 3, 4]), (1e6, [1, 4])):
        times.clear()
        path.unlink(missing_ok=True)
        tkrr.fit_als(make_model(), max_sweeps=4, rel_tol=0.0, seed=0, checkpoint=Recorded(path, seconds=seconds))
        assert times == expected


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "run.pt"
    fit_als(1, path)
    content = path.read_bytes()
    for damaged, message in [
        (content[:-20], "damaged"),
        (content[:2000] + b"\x00\x01" + content[2002:], "damaged"),
        (MAGIC, "damaged"),
        (b"", "not a checkpoint"),
        (b"PK\x03\x04 something else", "not a checkpoint"),
    ]:
        path.write_bytes(damaged)
        model = make_model()
        with pytest.raises(tkrr.CheckpointError, match=message):
            fit_als(2, path, model=model)
        assert not model.is_fitted and path.read_bytes() == damaged


def test_code_in_a_checkpoint_is_not_run(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return print, ("this must not be printed",)

    path = tmp_path / "run.pt"
    archive = io.BytesIO()
    torch.save({"identity": {}, "state": Evil()}, archive)
    for payload in (
        archive.getvalue(),
        pickle.dumps({"identity": {}, "state": Evil()}, protocol=2),
        pickle.dumps([1, 2], protocol=2),
        b"",
        b"something else",
    ):
        path.write_bytes(MAGIC + hashlib.sha256(payload).digest() + payload)
        with pytest.raises(tkrr.CheckpointError, match="more than tensors"):
            fit_als(1, path)
    assert capsys.readouterr().out == ""


def test_checkpoints_of_other_fits_are_refused(tmp_path):
    path = tmp_path / "run.pt"
    fit_als(1, path)
    x, y = make_data()

    def other_lengthscale():
        model = make_model()
        with torch.no_grad():
            next(model.covar_module.parameters()).add_(0.1)
        return model

    for message, options in [
        ("seed", {"seed": 1}),
        ("penalty", {"penalty": tkrr.ColumnPenalty()}),
        ("learn_hyperparameters", {"learn_hyperparameters": True}),
        ("model.rank", {"model": make_model(rank=4)}),
        ("data.num_rows", {"data": (x[:-1], y[:-1])}),
        ("data.mean", {"data": (x, y + 1)}),
        ("data.fingerprint", {"data": (x, y.flip(0))}),  # the same mean, variance and range
        ("initial_factors.0", {"initial_factors": [torch.ones(9, 3)] * 3}),
        ("model.covar_module", {"model": other_lengthscale()}),
    ]:
        with pytest.raises(tkrr.CheckpointError, match=re.escape(f"another fit: {message}")):
            fit_als(2, path, **options)
    with pytest.raises(tkrr.CheckpointError, match="folder"):
        fit_als(1, tmp_path / "missing" / "run.pt")
    with pytest.raises(tkrr.CheckpointError, match="is a folder"):
        fit_als(1, tmp_path)
    reordered, plain = fit_als(2, path, data=[(x[50:], y[50:]), (x[:50], y[:50])])[0], fit_als(2, path)[0]
    for one, two in zip(reordered.factors, plain.factors, strict=True):  # another order of rows: rounded anew
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


def with_kernel(kernel, likelihood=None, mean=None):
    x, y = make_data()
    likelihood = gpytorch.likelihoods.GaussianLikelihood() if likelihood is None else likelihood
    kernel = gpytorch.kernels.ScaleKernel(kernel).double()
    model = tkrr.TKRR(
        x, y, likelihood.double(), kernel=kernel, rank=2, num_basis=6, domain=tkrr.Domain(0.5, 2.0), mean_module=mean
    )
    return model


def matern(nu=2.5, **kwargs):
    return gpytorch.kernels.MaternKernel(nu=nu, ard_num_dims=3, **kwargs)


def on_columns(a, b):
    return gpytorch.kernels.RBFKernel(active_dims=(a,)) * gpytorch.kernels.RBFKernel(active_dims=(b,))


def fixed_noise(level):
    noise = torch.full((len(make_data()[1]),), 0.1, dtype=torch.float64)
    noise[0] = level
    return gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)


class FunctionMean(gpytorch.means.Mean):
    """A mean that is a function of the user's."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def frozen(model):
    model.covar_module.base_kernel.raw_lengthscale.requires_grad_(False)
    return model


def sloped(slope):
    return lambda x: slope * x.sum(-1)


OTHERS = {
    "nu": (lambda: with_kernel(matern(0.5)), lambda: with_kernel(matern(2.5))),
    "fixed noise": (lambda: with_kernel(matern(), fixed_noise(0.2)), lambda: with_kernel(matern(), fixed_noise(0.3))),
    "requires_grad": (lambda: with_kernel(matern()), lambda: frozen(with_kernel(matern()))),
    "constraint": (
        lambda: with_kernel(matern(lengthscale_constraint=gpytorch.constraints.Interval(0.1, 2.0))),
        lambda: with_kernel(matern(lengthscale_constraint=gpytorch.constraints.Interval(0.1, 3.0))),
    ),
    "prior": (
        lambda: with_kernel(matern(lengthscale_prior=gpytorch.priors.GammaPrior(2.0, 1.0))),
        lambda: with_kernel(matern(lengthscale_prior=gpytorch.priors.GammaPrior(3.0, 1.0))),
    ),
    "columns": (
        lambda: with_kernel(on_columns(0, 1)),
        lambda: with_kernel(on_columns(0, 2)),
    ),
    "function": (
        lambda: with_kernel(matern(), mean=FunctionMean(sloped(1.0))),
        lambda: with_kernel(matern(), mean=FunctionMean(sloped(2.0))),
    ),
}


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.SeparableKernelWarning")
@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ApproximationWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_belongs_to_one_model(tmp_path, name):
    path = tmp_path / "run.pt"
    one, other = OTHERS[name]
    options = {"seed": 0, "rel_tol": 0.0, "checkpoint": Checkpoint(path, seconds=0)}
    first = tkrr.fit_als(one(), max_sweeps=1, **options)
    with pytest.raises(tkrr.CheckpointError, match="belongs to another fit"):
        tkrr.fit_als(other(), max_sweeps=2, **options)
    assert tkrr.fit_als(one(), max_sweeps=2, **options).objective[: len(first.objective) - 1] == first.objective[:-1]


def test_small_numbers_are_told_apart(tmp_path):
    """Data, noise and parameters have units: no number is small by itself."""
    x, y = make_data()
    for scale in (1.0, 3.0):
        noise = torch.full_like(y, scale * 1e-30)
        likelihood = gpytorch.likelihoods.GaussianLikelihood(
            noise_constraint=gpytorch.constraints.GreaterThan(1e-40)
        ).double()
        likelihood.noise = noise[0]
        model = tkrr.TKRR(x, 1e-14 * y, likelihood, rank=2, num_basis=4)
        with nullcontext() if scale == 1.0 else pytest.raises(tkrr.CheckpointError, match="raw_noise"):
            tkrr.fit_als(model, max_sweeps=1, seed=0, checkpoint=tmp_path / "run.pt")
    left = {"data.mean": 1e-20, "data.variance": 1.0, "model.mean_module.raw_constant": torch.tensor(1e-18)}
    right = {"data.mean": 3e-20, "data.variance": 1.0, "model.mean_module.raw_constant": torch.tensor(0.0)}
    assert difference(left, right) is None  # the rounding of sums
    left["data.variance"] = right["data.variance"] = 1e-24
    assert difference(left, right) == "data.mean"


def test_an_attribute_that_cannot_be_compared_is_refused(tmp_path):
    kernel = matern()
    kernel.note = (number for number in range(3))
    with pytest.warns(tkrr.SeparableKernelWarning):
        model = with_kernel(kernel)
    with pytest.raises(tkrr.CheckpointError, match=r"base_kernel.note is a generator, which cannot be compared"):
        tkrr.fit_als(model, max_sweeps=1, checkpoint=tmp_path / "run.pt")
    tkrr.fit_als(model, max_sweeps=1)


def test_two_fits_do_not_share_a_file(tmp_path):
    path = tmp_path / "run.pt"

    def second(model, number):
        if number == 2:
            with pytest.raises(tkrr.CheckpointError, match="used by another fit that is running"):
                fit_als(1, path)

    fit_als(1, path, callback=second)
    fit_als(2, path)  # the lock has gone with the first
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_a_fit_that_fails_gives_its_file_back(tmp_path):
    path = tmp_path / "run.pt"

    def fail(model, number):
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        fit_als(1, path, callback=fail)
    fit_als(1, path)


def test_checkpoints_of_other_draws_are_refused(tmp_path):
    path = tmp_path / "run.pt"
    options = {"num_draws": 4, "num_warmup": 2, "num_chains": 1, "seed": 0}
    tkrr.fit_gibbs(make_model(), checkpoint=path, **options)
    for name, value in (("num_draws", 5), ("num_warmup", 3), ("num_chains", 2), ("seed", 1)):
        with pytest.raises(tkrr.CheckpointError, match=f"another fit: {name}"):
            tkrr.fit_gibbs(make_model(), checkpoint=path, **{**options, name: value})
    with pytest.raises(tkrr.CheckpointError, match="another fit: kind was 'fit_gibbs' and is now 'fit_als'"):
        fit_als(1, path)


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import test_checkpoint
from gpytorch_tkrr.cp.design import Design

sums, number = Design.sums, 0
def slow(*args):
    global number
    result = sums(*args)
    number += 1
    print(number, flush=True)
    time.sleep(0.05)
    return result
Design.sums = slow
test_checkpoint.{call}
"""


def kill_in_a_sweep(path, request, call, number):
    """Run a fit in another process and end it by SIGKILL in the middle of an update."""
    script = SCRIPT.format(tests=str(request.path.parent), call=call)
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if int(line) == number:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL and path.exists()


def test_a_killed_fit_goes_on(tmp_path, request):
    """In the third sweep; 4 updates are a sweep."""
    path = tmp_path / "run.pt"
    kill_in_a_sweep(path, request, "fit_als(50, sys.argv[1])", 11)
    expected, whole = fit_als(4)
    model, result = fit_als(4, path)
    assert_same(model, expected)
    assert result.objective == whole.objective


def fit_gibbs(path=None, *, classes, memory):
    x, y = make_data()
    likelihood = gpytorch.likelihoods.BernoulliLikelihood() if classes else gpytorch.likelihoods.GaussianLikelihood()
    model = tkrr.TKRR(None, None, likelihood.double(), rank=3)
    targets = (y > 0.8).double() if classes else y
    data = [(x[:40], targets[:40]), (x[40:], targets[40:])]
    checkpoint = None if path is None else Checkpoint(path, seconds=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ConvergenceWarning)  # the chains are short
        tkrr.fit_gibbs(
            model, data=data, num_warmup=3, num_draws=4, num_chains=2, seed=0, checkpoint=checkpoint, memory=memory
        )
    return model


@pytest.mark.parametrize(("classes", "memory"), [(False, 2 << 30), (True, 0)], ids=["regression", "streamed classes"])
def test_a_killed_sampler_goes_on(tmp_path, request, classes, memory):
    """In the second chain, which starts after 7 sweeps of 3 updates."""
    path = tmp_path / "run.pt"
    kill_in_a_sweep(path, request, f"fit_gibbs(sys.argv[1], classes={classes}, memory={memory})", 29)
    expected, model = fit_gibbs(classes=classes, memory=memory), fit_gibbs(path, classes=classes, memory=memory)
    for left, right in zip(expected.posterior.factors, model.posterior.factors, strict=True):
        assert torch.equal(left, right)
    assert torch.equal(expected.posterior.noise, model.posterior.noise)
    for left, right in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right)
