#include <peerlane/peers/arena.cuh>
