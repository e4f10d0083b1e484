// All that ranks say to each other: the arena and its epochs, packets, the eight primitives, queues of stores, and progress that a warp of its own tells.
#pragma once

#include <peerlane/arena.cuh>
#include <peerlane/packet.cuh>
#include <peerlane/peers.cuh>
#include <peerlane/progress.cuh>
#include <peerlane/store_queue.cuh>
