"""Codes of few bits, as a candidate that saves bandwidth or arithmetic without leave would use them: for known wrong answers."""

import torch
import torch.nn.functional as F

BLOCK = 32
"""neighbours along the last dimension that share a scale"""


def eight_bits(tensor: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """What is left of a floating-point tensor after a code of signed 8-bit integers with a float32 scale for every ``block`` neighbours
    along its last dimension, in the tensor's dtype: 8.5 to 9 bits an element in all."""
    if tensor.numel() == 0 or tensor.dim() == 0:
        return tensor.clone()
    width = tensor.shape[-1]
    padded = F.pad(tensor.to(torch.float32), (0, -width % block))
    blocks = padded.view(*padded.shape[:-1], -1, block)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    coded = torch.where(scale > 0, blocks / scale, 0.0).round() * scale
    return coded.view(padded.shape)[..., :width].to(tensor.dtype)


def eight_bit_floats(tensor: torch.Tensor) -> torch.Tensor:
    """What is left of a floating-point tensor after float8_e4m3fn with a float32 scale for every row (last dimension), in its dtype."""
    if tensor.numel() == 0:
        return tensor.clone()
    wide = tensor.to(torch.float32)
    scale = wide.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    coded = torch.where(scale > 0, wide / scale, 0.0).to(torch.float8_e4m3fn).to(torch.float32)
    return (coded * scale).to(tensor.dtype)
