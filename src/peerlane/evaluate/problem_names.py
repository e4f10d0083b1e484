"""Tells which problem a candidate's file name means: peerlane's names, those of the public benchmark, and its older numbering."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

PUBLIC_SLUGS: Mapping[int, str] = {
    59: "physicsnemo_distributed_rfft",
    60: "physicsnemo_distributed_irfft",
    61: "gsplat_3d_gaussian_splatting",
    62: "torchharmonics_spherical_convolution",
    63: "deepmd_kalman_filter_optimizer",
    64: "gnn_neighbor_sampling",
    65: "gnn_feature_exchange_all2all",
    66: "gnn_feature_exchange_all2all_backward",
    67: "gnn_sparse_embedding_all2all",
    68: "gnn_sparse_feature_fetch_projection",
    69: "gnn_negative_scoring",
    70: "torchrec_kjt_all2all",
    71: "hyena_conv1d_boundary_exchange",
    72: "hyena_forward_cp",
    73: "vocab_parallel_cross_entropy_loss",
    74: "fla_kimi_delta_attention_cp_tp",
    75: "fla_gated_deltanet_cp",
    76: "opensora_conv3d_allreduce",
    77: "magi1_cso_async_attention",
    78: "magi1_tile_parallel_vae_decode",
    79: "dinov2_distributed_knn",
    80: "dinov2_distributed_sinkhorn_knopp",
    81: "sam3_allgather_iou_suppression",
    82: "vocab_parallel_log_prob_topk",
    83: "vocab_parallel_log_prob_topk_chunked",
    84: "vocab_parallel_log_prob_topk_chunked_backward",
    86: "tp_muon_orthogonalization",
    87: "conv2d_boundary_exchange",
}
"""Today's slug of a problem there, by the number that it has there and here."""

_SHIFTED = """
ulysses_all_to_all_tensor_primitive ulysses_all_gather_into_tensor_primitive ulysses_all_gather_variable_primitive
ulysses_gather_seq_scatter_heads ulysses_gather_heads_scatter_seq ulysses_gather_seq_scatter_heads_qkv ulysses_attention_e2e ddp
zero1_optimizer_shard zero2_optimizer_shard_grad fused_adam_grad_unshard_allgather quantized_grad_allreduce reducescatter_fused_rmsnorm
fsdp_adamw_sharded fsdp_step_e2e fsdp_and_tp moe_ep_balanced moe_ep_wide moe_ep_narrow fp8_reduce_scatter_grads fp8_allgather_params
ring_attention ring_attention_tp ring_attention_pp ring_attention_backward_dp openclip_contrastive_loss physicsnemo_distributed_rfft
physicsnemo_distributed_irfft gsplat_3d_gaussian_splatting torchharmonics_spherical_convolution deepmd_kalman_filter_optimizer
gnn_neighbor_sampling gnn_feature_exchange_all2all gnn_feature_exchange_all2all_backward gnn_sparse_embedding_all2all
gnn_sparse_feature_fetch_projection gnn_negative_scoring torchrec_kjt_all2all hyena_conv1d_boundary_exchange hyena_forward_cp
vocab_parallel_cross_entropy_loss fla_kimi_delta_attention_cp_tp fla_gated_deltanet_cp opensora_conv3d_allreduce magi1_cso_async_attention
magi1_tile_parallel_vae_decode dinov2_distributed_knn dinov2_distributed_sinkhorn_knopp sam3_allgather_iou_suppression
vocab_parallel_log_prob_topk vocab_parallel_log_prob_topk_chunked vocab_parallel_log_prob_topk_chunked_backward distributed_sample_sort
tp_muon_orthogonalization conv2d_boundary_exchange
"""
"""The older slugs from 34 on. These problems were numbered one higher."""

OLDER_NAMES: Mapping[tuple[int, str], int | None] = {
    (11, "gemm_allgather_AT"): 11,
    (12, "gemm_allgather"): 12,
    (14, "gemm_allscatter"): 14,
    (18, "rms_norm"): 18,
    **{(number, slug): number - 1 for number, slug in enumerate(_SHIFTED.split(), 34)},
    (47, "fsdp_adamw_sharded"): None,
}
"""The problem of today that an older number and slug stand for; None: the problem was removed."""

_NAME = re.compile(r"p?(\d+)_(.+)", re.DOTALL)


@dataclass(frozen=True)
class Resolution:
    """The meaning of a file name.

    Attributes:
        problem: its number; None if the name means no problem.
        note: a sentence, where the name means no problem or its number is another problem's; else empty.
    """

    problem: int | None
    note: str = ""


def resolve(stem: str, slugs: Mapping[int, str]) -> Resolution | None:
    """Finds the problem that ``<number>_<name>_<backend>`` means; None for a name without a number.

    The slug is the longest one that the name begins with. A number and slug that belong together decide, those of today before those of
    the older numbering. Where they disagree, the slug decides. A name with no known slug means its number.

    Args:
        stem: the file's name without ``.py``.
        slugs: those of all problems, by number.
    """
    match = _NAME.fullmatch(stem)
    if match is None:
        return None
    number = int(match[1])
    by_slug = {slug: problem for (_, slug), problem in OLDER_NAMES.items()}
    by_slug |= {slug: problem for table in (PUBLIC_SLUGS, slugs) for problem, slug in table.items()}
    for words_left_out, name in enumerate(_beginnings(match[2])):
        if name in (slugs.get(number), PUBLIC_SLUGS.get(number)):
            return Resolution(number)
        if (number, name) in OLDER_NAMES:
            return _resolution(OLDER_NAMES[number, name], number, name, slugs)
        if name in by_slug and words_left_out <= 1:  # more words than a backend behind a slug are another name
            return _resolution(by_slug[name], number, name, slugs)
    if number in slugs:
        return Resolution(number)
    return Resolution(None, f"there is no problem {number}, and no problem is named as in {stem!r}; `peerlane list` prints those there are")


def _beginnings(name: str) -> Iterator[str]:
    """Yields the name, and what is left of it without its last word, two words, and so on."""
    while name:
        yield name
        name = name.rpartition("_")[0]


def _resolution(problem: int | None, number: int, name: str, slugs: Mapping[int, str]) -> Resolution:
    if problem is None:
        return Resolution(None, f"{number}_{name} was removed from the public benchmark: no problem here is like it")
    return Resolution(problem, "" if problem == number else f"{number}_{name} is problem {problem} here ({slugs.get(problem, name)})")
