"""Ax's modular BoTorch generator with our models, where Ax is installed (pip install ax-platform)."""

from __future__ import annotations

import pytest

pytest.importorskip("botorch.models")  # not the folder of this name
pytest.importorskip("ax")
from ax.adapter.cross_validation import cross_validate
from ax.adapter.registry import Generators
from ax.api.client import Client
from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig
from ax.generation_strategy.generation_node import GenerationNode
from ax.generation_strategy.generation_strategy import GenerationStrategy
from ax.generation_strategy.generator_spec import GeneratorSpec
from ax.generation_strategy.transition_criterion import MinTrials
from ax.generators.torch.botorch_modular.surrogate import ModelConfig, SurrogateSpec

from gpytorch_tkrr.botorch import HilbertGPModel, TKRRModel

pytestmark = pytest.mark.filterwarnings("ignore")  # Ax's own, of many kinds


def strategy(model_class, options):
    """Five quasi-random trials, then the model."""
    config = ModelConfig(botorch_model_class=model_class, model_options=options)
    spec = {"surrogate_spec": SurrogateSpec(model_configs=[config])}
    first = GenerationNode(
        name="first",
        generator_specs=[GeneratorSpec(Generators.SOBOL, generator_kwargs={"seed": 0})],
        transition_criteria=[MinTrials(threshold=5, transition_to="model", use_all_trials_in_exp=True)],
    )
    then = GenerationNode(
        name="model", generator_specs=[GeneratorSpec(Generators.BOTORCH_MODULAR, generator_kwargs=spec)]
    )
    return GenerationStrategy(name="ours", nodes=[first, then])


@pytest.mark.parametrize(
    ("model_class", "options"),
    [(HilbertGPModel, {}), (HilbertGPModel, {"num_functions": 64}), (TKRRModel, {}), (TKRRModel, {"rank": 4})],
    ids=str,
)
def test_trials_of_a_client(model_class, options):
    """Range and choice parameters, a constraint, and cross-validation, which loads states into new models."""
    client = Client(random_seed=1)
    parameters = [RangeParameterConfig(name=name, parameter_type="float", bounds=(-5.0, 10.0)) for name in ("a", "b")]
    colour = ChoiceParameterConfig(name="c", parameter_type="str", values=["red", "green"], is_ordered=False)
    client.configure_experiment(parameters=[*parameters, colour])
    client.configure_optimization(objective="-loss", outcome_constraints=["cost <= 20"])
    client.set_generation_strategy(strategy(model_class, options))
    for _ in range(7):
        for index, point in client.get_next_trials(max_trials=1).items():
            loss = (point["a"] - 1) ** 2 + (point["b"] - 2) ** 2 + (point["c"] == "red")
            client.complete_trial(index, raw_data={"loss": (loss, 0.1), "cost": (point["a"] + point["b"], 0.1)})
    adapter = client._generation_strategy.adapter
    model = adapter.generator.surrogate.model
    assert isinstance(getattr(model, "models", [model])[0], model_class)
    results = cross_validate(adapter, folds=2)
    assert len(results) == 6 and all(result.predicted.means_dict for result in results)
