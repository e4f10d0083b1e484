// What emulated ranks serve of cuBLAS, where the toolkit has no header of it: names and values are those of its public API.
#pragma once

#include <cuda_fp16.h>
#include <driver_types.h>
#include <library_types.h>

enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_ARCH_MISMATCH = 8,
    CUBLAS_STATUS_MAPPING_ERROR = 11,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_INTERNAL_ERROR = 14,
    CUBLAS_STATUS_NOT_SUPPORTED = 15,
    CUBLAS_STATUS_LICENSE_ERROR = 16,
};
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1, CUBLAS_OP_C = 2 };
enum cublasPointerMode_t { CUBLAS_POINTER_MODE_HOST = 0, CUBLAS_POINTER_MODE_DEVICE = 1 };
enum cublasMath_t {
    CUBLAS_DEFAULT_MATH = 0,
    CUBLAS_TENSOR_OP_MATH = 1,
    CUBLAS_PEDANTIC_MATH = 2,
    CUBLAS_TF32_TENSOR_OP_MATH = 3,
    CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16,
};
enum cublasComputeType_t {
    CUBLAS_COMPUTE_16F = 64,
    CUBLAS_COMPUTE_16F_PEDANTIC = 65,
    CUBLAS_COMPUTE_32F = 68,
    CUBLAS_COMPUTE_32F_PEDANTIC = 69,
    CUBLAS_COMPUTE_64F = 70,
    CUBLAS_COMPUTE_64F_PEDANTIC = 71,
    CUBLAS_COMPUTE_32I = 72,
    CUBLAS_COMPUTE_32I_PEDANTIC = 73,
    CUBLAS_COMPUTE_32F_FAST_16F = 74,
    CUBLAS_COMPUTE_32F_FAST_16BF = 75,
    CUBLAS_COMPUTE_32F_FAST_TF32 = 77,
};
enum cublasGemmAlgo_t { CUBLAS_GEMM_DFALT = -1, CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DFALT_TENSOR_OP = 99, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 };
typedef struct cublasContext* cublasHandle_t;
typedef cudaDataType cublasDataType_t;

extern "C" {
cublasStatus_t cublasCreate_v2(cublasHandle_t* handle);
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle);
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream);
cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t* stream);
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void* workspace, size_t bytes);
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode);
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode);
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode);
cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode);
const char* cublasGetStatusName(cublasStatus_t status);
const char* cublasGetStatusString(cublasStatus_t status);

#define PEERLANE_OPERANDS cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k
#define PEERLANE_PRODUCTS(letter, suffix, word)                                                                                               \
    cublasStatus_t cublas##letter##gemm##suffix(PEERLANE_OPERANDS, const word* alpha, const word* a, int lda, const word* b, int ldb,         \
                                                const word* beta, word* c, int ldc);                                                          \
    cublasStatus_t cublas##letter##gemmStridedBatched(PEERLANE_OPERANDS, const word* alpha, const word* a, int lda, long long int stride_a,   \
                                                      const word* b, int ldb, long long int stride_b, const word* beta, word* c, int ldc,     \
                                                      long long int stride_c, int batch);
PEERLANE_PRODUCTS(S, _v2, float)
PEERLANE_PRODUCTS(D, _v2, double)
PEERLANE_PRODUCTS(H, , __half)
cublasStatus_t cublasSgemv_v2(cublasHandle_t handle, cublasOperation_t op, int m, int n, const float* alpha, const float* a, int lda, const float* x,
                              int step_x, const float* beta, float* y, int step_y);
cublasStatus_t cublasDgemv_v2(cublasHandle_t handle, cublasOperation_t op, int m, int n, const double* alpha, const double* a, int lda,
                              const double* x, int step_x, const double* beta, double* y, int step_y);
cublasStatus_t cublasGemmEx(PEERLANE_OPERANDS, const void* alpha, const void* a, cudaDataType type_a, int lda, const void* b, cudaDataType type_b,
                            int ldb, const void* beta, void* c, cudaDataType type_c, int ldc, cublasComputeType_t computes,
                            cublasGemmAlgo_t algorithm);
cublasStatus_t cublasGemmStridedBatchedEx(PEERLANE_OPERANDS, const void* alpha, const void* a, cudaDataType type_a, int lda, long long int stride_a,
                                          const void* b, cudaDataType type_b, int ldb, long long int stride_b, const void* beta, void* c,
                                          cudaDataType type_c, int ldc, long long int stride_c, int batch, cublasComputeType_t computes,
                                          cublasGemmAlgo_t algorithm);
cublasStatus_t cublasSgemmEx(PEERLANE_OPERANDS, const float* alpha, const void* a, cudaDataType type_a, int lda, const void* b, cudaDataType type_b,
                             int ldb, const float* beta, void* c, cudaDataType type_c, int ldc);
}
#undef PEERLANE_OPERANDS
#undef PEERLANE_PRODUCTS

#define cublasCreate cublasCreate_v2
#define cublasDestroy cublasDestroy_v2
#define cublasSetStream cublasSetStream_v2
#define cublasGetStream cublasGetStream_v2
#define cublasSetWorkspace cublasSetWorkspace_v2
#define cublasSetPointerMode cublasSetPointerMode_v2
#define cublasGetPointerMode cublasGetPointerMode_v2
#define cublasSgemm cublasSgemm_v2
#define cublasDgemm cublasDgemm_v2
#define cublasSgemv cublasSgemv_v2
#define cublasDgemv cublasDgemv_v2

// The form before cuBLAS 11 says the type of numbers in which to compute.
inline cublasComputeType_t peerlane_computes(cudaDataType type) {
    return type == CUDA_R_64F ? CUBLAS_COMPUTE_64F : type == CUDA_R_16F ? CUBLAS_COMPUTE_16F : type == CUDA_R_32I ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F;
}
inline cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const void* alpha,
                                   const void* a, cudaDataType type_a, int lda, const void* b, cudaDataType type_b, int ldb, const void* beta,
                                   void* c, cudaDataType type_c, int ldc, cudaDataType computes, cublasGemmAlgo_t algorithm) {
    return cublasGemmEx(handle, op_a, op_b, m, n, k, alpha, a, type_a, lda, b, type_b, ldb, beta, c, type_c, ldc, peerlane_computes(computes),
                        algorithm);
}
