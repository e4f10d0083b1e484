#include <peerlane/products/gemm.cuh>
