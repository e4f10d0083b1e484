#include <peerlane/ptx/ptx_async.cuh>
