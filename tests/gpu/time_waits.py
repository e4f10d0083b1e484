"""What the end of waits costs a wait: barriers of two ranks on one GPU, by the kit's waits and by polls that never end.

    PYTHONPATH=src python tests/gpu/time_waits.py [--rounds 2000] [--repeats 15] [--out FILE]

Three kinds: polls that never end, polls that end by the clock, and the kit's, which the host can end. Two ranks of one process, each on its
half of the SMs, go through ROUNDS barriers in one launch, `blocks` blocks each. The kinds alternate. The table gives nanoseconds of a
barrier: median and quartiles over the repeats.
"""

import statistics
from collections.abc import Iterator

import torch
from harness import Row, report, script
from local_ranks import LocalRanks

from peerlane.device import U32, DeclaredKernel, Epochs, Flags

SOURCE = r"""
#include <peerlane/peers/peers.cuh>
using namespace peerlane;

// A wait without a limit, otherwise as the kit's.
__device__ void wait_for_ever(const Arena& arena, u64 flags, int source, u32 slot, u32 number) {
    if (threadIdx.x == 0) {
        const u32* place = flag_of<WORLD_SIZE>(arena, flags, arena.rank, slot, source);
        while (!reached(ptx::load_relaxed_system(place), number)) {}
        ptx::load_acquire_system(place);
        ptx::fence_proxy_async();
    }
    __syncthreads();
}

// A wait that only counts its polls and reads the clock after every 1,024, as the kit's did before the host could end them.
__device__ void wait_by_clock(const Arena& arena, u64 flags, int source, u32 slot, u32 number) {
    if (threadIdx.x == 0) {
        const u32* place = flag_of<WORLD_SIZE>(arena, flags, arena.rank, slot, source);
        u64 end = 0;
        u32 tries = 0;
        while (!reached(ptx::load_relaxed_system(place), number)) {
            if ((++tries & 1023u) != 0) continue;
            const u64 now = ptx::globaltimer();
            if (end == 0) end = now + 10'000'000'000;
            if (now > end) ptx::trap();
        }
        ptx::load_acquire_system(place);
        ptx::fence_proxy_async();
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(128)
    many_barriers(const __grid_constant__ Arena arena, const __grid_constant__ ManyBarriers args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)), args.rounds);
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    for (u32 round = 0; round < args.rounds; ++round) {
        peers.signal_all(blockIdx.x, epoch + round);
        if (KIND == 2) {
            peers.wait(1 - int(arena.rank), blockIdx.x, epoch + round);
        } else if (KIND == 1) {
            wait_by_clock(arena, args.flags, 1 - int(arena.rank), blockIdx.x, epoch + round);
        } else {
            wait_for_ever(arena, args.flags, 1 - int(arena.rank), blockIdx.x, epoch + round);
        }
    }
}
"""
KINDS = ("for ever", "by clock", "kit")
BARRIERS = DeclaredKernel("many_barriers", SOURCE, epochs=Epochs(), flags=Flags(), rounds=U32)


def rows_of(rounds: int, repeats: int) -> Iterator[Row]:
    ranks = LocalRanks(2)
    for blocks in (1, 16, 60):
        launches = {
            kind: [
                BARRIERS.bind(group, grid=blocks, block=128, sizes={"flags": blocks}, defines={"KIND": kind}, rounds=rounds)
                for group in ranks.each()
            ]
            for kind in range(len(KINDS))
        }
        times: dict[int, list[float]] = {kind: [] for kind in launches}
        for repeat in range(repeats + 2):
            for kind in sorted(launches, reverse=repeat % 2 == 0):
                events = []
                for _group, launch in zip(ranks.each(), launches[kind], strict=True):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    launch()
                    end.record()
                    events.append((begin, end))
                ranks.synchronize()
                if repeat >= 2:
                    times[kind].append(min(begin.elapsed_time(end) for begin, end in events) * 1e6 / rounds)
        quartiles = {name: [round(value, 1) for value in statistics.quantiles(times[kind], n=4)] for kind, name in enumerate(KINDS)}
        yield {"blocks": blocks, **quartiles}


if __name__ == "__main__":
    parser = script(__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    report([rows_of(options.rounds, options.repeats)], options.out)
