"""C46: the right norm, and gradients that stay as they were."""

from peerlane import problems

reference = problems.get(21).reference


def solution(grad_tensors, max_norm, norm_type=2.0, fsdp_group=None):
    copies = [None if gradient is None else gradient.clone() for gradient in grad_tensors]
    return reference(copies, max_norm, norm_type, fsdp_group)
