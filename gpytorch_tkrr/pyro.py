r"""Hilbert Gaussian processes and CP-weight functions inside Pyro models; needs the extra `pyro`.

Two ways lead from a kernel with priors to draws of its hyperparameters:

- *Collapsed*: an :class:`~gpytorch.models.ExactGP` with a :class:`~gpytorch_tkrr.HilbertKernel`, whose hyperparameters
  are drawn by :meth:`pyro_sample_from_prior` (or :func:`sample_priors`, which copies nothing) and whose weights are
  integrated out. Features and Gram matrix are computed once for the whole run.
- *Weight space*: :func:`hilbert_gp` and :func:`cp_function` are functions with standard normal weights, to be used
  anywhere in a Pyro model and with any likelihood.

A step at which a factorisation fails is rejected. :func:`to_arviz` exports runs of either kind to ArviZ.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from gpytorch import Module
from gpytorch.kernels import Kernel
from gpytorch.models import ExactGP
from gpytorch.module import RandomModuleMixin
from torch import Tensor

from .bases.domain import Domain
from .errors import InputError
from .features.separable import separate
from .hilbert.functions import draw_posterior_functions
from .hilbert.kernel import HilbertKernel
from .hilbert.prediction import by_functions, split_covariance
from .hilbert.sampled import random_twin, reject_failed_steps
from .inference.arviz import inference_data, regression_to_arviz
from .model.likelihoods.registry import observe
from .operators.capacitance import root

try:
    import pyro
    import pyro.distributions as dist
    from pyro import poutine
    from pyro.infer import MCMC
except ImportError as error:
    raise ImportError(
        "gpytorch_tkrr.pyro needs Pyro: pip install pyro-ppl, or gpytorch_tkrr[pyro] with its extra."
    ) from error

__all__ = ["cp_function", "hilbert_gp", "sample_priors", "to_arviz"]

reject_failed_steps()

#: Hyperparameter draws whose functions are drawn at once.
DRAWS_AT_ONCE = 50


def sample_priors(module: Module, name: str = "") -> Module:
    """
    A twin of a GPyTorch module whose parameters are drawn from their registered priors, one Pyro site for each.

    The sites are those of :meth:`pyro_sample_from_prior`, which copies the whole module with its training data several
    times over; the twin shares everything but the parameters.

    :param module: A kernel, likelihood or model. Parameters without a prior keep their values, as constants.
    :param name: Stands before the names of the sites, with a dot, where it is not empty.

    Example:
        >>> import gpytorch, pyro
        >>> from gpytorch_tkrr.pyro import sample_priors
        >>> kernel = gpytorch.kernels.RBFKernel(lengthscale_prior=gpytorch.priors.GammaPrior(3.0, 6.0))
        >>> trace = pyro.poutine.trace(lambda: sample_priors(kernel, "k")).get_trace()
        >>> list(trace.stochastic_nodes)
        ['k.lengthscale_prior']
    """
    twin = random_twin(module)
    for site, owner, prior, closure, setter in twin.named_priors():
        if setter is None:
            raise InputError(
                f"The prior {site} was registered without a setting_closure, so its parameter cannot be set. Register "
                "it by the name of the parameter: register_prior(name, prior, 'lengthscale')."
            )
        shape = closure(owner).shape
        value = pyro.sample(f"{name}.{site}" if name else site, prior.expand(shape))
        if value.shape != shape:
            raise InputError(
                f"{site} has shape {tuple(shape)} but was drawn with shape {tuple(value.shape)}, inside a plate. Draw "
                "hyperparameters outside: kernel = gpytorch_tkrr.pyro.sample_priors(kernel, name), before the plate. "
                "Vectorised particles and Predictive(parallel=True) are such plates, too: leave them out."
            )
        setter(owner, value)
    return twin


def hilbert_gp(name: str, kernel: Kernel, x: Tensor) -> Tensor:
    r"""
    A function from a Gaussian process with a :class:`~gpytorch_tkrr.HilbertKernel`, by standard normal weights,

    .. math:: f(x) = \sum_i \sqrt{v_i(\theta)}\, \phi_i(x)\, w_i, \qquad w_i \sim N(0, 1).

    Sites: `name.weights`, one for each prior registered on the kernel (`name.base_kernel.lengthscale_prior` and the
    like, unless :func:`sample_priors` has drawn them before), and `name`, the values, deterministic.

    :param name: Name of the function.
    :param kernel: A HilbertKernel, or a ScaleKernel around one. The inputs must lie in its domain.
    :param x: Inputs `(N, D)`, or `(N,)` for one dimension.
    :return: `(N,)`; `(*plates, N)`, one function for each entry, inside of plates.

    Example:
        >>> import gpytorch, pyro, torch, gpytorch_tkrr as tkrr
        >>> x = torch.linspace(0, 1, 50)
        >>> base = gpytorch.kernels.RBFKernel(lengthscale_prior=gpytorch.priors.GammaPrior(3.0, 6.0))
        >>> kernel = tkrr.HilbertKernel(base, tkrr.Domain.from_data(x, boundary_factor=3.0), num_basis=20)
        >>> def counts(x, y=None):
        ...     f = tkrr.pyro.hilbert_gp("f", kernel, x)
        ...     with pyro.plate("rows", len(x)):
        ...         return pyro.sample("y", pyro.distributions.Poisson(f.exp()), obs=y)
        >>> counts(x).shape
        torch.Size([50])
    """
    kernel = kernel if isinstance(kernel, RandomModuleMixin) else sample_priors(kernel, name)
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    if not any(isinstance(part, HilbertKernel) for part in kernel.modules()):
        raise InputError(
            f"hilbert_gp takes a HilbertKernel, or a ScaleKernel around one; got a {type(kernel).__name__}. Wrap the "
            "kernel: HilbertKernel.from_tolerance(kernel, x)."
        )
    with by_functions(kernel):
        covariance = kernel(x).evaluate_kernel()
    low_rank, _ = split_covariance(covariance)
    weights = _standard_normal(f"{name}.weights", low_rank.scale.shape, low_rank.scale)
    values = ((low_rank.scale * weights).unsqueeze(-2) @ low_rank.mixed_features.mT).squeeze(-2)
    return pyro.deterministic(name, values.to(covariance.dtype), event_dim=1)


def cp_function(
    name: str, kernel: Kernel, x: Tensor, *, domain: Domain, rank: int, num_basis: int | Sequence[int] = 20
) -> Tensor:
    r"""
    A function of many inputs whose weights are a low-rank CP tensor with standard normal entries,

    .. math:: f(x) = \frac{\sigma}{\sqrt R} \sum_{r=1}^R \prod_{d=1}^D \sum_j \sqrt{v_{dj}(\theta)}\, \phi_{dj}(x_d)\,
        w_{drj}, \qquad w_{drj} \sim N(0, 1).

    Its prior covariance is the kernel, :math:`\sigma^2 \prod_d k_d`, whatever the rank; the prior itself tends to the
    Gaussian process as the rank grows.

    Sites: `name.weights_d` for every input dimension d, one for each prior registered on the kernel, and `name`, the
    values, deterministic.

    :param name: Name of the function.
    :param kernel: A separable kernel, such as :func:`~gpytorch_tkrr.anova_kernel`.
    :param x: Inputs `(N, D)`.
    :param domain: The box; it must be the same wherever the function is evaluated.
    :param rank: R.
    :param num_basis: Number of sines, for all dimensions or for each.
    :return: `(N,)`; `(*plates, N)` inside of plates.

    Example:
        >>> import pyro, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(40, 6)
        >>> kernel, domain = tkrr.anova_kernel(6), tkrr.Domain(0.5, 2.0)
        >>> tkrr.pyro.cp_function("f", kernel, x, domain=domain, rank=4).shape
        torch.Size([40])
    """
    kernel = kernel if isinstance(kernel, RandomModuleMixin) else sample_priors(kernel, name)
    separable = separate(kernel, domain, num_basis, x.shape[-1])
    product: Tensor | None = None
    for d, mode in enumerate(separable.modes):
        prior = mode.covariance()
        scale = root(prior.variances)
        weights = _standard_normal(f"{name}.weights_{d}", torch.Size([rank, mode.num_functions]), scale)
        values = prior.unmix(weights * scale) @ mode.basis(x[..., d]).mT  # (..., R, N)
        product = values if product is None else product * values
    assert product is not None
    values = product.sum(-2) * (separable.outputscale() / rank).sqrt()
    return pyro.deterministic(name, values.to(x.dtype), event_dim=1)


def _standard_normal(site: str, shape: torch.Size, like: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    return pyro.sample(site, dist.Normal(zero, 1.0).expand(shape).to_event(len(shape)))


@torch.no_grad()
def to_arviz(mcmc: MCMC, gp: ExactGP | None = None, *, seed: int = 0) -> Any:
    """
    A run of HMC or NUTS as ArviZ's InferenceData (a DataTree from ArviZ 1.0 on), with the groups of
    :meth:`gpytorch_tkrr.GibbsResult.to_arviz`.

    :param mcmc: The run.
    :param gp: The Gaussian process whose hyperparameters were drawn, if its weights were integrated out. A function is
        then drawn from its posterior for every draw, and the log likelihood is that of each row given the function, as
        for other models; the variance that its basis does not represent (`missing_variance`) counts as noise. Without
        it, whatever the Pyro model observes is reported.
    :param seed: Seed of the drawn functions and of the replicated targets.

    Example:
        >>> import gpytorch, pyro, torch, gpytorch_tkrr as tkrr
        >>> x = torch.linspace(0, 1, 20)
        >>> kernel = tkrr.HilbertKernel(gpytorch.kernels.RBFKernel(), tkrr.Domain(0.5, 2.0), num_basis=8)
        >>> def model(x, y=None):
        ...     f = tkrr.pyro.hilbert_gp("f", kernel, x)
        ...     with pyro.plate("rows", len(x)):
        ...         pyro.sample("y", pyro.distributions.Normal(f, 0.1), obs=y)
        >>> pyro.set_rng_seed(0)
        >>> mcmc = pyro.infer.MCMC(pyro.infer.NUTS(model), num_samples=4, warmup_steps=4, disable_progbar=True)
        >>> mcmc.run(x, torch.sin(6 * x))
        >>> draws = tkrr.pyro.to_arviz(mcmc)
        >>> draws.posterior["f"].shape
        (1, 4, 20)
    """
    samples = mcmc.get_samples(group_by_chain=True)  # each (chains, draws, ...)
    num_chains, num_draws = next(iter(samples.values())).shape[:2]
    diverging = torch.zeros(num_chains, num_draws, dtype=torch.bool)
    for chain, draws in enumerate(mcmc.diagnostics()["divergences"].values()):
        diverging[chain, draws] = True
    if gp is not None:
        return _collapsed_to_arviz(gp, samples, {"diverging": diverging}, seed)
    return _sites_to_arviz(mcmc, samples, {"diverging": diverging}, seed)


def _collapsed_to_arviz(gp: ExactGP, samples: dict[str, Tensor], stats: dict[str, Tensor], seed: int) -> Any:
    shape = next(iter(samples.values())).shape[:2]
    flat = {site: values.flatten(0, 1) for site, values in samples.items()}
    generator = torch.Generator().manual_seed(seed)
    functions, noise, missing, observation = [], [], [], observe(gp.likelihood)
    for index in torch.arange(shape.numel()).split(DRAWS_AT_ONCE):
        twin = copy.deepcopy(gp)
        twin.pyro_load_from_samples({site: values[index] for site, values in flat.items()})
        functions.append(draw_posterior_functions(twin.eval(), 1, generator=generator))
        variance = twin.likelihood.noise.double()  # (S, 1) where it is drawn, (N,) where it is known for each row
        noise.append(variance.reshape(-1, variance.shape[-1]).mean(-1).expand(len(index)))
        with by_functions(twin):
            _, rest = split_covariance(twin.prediction_strategy._evaluate())
        missing.append(torch.zeros_like(noise[-1]) if rest is None else rest.detach().mean(-1).expand(len(index)))
    values = {_parameter_name(site): draws.reshape(*shape, -1).squeeze(-1) for site, draws in samples.items()}
    # What the functions do not represent is independent variance of the rows, beside the noise.
    values["missing_variance"] = torch.cat(missing).unflatten(0, shape)
    return regression_to_arviz(
        lambda x: torch.cat([f(x).squeeze(0) for f in functions]).double().unflatten(0, shape),
        observation,
        {"noise": torch.cat(noise).unflatten(0, shape) + values["missing_variance"]},
        observation.rows(len(gp.train_targets), True),
        values,
        gp.train_inputs[0],
        gp.train_targets,
        sample_stats=stats,
        seed=seed,
    )


def _parameter_name(site: str) -> str:
    """The site of a prior by the name that its parameter has in the export of other samplers."""
    name = site.removesuffix("_prior").removeprefix("covar_module.")
    return "noise" if name == "likelihood.noise_covar.noise" else name


def _sites_to_arviz(mcmc: Any, samples: dict[str, Tensor], stats: dict[str, Tensor], seed: int) -> Any:
    """Replays the model at every draw; nothing is asked of its vectorisation."""
    model, args, kwargs = mcmc.kernel.model, mcmc._args, mcmc._kwargs
    shape = next(iter(samples.values())).shape[:2]
    functions, log_likelihood, replicates = defaultdict(list), defaultdict(list), defaultdict(list)
    observed: dict[str, Tensor] = {}
    site: Any
    with torch.random.fork_rng():
        pyro.set_rng_seed(seed)
        for i in range(shape.numel()):
            draw = {name: values.flatten(0, 1)[i] for name, values in samples.items()}
            for name, site in poutine.trace(poutine.condition(model, draw)).get_trace(*args, **kwargs).nodes.items():
                if site["type"] != "sample" or not site["is_observed"] or name in draw:
                    continue
                if site["infer"].get("_deterministic"):
                    functions[name].append(site["value"])
                else:
                    observed[name] = site["value"]
                    log_likelihood[name].append(site["fn"].log_prob(site["value"]))
                    replicates[name].append(site["fn"].sample())
    if not observed:
        raise InputError("The Pyro model observes nothing with the arguments of this run: give it the targets.")
    bound = inspect.signature(model).bind(*args, **kwargs).arguments
    drawn = {"posterior": functions, "log_likelihood": log_likelihood, "posterior_predictive": replicates}
    groups = {
        group: {name: torch.stack(values).unflatten(0, shape) for name, values in variables.items()}
        for group, variables in drawn.items()
    }
    total = sum(values.reshape(*shape, -1).sum(-1) for values in groups["log_likelihood"].values())
    groups["posterior"] = {**samples, **groups["posterior"]}
    groups["sample_stats"] = {**stats, "deviance": -2 * total}
    groups["observed_data"] = observed
    groups["constant_data"] = {
        name: value
        for name, value in bound.items()
        if torch.is_tensor(value) and not any(value is target for target in observed.values())
    }
    rows = {target.shape for target in observed.values() if target.dim() == 1}
    values = {**observed, **{name: each[0] for name, each in functions.items()}}
    dims = {name: ["row"] for name, value in values.items() if rows == {value.shape}}
    return inference_data(groups, dims, {})
