// The types and functions of cuda_bf16.h and cuda_fp16.h that kernels use most. Arithmetic rounds once, as on the GPU.
#pragma once

#include "cuda.h"

// `type`: as CUDA names it; `pair`: its vector of two; `word`: the part of functions' names that says the type; `of`: suffix of half.h.
#define PEERLANE_SMALL_FLOAT(type, pair, word, of)                                                                                        \
    struct type {                                                                                                                         \
        unsigned short __x;                                                                                                               \
        type() = default;                                                                                                                 \
        PEERLANE_INLINE type(float value) : __x(::peerlane::emulator::narrow_##of(value)) {}                                              \
        PEERLANE_INLINE type(double value) : type(static_cast<float>(value)) {}                                                           \
        PEERLANE_INLINE type(int value) : type(static_cast<float>(value)) {}                                                              \
        PEERLANE_INLINE operator float() const { return ::peerlane::emulator::widen_##of(__x); }                                          \
    };                                                                                                                                    \
    struct __align__(4) pair {                                                                                                            \
        type x, y;                                                                                                                        \
    };                                                                                                                                    \
    PEERLANE_INLINE float __##word##2float(type a) { return a; }                                                                          \
    PEERLANE_INLINE type __float2##word(float a) { return a; }                                                                            \
    PEERLANE_INLINE type __float2##word##_rn(float a) { return a; }                                                                       \
    PEERLANE_INLINE type __int2##word##_rn(int a) { return a; }                                                                           \
    PEERLANE_INLINE unsigned short __##word##_as_ushort(type a) { return a.__x; }                                                         \
    PEERLANE_INLINE type __ushort_as_##word(unsigned short bits) { return ::peerlane::emulator::from_bits<type>(bits); }                  \
    PEERLANE_INLINE type operator+(type a, type b) { return float(a) + float(b); }                                                        \
    PEERLANE_INLINE type operator-(type a, type b) { return float(a) - float(b); }                                                        \
    PEERLANE_INLINE type operator*(type a, type b) { return float(a) * float(b); }                                                        \
    PEERLANE_INLINE type operator/(type a, type b) { return float(a) / float(b); }                                                        \
    PEERLANE_INLINE type operator-(type a) { return -float(a); }                                                                          \
    PEERLANE_INLINE type& operator+=(type& a, type b) { return a = a + b; }                                                               \
    PEERLANE_INLINE type& operator-=(type& a, type b) { return a = a - b; }                                                               \
    PEERLANE_INLINE type& operator*=(type& a, type b) { return a = a * b; }                                                               \
    PEERLANE_INLINE bool operator<(type a, type b) { return float(a) < float(b); }                                                        \
    PEERLANE_INLINE bool operator>(type a, type b) { return float(a) > float(b); }                                                        \
    PEERLANE_INLINE bool operator==(type a, type b) { return float(a) == float(b); }                                                      \
    PEERLANE_INLINE type __hadd(type a, type b) { return a + b; }                                                                         \
    PEERLANE_INLINE type __hsub(type a, type b) { return a - b; }                                                                         \
    PEERLANE_INLINE type __hmul(type a, type b) { return a * b; }                                                                         \
    PEERLANE_INLINE type __hdiv(type a, type b) { return a / b; }                                                                         \
    PEERLANE_INLINE type __hfma(type a, type b, type c) { return fmaf(a, b, c); }                                                         \
    PEERLANE_INLINE type __hmax(type a, type b) { return fmaxf(a, b); }                                                                   \
    PEERLANE_INLINE type __hmin(type a, type b) { return fminf(a, b); }                                                                   \
    PEERLANE_INLINE type __habs(type a) { return fabsf(a); }                                                                              \
    PEERLANE_INLINE type __hneg(type a) { return -float(a); }                                                                             \
    PEERLANE_INLINE bool __hlt(type a, type b) { return a < b; }                                                                          \
    PEERLANE_INLINE bool __hgt(type a, type b) { return a > b; }                                                                          \
    PEERLANE_INLINE bool __hisnan(type a) { return float(a) != float(a); }                                                                \
    PEERLANE_INLINE pair __floats2##word##2_rn(float a, float b) { return {a, b}; }                                                       \
    PEERLANE_INLINE pair __float22##word##2_rn(float2 a) { return {a.x, a.y}; }                                                           \
    PEERLANE_INLINE pair __halves2##word##2(type a, type b) { return {a, b}; }                                                            \
    PEERLANE_INLINE pair __##word##2##word##2(type a) { return {a, a}; }                                                                  \
    PEERLANE_INLINE float2 __##word##22float2(pair a) { return {a.x, a.y}; }                                                              \
    PEERLANE_INLINE pair make_##word##2(type a, type b) { return {a, b}; }                                                                \
    PEERLANE_INLINE float __low2float(pair a) { return a.x; }                                                                             \
    PEERLANE_INLINE float __high2float(pair a) { return a.y; }                                                                            \
    PEERLANE_INLINE type __low2##word(pair a) { return a.x; }                                                                             \
    PEERLANE_INLINE type __high2##word(pair a) { return a.y; }                                                                            \
    PEERLANE_INLINE pair __hadd2(pair a, pair b) { return {a.x + b.x, a.y + b.y}; }                                                       \
    PEERLANE_INLINE pair __hsub2(pair a, pair b) { return {a.x - b.x, a.y - b.y}; }                                                       \
    PEERLANE_INLINE pair __hmul2(pair a, pair b) { return {a.x * b.x, a.y * b.y}; }                                                       \
    PEERLANE_INLINE pair __hfma2(pair a, pair b, pair c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }                       \
    PEERLANE_INLINE pair __hmax2(pair a, pair b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                                         \
    PEERLANE_INLINE pair __hmin2(pair a, pair b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }                                         \
    PEERLANE_INLINE pair operator+(pair a, pair b) { return __hadd2(a, b); }                                                              \
    PEERLANE_INLINE pair operator*(pair a, pair b) { return __hmul2(a, b); }
