"""Kernels whose results show the bits of single PTX instructions, and what each shall be, computed with fractions and Python's integers.

The emulator is compared with these numbers here, a GPU by tests/gpu/check_random_kernels.py.
"""

import math
import random
import struct
from collections.abc import Callable
from fractions import Fraction

THREADS, RESULTS = 32, 24
SOURCE = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda/atomic>
typedef unsigned u32;
typedef unsigned long long u64;
#define ROW                                                  \
    const int t = threadIdx.x, a = in[t], b = in[t + 32];    \
    [[maybe_unused]] const u32 ua = a, ub = b;               \
    int* row = out + 24 * t
__device__ u32 both(u32 low, u32 high) { return low & 0xffff | high << 16; }
__device__ u32 bits(__half h) { return __half_as_ushort(h); }
__device__ u32 bits(__nv_bfloat16 h) { return __bfloat16_as_ushort(h); }
__device__ u32 bits(__half2 h) { return both(bits(__low2half(h)), bits(__high2half(h))); }

extern "C" __global__ void halves(const int* in, int* out) {
    ROW;
    const float x = float(a) * 0.37f, y = float(b % 4096) * 0.001f;
    const __half2 h = __floats2half2_rn(float(a % 512) * 0.0625f, y), k = __floats2half2_rn(y, float(b % 64) * -0.125f);
    row[0] = both(bits(__float2half_rz(x)), bits(__float2half_rd(x)));
    row[1] = both(bits(__float2half_ru(x)), bits(__float2bfloat16_rz(y)));
    row[2] = both(bits(__float2bfloat16_rd(x)), bits(__float2bfloat16_ru(x)));
    row[3] = both(bits(__int2half_rz(a)), bits(__int2half_rd(a)));
    row[4] = both(bits(__int2half_ru(a)), bits(__ll2bfloat16_rn((long long)a << 30 | ub)));
    row[5] = both(bits(__ll2bfloat16_rz((long long)a << 30 | ub)), bits(__ll2bfloat16_ru((long long)a << 30 | ub)));
    row[6] = bits(__hadd2_sat(h, k));
    row[7] = bits(__hfma2_sat(h, k, k));
    row[8] = bits(__hmul2_sat(h, k));
    row[9] = bits(__hlt2(h, k));
    row[10] = __hge2_mask(h, k);
    row[11] = bits(__hneu2(h, h));
    row[12] = bits(h2trunc(h));
    row[13] = bits(h2ceil(k));
    row[14] = __nv_cvt_halfraw2_to_fp8x2(__half2_raw(h), __NV_SATFINITE, __NV_E4M3);
    row[15] = __nv_cvt_halfraw2_to_fp8x2(__half2_raw(k), __NV_SATFINITE, __NV_E5M2);
}

extern "C" __global__ void integers(const int* in, int* out) {
    ROW;
    row[0] = __dp4a(a, b, t);
    row[1] = __dp4a(ua, ub, (u32)t);
    row[2] = __dp2a_lo(a, b, t);
    row[3] = __dp2a_hi(ua, ub, (u32)t);
    row[4] = __sad(a, b, 5);
    row[5] = __usad(ua, ub, 5);
    row[6] = __vabsdiffu4(ua, ub);
    row[7] = __vmaxs2(ua, ub);
    row[8] = __vminu2(ua, ub);
    row[9] = __vadd2(ua, ub);
    asm("bfind.u32 %0, %1;" : "=r"(row[10]) : "r"(a));
    asm("bfind.s32 %0, %1;" : "=r"(row[11]) : "r"(a));
    asm("bfind.shiftamt.u32 %0, %1;" : "=r"(row[12]) : "r"(a));
    row[13] = __fns(ua, t, b % 4);
    row[14] = __match_any_sync(~0u, ua & 3);
    int same;
    row[15] = __match_all_sync(~0u, ua | ~0u, &same) + __match_all_sync(~0u, ua, &same);
    asm("{ mad.lo.cc.u32 %0, %2, %3, %2; madc.hi.u32 %1, %2, %3, %3; }" : "=&r"(row[16]), "=&r"(row[17]) : "r"(ua), "r"(ub));
    asm("{ sub.cc.u32 %0, %2, %3; subc.cc.u32 %1, %3, %2; }" : "=&r"(row[18]), "=&r"(row[19]) : "r"(ua), "r"(ub));
    asm("{ add.cc.s32 %0, %2, %3; addc.s32 %1, %2, %3; }" : "=&r"(row[20]), "=&r"(row[21]) : "r"(ua), "r"(ub));
    asm("{ .reg .v2 .b32 pair; .reg.b16 low, high; mov.v2.b32 pair, {%2, %3}; xor.b32 pair.x, pair.x, pair.y; mov.b32 {low, high}, pair.x;"
        "  mov.b32 %0, {high, low}; mov.b32 %1, pair.y; }" : "=r"(row[22]), "=r"(row[23]) : "r"(a), "r"(b));
}

extern "C" __global__ void directed(const int* in, int* out) {
    ROW;
    const float x = float(a) * 0.37f, y = float(b) * 1e-9f;
    const float made[9] = {__fadd_rz(x, y), __fadd_ru(x, y), __fadd_rd(x, y), __fsub_rz(x, y), __fsub_ru(x, y), __fsub_rd(x, y),
                           __fmul_rz(x, y), __fmul_ru(x, y), __fmul_rd(x, y)};
    for (int i = 0; i < 9; ++i) row[i] = __float_as_int(made[i]);
    row[9] = __float_as_int(x);
    row[10] = __float_as_int(y);
}

struct Pair { long long first; int second[3]; };
__noinline__ __device__ Pair swapped(Pair given, int by) {
    return {given.second[0] + by, {int(given.first), given.second[2], given.second[1]}};
}
__noinline__ __device__ int steps(u32 n) { return n < 2 ? 0 : 1 + steps(n % 2 ? 3 * (n % 1000) + 1 : n / 2); }

extern "C" __global__ void calls(const int* in, int* out) {
    ROW;
    const Pair made = swapped({a, {b, t, 7}}, 3);
    row[0] = int(made.first);
    row[1] = made.second[0] + 10 * made.second[1] + 100 * made.second[2];
    row[2] = steps(ua % 1000);
    for (int i = t; i < 40; i += 32) row[5] += __popc(__ballot_sync(__activemask(), i != 3));
    asm("bmsk.clamp.b32 %0, %2, %3; bmsk.wrap.b32 %1, %2, %3;" : "=&r"(row[3]), "=&r"(row[4]) : "r"(ua % 40), "r"(ub % 40));
}

extern "C" __global__ void atomics(const int* in, int* out) {
    ROW;
    row[0] = a;
    cuda::atomic_ref<int, cuda::thread_scope_block> narrow(row[0]);
    row[1] = narrow.fetch_add(b, cuda::memory_order_acq_rel);
    row[2] = narrow.fetch_max(t, cuda::memory_order_release);
    row[3] = narrow.exchange(b, cuda::memory_order_acquire);
    cuda::atomic_ref<int, cuda::thread_scope_system> wide(row[0]);
    row[4] = wide.fetch_xor(a, cuda::memory_order_relaxed);
    row[5] = wide.fetch_min(-t, cuda::memory_order_seq_cst);
    int expected = -t;
    row[6] = wide.compare_exchange_strong(expected, 9, cuda::memory_order_acq_rel) + 2 * expected;
    for (int i = 8; i < 12; ++i) row[i] = __float_as_int(i + t);
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %1, %2};" ::"l"(row + 8), "f"(1.5f), "f"(-0.25f) : "memory");
}
"""
KERNELS = ("halves", "integers", "directed", "calls", "atomics")


def inputs(kernel: str) -> list[int]:
    """Returns the inputs of a kernel: large, small and equal numbers."""
    draw = random.Random(kernel)
    return [draw.randrange(-size, size) for size in draw.choices((2**31, 40, 70000), k=2 * THREADS)]


# ---- what they shall leave


def _round(value: Fraction, how: str, precision: int, lowest: int, width: int) -> int:
    """Returns the bits of a float with ``precision`` bits and the exponent ``lowest`` of its smallest normal number."""
    exponent_bits = width - precision
    most = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** (1 - lowest)
    size, sign = abs(value), (1 << (width - 1)) * (value < 0)
    if size == 0:
        return 0
    exponent = max(lowest, next(e for e in range(200, -400, -1) if Fraction(2) ** e <= size))
    step = Fraction(2) ** (exponent - precision + 1)
    units = size / step
    whole = units.numerator // units.denominator
    nearest = units - whole + Fraction(whole % 2, 10**9) > Fraction(1, 2)  # a tie goes to the even one
    up = {"rz": False, "rd": value < 0, "ru": value > 0, "rn": nearest}
    whole += up[how] and units != whole
    if whole * step > most:
        infinite = how == "rn" or (how == "ru" and value > 0) or (how == "rd" and value < 0)
        return sign + (((1 << exponent_bits) - 1) << (precision - 1)) - (0 if infinite else 1)
    return sign + (((exponent - lowest) << (precision - 1)) + whole)


def _f16(value: Fraction, how: str = "rn") -> int:
    return _round(value, how, 11, -14, 16)


def _bf16(value: Fraction, how: str = "rn") -> int:
    return _round(value, how, 8, -126, 16)


def _f32(value: Fraction, how: str = "rn") -> int:
    return _round(value, how, 24, -126, 32)


def _of_f32(bits: int) -> Fraction:
    return Fraction(struct.unpack("<f", struct.pack("<I", bits))[0])


def _of_f16(bits: int) -> Fraction:
    return Fraction(struct.unpack("<e", struct.pack("<H", bits))[0])


def _f32_of(number: int) -> Fraction:
    return _of_f32(_f32(Fraction(number)))


def _times(number: int, factor: float) -> Fraction:
    return _of_f32(_f32(_f32_of(number) * _of_f32(_f32(Fraction(factor)))))


def _rem(a: int, b: int) -> int:
    return int(math.fmod(a, b))


def _fp8(value: Fraction, precision: int, lowest: int, most: int) -> int:
    size = min(abs(value), Fraction(most))
    bits = _round(size, "rn", precision, lowest, 8) if size else 0
    return bits | 0x80 * (value < 0)


def _halves(a: int, b: int, t: int) -> list[int]:
    x, y, ub = _times(a, 0.37), _times(_rem(b, 4096), 0.001), b % 2**32
    h = [_of_f16(_f16(_times(_rem(a, 512), 0.0625))), _of_f16(_f16(y))]
    k = [_of_f16(_f16(y)), _of_f16(_f16(_times(_rem(b, 64), -0.125)))]
    wide = (a << 30) | ub
    wide -= 2**64 * (wide >= 2**63)

    def both(low: int, high: int) -> int:
        return low | high << 16

    def pair(act: Callable[[Fraction, Fraction], int]) -> int:
        return both(*(act(p, q) for p, q in zip(h, k, strict=True)))

    def whole(value: Fraction, act: Callable[[Fraction], int]) -> int:
        return _f16(Fraction(act(value))) | 0x8000 * (value < 0 and act(value) == 0)

    def saturated(value: Fraction) -> int:
        return _f16(min(max(value, Fraction(0)), Fraction(1)))

    zero = 0x8000 * (k[1] == 0)  # 0 * -0.125
    return [
        both(_f16(x, "rz"), _f16(x, "rd")), both(_f16(x, "ru"), _bf16(y, "rz")), both(_bf16(x, "rd"), _bf16(x, "ru")),
        both(_f16(Fraction(a), "rz"), _f16(Fraction(a), "rd")), both(_f16(Fraction(a), "ru"), _bf16(Fraction(wide))),
        both(_bf16(Fraction(wide), "rz"), _bf16(Fraction(wide), "ru")),
        pair(lambda p, q: saturated(p + q)), pair(lambda p, q: saturated(p * q + q)), pair(lambda p, q: saturated(p * q)),
        pair(lambda p, q: 0x3C00 * (p < q)), pair(lambda p, q: 0xFFFF * (p >= q)), 0,
        both(*(whole(p, math.trunc) for p in h)), both(whole(k[0], math.ceil), whole(k[1], math.ceil) | zero),
        _fp8(h[0], 4, -6, 448) | _fp8(h[1], 4, -6, 448) << 8,
        _fp8(k[0], 3, -14, 57344) | (_fp8(k[1], 3, -14, 57344) | zero >> 8) << 8,
    ]  # fmt: skip


def _integers(a: int, b: int, t: int, all_a: list[int]) -> list[int]:
    ua, ub = a % 2**32, b % 2**32

    def parts(value: int, bits: int, signed: bool) -> list[int]:
        made = [value >> i & ((1 << bits) - 1) for i in range(0, 32, bits)]
        return [part - (1 << bits) * (signed and part >> (bits - 1)) for part in made]

    def dot(one: list[int], other: list[int]) -> int:
        return sum(p * q for p, q in zip(one, other, strict=False)) + t

    def lanes(act: Callable[[int, int], int], signed: bool, bits: int) -> int:
        pairs = zip(parts(ua, bits, signed), parts(ub, bits, signed), strict=True)
        return sum((act(p, q) % (1 << bits)) << (bits * i) for i, (p, q) in enumerate(pairs))

    nth = _rem(b, 4)
    places = [i for i in (range(t, 32) if nth >= 0 else range(t, -1, -1)) if ua >> i & 1]
    places = places if nth else [t] * (ua >> t & 1)
    found = places[max(abs(nth), 1) - 1] if len(places) >= max(abs(nth), 1) else -1
    low = ua * ub % 2**32 + ua
    difference = ua - ub
    total = ua + ub
    mixed = ua ^ ub
    return [
        dot(parts(ua, 8, True), parts(ub, 8, True)), dot(parts(ua, 8, False), parts(ub, 8, False)),
        dot(parts(ua, 16, True), parts(ub, 8, True)), dot(parts(ua, 16, False), parts(ub, 8, False)[2:]),
        abs(a - b) + 5, abs(ua - ub) + 5, lanes(lambda p, q: abs(p - q), False, 8), lanes(max, True, 16), lanes(min, False, 16),
        lanes(lambda p, q: p + q, False, 16),
        ua.bit_length() - 1, (a if a >= 0 else ~a).bit_length() - 1, 32 - ua.bit_length() if ua else -1, found,
        sum(1 << i for i, other in enumerate(all_a) if other & 3 == a & 3), -1,
        low, (ua * ub >> 32) + ub + (low >> 32), difference, ub - ua - (difference < 0), total, total + (total >> 32),
        mixed >> 16 | mixed << 16, ub,
    ]  # fmt: skip


def _directed(a: int, b: int) -> list[int]:
    x, y = _times(a, 0.37), _times(b, 1e-9)
    made = [_f32(value, how) for value in (x + y, x - y, x * y) for how in ("rz", "ru", "rd")]
    return [*made, _f32(x), _f32(y)]


def _calls(a: int, b: int, t: int) -> list[int]:
    at, bits = a % 2**32 % 40, b % 2**32 % 40
    masks = [((1 << bits) - 1) << at for at, bits in ((min(at, 32), min(bits, 32)), (at % 32, bits % 32))]
    return [b + 3, a + 10 * 7 + 100 * t, _steps(a % 2**32 % 1000), *masks, 31 + 8 * (t < 8)]


def _steps(n: int) -> int:
    return 0 if n < 2 else 1 + _steps(3 * (n % 1000) + 1 if n % 2 else n // 2)


def _signed(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def _atomics(a: int, b: int, t: int) -> list[int]:
    added = _signed(a + b)
    smallest = min(_signed(b ^ a), -t)
    return [9 if smallest == -t else smallest, a, added, max(added, t), b, b ^ a, (smallest == -t) + 2 * smallest, 0,
            *(_f32(Fraction(i + t) + (Fraction(3, 2), Fraction(-1, 4))[i % 2]) for i in range(8, 12))]  # fmt: skip


def expected(kernel: str) -> list[list[int]]:
    """Returns what every thread leaves, as unsigned words; results that the kernel does not write are missing."""
    given = inputs(kernel)
    rows = []
    for t in range(THREADS):
        a, b = given[t], given[t + 32]
        made = {
            "halves": lambda: _halves(a, b, t),  # noqa: B023
            "integers": lambda: _integers(a, b, t, given[:32]),  # noqa: B023
            "directed": lambda: _directed(a, b),  # noqa: B023
            "calls": lambda: _calls(a, b, t),  # noqa: B023
            "atomics": lambda: _atomics(a, b, t),  # noqa: B023
        }[kernel]()
        rows.append([value % 2**32 for value in made])
    return rows
