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

OLDER_NAMES: Mapping[tuple[int, str], int | None] = {
    (11, "gemm_allgather_AT"): 11,
    (12, "gemm_allgather"): 12,
    (14, "gemm_allscatter"): 14,
    (18, "rms_norm"): 18,
    (34, "ulysses_all_to_all_tensor_primitive"): 33,
    (35, "ulysses_all_gather_into_tensor_primitive"): 34,
    (36, "ulysses_all_gather_variable_primitive"): 35,
    (37, "ulysses_gather_seq_scatter_heads"): 36,
    (38, "ulysses_gather_heads_scatter_seq"): 37,
    (39, "ulysses_gather_seq_scatter_heads_qkv"): 38,
    (40, "ulysses_attention_e2e"): 39,
    (41, "ddp"): 40,
    (42, "zero1_optimizer_shard"): 41,
    (43, "zero2_optimizer_shard_grad"): 42,
    (44, "fused_adam_grad_unshard_allgather"): 43,
    (45, "quantized_grad_allreduce"): 44,
    (46, "reducescatter_fused_rmsnorm"): 45,
    (47, "fsdp_adamw_sharded"): None,
    (48, "fsdp_step_e2e"): 47,
    (49, "fsdp_and_tp"): 48,
    (50, "moe_ep_balanced"): 49,
    (51, "moe_ep_wide"): 50,
    (52, "moe_ep_narrow"): 51,
    (53, "fp8_reduce_scatter_grads"): 52,
    (54, "fp8_allgather_params"): 53,
    (55, "ring_attention"): 54,
    (56, "ring_attention_tp"): 55,
    (57, "ring_attention_pp"): 56,
    (58, "ring_attention_backward_dp"): 57,
    (59, "openclip_contrastive_loss"): 58,
    (60, "physicsnemo_distributed_rfft"): 59,
    (61, "physicsnemo_distributed_irfft"): 60,
    (62, "gsplat_3d_gaussian_splatting"): 61,
    (63, "torchharmonics_spherical_convolution"): 62,
    (64, "deepmd_kalman_filter_optimizer"): 63,
    (65, "gnn_neighbor_sampling"): 64,
    (66, "gnn_feature_exchange_all2all"): 65,
    (67, "gnn_feature_exchange_all2all_backward"): 66,
    (68, "gnn_sparse_embedding_all2all"): 67,
    (69, "gnn_sparse_feature_fetch_projection"): 68,
    (70, "gnn_negative_scoring"): 69,
    (71, "torchrec_kjt_all2all"): 70,
    (72, "hyena_conv1d_boundary_exchange"): 71,
    (73, "hyena_forward_cp"): 72,
    (74, "vocab_parallel_cross_entropy_loss"): 73,
    (75, "fla_kimi_delta_attention_cp_tp"): 74,
    (76, "fla_gated_deltanet_cp"): 75,
    (77, "opensora_conv3d_allreduce"): 76,
    (78, "magi1_cso_async_attention"): 77,
    (79, "magi1_tile_parallel_vae_decode"): 78,
    (80, "dinov2_distributed_knn"): 79,
    (81, "dinov2_distributed_sinkhorn_knopp"): 80,
    (82, "sam3_allgather_iou_suppression"): 81,
    (83, "vocab_parallel_log_prob_topk"): 82,
    (84, "vocab_parallel_log_prob_topk_chunked"): 83,
    (85, "vocab_parallel_log_prob_topk_chunked_backward"): 84,
    (86, "distributed_sample_sort"): 85,
    (87, "tp_muon_orthogonalization"): 86,
    (88, "conv2d_boundary_exchange"): 87,
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
