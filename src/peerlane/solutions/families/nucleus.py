"""Log-probabilities of given tokens under top-k and top-p, and their gradients, with a sharded vocabulary (problems 82 to 84).

The filter is found without a sort, by teams of warps. Up to 93 largest: each rank sends its own k largest. Else ranks count their logits in
bins, and send sums over bins until they know which one holds the threshold. ``peerlane/collectives/nucleus.cuh``, ``nucleus_search.cuh``.
"""

from dataclasses import dataclass

import torch

from peerlane.device import F32, U32, BoundKernel, DeclaredKernel, Epochs, Group, Packets, Pointer, element_type, per_group
from peerlane.device.host.resources import SYSTEM_BYTES
from peerlane.device.host.roles import SHARED_LIMIT_BYTES
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/collectives/nucleus_search.cuh>
using namespace peerlane;

struct TeamMemory {
    RoundMemory<WORLD_SIZE> rounds;
    u32 words[TEAM_WORDS];  // candidates, or bins
};
static_assert(TEAMS * sizeof(TeamMemory) == SHARED_BYTES);

extern "C" __global__ void __launch_bounds__(TEAMS * TEAM_THREADS)
    filtered_logits(const __grid_constant__ Arena arena, const __grid_constant__ FilteredLogits args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)), args.rounds);
    const u32 number = threadIdx.x / TEAM_THREADS, first = (blockIdx.x * TEAMS + number) * round_packets;
    const Warps team{number * (TEAM_THREADS / warp_threads), TEAM_THREADS / warp_threads, 1 + number};
    TeamMemory& memory = reinterpret_cast<TeamMemory*>(ptx::dynamic_shared())[number];
    Rounds<WORLD_SIZE> rounds(arena, args.packets, first, epoch, team, memory.rounds);
    for (u32 token = number * gridDim.x + blockIdx.x; token < args.tokens; token += gridDim.x * TEAMS) {
        const long long target = args.target[token] - static_cast<long long>(arena.rank) * args.columns;
        const ShardRow<ELEMENT> shard{args.logits + u64(token) * args.columns * ShardRow<ELEMENT>::bytes, args.columns, target};
#if LISTS
        float* const candidates = reinterpret_cast<float*>(memory.words);
        const u32 owner = u32(args.target[token] / args.columns);
        const KeptLogits kept = merge_largest<TEAM_THREADS>(rounds, shard, owner, args.top_k, args.top_p, candidates, CAPACITY);
#else
        const KeptLogits kept = search_kept<TOP_K, TOP_P>(rounds, shard, args.top_k, args.top_p, memory.words);
#endif
        const bool has_nan = kept.mass != kept.mass;  // all of the token's results are NaN
        const bool has_target = (kept.target >= kept.threshold && kept.target > -infinity) || has_nan;
#if GRADIENT
        constexpr u32 lanes = ShardRow<ELEMENT>::lanes;
        const float weight = element_of<WEIGHT>(args.weight, token), factor = weight / kept.mass;
        char* const out = reinterpret_cast<char*>(args.out + u64(token) * args.columns);
        shard.each(team, [&](u32 column, const float (&value)[lanes]) {
            u32 words[lanes];
            for (u32 e = 0; e < lanes; ++e) {
                const bool keeps = value[e] >= kept.threshold || has_nan;
                const float hit = has_target && column + e == shard.target ? weight : 0.0f;
                words[e] = __float_as_uint(hit - (keeps ? factor * fast_mass_of(value[e], kept.maximum) : 0.0f));
            }
            store_words(out, 4ull * column, 4ull * args.columns, words);
        });
#else
        if (team.thread() == 0) args.out[token] = has_target ? kept.target - kept.maximum - logf(kept.mass) : -infinity;
#endif
    }
    rounds.close();
}
"""
FILTERED_LOGITS = DeclaredKernel(
    "filtered_logits", SOURCE, epochs=Epochs(), packets=Packets(), logits=Pointer("const char*"), target=Pointer("const long long*"),
    weight=Pointer("const char*"), out=Pointer("float*"), tokens=U32, columns=U32, rounds=U32, top_k=U32, top_p=F32,
)  # fmt: skip
THREADS, TEAMS = 1024, 4
"""Threads of a block, one on each SM, and how many tokens it does at a time."""
CANDIDATES = 4096
"""Numbers of a token among which the largest are sought."""
ROUND_PACKETS, LONGEST_LIST, HISTOGRAM_BINS = 32, 93, 6144
"""The same numbers as in the headers."""
SEARCH_ROUNDS = 9
"""The most of a filter: one for a window that must be moved, and two for each of four divisions."""


@dataclass(frozen=True)
class Filter:
    """The largest ``top_k`` of the vocabulary's logits, 0 for all, and of these the nucleus of ``top_p``, 1 for all."""

    top_k: int
    top_p: float

    @staticmethod
    def of(top_k: int | None, top_p: float | None, vocabulary: int) -> "Filter":
        """Returns the filter of a problem's arguments: off if None, not positive, or not below one."""
        return Filter(min(max(top_k or 0, 0), vocabulary), 1.0 if top_p is None else min(top_p, 1.0))

    @property
    def lists(self) -> bool:
        """True if ranks send their largest logits."""
        return 0 < self.top_k <= LONGEST_LIST

    @property
    def rounds(self) -> int:
        """The most rounds of packets that a token takes."""
        return 1 if self.lists else 1 + SEARCH_ROUNDS * ((self.top_k > 0) + (self.top_p < 1))


@dataclass(frozen=True)
class Shape:
    """A launch: blocks, and of each the teams, which do a token at a time."""

    grid: int
    teams: int
    team_threads: int

    @staticmethod
    def of(group: Group, tokens: int, kept: Filter, dtype: torch.dtype) -> "Shape":
        """Returns one in which a team has as many threads as the tokens leave it, and its own part of shared memory."""
        threads, grid = min(THREADS, group.max_threads), min(group.sm_count, tokens)
        shape = Shape(grid, teams := min(TEAMS, threads // 64, 1 << (-(-tokens // grid) - 1).bit_length()), threads // teams)
        while shape.shared_bytes(kept, dtype, group.world_size) > SHARED_LIMIT_BYTES - SYSTEM_BYTES:
            teams //= 2
            shape = Shape(grid, teams, threads // teams)
        return shape

    def rounds(self, tokens: int, of_token: int) -> int:
        """Returns the rounds of a launch, an even number, for teams that need up to ``of_token`` for each of theirs."""
        rounds = -(-tokens // (self.grid * self.teams)) * of_token
        return rounds + rounds % 2

    def words(self, kept: Filter, dtype: torch.dtype) -> int:
        """Returns the 32-bit words of shared memory in which a team gathers a token's largest logits, or counts all."""
        if kept.lists:
            return max(CANDIDATES, self.team_threads)
        exact = dtype == torch.bfloat16 or kept.top_p >= 1
        return HISTOGRAM_BINS * (1 if exact else 2) if kept.top_k or kept.top_p < 1 else 4

    def shared_bytes(self, kept: Filter, dtype: torch.dtype, world_size: int) -> int:
        """Returns the dynamic shared memory of a block."""
        return 4 * self.teams * (3 * ROUND_PACKETS * (2 + world_size) + 68 + self.words(kept, dtype))

    def defines(self, kept: Filter, dtype: torch.dtype, weight: torch.dtype | None, world_size: int) -> dict[str, str | int]:
        """Returns the kernel's macros; ``weight`` is the dtype of a gradient's weights."""
        defines: dict[str, str | int] = {
            "ELEMENT": element_type(dtype),
            "LISTS": int(kept.lists),
            "TOP_K": int(kept.top_k > 0),
            "TOP_P": int(kept.top_p < 1),
            "GRADIENT": int(weight is not None),
            "TEAMS": self.teams,
            "TEAM_THREADS": self.team_threads,
            "TEAM_WORDS": self.words(kept, dtype),
            "CAPACITY": CANDIDATES,
            "SHARED_BYTES": self.shared_bytes(kept, dtype, world_size),
        }
        return defines if weight is None else {**defines, "WEIGHT": element_type(weight)}


@per_group
def _bound(group: Group, shape: tuple[int, int], dtype: torch.dtype, kept: Filter, weight: torch.dtype | None) -> BoundKernel:
    tokens, columns = shape
    launch = Shape.of(group, tokens, kept, dtype)
    bound = FILTERED_LOGITS.bind(
        group,
        grid=launch.grid,
        block=launch.teams * launch.team_threads,
        defines=launch.defines(kept, dtype, weight, group.world_size),
        sizes={"packets": launch.grid * launch.teams * ROUND_PACKETS},
        shared_bytes=launch.shared_bytes(kept, dtype, group.world_size),
        resident=True,
        tokens=tokens,
        columns=columns,
        rounds=launch.rounds(tokens, kept.rounds),
    )
    bound.set(top_k=kept.top_k, top_p=kept.top_p)
    return bound


def filtered_logits(
    group: Group, logits: torch.Tensor, target: torch.Tensor, filters: tuple[int | None, float | None], weight: torch.Tensor | None = None
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
