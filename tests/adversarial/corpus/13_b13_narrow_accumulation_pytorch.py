"""B13: accumulates the product in the working precision, term by term, instead of in fp32."""

import torch
import torch.distributed as dist


def solution(A_local, B_local):
    product = A_local.new_zeros(A_local.shape[0], B_local.shape[1])
    for column, row in zip(A_local.T, B_local, strict=True):
        product += torch.outer(column, row)
    dist.all_reduce(product)
    return product
