// A matrix product as cuBLAS is asked for it, for Python: cuda_blas.py has the same fields.
#pragma once

#include <cstdint>

struct Product {
    const char* name;
    std::uint64_t a, b, c;
    std::int64_t m, n, k, lda, ldb, ldc, stride_a, stride_b, stride_c;
    std::int32_t batch, transposes_a, transposes_b, type_a, type_b, type_c;
    double alpha, beta;
};

// Computes it in the stream's order.
extern "C" void peerlane_multiply(const Product* product);
extern "C" [[noreturn]] void peerlane_missing(const char* name);
