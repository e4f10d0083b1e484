// All that ranks say to each other: the arena and its epochs, packets, the eight primitives, queues of stores, and progress that a warp of its own tells.
#pragma once

#include <peerlane/peers/arena.cuh>
#include <peerlane/peers/packet.cuh>
#include <peerlane/peers/peers.cuh>
#include <peerlane/peers/progress.cuh>
#include <peerlane/peers/store_queue.cuh>
