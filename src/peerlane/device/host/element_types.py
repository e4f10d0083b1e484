"""The C++ element types of dtypes, as kernels that add elements are compiled for."""

import torch

from peerlane.errors import UsageError

ELEMENT_TYPES = {
    torch.bfloat16: "peerlane::BFloat16",
    torch.float16: "peerlane::Float16",
    torch.float32: "peerlane::Float32",
    torch.float8_e4m3fn: "peerlane::Float8E4M3",
    torch.float8_e5m2: "peerlane::Float8E5M2",
    torch.int32: "peerlane::Int32",
}
"""The C++ element type of each dtype that can be summed. What is only moved may have any dtype."""


def element_type(dtype: torch.dtype) -> str:
    """The C++ type that sums this dtype; raises UsageError where there is none."""
    if dtype not in ELEMENT_TYPES:
        raise UsageError(f"a sum of {dtype}: expected one of {', '.join(map(str, ELEMENT_TYPES))}; convert the tensor")
    return ELEMENT_TYPES[dtype]
