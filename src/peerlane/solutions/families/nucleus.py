"""Log-probabilities of given tokens under top-k and top-p, and their gradients, with a sharded vocabulary (problems 82 to 84).

The filter is found without moving a logit. Up to 32 largest: each rank sends its own k largest, one packet for each. Else ranks search for
the thresholds, by sums over their shards, of which each round sends one packet. ``include/peerlane/nucleus.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from peerlane.device import F32, U32, BoundKernel, DeclaredKernel, Epochs, Group, Packets, Pointer, element_type, per_group
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/nucleus.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(512)
    filtered_logits(const __grid_constant__ Arena arena, const __grid_constant__ FilteredLogits args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)), ROUNDS);
    const auto shard_of = [&](u32 token) {
        const long long target = args.target[token] - static_cast<long long>(arena.rank) * args.columns;
        return ShardRow<ELEMENT>{RowOf<ELEMENT>(args.logits, token, args.columns), args.columns, target};
    };
    const auto target_of = [&](u32 token, const ShardRow<ELEMENT>& shard) {
        if (shard.target < 0 || shard.target >= args.columns) return -infinity;
        return element_of<ELEMENT>(args.logits, u64(token) * args.columns + shard.target);
    };
    const auto finish = [&](u32 token, const ShardRow<ELEMENT>& shard, const KeptLogits& kept) {
        const bool has_nan = kept.mass != kept.mass;  // all of the token's results are NaN
        const bool has_target = (kept.target >= kept.threshold && kept.target > -infinity) || has_nan;
#if GRADIENT
        const float weight = element_of<WEIGHT>(args.weight, token);
        float* out = args.out + u64(token) * args.columns;
        each_column(args.columns, [&](u32 column) {
            float value[row_lanes];
            shard.row.load(column, value);
            for (int e = 0; e < row_lanes; ++e) {
                const float q = value[e] >= kept.threshold || has_nan ? mass_of(value[e], kept.maximum) / kept.mass : 0.0f;
                value[e] = weight * ((has_target && column + e == shard.target ? 1.0f : 0.0f) - q);
            }
            RowOf<Float32>(reinterpret_cast<char*>(out), 0, args.columns).store(column, value);
        });
#else
        if (Warp{}.thread() == 0) args.out[token] = has_target ? kept.target - kept.maximum - logf(kept.mass) : -infinity;
#endif
    };
#if LISTS
    const SmallExchange<WORLD_SIZE, SentCandidate> exchange(arena, args.packets, epoch);
    each_row(args.tokens, [&](u32 token) {
        const auto shard = shard_of(token);
        push_candidates(exchange, token, shard, target_of(token, shard), args.top_k);
    });
    each_row(args.tokens, [&](u32 token) {
        const u32 owner = u32(args.target[token] / args.columns);
        finish(token, shard_of(token), pull_candidates(exchange, token, owner, args.top_k, args.top_p < 1.0f, args.top_p));
    });
#else
    each_row(args.tokens, [&](u32 token) {
        const auto shard = shard_of(token);
        const VocabularySums<ELEMENT, WORLD_SIZE> sums(arena, args.packets, epoch, token, shard);
        finish(token, shard, search_kept(sums, shard, target_of(token, shard), args.top_k, args.top_p));
    });
#endif
}
"""
FILTERED_LOGITS = DeclaredKernel(
    "filtered_logits", SOURCE, epochs=Epochs(), packets=Packets(), logits=Pointer("const char*"), target=Pointer("const long long*"),
    weight=Pointer("const char*"), out=Pointer("float*"), tokens=U32, columns=U32, top_k=U32, top_p=F32,
)  # fmt: skip
THREADS, LONGEST_LIST = 512, 32


@dataclass(frozen=True)
class Filter:
    """The largest ``top_k`` of the vocabulary's logits, 0 for all, and of these the nucleus of ``top_p``, 1 for all."""

    top_k: int
    top_p: float

    @staticmethod
    def of(top_k: int | None, top_p: float | None, vocabulary: int) -> Filter:
        """Returns the filter of a problem's arguments: off if None, not positive, or not below one."""
        return Filter(min(max(top_k or 0, 0), vocabulary), 1.0 if top_p is None else min(top_p, 1.0))

    @property
    def lists(self) -> bool:
        """True if ranks send their largest logits."""
        return 0 < self.top_k <= LONGEST_LIST

    def rounds(self, dtype: torch.dtype) -> int:
        """Returns how many packets a token takes from each rank, one after the other; a search halves the logits' bits twice in each."""
        search = 8 if dtype == torch.bfloat16 else 16
        return 1 if self.lists else 2 + search * (self.top_k > 0) + (search + 1) * (self.top_p < 1)


@per_group
def _bound(group: Group, shape: tuple[int, int], dtype: torch.dtype, kept: Filter, weight: torch.dtype | None) -> BoundKernel:
    tokens, columns = shape
    defines: dict[str, str | int] = {
        "ELEMENT": element_type(dtype),
        "ROUNDS": kept.rounds(dtype),
        "LISTS": int(kept.lists),
        "GRADIENT": int(weight is not None),
    }
    if weight is not None:
        defines["WEIGHT"] = element_type(weight)
    bound = FILTERED_LOGITS.bind(
        group,
        grid=min(group.sm_count, tokens),
        block=min(THREADS, group.max_threads),
        defines=defines,
        sizes={"packets": tokens * (kept.top_k if kept.lists else 1)},
        tokens=tokens,
        columns=columns,
    )
    bound.set(top_k=kept.top_k, top_p=kept.top_p)
    return bound


def filtered_logits(
    group: Group,
    logits: torch.Tensor,
    target: torch.Tensor,
    filters: tuple[int | None, float | None],
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Collective: returns the targets' log-probabilities in float32; with ``weight``, the gradient of their sum, weighed so, to the rank's
    logits.

    ``logits`` (..., Vp) are entries [r Vp, (r + 1) Vp) of rank r, ``target`` (...) ids of all; ``filters`` are top_k and top_p."""
    if target.shape != logits.shape[:-1]:
        raise UsageError(f"targets of shape {tuple(target.shape)} for logits of {tuple(logits.shape)}; expected {tuple(logits.shape[:-1])}")
    columns, tokens = logits.shape[-1], target.numel()
    out = torch.empty(target.shape if weight is None else logits.shape, dtype=torch.float32, device=logits.device)
    if tokens:
        kept = Filter.of(*filters, columns * group.world_size)
        launch = _bound(group, (tokens, columns), logits.dtype, kept, None if weight is None else weight.dtype)
        launch(
            logits=logits.contiguous(),
            target=target.to(torch.int64).contiguous(),
            weight=None if weight is None else weight.contiguous(),
            out=out,
        )
    return out
