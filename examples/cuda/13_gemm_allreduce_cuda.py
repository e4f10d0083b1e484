"""Problem 13, row-parallel matrix product and all-reduce: cuBLAS for the product, then one launch that sums it over the ranks in place.

The partial products are rounded to the input's dtype, as in the reference, and added in fp32 in rank order. Against a product, a clone
and an NCCL all-reduce this saves a pass over the result and a launch, and takes the shorter path over the links. The communicator is made
by the first call, which is collective; it picks the kernel by size.
"""

from __future__ import annotations

import torch

from peerlane.device import communicator


def solution(A_local: torch.Tensor, B_local: torch.Tensor) -> torch.Tensor:
    product = torch.mm(A_local, B_local)
    communicator().all_reduce(product)
    return product
