#include <peerlane/moe/moe.cuh>
