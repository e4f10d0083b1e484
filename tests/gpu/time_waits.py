"""What the end of waits costs a wait: barriers of two ranks on one GPU, by the kit's waits and by polls that never end.

    PYTHONPATH=src python tests/gpu/time_waits.py [--rounds 2000] [--repeats 15] [--out FILE]

Two ranks of one process, each on its half of the SMs, go through ROUNDS barriers in one launch, `blocks` blocks each. The kinds alternate.
The table gives nanoseconds of a barrier: median and quartiles over the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from peerlane.device import U32, DeclaredKernel, Epochs, Flags
from peerlane.device.host.local import LocalRanks

SOURCE = r"""
#include <peerlane/peers.cuh>
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

extern "C" __global__ void __launch_bounds__(128) many_barriers(const __grid_constant__ Arena arena, const __grid_constant__ ManyBarriers args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)), args.rounds);
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    for (u32 round = 0; round < args.rounds; ++round) {
        peers.signal_all(blockIdx.x, epoch + round);
        if (ENDS) {
            peers.wait(1 - int(arena.rank), blockIdx.x, epoch + round);
        } else {
            wait_for_ever(arena, args.flags, 1 - int(arena.rank), blockIdx.x, epoch + round);
        }
    }
}
"""
BARRIERS = DeclaredKernel("many_barriers", SOURCE, epochs=Epochs(), flags=Flags(), rounds=U32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ranks, found = LocalRanks(2), []
    for blocks in (1, 16):
        launches = {
            ends: [
                BARRIERS.bind(group, grid=blocks, block=128, sizes={"flags": blocks}, defines={"ENDS": ends}, rounds=options.rounds)
                for group in ranks.each()
            ]
            for ends in (0, 1)
        }
        times: dict[int, list[float]] = {0: [], 1: []}
        for repeat in range(options.repeats + 2):
            for ends in (0, 1) if repeat % 2 else (1, 0):
                events = []
                for group, launch in zip(ranks.each(), launches[ends], strict=True):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    launch()
                    end.record()
                    events.append((begin, end))
                ranks.synchronize()
                if repeat >= 2:
                    times[ends].append(min(begin.elapsed_time(end) for begin, end in events) * 1e6 / options.rounds)
        row = {
            "blocks": blocks,
            **{name: [round(value, 1) for value in statistics.quantiles(times[ends], n=4)] for ends, name in ((0, "for ever"), (1, "kit"))},
        }
        found.append(row)
        print(json.dumps(row), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
