// Discrete Fourier transforms by a block: lines of one length in shared memory, in Stockham's stages of any radix up to 16.
//
// A stage reads every line once and writes it once. The first may read from elsewhere and the last may write elsewhere, so that memory is passed once.
#pragma once

#include <peerlane/ptx/ptx.cuh>

namespace peerlane {

struct alignas(8) Complex {
    float x, y;
};
__device__ constexpr Complex operator+(Complex a, Complex b) { return {a.x + b.x, a.y + b.y}; }
__device__ constexpr Complex operator-(Complex a, Complex b) { return {a.x - b.x, a.y - b.y}; }
__device__ constexpr Complex operator*(Complex a, Complex b) { return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x}; }
__device__ constexpr Complex operator*(float a, Complex b) { return {a * b.x, a * b.y}; }
__device__ constexpr Complex conjugate(Complex a) { return {a.x, -a.y}; }

// cos(2 pi k / n), for constants.
__device__ constexpr double cosine(int k, int n) {
    k = (k % n + n) % n;
    const double angle = 6.283185307179586 * (2 * k > n ? n - k : k) / n;
    double sum = 1, term = 1;
    for (int i = 1; i < 32; i += 2) sum += term *= -angle * angle / (i * (i + 1));
    return sum;
}
// e^(-2 pi i k / n).
template <int n>
struct Roots {
    Complex of[n];
    __device__ constexpr Roots() : of{} {
        for (int k = 0; k < n; ++k) of[k] = {static_cast<float>(cosine(k, n)), -static_cast<float>(cosine(4 * k - n, 4 * n))};
    }
};

__device__ constexpr int smallest_factor(int n) {
    for (int p = 2; p < n; ++p) {
        if (n % p == 0) return p;
    }
    return n;
}

// The transform of numbers in registers.
template <int R>
__device__ inline void fourier(Complex (&x)[R]) {
    constexpr int P = R % 4 == 0 && R > 4 ? 4 : smallest_factor(R), Q = R / P;
    if constexpr (R == 2) {
        const Complex first = x[0];
        x[0] = first + x[1], x[1] = first - x[1];
    } else if constexpr (P < R) {  // x[P q + p]
        constexpr Roots<R> roots;
        Complex inner[P][Q];
#pragma unroll
        for (int p = 0; p < P; ++p) {
#pragma unroll
            for (int q = 0; q < Q; ++q) inner[p][q] = x[P * q + p];
            fourier(inner[p]);
        }
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            Complex outer[P];
#pragma unroll
            for (int p = 0; p < P; ++p) {
                const Complex a = inner[p][q];
                const int k = p * q;
                outer[p] = k == 0 ? a : 4 * k == R ? Complex{a.y, -a.x} : 2 * k == R ? Complex{-a.x, -a.y} : a * roots.of[k % R];
            }
            fourier(outer);
#pragma unroll
            for (int p = 0; p < P; ++p) x[q + Q * p] = outer[p];
        }
    } else if constexpr (R > 2) {  // an odd prime: numbers i and R - i have conjugate roots
        constexpr Roots<R> roots;
        Complex sum[R], difference[R];
        const Complex first = x[0];
#pragma unroll
        for (int i = 1; i <= R / 2; ++i) sum[i] = x[i] + x[R - i], difference[i] = x[i] - x[R - i], x[0] = x[0] + sum[i];
#pragma unroll
        for (int k = 1; k <= R / 2; ++k) {
            Complex even = first, odd = {};
#pragma unroll
            for (int i = 1; i <= R / 2; ++i) even = even + roots.of[i * k % R].x * sum[i], odd = odd + roots.of[i * k % R].y * difference[i];
            x[k] = {even.x - odd.y, even.y + odd.x}, x[R - k] = {even.x + odd.y, even.y - odd.x};
        }
    }
}

// Lines in shared memory. Threads that follow each other take points of a line if `along`, else lines.
template <u32 points, u32 lines, bool along, u32 threads>
class FourierTile {
  public:
    // A gap every 16 points keeps powers of two, as strides of a stage, in banks of their own.
    static constexpr bool gaps = points % 64 == 0;
    static constexpr u32 pitch = points + (gaps ? points / 16 : 0) + 1;

    // The number of the thread comes through a shuffle, so that the compiler does not keep the places of all stages in registers where a block
    // makes one tile after another.
    __device__ explicit FourierTile(char* memory)
        : data_(reinterpret_cast<Complex*>(memory)), thread_(__shfl_sync(0xffffffffu, threadIdx.x, threadIdx.x % 32)) {}
    __device__ Complex& at(u32 line, u32 point) const {
        return data_[along ? line * pitch + point + (gaps ? point / 16 : 0) : point * lines + line];
    }

    // Transforms the first `active` lines, by stages of the radices R, REST...; their product is `points`. `twiddles` are those of
    // `peerlane.solutions.families.fourier.twiddles`. load(line, point, step, x) fills the array x with points from `point` on, `step` apart;
    // store(line, point, step, x) takes results likewise. All threads call it. What load reads of the tile is read before store is called.
    template <u32 active, u32 S, u32 R, u32... REST, class Load, class Store>
    __device__ void transform(const Complex* twiddles, const Load& load, const Store& store) const {
        constexpr u32 butterflies = points / R, total = active * butterflies, each = (total + threads - 1) / threads;
        Complex x[each][R];
#pragma unroll
        for (u32 e = 0; e < each; ++e) {
            const u32 t = thread_ + e * threads, j = along ? t % butterflies : t / active;
            if (t < total) {
                load(along ? t / butterflies : t % active, j, butterflies, x[e]);
                if (S > 1) {
#pragma unroll
                    for (u32 i = 1; i < R; ++i) x[e][i] = x[e][i] * twiddles[(i - 1) * S + j % S];
                }
                fourier(x[e]);
            }
            if (each > 1) __syncwarp();  // one after another, for want of registers
        }
        __syncthreads();
        const auto put = [&](const auto& store) {
#pragma unroll
            for (u32 e = 0; e < each; ++e) {
                const u32 t = thread_ + e * threads, j = along ? t % butterflies : t / active;
                if (t < total) store(along ? t / butterflies : t % active, j / S * (S * R) + j % S, S, x[e]);
            }
        };
        if constexpr (sizeof...(REST) == 0) {
            put(store);
        } else {
            put(into());
            __syncthreads();
            transform<active, S * R, REST...>(twiddles + (S > 1 ? S * (R - 1) : 0), from(), store);
        }
    }
    // The tile's own points.
    __device__ auto from() const {
        return [*this]<int R>(u32 line, u32 point, u32 step, Complex(&x)[R]) {
#pragma unroll
            for (u32 i = 0; i < R; ++i) x[i] = at(line, point + i * step);
        };
    }
    __device__ auto into() const {
        return [*this]<int R>(u32 line, u32 point, u32 step, const Complex(&x)[R]) {
#pragma unroll
            for (u32 i = 0; i < R; ++i) at(line, point + i * step) = x[i];
        };
    }

  private:
    Complex* data_;
    u32 thread_;
};

}  // namespace peerlane
