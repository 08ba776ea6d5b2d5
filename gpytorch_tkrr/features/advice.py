"""What to write instead of a kernel that has no features."""

from __future__ import annotations

from gpytorch import kernels
from gpytorch.kernels import Kernel

_DERIVATIVES = (
    "It is the joint covariance of a function and its derivatives, and features of the function alone would leave the "
    "derivatives out. Keep the exact kernel for derivative observations."
)
_TASKS = (
    "It is a covariance of several tasks. Put HilbertKernel inside: MultitaskKernel(HilbertKernel.from_tolerance(base, "
    "x), num_tasks)."
)
_APPROXIMATION = (
    "It approximates its base kernel, as HilbertKernel does. Give the base kernel to HilbertKernel: "
    "HilbertKernel.from_tolerance(base_kernel, x)."
)
_WARPED = (
    "It applies its base kernel to transformed inputs. Transform the inputs first, and give the base kernel to "
    "HilbertKernel."
)

#: The first class that fits decides, so that subclasses stand before their bases.
_ADVICE: list[tuple[type[Kernel], str]] = [
    (kernels.RBFKernelGrad, _DERIVATIVES),
    (kernels.RBFKernelGradGrad, _DERIVATIVES),
    (kernels.Matern52KernelGrad, _DERIVATIVES),
    (kernels.PolynomialKernelGrad, _DERIVATIVES),
    (kernels.MultitaskKernel, _TASKS),
    (kernels.LCMKernel, _TASKS),
    (
        kernels.RFFKernel,
        "It stands for an RBF kernel, at random frequencies. Use RBFKernel with the same lengthscale inside "
        "HilbertKernel.",
    ),
    (kernels.GridInterpolationKernel, _APPROXIMATION),  # a subclass of GridKernel
    (kernels.GridKernel, _APPROXIMATION),
    (kernels.InducingPointKernel, _APPROXIMATION),
    (
        kernels.MultiDeviceKernel,
        "It shares a large covariance matrix between devices, and HilbertKernel needs no such matrix. Use its base "
        "kernel.",
    ),
    (kernels.ArcKernel, _WARPED),
    (kernels.CylindricalKernel, _WARPED),
    (
        kernels.DistributionalInputKernel,
        "It compares probability distributions, which have no box. Keep the exact kernel; where only the mean of each "
        "input matters, use a kernel of the means.",
    ),
    (
        kernels.HammingIMQKernel,
        "Its functions are all products over the positions of a sequence, (vocabulary size) ** (length) of them. Keep "
        "the exact kernel.",
    ),
    (
        kernels.SpectralDeltaKernel,
        "It has no density. Use SpectralMixtureKernel, whose components have a width.",
    ),
    (
        kernels.CosineKernel,
        "It has two functions, a cosine and a sine, of one input column; over several columns it is not positive "
        "definite. Give it active_dims=(d,), or multiply one CosineKernel for each column.",
    ),
    (
        kernels.IndexKernel,
        "It is a table for the values of one input column: give it active_dims=(d,).",
    ),
]


def advise(kernel: Kernel) -> str:
    """
    What to write instead of a kernel without features; for a kernel that this package does not know, how to register
    its density.

    :param kernel: The kernel.

    Example:
        >>> import gpytorch
        >>> from gpytorch_tkrr.features.advice import advise
        >>> advise(gpytorch.kernels.RFFKernel(num_samples=10, num_dims=1)).split(". ")[1]
        'Use RBFKernel with the same lengthscale inside HilbertKernel.'
    """
    name = type(kernel).__name__
    if type(kernel).__module__.startswith("gpytorch.kernels.keops"):
        return f"It never forms a covariance matrix, and neither does HilbertKernel. Use gpytorch.kernels.{name}."
    for kernel_class, advice in _ADVICE:
        if isinstance(kernel, kernel_class):
            return advice
    if type(kernel).num_outputs_per_input is not Kernel.num_outputs_per_input:
        return "It has several outputs for each input, and features have one. Keep the exact kernel."
    return (
        "If it is stationary, register a function that returns densities (*kernel.batch_shape, M) at frequencies "
        f"(M, len(dims)):\n\n    @gpytorch_tkrr.register_spectral_density({name})\n"
        "    def density(kernel, omega, dims): ..."
    )
