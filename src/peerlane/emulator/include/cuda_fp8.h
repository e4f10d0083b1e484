// Stands for the toolkit's header of this name on emulated ranks.
#pragma once

#include <peerlane_emulator/cuda.h>

struct __nv_fp8_e4m3 {
    unsigned char __x;
    __nv_fp8_e4m3() = default;
    PEERLANE_INLINE explicit __nv_fp8_e4m3(float value) : __x(::peerlane::emulator::narrow_float8<3, 7, 448>(value)) {}
    PEERLANE_INLINE explicit operator float() const { return ::peerlane::emulator::widen_e4m3(__x); }
};
struct __nv_fp8_e5m2 {
    unsigned char __x;
    __nv_fp8_e5m2() = default;
    PEERLANE_INLINE explicit __nv_fp8_e5m2(float value) : __x(::peerlane::emulator::narrow_float8<2, 15, 57344>(value)) {}
    PEERLANE_INLINE explicit operator float() const {
        return ::peerlane::emulator::widen_f16(static_cast<unsigned short>(__x << 8));
    }
};
