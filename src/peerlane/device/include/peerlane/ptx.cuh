#include <peerlane/ptx/ptx.cuh>
