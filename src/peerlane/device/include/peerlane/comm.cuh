// All that ranks say to each other: the arena and its epochs, packets, the eight primitives, and queues of stores.
#pragma once

#include <peerlane/arena.cuh>
#include <peerlane/packet.cuh>
#include <peerlane/peers.cuh>
#include <peerlane/store_queue.cuh>
