"""The tensor maps of a group's calls."""

from collections.abc import Hashable

import torch

from peerlane.device.host.group import Group, per_group
from peerlane.device.host.tensor_map import TensorMap

_KEPT_MAPS = 4096


class TensorMaps:
    """Maps of tensors that come again and again, kept by address and layout."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._kept: dict[Hashable, TensorMap] = {}

    def __call__(self, tensor: torch.Tensor, box: tuple[int, int], parts: int = 1) -> TensorMap:
        """The map of a matrix, cut along its first dimension into ``parts``."""
        key = self.group.address(tensor), tensor.shape, tensor.stride(), tensor.dtype, box, parts
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) == _KEPT_MAPS:
                self._kept.clear()
            found = self._kept[key] = self.group.encode(self.group.place(tensor).split(parts).map(box))
        return found


tensor_maps = per_group(TensorMaps)
"""Those that kernels of all sizes share."""
