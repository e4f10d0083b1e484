#include <peerlane/ptx/mma.cuh>
