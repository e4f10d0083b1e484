// All that ranks say to each other: the arena and its epochs, packets, and the eight primitives.
#pragma once

#include <peerlane/arena.cuh>
#include <peerlane/packet.cuh>
#include <peerlane/peers.cuh>
