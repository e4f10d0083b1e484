#pragma once

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Logging.h>

#define AT_CUDA_CHECK(expression) C10_CUDA_CHECK(expression)

namespace at::cuda {
using namespace c10::cuda;
}
