"""Gradients of mixture-of-experts models on one rank: those of replicated or sharded parameters, and those of its experts."""

from peerlane.problems.families.clipping import Entry, tensors
from peerlane.problems.families.collective import BF16


def _qwen3_30b_a3b(ep_ranks: int) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """4 of 48 layers: attention, norms and router; and a rank's share of 128 experts, stacked."""
    layer = ((4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128,), (128,), (128, 2048), (2048,), (2048,))
    experts = 128 // ep_ranks
    return tensors(BF16, *(layer * 4)), tensors(BF16, *([(experts, 768, 2048), (experts, 768, 2048), (experts, 2048, 768)] * 4))


def _deepseek_v3(ep_ranks: int) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """One of 58 layers: latent attention, norms, router and shared expert; and a rank's share of 64 of the 256 experts, stacked."""
    attention = ((1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384), (1536,), (512,))
    layer = (*attention, (7168,), (7168,), (256, 7168), (2048, 7168), (2048, 7168), (7168, 2048))
    experts = 64 // ep_ranks
    return tensors(BF16, *layer), tensors(BF16, (experts, 2048, 7168), (experts, 2048, 7168), (experts, 7168, 2048))


def _mixtral_8x7b(ep_ranks: int) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """2 of 32 layers: attention, norms and router; and a rank's share of 8 experts, stacked."""
    layer = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (8, 4096), (4096,), (4096,))
    experts = 8 // ep_ranks
    return tensors(BF16, *(layer * 2)), tensors(BF16, *([(experts, 14336, 4096), (experts, 14336, 4096), (experts, 4096, 14336)] * 2))


MODELS = {"qwen3-30b-a3b": _qwen3_30b_a3b, "deepseek-v3": _deepseek_v3, "mixtral-8x7b": _mixtral_8x7b}
