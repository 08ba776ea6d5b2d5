"""Fits that are stopped and go on."""

from __future__ import annotations

import hashlib
import pickle
import re
import signal
import subprocess
import sys
import warnings

import gpytorch
import pytest
import torch

import gpytorch_tkrr as tkrr
from gpytorch_tkrr import gibbs
from gpytorch_tkrr.checkpoint import MAGIC, Checkpoint


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
    sweep, count = gibbs._Fit.sweep, 0

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
    monkeypatch.setattr(gibbs._Fit, "sweep", counted)
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


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("this must not be printed",)

    payload = pickle.dumps({"identity": {}, "state": Evil()}, protocol=2)
    path = tmp_path / "run.pt"
    path.write_bytes(MAGIC + hashlib.sha256(payload).digest() + payload)
    with pytest.raises(tkrr.CheckpointError, match="more than tensors"):
        fit_als(1, path)


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
        ("model.covar_module", {"model": other_lengthscale()}),
    ]:
        with pytest.raises(tkrr.CheckpointError, match=re.escape(f"another fit: {message}")):
            fit_als(2, path, **options)
    with pytest.raises(tkrr.CheckpointError, match="folder"):
        fit_als(1, tmp_path / "missing" / "run.pt")


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import test_checkpoint
from gpytorch_tkrr import als

update = als._Fit.update
def slow(self, d, objective):
    update(self, d, objective)
    print(len(objective), flush=True)
    time.sleep(0.2)
als._Fit.update = slow
test_checkpoint.fit_als(50, sys.argv[1])
"""


def test_a_killed_fit_goes_on(tmp_path, request):
    """SIGKILL in the middle of the third sweep; 4 updates are a sweep."""
    path = tmp_path / "run.pt"
    script = SCRIPT.format(tests=str(request.path.parent))
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if int(line) == 11:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    expected, whole = fit_als(4)
    model, result = fit_als(4, path)
    assert_same(model, expected)
    assert result.objective == whole.objective
