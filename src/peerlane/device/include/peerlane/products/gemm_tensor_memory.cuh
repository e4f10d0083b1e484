// The core of a product on compute capability 10.0: sums grow in tensor memory, and come to registers as a wgmma leaves them there. So all else of a
// kernel, its epilogue and what it sends, is the same as on Hopper.
//
// It compiles, and its PTX is checked; it has never run. Products of 64 rows are half of what the matrix units can do at a time.
#pragma once

#include <peerlane/tiles/pipeline.cuh>
#include <peerlane/ptx/ptx_tensor_memory.cuh>
#include <peerlane/peers/team.cuh>
#include <peerlane/tiles/tile.cuh>

namespace peerlane {

constexpr u32 first_tensor_memory_barrier = 8;  // of the block's named ones: one for each consumer group

// As multiply_steps. By a consumer group; its first warp starts the products, and every warp gives a slot back when the product behind it has
// started and its own is done. The group takes its columns of tensor memory for this tile alone: two groups of 256 columns have them all.
template <class Shape, class Consumer>
__device__ inline void multiply_in_tensor_memory(typename Shape::Sum& sum, u32 group, u32 steps, Consumer& in) {
    using E = typename Shape::E;
    constexpr int N = Shape::columns, slots = Shape::input_slots, groups = Shape::roles.consumer_groups;
    constexpr u32 instruction = ptx::mma_instruction<mma_type<E>, N, Shape::a_major, Shape::b_major>();
    __shared__ u32 taken[groups];
    __shared__ u64 done[groups][slots];  // of the steps in the ring's slots: a slot is filled again when all warps have seen its step done
    const u32 warp = threadIdx.x / warp_threads % 4;
    const auto meet = [&] { ptx::barrier_sync(first_tensor_memory_barrier + group, group_threads); };
    if (warp == 0) {
        ptx::tensor_memory_take<N>(taken + group);
        if (ptx::elect_one()) {
            for (u64& barrier : done[group]) ptx::mbarrier_init(&barrier, 1);
            ptx::mbarrier_init_fence();
        }
        ptx::tensor_memory_fence_before();
    }
    meet();
    ptx::tensor_memory_fence_after();
    const u32 memory = taken[group];
    const auto await = [&](u32 step) { wait_phase(done[group] + step % slots, step / slots % 2); };
    for (u32 step = 0; step < steps; ++step) {
        const auto& operands = in.wait().operands;
        if (warp == 0 && ptx::elect_one()) {
            ptx::tensor_memory_fence_after();
#pragma unroll
            for (int part = 0; part < Shape::depth / mma_depth; ++part) {
                const u64 a = ptx::tensor_memory_descriptor(operands.a.descriptor(64 * group, part));
                const u64 b = ptx::tensor_memory_descriptor(operands.b.descriptor(0, part));
                ptx::tensor_memory_mma(memory, a, b, instruction, step > 0 || part > 0);
            }
            ptx::tensor_memory_commit(done[group] + step % slots);
        }
        __syncwarp();
        if (step == 0) continue;
        await(step - 1);
        in.release();
    }
    await(steps - 1);
    in.release();
    ptx::tensor_memory_fence_after();
#pragma unroll
    for (int column = 0; column < N; column += 16) {
        ptx::tensor_memory_load(sum.value + column / 2, memory + (32 * warp << 16) + column);
    }
    ptx::tensor_memory_wait_load();
    ptx::wgmma_hold(sum.value);
    ptx::tensor_memory_fence_before();
    meet();
    if (warp == 0) {
        ptx::tensor_memory_fence_after();
        ptx::tensor_memory_give_back<N>(memory);
        if (ptx::elect_one()) {
            for (u64& barrier : done[group]) ptx::mbarrier_invalidate(&barrier);
        }
        __syncwarp();
    }
}

}  // namespace peerlane
