"""Several processes with rows of their own do what one process does with all rows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import gpytorch
import pytest
import torch
import torch.distributed as dist
from gpytorch.kernels import RBFKernel, ScaleKernel
from models import gaussian
from processes import results_of, run_processes, start_processes

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.chains.problem import GibbsProblem
from gpytorch_tkrr.cp.design import Design
from gpytorch_tkrr.data.parallel import ONE_PROCESS, ProcessGroup, as_processes
from gpytorch_tkrr.data.source import Shard, TensorSource
from gpytorch_tkrr.data.training import TrainingData
from gpytorch_tkrr.inference.gibbs import make_chain

N = 200
CUTS = [0, 57, 57, 200]  # the second of three processes has no rows
DOMAIN = tkrr.Domain(torch.full((3,), 0.5), 1.5)


def make_data():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(N, 3, dtype=torch.float64, generator=generator)
    x[:, 1] = (x[:, 1] * 4).round() / 4
    y = 5 + torch.sin(5 * x[:, 0]) * x[:, 1] + x[:, 2]
    return x, y + 0.1 * torch.randn(N, dtype=torch.float64, generator=generator)


def source_of(rows):
    x, y = make_data()
    return TensorSource(x[rows], y[rows], batch_rows=23)


def make_model(likelihood=None, rank=3):
    likelihood = gaussian() if likelihood is None else likelihood
    kernel = ScaleKernel(RBFKernel(ard_num_dims=3)).double()
    kernel.base_kernel.lengthscale = 0.4
    return tkrr.TKRR(None, None, likelihood, kernel=kernel, rank=rank, num_basis=7, domain=DOMAIN)


def own_rows(group):
    rank = dist.get_rank(group) if group is not None else 0
    return slice(CUTS[rank], CUTS[rank + 1]) if group is not None else slice(0, N)


@torch.no_grad()
def fit_everything(group=None):
    """The same calls in one process and in several."""
    data = source_of(own_rows(group))
    processes = as_processes(group)
    results = {}
    training = TrainingData(data, processes=processes)
    results["summary"] = training.summary
    results["first_row"] = training.first_row
    model = make_model()
    bases = [mode.basis for mode in model.separate().modes]
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(3, basis.num_functions, dtype=torch.float64, generator=generator) for basis in bases]
    design = Design(training, bases)
    results["sums"] = [design.sums(d, factors, torch.ones(3, dtype=torch.float64)).pack() for d in range(3)]
    results["marginals"] = [(marginal.dense(), marginal.mean) for marginal in design.marginals()]

    kernel = tkrr.HilbertKernel(RBFKernel(active_dims=[0]).double(), DOMAIN, [6, 1, 1])
    gp = tkrr.HilbertGP(data, gpytorch.likelihoods.GaussianLikelihood().double(), kernel, group=group)
    results["hilbert"] = gp.sums.state_dict()

    test_x = torch.rand(20, 3, dtype=torch.float64, generator=generator)
    for learn in (False, True):
        model = make_model()
        result = tkrr.fit_als(
            model, data=data, max_sweeps=3, rel_tol=0.0, learn_hyperparameters=learn, seed=0,
            group=group,
        )  # fmt: skip
        prediction = model.eval()(test_x)
        results[f"als {learn}"] = [prediction.mean.detach(), prediction.variance.detach(), result.objective]
        results[f"factors {learn}"] = [*model.factors, *(p.detach() for p in model.parameters())]
    model.compute_covariance(data=data, group=group)
    results["covariance"] = model(test_x).variance.detach()
    for name, targets in (("gibbs", data.parts[1]), ("probit", (data.parts[1] > 5.5).double())):
        likelihood = gpytorch.likelihoods.BernoulliLikelihood() if name == "probit" else None
        model = make_model(likelihood)
        source = TensorSource(data.parts[0], targets, batch_rows=N if group is None else 11)
        training = model.training_data(source, processes)
        model.prepare(training)
        problem = GibbsProblem(model, training, None, 1 << 30, entropy=0)
        problem.choose_plan(num_warmup=1, num_draws=4, num_chains=1)
        chain = make_chain(problem, 0)
        chain.begin()
        chain.sweep()
        state = chain.current
        results[name] = [
            *state.factors, *state.parameters.values(), state.precisions, problem.hyperparameters.values(),
        ]  # fmt: skip
    model = make_model(rank=None)
    training = model.training_data(data, processes)
    model.prepare(training)
    problem = GibbsProblem(model, training, None, 1 << 30, entropy=0)
    problem.choose_plan(num_warmup=None, num_draws=None, num_chains=2)
    chain = make_chain(problem, 0)  # in the limit of many components
    chain.begin()
    for _ in range(3):
        chain.sweep()
    results["limit"], results["scores"] = chain.coordinates, chain.scores[0]
    before = processes.volume
    tkrr.fit_als(make_model(), data=data, max_sweeps=1, seed=0, group=processes)
    results["volume"] = processes.volume - before
    return results


def fail_together(group):
    """What is wrong in one process is an error in all; the group can be used again afterwards."""
    rank = dist.get_rank(group)
    x, y = make_data()
    x, y = x[rank::2], y[rank::2].clone()
    errors = []
    if rank == 1:
        y[7] = torch.nan
    for data, rank_of_model, seed in [
        ((x, y), 3, 0),
        ((x, y.nan_to_num()), 3 + rank, 0),
        ((x, y.nan_to_num()), 3, rank),
    ]:
        model = make_model()
        model.resize(rank=rank_of_model)
        try:
            tkrr.fit_als(model, data=data, max_sweeps=1, seed=seed, group=group)
        except tkrr.TKRRError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


class CountedGroup(ProcessGroup):
    """Counts what is summed over all processes."""

    count = 0

    def sum(self, tensor):
        self.count += 1
        return super().sum(tensor)


class OddError(Exception):
    """Cannot be restored from a pickle."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def fail_oddly():
    raise OddError("this", "that")


def talk(group, folder):
    """What processes say to each other, and when they refuse to."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    counted = CountedGroup(group)
    results = {}
    tkrr.fit_als(make_model(), data=source_of(slice(rank, N, size)), max_sweeps=2, rel_tol=0.0, group=counted)
    results["als"], counted.count = counted.count, 0
    tkrr.fit_gibbs(make_model(), data=source_of(slice(rank, N, size)), num_draws=5, num_warmup=0, group=counted)
    results["gibbs"] = counted.count
    model = make_model()
    tkrr.fit_als(model, data=Shard(source_of(slice(0, 2)), rank, size), max_sweeps=2, seed=0, group=group)
    results["two rows"] = model.factors
    model = make_model()
    options = {"max_sweeps": 2, "seed": 0, "rel_tol": 0.0}
    before = counted.volume
    tkrr.fit_als(model, data=source_of(slice(0, N)), **options)  # no group: each for itself
    results["alone"] = [counted.volume - before, model.factors]
    errors = []
    for attempt in (
        lambda: tkrr.fit_als(make_model(), data=source_of(slice(0, 9)), group=dist.new_group([0])),
        lambda: tkrr.fit_als(make_model(), data=source_of(slice(0, 9)), group=group, checkpoint=folder / "foreign.pt"),
        lambda: tkrr.fit_als(make_model(), data=source_of(slice(0, 9)), group=group, checkpoint=folder),
        lambda: counted.collect(fail_oddly if rank == 1 else int),
    ):
        try:
            attempt()
            errors.append("none")
        except (tkrr.TKRRError, OddError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    results["errors"] = errors
    return results


class Leaving(TensorSource):
    """A source whose process leaves in the middle of its tenth pass."""

    num_passes = 0

    def rows(self, start, stop):
        self.num_passes += 1
        for batch in super().rows(start, stop):
            yield batch
            if self.num_passes == 10:
                self.mark.write_text(str(time.time()))
                os.kill(os.getpid(), self.how)


def lose_a_process(group, folder, method, how):
    """The last process leaves in the middle of a sweep."""
    x, y = make_data()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    source = Leaving(x, y, batch_rows=20) if rank == size - 1 else TensorSource(x, y)
    source.how, source.mark = how, folder / "left"
    fit = tkrr.fit_als if method == "als" else tkrr.fit_gibbs
    try:
        fit(make_model(), data=Shard(source, rank, size), seed=0, group=group, memory=0)
    except tkrr.ProcessError as error:
        return str(error), time.time() - float(source.mark.read_text())
    return "nothing happened", 0.0


def flatten(value):
    """All tensors and numbers of a result, as tensors."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in flatten(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in flatten(item)]
    if isinstance(value, tkrr.Summary):
        return flatten(vars(value))
    return [] if value is None else [torch.as_tensor(value, dtype=torch.float64)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return fit_everything(), run_processes(fit_everything, 3, tmp_path_factory.mktemp("processes"))


def test_sums_are_those_of_one_process(results):
    one, several = results
    for key in ("summary", "sums", "marginals", "hilbert"):
        for rank in range(3):
            for left, right in zip(flatten(one[key]), flatten(several[rank][key]), strict=True):
                scale = float(left.abs().max()) if left.numel() else 1.0
                torch.testing.assert_close(right, left, rtol=1e-10, atol=1e-10 * scale)


def test_all_processes_hold_the_same_bits(results):
    _, several = results
    for key in several[0].keys() - {"first_row", "scores"}:
        for other in several[1:]:
            for left, right in zip(flatten(several[0][key]), flatten(other[key]), strict=True):
                assert torch.equal(left, right), key


def test_rows_are_numbered_over_all_processes(results):
    assert [result["first_row"] for result in results[1]] == [0, 57, 57]


def test_one_process_talks_to_nobody():
    assert as_processes(None) is ONE_PROCESS and not dist.is_initialized()
    assert ONE_PROCESS.gather(3) == [3] and ONE_PROCESS.share("a") == "a"


def test_als_predicts_as_in_one_process(results):
    one, several = results
    for key in ("als False", "als True", "covariance"):
        for left, right in zip(flatten(one[key]), flatten(several[0][key]), strict=True):
            torch.testing.assert_close(right, left, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("key", ["gibbs", "probit"])
def test_a_first_gibbs_sweep_is_that_of_one_process(results, key):
    """Latent targets of a probit model depend neither on how rows are shared nor on batches."""
    one, several = results
    for left, right in zip(flatten(one[key]), flatten(several[0][key]), strict=True):
        torch.testing.assert_close(right, left, rtol=1e-8, atol=1e-8)


def test_the_limit_of_many_components_is_that_of_one_process(results):
    one, several = results
    torch.testing.assert_close(several[0]["limit"], one["limit"], rtol=1e-5, atol=1e-5)
    scores = torch.cat([each["scores"] for each in several])
    assert len(scores) > 15
    torch.testing.assert_close(scores, one["scores"], rtol=1e-4, atol=1e-4)


def test_only_packed_sums_are_exchanged(results):
    """A fit sends the sums of its 5 updates and 3 Laplace blocks, and three vectors for the start."""
    one, several = results
    size, rank = 7, 3
    packed = (2 * size + 1) * rank * (rank + 1) // 2 + rank * size + 2
    marginals = 3 * ((2 * size + 1) + size + 2)
    effects, pairs = 10 * 11, 9**2  # three directions of each input and a constant, and the targets
    assert one["volume"] == 0
    assert [result["volume"] for result in several] == [8 * (8 * packed + marginals + effects + pairs)] * 3


def test_what_is_wrong_in_one_process_is_an_error_in_all(tmp_path):
    first, second = run_processes(fail_together, 2, tmp_path)
    assert re.match(r"ProcessError: Process 1 of 2 failed: InputError: The targets hold NaN .* row 7\b", first[0])
    assert re.match(r"InputError: The targets hold NaN .* row 7\b", second[0])
    assert first[1:] == second[1:] and len(first) == 3
    assert "Process 1 fits something else than process 0: model.rank is 4 there" in first[1]
    assert "seed is 1 there" in first[2]


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talks")
    (folder / "foreign.pt").write_bytes(b"something else")
    return run_processes(talk, 3, folder, folder)


def test_one_sum_for_each_update(talks):
    """Two sweeps of ALS are 9 updates, then 3 Laplace blocks; five of Gibbs 15; and three sums for the start."""
    assert [(result["als"], result["gibbs"]) for result in talks] == [(3 + 9 + 3, 3 + 15)] * 3


def test_more_processes_than_rows(talks):
    model = make_model()
    tkrr.fit_als(model, data=source_of(slice(0, 2)), max_sweeps=2, seed=0)
    for result in talks:
        for left, right, expected in zip(result["two rows"], talks[0]["two rows"], model.factors, strict=True):
            assert torch.equal(left, right)
            torch.testing.assert_close(left, expected, rtol=1e-6, atol=1e-6)


def test_without_a_group_nothing_is_sent(talks):
    """Also where torch.distributed is initialised."""
    model = make_model()
    tkrr.fit_als(model, data=source_of(slice(0, N)), max_sweeps=2, seed=0, rel_tol=0.0)
    for result in talks:
        volume, factors = result["alone"]
        assert volume == 0 and all(torch.equal(a, b) for a, b in zip(factors, model.factors, strict=True))


def test_any_error_reaches_all(talks):
    messages = [result["errors"][3] for result in talks]
    assert messages[1] == "OddError: this and that"
    assert messages[0] == messages[2] == "ProcessError: Process 1 of 3 failed: OddError: this and that"


def test_groups_of_others_and_checkpoints_of_others_are_refused(talks):
    first, *others = (result["errors"] for result in talks)
    assert first[0] == "none" and "is not a checkpoint" in first[1] and "is a folder" in first[2]
    for errors in others:
        assert "does not belong to the group" in errors[0]
        assert re.match("ProcessError: Process 0 of 3 failed: CheckpointError: .* is not a checkpoint", errors[1])
        assert "is a folder" in errors[2]


@pytest.mark.parametrize("method", ["als", "gibbs"])
def test_a_killed_process_ends_the_others(tmp_path, method):
    results = results_of(start_processes(lose_a_process, 3, tmp_path, tmp_path, method, signal.SIGKILL), tmp_path)
    assert results[2] is None
    for message, seconds in results[:2]:
        assert "lost contact" in message and "of 3" in message
        assert seconds < 60  # the timeout of the group


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_others(tmp_path):
    processes = start_processes(lose_a_process, 2, tmp_path, tmp_path, "als", signal.SIGSTOP, timeout=20.0)
    (message, _), *_ = results_of(processes[:1], tmp_path)
    processes[1].kill()
    processes[1].join()
    assert "lost contact" in message


@pytest.mark.parametrize("method", ["als", pytest.param("gibbs", marks=pytest.mark.slow)])
def test_torchrun(tmp_path, method):
    """The command fits a file in two processes; one of them writes the model."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    pytest.importorskip("tqdm")
    x, y = make_data()
    columns = {name: x[:, d].numpy() for d, name in enumerate(["hour", "month", "distance"])}
    pandas.DataFrame({**columns, "delay": y.numpy()}).to_parquet(tmp_path / "flights.parquet", row_group_size=60)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gpytorch_tkrr", "fit"),
        *("--data", "flights.parquet", "--target", "delay", "--output", "model.pt", "--checkpoint", "run.pt"),
        *("--method", method, "--rank", "2", "--num-basis", "4"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("model.pt\n") == 1 and (tmp_path / "run.pt").exists()
    assert "100%" in result.stderr  # progress, from one of the processes
    prediction = tkrr.load(tmp_path / "model.pt").predict(pandas.DataFrame(columns))
    assert float(abs(prediction - y.numpy()).mean()) < float((y - y.mean()).abs().mean()) / 2
