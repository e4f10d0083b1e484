// The collectives as kernels, for one world size and one element type: compile with WORLD_SIZE and ELEMENT defined. All take the same
// arguments; `root` is a rank, `bytes` the tensor's length where all ranks have the same.
#include <peerlane/collectives/all_reduce.cuh>
#include <peerlane/collectives/exchange.cuh>
#include <peerlane/collectives/exchange_packets.cuh>
#include <peerlane/collectives/relay.cuh>

using namespace peerlane;

#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define PARAMETERS                                                                                \
    const __grid_constant__ Arena arena, const __grid_constant__ CollectiveWorkspace space,       \
        const __grid_constant__ Messages messages, const char *in, char *out, u64 bytes, int root

#ifdef ELEMENT
KERNEL(512) all_reduce_one_shot(PARAMETERS) { one_shot<ELEMENT, WORLD_SIZE>(arena, space, in, out, bytes); }
KERNEL(512) all_reduce_two_shot(PARAMETERS) { two_shot<ELEMENT, WORLD_SIZE>(arena, space, in, out, bytes); }
KERNEL(512) all_reduce_relay(PARAMETERS) { relay<ELEMENT, WORLD_SIZE>(arena, space, RelayAllReduce<WORLD_SIZE>{}, in, out, bytes); }
KERNEL(512) reduce_relay(PARAMETERS) { relay<ELEMENT, WORLD_SIZE>(arena, space, RelayReduce<WORLD_SIZE>{root}, in, out, bytes); }
KERNEL(512) reduce_packets(PARAMETERS) { peerlane::reduce_packets<ELEMENT, WORLD_SIZE>(arena, space, messages, in, out); }
KERNEL(exchange_threads<WORLD_SIZE>()) reduce_ring(PARAMETERS) { reduce_scatter<ELEMENT, WORLD_SIZE>(arena, space, messages, in, out); }
#else
KERNEL(512) broadcast_relay(PARAMETERS) { relay<void, WORLD_SIZE>(arena, space, RelayBroadcast<WORLD_SIZE>{root}, in, out, bytes); }
KERNEL(512) exchange_packets(PARAMETERS) { peerlane::exchange_packets<WORLD_SIZE>(arena, space, messages, in, out); }
KERNEL(exchange_threads<WORLD_SIZE>()) exchange_ring(PARAMETERS) { exchange<WORLD_SIZE>(arena, space, messages, in, out); }
#endif
