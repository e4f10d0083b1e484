// The kernel of short.py, which declares its arguments, ShortAttention.
#include <peerlane/comm.cuh>
#include <peerlane/peers/numeric.cuh>

// A rank that ends a launch has had all results for its tokens. So all ranks have read what it has pushed, and it may push again.
// A rank whose tokens have come has begun the launch. So its stream has done what read its results of the launch before.
namespace peerlane {

template <class E, int W>
struct ShortLine {
    static constexpr int lanes = 4 * E::lanes;  // elements of a Vec16
    const Arena& arena;
    const ShortAttention& args;
    const u32 batch, head, tokens, vectors;  // head: of a rank's; tokens: of all ranks; vectors: of a row
    const u64 come;                          // (q, k, v; tokens; depth), in the arena

    __device__ ShortLine(const Arena& a, const ShortAttention& p, u32 line)
        : arena(a), args(p), batch(line / p.heads), head(line % p.heads), tokens(W * p.length), vectors(p.depth / lanes),
          come(p.lines + u64(line) * 3 * tokens * vectors * sizeof(Vec16)) {}

    // What this rank has of the line, of the heads of each rank, to that rank.
    __device__ void push() const {
        constexpr int at_once = 4;
        const u32 each = args.length * vectors, total = W * 3 * each;
        for (u32 first = threadIdx.x; first < total; first += at_once * blockDim.x) {
            Vec16 value[at_once];
            Vec16* to[at_once];
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const u32 index = first + i * blockDim.x, rank = index / (3 * each), operand = index / each % 3;
                const u32 token = index / vectors % args.length, vector = index % vectors;
                if (index >= total) break;
                const u64* stride = args.strides + 3 * operand;
                const char* from = args.operands[operand] + batch * stride[0] + token * stride[1] + (rank * args.heads + head) * stride[2];
                const u32 row = operand * tokens + arena.rank * args.length + token;
                value[i] = reinterpret_cast<const Vec16*>(from)[vector];
                to[i] = reinterpret_cast<Vec16*>(arena.peer(rank, come)) + row * vectors + vector;
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                if (first + i * blockDim.x < total) *to[i] = value[i];
            }
        }
    }

    // Of a line that has come from all ranks.
    __device__ void attend() const {
        const u32 row = args.depth + 4;  // floats, so that neighbouring rows begin in different banks
        float* const loaded = reinterpret_cast<float*>(ptx::dynamic_shared());
        float* const scores = loaded + 3 * tokens * row;
        const Vec16* const line = reinterpret_cast<const Vec16*>(arena.local(come));
        for (u32 i = threadIdx.x; i < 3 * tokens * vectors; i += blockDim.x) {
            const Vec16 value = line[i];
#pragma unroll
            for (int w = 0; w < 4; ++w) E::widen(value.word[w], loaded + i / vectors * row + i % vectors * lanes + w * E::lanes);
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < tokens * tokens; i += blockDim.x) {
            const u32 query = i / tokens, key = i % tokens;
            const float4* const a = reinterpret_cast<const float4*>(loaded + query * row);
            const float4* const b = reinterpret_cast<const float4*>(loaded + (tokens + key) * row);
            float sum[4] = {};
#pragma unroll 4
            for (u32 d = 0; d < args.depth / 4; ++d) {
                const float4 x = a[d], y = b[d];
                sum[0] += x.x * y.x, sum[1] += x.y * y.y, sum[2] += x.z * y.z, sum[3] += x.w * y.w;
            }
            scores[query * (tokens + 1) + key] = ((sum[0] + sum[1]) + (sum[2] + sum[3])) * args.scale;
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < tokens * vectors; i += blockDim.x) {
            const u32 query = i / vectors, vector = i % vectors, keys = args.causal ? query + 1 : tokens;
            const float* const score = scores + query * (tokens + 1);
            const float* const values = loaded + 2 * tokens * row + vector * lanes;
            float top = score[0], total = 0.0f, sum[lanes] = {};
            for (u32 key = 1; key < keys; ++key) top = fmaxf(top, score[key]);
            for (u32 key = 0; key < keys; ++key) {
                const float weight = ptx::exp2(score[key] - top);
                total += weight;
#pragma unroll
                for (int e = 0; e < lanes; e += 4) {
                    const float4 v = *reinterpret_cast<const float4*>(values + key * row + e);
                    sum[e] += weight * v.x, sum[e + 1] += weight * v.y, sum[e + 2] += weight * v.z, sum[e + 3] += weight * v.w;
                }
            }
#pragma unroll
            for (float& value : sum) value /= total;
            Vec16 result;
#pragma unroll
            for (int w = 0; w < 4; ++w) result.word[w] = E::narrow(sum + w * E::lanes);
            const u32 owner = query / args.length, token = query % args.length;
            const u64 at = (u64(batch * args.length + token) * (W * args.heads) + arena.rank * args.heads + head) * vectors + vector;
            reinterpret_cast<Vec16*>(arena.peer(owner, args.out))[at] = result;
        }
    }
};

}  // namespace peerlane
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(256)
    short_attention(const __grid_constant__ Arena arena, const __grid_constant__ ShortAttention args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs))), lines = args.batch * args.heads;
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    for (u32 line = blockIdx.x; line < lines; line += gridDim.x) {
        ShortLine<ELEMENT, WORLD_SIZE>(arena, args, line).push();
        peers.signal_all(line, epoch);
    }
    for (u32 line = blockIdx.x; line < lines; line += gridDim.x) {
        peers.wait_all(line, epoch);
        ShortLine<ELEMENT, WORLD_SIZE>(arena, args, line).attend();
        peers.signal_all(lines + line, epoch);
    }
    for (u32 line = blockIdx.x; line < lines; line += gridDim.x) peers.wait_all(lines + line, epoch);
}
