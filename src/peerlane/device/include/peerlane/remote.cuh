#include <peerlane/peers/remote.cuh>
