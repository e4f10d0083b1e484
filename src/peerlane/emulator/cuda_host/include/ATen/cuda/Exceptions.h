// The checks of calls of CUDA and cuBLAS that host code takes from torch's header.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/util/Exception.h>
#include <cublas_v2.h>
#include <cuda.h>

#define AT_CUDA_CHECK(expression) C10_CUDA_CHECK(expression)
#define AT_CUDA_DRIVER_CHECK(expression)                                                                  \
    do {                                                                                                  \
        const CUresult code = expression;                                                                 \
        TORCH_CHECK(code == CUDA_SUCCESS, "CUDA driver error: ", static_cast<int>(code));                 \
    } while (0)
#define TORCH_CUDABLAS_CHECK(expression)                                                                  \
    do {                                                                                                  \
        const cublasStatus_t code = expression;                                                           \
        TORCH_CHECK(code == CUBLAS_STATUS_SUCCESS, "CUDA error: ", cublasGetStatusName(code), " when calling `" #expression "`"); \
    } while (0)
