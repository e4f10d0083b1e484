// Small kernels, right and wrong, for the tests of the emulator itself.
#include <peerlane/comm.cuh>

#include <peerlane/ptx/ptx_async.cuh>

using namespace peerlane;

#define KERNEL extern "C" __global__ void __launch_bounds__(1024)

__device__ u32 device_variable;

// ---- what must be clean

KERNEL reverse_in_shared(u32* out) {
    __shared__ u32 words[64];
    words[threadIdx.x] = blockIdx.x * 100 + threadIdx.x;
    __syncthreads();
    out[blockIdx.x * 64 + threadIdx.x] = words[63 - threadIdx.x];
}

template <class T>
__device__ T* typed_shared() {
    __shared__ alignas(128) T words[32];
    return words;
}

KERNEL shuffles(u32* out) {
    const u32 lane = threadIdx.x % 32;
    u32 sum = lane;
    for (int bits = 16; bits; bits /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bits);
    const u32 odd = __ballot_sync(0xffffffffu, lane & 1);
    const u32 last = __shfl_sync(0xffffffffu, threadIdx.x, 31);
    const u32 half = lane < 16 ? __shfl_down_sync(0x0000ffffu, lane, 1, 16) : 0;
    out[threadIdx.x] = sum * (odd == 0xaaaaaaaau) + 1000 * last + 100000 * half;
}

KERNEL exchange_in_warp(u32* out, u32 twin) {
    u32* words = typed_shared<u32>();
    words[threadIdx.x] = threadIdx.x;
    if (twin == 0) {
        __syncwarp();
    } else {
        (void)__any_sync(0xffffffffu, 1);  // meets the others, but orders nothing
    }
    out[threadIdx.x] = words[31 - threadIdx.x];
}

KERNEL named_barriers(u32* out) {
    __shared__ u32 word;
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) word = 7;
        ptx::barrier_arrive(1, 64);
    } else {
        ptx::barrier_sync(1, 64);
        out[threadIdx.x - 32] = word;
    }
}

KERNEL some_threads_leave(u32* out) {
    __shared__ u32 sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    if (threadIdx.x >= 20) return;
    atomicAdd_block(&sum, 1u);
    __syncthreads();
    out[threadIdx.x] = sum;
}

KERNEL count_in_grid(u32* counter, u32* out) {
    const u32 mine = atomicAdd(counter, 1u);
    u32 old = 0;
    do {
        old = ptx::load_relaxed_gpu(out);
    } while (old < mine && atomicCAS(out, old, mine) != old);
}

KERNEL volatile_flag(const __grid_constant__ Arena arena, u32* out) {
    volatile u32* theirs = reinterpret_cast<u32*>(arena.peer(1 - arena.rank, 128));
    volatile u32* mine = reinterpret_cast<u32*>(arena.local(128));
    u32* data = reinterpret_cast<u32*>(arena.peer(1 - arena.rank, 256));
    *data = arena.rank + 5;
    __threadfence_system();
    *theirs = 1;
    while (*mine == 0) {}
    __threadfence_system();
    *out = *reinterpret_cast<u32*>(arena.local(256));
}

KERNEL passes_time(u32* out) {
    const u64 end = ptx::globaltimer() + 50'000'000;
    while (ptx::globaltimer() < end) ptx::sleep(100);
    *out = 1;
}

KERNEL bytes_side_by_side(u8* out) { out[threadIdx.x] = static_cast<u8>(threadIdx.x); }

// Each rank adds to all of rank 0's words; two stages, a phase each way, as a pipeline would.
KERNEL add_in_bulk(const __grid_constant__ Arena arena, float* out) {
    float* tile = reinterpret_cast<float*>(ptx::dynamic_shared());
    tile[threadIdx.x] = static_cast<float>(threadIdx.x);
    ptx::fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::bulk_add<ptx::BulkAdd::f32>(arena.peer(0, 128), tile, blockDim.x * sizeof(float));
        ptx::bulk_commit();
        ptx::bulk_wait<0>();
        ptx::fence_system();
        ptx::add_relaxed_system(reinterpret_cast<u32*>(arena.peer(0, 1024)), 1);
        while (ptx::load_relaxed_system(reinterpret_cast<u32*>(arena.peer(0, 1024))) < arena.world_size) {}
        ptx::fence_system();
    }
    __syncthreads();
    out[threadIdx.x] = reinterpret_cast<float*>(arena.peer(0, 128))[threadIdx.x];
}

KERNEL pipeline(const float* in, float* out, u32 steps, u32 twin) {
    __shared__ u64 full[2], empty[2];
    float* stages = reinterpret_cast<float*>(ptx::dynamic_shared());
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) ptx::mbarrier_init(&full[s], 1), ptx::mbarrier_init(&empty[s], 32);
        if (twin != 1) ptx::mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == 32) {
        for (u32 i = 0; i < steps; ++i) {
            if (twin != 2) {
                while (!ptx::mbarrier_try_wait(&empty[i % 2], (i / 2 & 1) ^ 1)) {}
            }
            ptx::mbarrier_arrive_expect(&full[i % 2], 128);
            ptx::bulk_load(stages + i % 2 * 32, in + i * 32, 128, &full[i % 2]);
        }
    } else if (threadIdx.x < 32) {
        for (u32 i = 0; i < steps; ++i) {
            while (!ptx::mbarrier_try_wait(&full[i % 2], i / 2 & 1)) {}
            out[i * 32 + threadIdx.x] = stages[i % 2 * 32 + threadIdx.x] + 1;
            ptx::mbarrier_arrive(&empty[i % 2]);
        }
    }
}

KERNEL numbers(u32* out) {
    float low, high;
    ptx::unpack_f16x2(ptx::pack_f16x2(1.5f, -65504.0f), low, high);
    out[0] = ptx::pack_bf16x2(1.00390625f, -2.0f);  // half way: to even
    out[1] = low == 1.5f && high == -65504.0f;
    out[2] = ptx::pack_e4m3x2(1000.0f, -0.0087890625f);
    out[3] = ptx::unpack_e4m3x2(0x7e01);
    out[4] = ptx::pack_e5m2x2(1.0f, -1e9f);
    out[5] = ptx::unpack_e5m2x2(0xfb3c);
}

// ---- what must be found

KERNEL neighbours_race(u32* out) {
    out[threadIdx.x] = 1;
    if (threadIdx.x) out[threadIdx.x - 1] = 2;
}
KERNEL out_of_bounds(u32* out) { out[threadIdx.x] = 1; }
KERNEL peer_s_own_memory(u32* own, u64 to_the_peer_s) { *reinterpret_cast<u32*>(reinterpret_cast<char*>(own) + to_the_peer_s) = 1; }
KERNEL null_pointer() { *reinterpret_cast<u32*>(4 * threadIdx.x + 8ull) = 1; }
KERNEL prints(u32* out) { printf("thread %u has %u\n", threadIdx.x, out[threadIdx.x]); }
KERNEL polls_without_volatile(const u32* out) {
    while (*out == 0) {}
}
KERNEL writes_device_variable(u32* out) { device_variable = *out; }
KERNEL deep(u32* out) {
    volatile u32 large[1 << 17];
    for (u32 i = 0; i < 1 << 17; i += 512) large[i] = i;
    *out = large[512];
}
KERNEL traps(u32* out) {
    if (*out == 0) __trap();
}
KERNEL never_ends(u32* out) {
    while (true) ptx::add_relaxed_gpu(out, 1);
}
KERNEL torn_flag(Vec16* out) {
    if (threadIdx.x == 0) {
        ptx::store_relaxed_system(out, Vec16{{1, 1, 1, 1}});
    } else {
        out[1].word[0] = ptx::load_relaxed_system(&out->word[3]);
    }
}
KERNEL mbarrier_without_init() {
    __shared__ u64 barrier;
    ptx::mbarrier_arrive(&barrier);
}
