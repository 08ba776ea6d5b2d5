"""Features of training inputs that are computed once for many steps of training."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..operators.lazy_features import LazyFeatures


class FeatureCache:
    """
    Features of the training inputs seen last, found again by content.

    Deep copies of a kernel share it, since samplers copy the whole model at every step: what is found depends on
    everything that makes the features, not on who asks. Pickles leave it behind.
    """

    def __init__(self) -> None:
        self.content: tuple[Hashable, list[Tensor], LazyFeatures] | None = None

    def find(self, structure: Hashable, tensors: list[Tensor]) -> LazyFeatures | None:
        """
        The features, or None.

        :param structure: Which functions they are.
        :param tensors: The inputs and all tensors that the functions depend on.
        """
        if self.content is None or self.content[0] != structure or not _same_content(self.content[1], tensors):
            return None
        return self.content[2]

    def store(self, structure: Hashable, tensors: list[Tensor], features: LazyFeatures) -> None:
        """
        :param structure: Which functions they are.
        :param tensors: The inputs and all tensors that the functions depend on.
        :param features: `(..., N, M)`.
        """
        self.content = (structure, [tensor.detach().clone() for tensor in tensors], features)

    def __deepcopy__(self, memo: dict[int, Any]) -> FeatureCache:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureCache, ()


def _same_content(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        a is b or (a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
        for a, b in zip(left, right, strict=True)
    )
