"""Several classes: known probabilities, data sets of scikit-learn, two classes as one model, storage, errors."""

from __future__ import annotations

import copy
import io

import gpytorch
import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

import gpytorch_tkrr as tkrr


def _three_classes(num: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, labels and true probabilities."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num, 2, dtype=torch.float64, generator=generator)
    scores = torch.stack([3 * torch.sin(6 * x[:, 0]), 4 * x[:, 0] * x[:, 1], 2 - 3 * x[:, 1]], -1)
    probabilities = torch.softmax(scores, -1)
    labels = torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
    return x, labels, probabilities


@pytest.fixture(scope="module")
def fitted():
    x, labels, probabilities = _three_classes(900)
    model = tkrr.OneVsRest(x, 10 * labels - 5, rank=3, num_basis=8)
    results = model.fit(num_draws=30, num_warmup=30, seed=0)
    return model, x, probabilities, results


def test_probabilities_are_those_of_the_simulation(fitted):
    model, _, _, results = fitted
    new_x, _, probabilities = _three_classes(1000, seed=4)
    estimate = model.class_probabilities(new_x).detach()
    assert len(results) == len(model.models) == 3
    torch.testing.assert_close(estimate.sum(-1), torch.ones_like(estimate[:, 0]))
    shares = probabilities.mean(0).expand_as(probabilities)
    error = float((estimate - probabilities).abs().mean())
    assert error < 0.05 and error < 0.3 * float((shares - probabilities).abs().mean())


def test_predictions_are_labels(fitted):
    model, x, probabilities, _ = fitted
    assert model.classes.tolist() == [-5, 5, 15]
    predicted = model.predict(x)
    agreement = (predicted == 10 * probabilities.argmax(-1) - 5).double().mean()
    assert predicted.dtype == torch.int64 and agreement > 0.9
    torch.testing.assert_close(model.eval()(x).probs, model.class_probabilities(x))


@pytest.mark.parametrize("load", [load_iris, pytest.param(load_wine, marks=pytest.mark.slow)])
def test_as_good_as_logistic_regression(load):
    data = load()
    order = np.random.default_rng(0).permutation(len(data.target))
    train, test = order[:100], order[100:]
    scaler = StandardScaler().fit(data.data[train])
    logistic = LogisticRegression(max_iter=1000).fit(scaler.transform(data.data[train]), data.target[train])
    model = tkrr.OneVsRest(
        torch.from_numpy(data.data[train]), data.target_names[data.target[train]], rank=2, num_basis=4
    )
    model.fit(num_draws=20, num_warmup=20, seed=0)
    x = torch.from_numpy(data.data[test])
    truth = data.target_names[data.target[test]]
    error = np.mean(np.array(model.predict(x)) != truth)
    assert error <= np.mean(logistic.predict(scaler.transform(data.data[test])) != data.target[test]) + 0.05
    numbers = torch.from_numpy(data.target[test])
    log_loss = -model.class_probabilities(x).detach().log().gather(1, numbers.unsqueeze(1)).mean()
    assert log_loss < 0.3


def test_two_classes_are_the_binary_model():
    x, labels, _ = _three_classes(120)
    y = (labels > 0).double()
    options = {"rank": 2, "num_basis": 5}
    binary = tkrr.TKRR(x, y, gpytorch.likelihoods.BernoulliLikelihood(), **options)
    tkrr.fit_gibbs(binary, num_draws=10, num_warmup=10, seed=4)
    model = tkrr.OneVsRest(x, ["yes" if value else "no" for value in y], **options)
    model.fit(num_draws=10, num_warmup=10, seed=4)
    assert model.classes == ("no", "yes") and len(model.models) == 1
    p = binary.class_probabilities(x)
    torch.testing.assert_close(model.class_probabilities(x), torch.stack([1 - p, p], -1), rtol=0, atol=0)
    assert model.predict(x) == ["yes" if value > 0.5 else "no" for value in p]


def test_models_do_not_share_what_they_are_given():
    x, labels, _ = _three_classes(60)
    kernel = tkrr.anova_kernel(2)
    model = tkrr.OneVsRest(x, labels, kernel=kernel, rank=2, num_basis=5)
    modules = {id(m.covar_module) for m in model.models}
    assert len(modules) == 3 and id(kernel) not in modules


def test_stored_and_copied(fitted):
    model, x, _, _ = fitted
    expected = model.class_probabilities(x)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = tkrr.OneVsRest(None, None)
    fresh.load_state_dict(torch.load(file, weights_only=False))
    assert fresh.classes.tolist() == [-5, 5, 15]
    for other in (fresh, copy.deepcopy(model), copy.deepcopy(model).float()):
        torch.testing.assert_close(other.class_probabilities(x), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(20), "at least two classes"),
        (torch.tensor([0.0, 1.0, float("nan")] + [2.0] * 17), "row 2"),
        (torch.arange(19), "19 labels for 20"),
        (torch.zeros(20, 2), r"shape \(N,\)"),
        ([None, 1] * 10, "numbers or strings"),
    ],
)
def test_unsuitable_labels(labels, message):
    with pytest.raises(tkrr.InputError, match=message):
        tkrr.OneVsRest(torch.rand(20, 2), labels)


def test_without_data():
    with pytest.raises(tkrr.InputError, match="both"):
        tkrr.OneVsRest(torch.rand(20, 2), None)
    model = tkrr.OneVsRest(None, None)
    for call in (model.fit, lambda: model.predict(torch.rand(3, 2))):
        with pytest.raises(tkrr.NotFittedError, match="no classes"):
            call()
    with pytest.raises(tkrr.NotFittedError, match="fit"):
        tkrr.OneVsRest(torch.rand(20, 2), torch.arange(20) % 3).class_probabilities(torch.rand(3, 2))
