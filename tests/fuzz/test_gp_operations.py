"""Random sequences of operations on an ExactGP with a HilbertKernel: after each it is as a fresh one in its state.

The default profile runs about a hundred operations; ``pytest tests/fuzz --hypothesis-profile=long`` runs 100 000
sequences.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import hypothesis.strategies as st
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import LinearKernel, MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from hypothesis import given

import gpytorch_tkrr as tkrr

pytestmark = pytest.mark.usefixtures("functions_for_few_rows")

NUM_DIMS = 2

#: Kernels over two columns.
BASES = {
    "rbf": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "swapped": lambda: ScaleKernel(RBFKernel(ard_num_dims=2, active_dims=[1, 0])),
    "first": lambda: RBFKernel(active_dims=[0]),
    "second": lambda: RBFKernel(active_dims=[1]),
    "matern": lambda: MaternKernel(nu=2.5),
    "rough": lambda: MaternKernel(nu=1.5),
    "sum": lambda: RBFKernel(active_dims=[0]) + LinearKernel(active_dims=[1]),
    "mixed": lambda: RBFKernel(active_dims=[1]) * PeriodicKernel(active_dims=[0]),
}

BOXES = [([0.5, 0.5], [2.5, 2.5]), ([0.5, 0.5], [4.0, 3.0]), ([0.4, 0.6], [3.0, 3.0])]

COUNTS = [9, [6, 9], [9, 6], [4, 4]]

INDEX_SETS = [tkrr.FullTensor(), tkrr.TotalDegree(7), tkrr.HyperbolicCross(8)]


class GP(ExactGP):
    def __init__(self, x, y, kernel):
        super().__init__(x, y, GaussianLikelihood())
        self.mean_module, self.covar_module = ConstantMean(), kernel
        self.double()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def rows(num_rows, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_rows, NUM_DIMS, generator=generator, dtype=torch.float64)
    return x, torch.sin(5 * x[:, 0]) * x[:, 1] + 0.1 * torch.randn(num_rows, generator=generator, dtype=torch.float64)


#: Within the rows' range, near and outside the boxes' edges.
POINTS = torch.cat([rows(6, 99)[0], torch.tensor([[1.2, 0.5], [3.2, -2.0], [9.0, 0.5]], dtype=torch.float64)])


class Interrupt(torch.nn.Module):
    """A mean that stops the computation in the middle."""

    def forward(self, x):
        raise KeyboardInterrupt


class Session:
    """A model on which operations are made, and what a fresh one is made of."""

    def __init__(self, base, by_tolerance, is_scaled, num_rows=14):
        self.base, self.by_tolerance, self.is_scaled, self.num_rows = base, by_tolerance, is_scaled, num_rows
        self.index_set = INDEX_SETS[0]
        self.model = self.fresh()
        self.states = [(self.base, self.state())]

    def fresh(self):
        x, y = rows(self.num_rows, 0)
        if self.by_tolerance:
            kernel = tkrr.HilbertKernel.from_tolerance(BASES[self.base](), x, tol=0.1)
        else:
            kernel = tkrr.HilbertKernel(BASES[self.base](), tkrr.Domain(*BOXES[0]), COUNTS[0], index_set=self.index_set)
        return GP(x, y, ScaleKernel(kernel) if self.is_scaled else kernel)

    def state(self):
        return copy.deepcopy(self.model.state_dict())

    @property
    def kernel(self):
        return next(module for module in self.model.modules() if isinstance(module, tkrr.HilbertKernel))

    # Operations: each takes a number that decides about the rest.

    def train(self, number):
        self.model.train()
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.3)
        objective = ExactMarginalLogLikelihood(self.model.likelihood, self.model)
        for _ in range(1 + number):
            optimizer.zero_grad()
            (-objective(self.model(*self.model.train_inputs), self.model.train_targets)).backward()
            optimizer.step()

    def predict(self, number):
        answers(self.model)

    def evaluate_the_kernel(self, number):
        self.model.train(number % 2 == 0)
        self.kernel(self.model.train_inputs[0]).to_dense()

    def interrupt(self, number):
        mean, self.model.mean_module = self.model.mean_module, Interrupt()
        self.model.train(number % 2 == 0)
        with pytest.raises(KeyboardInterrupt):
            self.model(*self.model.train_inputs)
        self.model.mean_module = mean

    def replace_data(self, number):
        self.model.set_train_data(*rows(len(self.model.train_targets), number))

    def more_data(self, number):
        self.model.set_train_data(*rows(self.num_rows - 4 + 3 * number, number), strict=False)

    def move_data_outside(self, number):
        self.model.set_train_data(self.model.train_inputs[0] + 2.0 * (number - 3))

    def move_data_back(self, number):
        self.model.set_train_data(*rows(len(self.model.train_targets), number))

    def fantasise(self, number):
        self.model.eval()
        self.model(POINTS)
        self.model = self.model.get_fantasy_model(*rows(1 + number, 10 + number))
        self.model.train_inputs = tuple(self.model.train_inputs)

    def save(self, number):
        self.states.append((self.base, self.state()))

    def load(self, number):
        base, state = self.states[number % len(self.states)]
        if base == self.base:
            self.model.load_state_dict(state)

    def load_damaged(self, number):
        state = self.state()
        del state[list(state)[number % len(state)]]
        self.model.load_state_dict(state)

    def change_counts(self, number):
        self.by_hand()
        self.kernel.num_basis = COUNTS[number % len(COUNTS)]

    def change_counts_badly(self, number):
        self.kernel.num_basis = [[3, 3, 3], 0, [3, -1], 200_000][number % 4]

    def change_box(self, number):
        self.by_hand()
        self.kernel.domain = tkrr.Domain(*BOXES[number % len(BOXES)])

    def change_index_set(self, number):
        self.by_hand()
        self.index_set = self.kernel.index_set = INDEX_SETS[number % len(INDEX_SETS)]

    def by_hand(self):
        """The basis stays as it is from now on."""
        if self.by_tolerance:
            self.kernel.keep_basis()
            self.by_tolerance, self.index_set = False, self.kernel.index_set
        self.model.train()  # GPyTorch's rule: what a model has computed for predictions is forgotten by this

    def change_parameters(self, number):
        self.model.train()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.2 * (number - 3))

    def replace_kernel(self, number):
        self.model.train()
        self.base = list(BASES)[number % len(BASES)]
        self.kernel.base_kernel = BASES[self.base]().double()

    def deep_copy(self, number):
        left, self.model = self.model, copy.deepcopy(self.model)
        before = answers(self.model)
        if number % 2:
            disturb(left)
            assert_same(answers(self.model), before)

    def round_trip(self, number):
        self.model = pickle.loads(pickle.dumps(self.model))

    def state_round_trip(self, number):
        file = io.BytesIO()
        torch.save(self.model.state_dict(), file)
        file.seek(0)
        self.model.load_state_dict(torch.load(file, weights_only=True))

    def to_single_and_back(self, number):
        self.model.float().double()


NOT_OPERATIONS = ("fresh", "state", "kernel", "by_hand")
OPERATIONS = [name for name in vars(Session) if not name.startswith("_") and name not in NOT_OPERATIONS]


@torch.no_grad()
def answers(model):
    """What a model says, by name; the text of the error where it refuses."""
    found, mode = {}, model.training
    try:
        prediction = model.eval()(POINTS)
        found.update(mean=prediction.mean, covariance=prediction.covariance_matrix)
        own = model.train()(*model.train_inputs)
        found.update(evidence=model.likelihood(own).log_prob(model.train_targets), matrix=own.covariance_matrix)
        found.update(prior=model.covar_module(*model.train_inputs).to_dense())
    except tkrr.TKRRError as error:
        found["error"] = str(error)
    finally:
        model.train(mode)
    return found


def disturb(model):
    """Change whatever can be changed."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
        model.train_targets.add_(1)
        model.train_inputs[0].mul_(0.5)
    answers(model)


def assert_same(one, two):
    assert one.keys() == two.keys(), (one.get("error"), two.get("error"))
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, two[name], rtol=1e-7, atol=1e-8, msg=name)
        else:
            assert value == two[name], name


def step(session, name, number):
    """One operation, which works or changes nothing; then a model as a fresh one."""
    before, mode = answers(session.model), session.model.training
    try:
        getattr(session, name)(number)
    except (tkrr.TKRRError, RuntimeError) as error:
        assert len(str(error)) > 30
        assert_same(answers(session.model.train(mode)), before)
    found = answers(session.model)  # the basis of from_tolerance is chosen when it is needed
    fresh = session.fresh()
    fresh.set_train_data(*session.model.train_inputs, session.model.train_targets, strict=False)
    fresh.load_state_dict(session.state())
    assert_same(answers(fresh), found)


LISTS = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 7)), min_size=1, max_size=6)


def run(session, operations):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, number in operations:
            step(session, name, number)


@given(base=st.sampled_from(list(BASES)), is_scaled=st.booleans(), operations=LISTS)
def test_a_gaussian_process_is_as_a_fresh_one(base, is_scaled, operations):
    run(Session(base, False, is_scaled), operations)


#: Of the first number the kernel is mostly evaluated as it is, of the second by functions.
NUM_ROWS = st.sampled_from([14, 60])


@given(base=st.sampled_from(list(BASES)), is_scaled=st.booleans(), num_rows=NUM_ROWS, operations=LISTS)
def test_with_a_tolerance_it_is_as_a_fresh_one(base, is_scaled, num_rows, operations):
    run(Session(base, True, is_scaled, num_rows), operations)
