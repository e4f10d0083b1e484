// The template of fused kernels: warps with roles, rings between them, and each role's loop over the block's tiles.
//
//   compute blocks        loader (a warp): copies operands into the input ring
//                         consumers (warpgroups): use them, and put results into the output ring, one per group
//                         storers (a warp per group): copy results out, to this rank or another one, and tell it; the first group's also
//                         watches, before each tile, for what its loader needs of other ranks
//                         communicator (the spare warp of the first warpgroup): sends what was there before
//   communicator blocks   fetcher (a warp): copies local data into the input ring
//                         sender (a warp): copies it on to other ranks, and tells them
//
// A kernel is a type that says what each role does with one tile, and of which kinds and sizes everything is; docs/device/template.md lists what
// it has to have. The template lays out shared memory, initialises barriers, keeps phases, moves registers from the warps that copy to the
// warps that compute, and loops. `peerlane.device.host.roles` is the host's side of it.
#pragma once

#include <peerlane/peers/observe.cuh>
#include <peerlane/tiles/pipeline.cuh>
#include <peerlane/ptx/ptx_mma.cuh>

namespace peerlane {

constexpr int group_threads = 128;  // a warpgroup: what wgmma and register reallocation work on

// How the warps of a compute block are made up. Loader, storers and communicator share the first warpgroup, each group of consumers is one more.
struct RoleTable {
    int consumer_groups;     // 1 to 3
    int service_registers;   // per thread of the loader's and storers' warpgroup
    int consumer_registers;  // per thread of the consumers'

    constexpr int threads() const { return group_threads * (1 + consumer_groups); }
    // One group of consumers has as many as a thread can have.
    constexpr bool moves_registers() const { return consumer_groups > 1; }
    // What a thread begins with. A block never holds more than its threads begin with. A group that asks for more waits without a time limit.
    constexpr int entry_registers() const { return 65536 / threads() / 8 * 8; }
    constexpr bool fits() const {
        return consumer_groups >= 1 && consumer_groups <= 3 &&
               (!moves_registers() || service_registers + consumer_groups * consumer_registers <= (1 + consumer_groups) * entry_registers());
    }
};

// Blocks of a cluster work on one tile, each on its part, and share what `load` copies to all of them: a kernel type with more than one says so by a
// member `cluster_blocks`. Its `load` fills the input ring as often in each of them. It is launched with __cluster_dims__ of as many, and numbers of
// communicator blocks and of all blocks that are multiples of it.
template <class Kernel>
constexpr int cluster_blocks = 1;
template <class Kernel>
    requires requires { Kernel::cluster_blocks; }
constexpr int cluster_blocks<Kernel> = Kernel::cluster_blocks;

// Row panels in groups of `group_rows`, each group column by column: neighbours in the order share operands while they are in L2.
struct GroupedTiles {
    u32 rows, columns, group_rows;  // in tiles

    struct Tile {
        int row, column;
    };
    __device__ u32 count() const { return rows * columns; }
    __device__ Tile at(u32 index) const {
        const u32 group = index / (group_rows * columns), first = group * group_rows;
        const u32 height = rows - first < group_rows ? rows - first : group_rows;
        const u32 within = index - first * columns;
        return {static_cast<int>(first + within % height), static_cast<int>(within / height)};
    }
};

// Hands tiles to whichever block is ready. `counters` (u32[2], zero at first) lie in device memory; launches that share them have epochs that
// go up by one, on one stream: each launch counts in one and leaves the other at zero for the next.
struct TileClaims {
    u32* counter;

    // By all threads of all blocks.
    __device__ TileClaims(u32* counters, u32 epoch) : counter(counters + (epoch & 1)) {
        if (blockIdx.x == 0 && threadIdx.x == 0) counters[~epoch & 1] = 0;
    }
    // The next tile that nobody has claimed. By one thread.
    __device__ u32 next() const { return ptx::add_relaxed_gpu(counter, 1); }
};

constexpr int claim_slots = 2;  // tiles that a block claims ahead

// A kernel whose tiles are claimed has a member `u32 claim() const`; otherwise block (cluster) b of B takes tiles b, b + B, ...
template <class Kernel>
concept ClaimsTiles = requires(const Kernel& kernel) { kernel.claim(); };

// A kernel whose tiles need something of other ranks has a member `void watch(const Tile&, ReadyProducer&) const`, which waits for it and
// passes a token on for everything that `load` takes one for: `load` has the tokens' other end as its third argument. A wait takes longer than
// what a loader has copied ahead lasts, with its fences alone; here it holds up nothing.
template <class Kernel>
concept Watches = requires { &Kernel::watch; };

// With `watches_ahead`, it waits for a tile before the one in front of that is stored, so that its operands come during the end of that. For kernels
// that pass on one token for a tile, and whose waits end whether or not this block stores what it has.
template <class Kernel>
concept WatchesAhead = Watches<Kernel> && Kernel::watches_ahead;

constexpr int ready_slots = 4;

// A kernel that keeps something for all of a tile's steps, such as an operand that they share, has a type `Kept`, `kept_slots` of it, and
// `load(tile, in, kept)` and `compute(tile, group, in, kept, out)`: the ends of one more ring (`load` with tokens: `load(tile, in, kept, ready)`).
template <class Kernel>
concept Keeps = requires { typename Kernel::Kept; };

template <class Kernel>
struct KeptTiles {};
template <Keeps Kernel>
struct KeptTiles<Kernel> {
    typename Kernel::Kept kept[Kernel::kept_slots];
};
template <class Kernel>
struct KeptRing {};
template <Keeps Kernel>
struct KeptRing<Kernel> : Ring<Kernel::kept_slots> {};

// A kernel whose communicator warps copy through shared memory has a type `Parcel`, `parcel_slots` of it, and
// `communicate(part, parts, fill, drain)`: both ends of a ring, for the one warp.
template <class Kernel>
concept SendsParcels = requires { typename Kernel::Parcel; };

template <class Kernel>
struct ParcelSlots {};
template <SendsParcels Kernel>
struct ParcelSlots<Kernel> {
    typename Kernel::Parcel parcel[Kernel::parcel_slots];
};
template <class Kernel>
struct ParcelRing {};
template <SendsParcels Kernel>
struct ParcelRing<Kernel> : Ring<Kernel::parcel_slots> {};

// A block's shared memory.
template <class Kernel>
struct RoleMemory : KeptTiles<Kernel>, ParcelSlots<Kernel> {
    typename Kernel::Input input[Kernel::input_slots];
    typename Kernel::Output output[Kernel::roles.consumer_groups][Kernel::output_slots];
    Ring<Kernel::input_slots> input_ring;
    Ring<Kernel::output_slots> output_ring[Kernel::roles.consumer_groups];
    Ring<claim_slots> claim_ring;
    u32 claimed[claim_slots];
    Ring<ready_slots> ready_ring;
    u32 ready[ready_slots];
    KeptRing<Kernel> kept_ring;
    ParcelRing<Kernel> parcel_ring;
};

// The tiles of a block, for one of its roles: every role sees the same ones in the same order.
template <class Kernel>
class TileStream {
  public:
    __device__ TileStream(const Kernel& kernel, RoleMemory<Kernel>& memory, u32 block, u32 blocks)
        : kernel_(kernel), claims_(memory.claimed, memory.claim_ring), next_(block), blocks_(blocks) {}

    // use(tile) for each. `claims`: this is the role, a warp, that claims them for all.
    template <bool claims, class Use>
    __device__ void each(const Use& use) {
        for (u32 index = next<claims>(); index < kernel_.tile_count(); index = next<claims>()) use(kernel_.tile(index));
    }

  private:
    template <bool claims>
    __device__ u32 next() {
        u32 index = next_;
        if constexpr (!ClaimsTiles<Kernel>) {
            next_ += blocks_;
        } else if constexpr (claims) {
            u32& slot = claims_.producer.acquire();
            if (ptx::elect_one()) slot = kernel_.claim();
            __syncwarp();
            index = slot;
            claims_.producer.commit();
        } else {
            index = claims_.consumer.wait();
            claims_.consumer.release();
        }
        return index;
    }

    // Which of the two a role uses, the compiler sees.
    struct Ends {
        StoreProducer<u32, claim_slots> producer;
        Consumer<u32, claim_slots> consumer;
        __device__ Ends(u32* slots, Ring<claim_slots>& ring) : producer(slots, ring), consumer(slots, ring) {}
    };

    const Kernel& kernel_;
    Ends claims_;
    u32 next_;
    const u32 blocks_;
};

template <class Kernel>
using InputProducer = CopyProducer<typename Kernel::Input, Kernel::input_slots>;
template <class Kernel>
using InputConsumer = Consumer<typename Kernel::Input, Kernel::input_slots, cluster_blocks<Kernel>>;
template <class Kernel>
using SenderInput = Consumer<typename Kernel::Input, Kernel::input_slots>;  // of a communicator block, which shares nothing
template <class Kernel>
using OutputProducer = StoreProducer<typename Kernel::Output, Kernel::output_slots>;
template <class Kernel>
using OutputConsumer = Consumer<typename Kernel::Output, Kernel::output_slots>;

template <class Kernel>
using KeptProducer = CopyProducer<typename Kernel::Kept, Kernel::kept_slots>;
template <class Kernel>
using KeptConsumer = Consumer<typename Kernel::Kept, Kernel::kept_slots>;
template <class Kernel>
using ParcelProducer = CopyProducer<typename Kernel::Parcel, Kernel::parcel_slots>;
template <class Kernel>
using ParcelConsumer = Consumer<typename Kernel::Parcel, Kernel::parcel_slots>;

using ReadyProducer = StoreProducer<u32, ready_slots>;
using ReadyConsumer = Consumer<u32, ready_slots>;

struct NoSpan {};

// Stamps what a warp or warpgroup does with a tile, where the kernel has a member `arena`. Groups of one role have tracks of their own.
template <class Kernel>
__device__ inline auto role_span(const Kernel& kernel, u32 role, u32 kind, u32 group = 0, u32 team = 32) {
    if constexpr (requires { kernel.arena; }) {
        return Span(kernel.arena, role + roles_per_group * group, kind, threadIdx.x % team == 0);
    } else {
        return NoSpan{};
    }
}

// Runs a kernel: call it with all threads of all blocks, and return. The first `communicator_blocks` blocks communicate, the others compute.
template <class Kernel>
__device__ inline void run_roles(const Kernel& kernel, u32 communicator_blocks = 0) {
    constexpr RoleTable roles = Kernel::roles;
    static_assert(roles.fits(), "the registers of all warpgroups exceed those that the block begins with: 504 of two groups and the service group, 512 of three");
    constexpr u32 blocks = cluster_blocks<Kernel>;
    static_assert(blocks == 1 || !ClaimsTiles<Kernel>, "blocks of a cluster work on the same tile, each claims its own");
    static_assert(!requires { &Kernel::communicate; } || roles.consumer_groups <= 2, "with three groups of consumers there is no spare warp");
    auto& memory = *reinterpret_cast<RoleMemory<Kernel>*>(ptx::dynamic_shared());
    const u32 warp = threadIdx.x / 32;
    const bool communicates = blockIdx.x < communicator_blocks;
    if (threadIdx.x == 0) {
        memory.input_ring.init(1, communicates ? 1 : 4 * roles.consumer_groups * blocks);
        for (auto& ring : memory.output_ring) ring.init(4, 1);
        memory.claim_ring.init(1, 5 * roles.consumer_groups);
        memory.ready_ring.init(1, 1);
        if constexpr (Keeps<Kernel>) memory.kept_ring.init(1, 4 * roles.consumer_groups);
        if constexpr (SendsParcels<Kernel>) memory.parcel_ring.init(1, 1);
        ptx::mbarrier_init_fence();
    }
    if constexpr (blocks == 1) {
        __syncthreads();
    } else {
        ptx::cluster_barrier();
    }

    TileStream<Kernel> tiles(kernel, memory, (blockIdx.x - communicator_blocks) / blocks, (gridDim.x - communicator_blocks) / blocks);
    if (communicates) {
        if constexpr (requires { &Kernel::fetch; }) {
            if (warp == 0) {
                InputProducer<Kernel> in(memory.input, memory.input_ring);
                [[maybe_unused]] const auto span = role_span(kernel, loader, span_load);
                kernel.fetch(blockIdx.x, communicator_blocks, in);
            } else if (warp == 1) {
                SenderInput<Kernel> in(memory.input, memory.input_ring);
                [[maybe_unused]] const auto span = role_span(kernel, communicator, span_send);
                kernel.send(blockIdx.x, communicator_blocks, in);
            }
        }
    } else if (warp < 4) {
        if constexpr (roles.moves_registers()) ptx::registers_decrease<roles.service_registers>();
        if (warp == 0) {
            InputProducer<Kernel> in(memory.input, memory.input_ring);
            ReadyConsumer ready(memory.ready, memory.ready_ring);
            if constexpr (Keeps<Kernel>) {
                KeptProducer<Kernel> kept(memory.kept, memory.kept_ring);
                tiles.template each<true>([&](const auto& tile) {
                    [[maybe_unused]] const auto span = role_span(kernel, loader, span_load);
                    if constexpr (Watches<Kernel>) {
                        kernel.load(tile, in, kept, ready);
                    } else {
                        kernel.load(tile, in, kept);
                    }
                });
            } else {
                tiles.template each<true>([&](const auto& tile) {
                    [[maybe_unused]] const auto span = role_span(kernel, loader, span_load);
                    if constexpr (Watches<Kernel>) {
                        kernel.load(tile, in, ready);
                    } else {
                        kernel.load(tile, in);
                    }
                });
            }
            if constexpr (blocks > 1) in.drain();
        } else if (warp <= roles.consumer_groups) {
            const u32 group = warp - 1;
            OutputConsumer<Kernel> out(memory.output[group], memory.output_ring[group]);
            ReadyProducer ready(memory.ready, memory.ready_ring);
            const auto watch = [&](const auto& tile) {
                if constexpr (Watches<Kernel>) {
                    if (group == 0) kernel.watch(tile, ready);
                }
            };
            const auto store = [&](const auto& tile) {
                [[maybe_unused]] const auto span = role_span(kernel, storer, span_store, group);
                kernel.store(tile, group, out);
            };
            if constexpr (WatchesAhead<Kernel>) {
                typename Kernel::Tile before{};
                bool any = false;
                tiles.template each<false>([&](const auto& tile) {
                    watch(tile);
                    if (any) store(before);
                    before = tile, any = true;
                });
                if (any) store(before);
            } else {
                tiles.template each<false>([&](const auto& tile) {
                    watch(tile);
                    store(tile);
                });
            }
            if constexpr (requires { &Kernel::finish; }) {
                const u32 blocks_at_work = gridDim.x - communicator_blocks;
                kernel.finish((blockIdx.x - communicator_blocks) * roles.consumer_groups + group, blocks_at_work * roles.consumer_groups);
            }
        } else if (warp == 3) {
            [[maybe_unused]] const auto span = role_span(kernel, communicator, span_send);
            if constexpr (SendsParcels<Kernel>) {
                ParcelProducer<Kernel> fill(memory.parcel, memory.parcel_ring);
                ParcelConsumer<Kernel> drain(memory.parcel, memory.parcel_ring);
                kernel.communicate(blockIdx.x - communicator_blocks, gridDim.x - communicator_blocks, fill, drain);
            } else if constexpr (requires { &Kernel::communicate; }) {
                kernel.communicate(blockIdx.x - communicator_blocks, gridDim.x - communicator_blocks);
            }
        }
    } else {
        if constexpr (roles.moves_registers()) ptx::registers_increase<roles.consumer_registers>();
        const u32 group = warp / 4 - 1;
        InputConsumer<Kernel> in(memory.input, memory.input_ring);
        OutputProducer<Kernel> out(memory.output[group], memory.output_ring[group]);
        constexpr u32 warps = 4 * roles.consumer_groups;  // of a block's consumers
        const u32 part = (blockIdx.x - communicator_blocks) * warps + warp - 4, parts = (gridDim.x - communicator_blocks) * warps;
        if constexpr (requires { &Kernel::prepare; }) kernel.prepare(part, parts);
        if constexpr (Keeps<Kernel>) {
            KeptConsumer<Kernel> kept(memory.kept, memory.kept_ring);
            tiles.template each<false>([&](const auto& tile) {
                [[maybe_unused]] const auto span = role_span(kernel, consumer, span_compute, group, group_threads);
                kernel.compute(tile, group, in, kept, out);
            });
        } else {
            tiles.template each<false>([&](const auto& tile) {
                [[maybe_unused]] const auto span = role_span(kernel, consumer, span_compute, group, group_threads);
                kernel.compute(tile, group, in, out);
            });
        }
        if constexpr (requires { &Kernel::conclude; }) kernel.conclude(part, parts);
    }
}

}  // namespace peerlane
