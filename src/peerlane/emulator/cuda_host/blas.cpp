// cuBLAS as emulated ranks find it: products of matrices. Handles hold nothing, for all work of a rank is in one stream.

#include "product.h"

#include <cublas_v2.h>
#include <cuda_fp16.h>

#include <string>

namespace {

struct Matrix {
    const void* at;
    cudaDataType type;
    std::int64_t pitch, stride = 0;
};

double factor(const void* at, int type) {
    switch (type) {
        case CUDA_R_64F: return *static_cast<const double*>(at);
        case CUDA_R_32F: return *static_cast<const float*>(at);
        case CUDA_R_16F: return __half2float(*static_cast<const __half*>(at));
        default: return *static_cast<const int*>(at);
    }
}

cudaDataType factor_type(const char* name, cublasComputeType_t type) {
    switch (type) {
        case CUBLAS_COMPUTE_16F: case CUBLAS_COMPUTE_16F_PEDANTIC: return CUDA_R_16F;
        case CUBLAS_COMPUTE_32F: case CUBLAS_COMPUTE_32F_PEDANTIC: case CUBLAS_COMPUTE_32F_FAST_16F: case CUBLAS_COMPUTE_32F_FAST_16BF:
        case CUBLAS_COMPUTE_32F_FAST_TF32: return CUDA_R_32F;
        case CUBLAS_COMPUTE_64F: case CUBLAS_COMPUTE_64F_PEDANTIC: return CUDA_R_64F;
        case CUBLAS_COMPUTE_32I: case CUBLAS_COMPUTE_32I_PEDANTIC: return CUDA_R_32I;
        default: peerlane_missing((std::string(name) + " of compute type " + std::to_string(type)).c_str());
    }
}

cublasStatus_t multiply(const char* name, cublasOperation_t op_a, cublasOperation_t op_b, std::int64_t m, std::int64_t n, std::int64_t k,
                        const void* alpha, Matrix a, Matrix b, const void* beta, Matrix c, int batch, cudaDataType factors) {
    const auto rows = [](cublasOperation_t op, std::int64_t straight, std::int64_t turned) { return op == CUBLAS_OP_N ? straight : turned; };
    if (m < 0 || n < 0 || k < 0 || batch < 0 || a.pitch < rows(op_a, m, k) || b.pitch < rows(op_b, k, n) || c.pitch < m)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!m || !n || !batch) return CUBLAS_STATUS_SUCCESS;
    const auto number = [](const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); };
    const Product product{name, number(a.at), number(b.at), number(c.at), m, n, k, a.pitch, b.pitch, c.pitch, a.stride, b.stride, c.stride,
                          batch, op_a != CUBLAS_OP_N, op_b != CUBLAS_OP_N, a.type, b.type, c.type, factor(alpha, factors), factor(beta, factors)};
    peerlane_multiply(&product);
    return CUBLAS_STATUS_SUCCESS;
}

const cublasHandle_t handle = reinterpret_cast<cublasHandle_t>(new char);
cublasPointerMode_t pointer_mode = CUBLAS_POINTER_MODE_HOST;
cublasMath_t math_mode = CUBLAS_DEFAULT_MATH;

}  // namespace

extern "C" {
cublasStatus_t cublasCreate_v2(cublasHandle_t* made) {
    *made = handle;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetStream_v2(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasGetStream_v2(cublasHandle_t, cudaStream_t* stream) {
    *stream = nullptr;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, std::size_t) { return CUBLAS_STATUS_SUCCESS; }
// Factors are read where they are: host code can read memory of the device.
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t, cublasPointerMode_t mode) {
    pointer_mode = mode;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t* mode) {
    *mode = pointer_mode;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t mode) {
    math_mode = mode;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* mode) {
    *mode = math_mode;
    return CUBLAS_STATUS_SUCCESS;
}
const char* cublasGetStatusName(cublasStatus_t status) {
    return status == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_INVALID_VALUE";
}
const char* cublasGetStatusString(cublasStatus_t status) { return status == CUBLAS_STATUS_SUCCESS ? "success" : "an invalid value"; }

#define PRODUCTS(letter, suffix, word, type)                                                                                                      \
    cublasStatus_t cublas##letter##gemm##suffix(cublasHandle_t, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,              \
                                                const word* alpha, const word* a, int lda, const word* b, int ldb, const word* beta, word* c,     \
                                                int ldc) {                                                                                        \
        return multiply("cublas" #letter "gemm", op_a, op_b, m, n, k, alpha, {a, type, lda}, {b, type, ldb}, beta, {c, type, ldc}, 1, type);      \
    }                                                                                                                                             \
    cublasStatus_t cublas##letter##gemmStridedBatched(                                                                                            \
        cublasHandle_t, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const word* alpha, const word* a, int lda,           \
        long long int stride_a, const word* b, int ldb, long long int stride_b, const word* beta, word* c, int ldc, long long int stride_c,       \
        int batch) {                                                                                                                              \
        return multiply("cublas" #letter "gemmStridedBatched", op_a, op_b, m, n, k, alpha, {a, type, lda, stride_a}, {b, type, ldb, stride_b},    \
                        beta, {c, type, ldc, stride_c}, batch, type);                                                                             \
    }
PRODUCTS(S, _v2, float, CUDA_R_32F)
PRODUCTS(D, _v2, double, CUDA_R_64F)
PRODUCTS(H, , __half, CUDA_R_16F)

// A vector is a matrix of one row, whose pitch is the step from one element to the next.
#define VECTORS(letter, word, type)                                                                                                               \
    cublasStatus_t cublas##letter##gemv_v2(cublasHandle_t, cublasOperation_t op, int m, int n, const word* alpha, const word* a, int lda,         \
                                           const word* x, int step_x, const word* beta, word* y, int step_y) {                                    \
        if (step_x < 1 || step_y < 1) peerlane_missing("cublas" #letter "gemv with a step below 1");                                              \
        const bool straight = op == CUBLAS_OP_N;                                                                                                  \
        return multiply("cublas" #letter "gemv", CUBLAS_OP_N, straight ? CUBLAS_OP_T : CUBLAS_OP_N, 1, straight ? m : n, straight ? n : m, alpha, \
                        {x, type, step_x}, {a, type, lda}, beta, {y, type, step_y}, 1, type);                                                     \
    }
VECTORS(S, float, CUDA_R_32F)
VECTORS(D, double, CUDA_R_64F)

cublasStatus_t cublasGemmEx(cublasHandle_t, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const void* alpha, const void* a,
                            cudaDataType type_a, int lda, const void* b, cudaDataType type_b, int ldb, const void* beta, void* c,
                            cudaDataType type_c, int ldc, cublasComputeType_t computes, cublasGemmAlgo_t) {
    return multiply("cublasGemmEx", op_a, op_b, m, n, k, alpha, {a, type_a, lda}, {b, type_b, ldb}, beta, {c, type_c, ldc}, 1,
                    factor_type("cublasGemmEx", computes));
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const void* alpha,
                                          const void* a, cudaDataType type_a, int lda, long long int stride_a, const void* b, cudaDataType type_b,
                                          int ldb, long long int stride_b, const void* beta, void* c, cudaDataType type_c, int ldc,
                                          long long int stride_c, int batch, cublasComputeType_t computes, cublasGemmAlgo_t) {
    return multiply("cublasGemmStridedBatchedEx", op_a, op_b, m, n, k, alpha, {a, type_a, lda, stride_a}, {b, type_b, ldb, stride_b}, beta,
                    {c, type_c, ldc, stride_c}, batch, factor_type("cublasGemmStridedBatchedEx", computes));
}
cublasStatus_t cublasSgemmEx(cublasHandle_t, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const float* alpha, const void* a,
                             cudaDataType type_a, int lda, const void* b, cudaDataType type_b, int ldb, const float* beta, void* c,
                             cudaDataType type_c, int ldc) {
    return multiply("cublasSgemmEx", op_a, op_b, m, n, k, alpha, {a, type_a, lda}, {b, type_b, ldb}, beta, {c, type_c, ldc}, 1, CUDA_R_32F);
}
}

namespace at::cuda {
cublasHandle_t getCurrentCUDABlasHandle(bool) { return handle; }
}  // namespace at::cuda
