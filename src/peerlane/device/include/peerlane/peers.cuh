#include <peerlane/peers/peers.cuh>
