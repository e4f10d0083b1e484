// What attention over shards of a sequence has in common, whose queries, keys and values are pushed between ranks by parcels.
#pragma once

#include <peerlane/attention/attention.cuh>
#include <peerlane/attention/parcels.cuh>

namespace peerlane {

// Parameters have u32 batch, heads, length, causal, piece_tokens, and in the arena u64 flags, epochs, claims; see the kernels.
template <class Shape, int W, class Parameters>
struct ShardedAttention : Shape {
    struct Tile : AttentionTile {
        int owner;  // of the queries
    };
    using Parcel = peerlane::Parcel;
    static constexpr int parcel_slots = parcels_at_once;
    static constexpr RoleTable roles{Shape::roles.consumer_groups, 64, 216};  // who sends and waits needs more registers

    const Parameters& parameters;
    const Arena& arena;
    const u32 epoch;
    const TileClaims claims;

    // By all threads: advances the epoch.
    __device__ ShardedAttention(const Parameters& p, const Arena& a)
        : parameters(p),
          arena(a),
          epoch(next_epoch(reinterpret_cast<u32*>(a.local(p.epochs)))),
          claims(reinterpret_cast<u32*>(a.local(p.claims)), epoch) {}

    __device__ u32 claim() const { return claims.next(); }

  protected:
    static constexpr u32 begun = 0;  // the flag of who has begun a launch

    __device__ Peers<W, Warp> peers(Role role) const { return {arena, parameters.flags, {}, role}; }
    __device__ u32 lines() const { return parameters.batch * parameters.heads; }
    __device__ u32 blocks() const { return (parameters.length + Shape::queries - 1) / Shape::queries; }
    __device__ u32 pieces() const { return (parameters.length + parameters.piece_tokens - 1) / parameters.piece_tokens; }
    __device__ u32 shard_steps() const { return (parameters.length + Shape::keys - 1) / Shape::keys; }
    __device__ u32 steps(int owner, int query) const {
        if (!parameters.causal) return W * shard_steps();
        return owner * shard_steps() + (min(query + Shape::queries, static_cast<int>(parameters.length)) + Shape::keys - 1) / Shape::keys;
    }
    __device__ bool begins_piece(const AttentionStep& step) const { return step.source != arena.rank && step.key % parameters.piece_tokens == 0; }
    __device__ u32 piece_flag(u32 line, u32 piece) const { return 1 + line * pieces() + piece; }
    __device__ int gathered_batch(u32 source, u32 batch) const { return static_cast<int>(((epoch & 1) * W + source) * parameters.batch + batch); }
};

}  // namespace peerlane
