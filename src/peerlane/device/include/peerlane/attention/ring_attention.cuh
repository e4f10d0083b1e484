// Attention over a sequence that lies in equal shards on all ranks, in rank order, in one launch.
//
// Keys and values of every rank are pushed to the ranks that need them, once, while tiles compute: by the spare warp of every compute block, through
// a little shared memory, in pieces of some tokens of one key head, with a flag behind each. Pieces go in the order in which tiles use them.
// Each tile starts with this rank's own shard, goes on with the rank before and so on, and waits for the pieces it needs. Nothing is passed
// from rank to rank.
//
// Under a causal mask late ranks have more to do. Then the last tiles of rank W - 1 - r are guests of rank r < (W - 1) / 2: their queries are pushed
// like keys, and their results are stored straight into the owner's result, which therefore lies in the arena.
//
// What is pushed is double-buffered by the launch's epoch. Every rank tells all when it begins a launch; by then its launches before have ended.
// A rank pushes in launch e to ranks that have begun e - 1, and so have finished e - 2, which used the same buffer. It stores results of launch e
// for queries that came in launch e: their owner has begun it, and its stream has done what read the result of e - 1.
//
// Who pushes waits for nothing else, and all blocks are resident, so every tile gets what it waits for.
#pragma once

#include <peerlane/attention/shards.cuh>

namespace peerlane {

// Parameters have, with maps of (depth, heads, tokens, batch), innermost first,
//   TensorMap q, k, v, out                        this rank's
//   TensorMap gathered_k, gathered_v              pushed here; batches are (buffer * W + source) * batch + entry
//   TensorMap guest_q, guest_out                  queries pushed here, with batches buffer * batch + entry; the result of the rank they come from
//   TensorMap parcels_k, parcels_v, parcels_q     this rank's, for copies of a parcel
//   float scale                                   of scores, as powers of two
//   u32 batch, heads, key_heads, length           length: of a shard
//   u32 depth, value_depth, causal
//   u32 own_blocks                                tiles of a head that are computed here: the first of this rank's,
//   u32 guest_rank, first_guest, guest_blocks     and some of that rank's
//   u32 host_rank, first_hosted, hosted_blocks    of this rank's, computed there
//   u32 lines_at_once                             heads whose tiles come side by side
//   u32 piece_tokens                              a multiple of a block of keys
//   u32 targets                                   ranks that need this rank's keys
// and in the arena
//   u64 gathered_k_at, gathered_v_at, guest_q_at
//   u64 logarithms                                (batch, heads, length) floats
//   u64 flags, epochs, claims                     claims: u32[2]
template <class Shape, int W, class Parameters>
struct RingAttentionRoles : ShardedAttention<Shape, W, Parameters> {
    using Sharded = ShardedAttention<Shape, W, Parameters>;
    using Sharded::Sharded;
    using typename Sharded::Tile;
    using Sharded::parameters, Sharded::arena, Sharded::epoch;

    // ---- tiles ---------------------------------------------------------------------------------------------------------------------------

    __device__ u32 tile_count() const { return lines() * (parameters.own_blocks + parameters.guest_blocks); }

    // Heads in groups; in a group the tiles with most keys first, but in the first one guests last, for they have to come.
    __device__ Tile tile(u32 index) const {
        const u32 depth = parameters.own_blocks + parameters.guest_blocks;
        const auto [group, line, place] = LineTile::at(index, lines(), depth, parameters.lines_at_once);
        const u32 guests_from = group == 0 ? parameters.own_blocks : 0;
        const bool guest = place - guests_from < parameters.guest_blocks;
        u32 block;
        if (guest) {
            block = parameters.first_guest + parameters.guest_blocks - 1 - (place - guests_from);
        } else {
            block = parameters.own_blocks - 1 - (group == 0 ? place : place - parameters.guest_blocks);
        }
        const int owner = guest ? static_cast<int>(parameters.guest_rank) : static_cast<int>(arena.rank);
        const int query = static_cast<int>(block * Shape::queries);
        return {{query, static_cast<int>(line % parameters.heads), static_cast<int>(line / parameters.heads), steps(owner, query)}, owner};
    }

    // Own keys first, then those of the rank before, and so on; of a guest its own last.
    __device__ AttentionStep step(const Tile& tile, u32 number) const {
        const u32 shard = shard_steps(), rank = arena.rank;
        int source;
        u32 block;
        if (!parameters.causal) {
            source = rank_after<W>(rank, W - static_cast<int>(number / shard)), block = number % shard;
        } else if (tile.owner == rank) {
            const u32 own = tile.steps - rank * shard;
            if (number < own) {
                source = static_cast<int>(rank), block = number;
            } else {
                source = static_cast<int>(rank - 1 - (number - own) / shard), block = (number - own) % shard;
            }
        } else {
            const u32 before = tile.owner * shard, from = number < (rank + 1) * shard ? rank : tile.owner - 1;
            const u32 rest = number < (rank + 1) * shard ? number : number - (rank + 1) * shard;
            source = number < before ? static_cast<int>(from - rest / shard) : tile.owner;
            block = number < before ? rest % shard : number - before;
        }
        const int key = static_cast<int>(block * Shape::keys);
        const bool diagonal = parameters.causal && source == tile.owner;
        return {source, key, static_cast<int>(parameters.length) - key, diagonal ? tile.query - key : no_diagonal};
    }

    // ---- roles ---------------------------------------------------------------------------------------------------------------------------

    __device__ void load(const Tile& tile, InputProducer<RingAttentionRoles>& in, KeptProducer<RingAttentionRoles>& kept, ReadyConsumer& ready) const {
        const auto take_token = [&] {
            ready.wait();
            ready.release();
        };
        const bool guest = is_guest(tile);
        if (guest) take_token();
        kept.fill(Shape::Kept::bytes, [&](auto& queries, u64* full) {
            queries.load(guest ? &parameters.guest_q : &parameters.q, full, Place4(0, tile.head, tile.query, guest ? guest_batch(tile.batch) : tile.batch));
        });
        const int head = key_head(tile.head);
        const auto copy = [&](const TensorMap* own, const TensorMap* gathered) {
            return [=, this](auto& block, u64* full, const AttentionStep& step) {
                const bool here = step.source == arena.rank;
                block.load(here ? own : gathered, full, Place4(0, head, step.key, here ? tile.batch : gathered_batch(step.source, tile.batch)));
            };
        };
        load_blocks<Shape>(
            *this, tile, in,
            [&](const AttentionStep& step) {
                if (begins_piece(step)) take_token();
            },
            copy(&parameters.k, &parameters.gathered_k), copy(&parameters.v, &parameters.gathered_v));
    }

    // For the queries and pieces that `load` takes tokens for, in that order.
    __device__ void watch(const Tile& tile, ReadyProducer& ready) const {
        const u32 line = tile.batch * parameters.key_heads + key_head(tile.head);
        const auto give_token = [&] {
            ready.acquire();
            ready.commit();
        };
        if (is_guest(tile)) {
            peers(storer).wait(tile.owner, query_flag(tile), epoch);
            give_token();
        }
        const auto pieces = [&](const AttentionStep& step) { return begins_piece(step) ? piece_flag(line, step.key / parameters.piece_tokens) : no_flag; };
        watch_blocks(*this, tile, peers(storer), epoch, pieces, give_token);
    }

    __device__ void compute(const Tile& tile, u32 group, InputConsumer<RingAttentionRoles>& in, KeptConsumer<RingAttentionRoles>& kept,
                            OutputProducer<RingAttentionRoles>& out) const {
        OnlineSoftmax<Shape> state;
        attend(state, *this, tile, group, parameters.scale, in, kept);
        float* logarithms = reinterpret_cast<float*>(arena.peer(tile.owner, parameters.logarithms));
        write_logarithms(state, logarithms + (u64(tile.batch) * parameters.heads + tile.head) * parameters.length, tile.query + 64 * group,
                         parameters.length);
        emit_attention(state, out);
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<RingAttentionRoles>& out) const {
        const Place4 at(0, tile.head, tile.query + 64 * static_cast<int>(group), tile.batch);
        if (!is_guest(tile)) {
            store_attention<Shape>(out, &parameters.out, at);
            return;
        }
        store_attention<Shape>(out, &parameters.guest_out, at);
        peers(storer).signal(tile.owner, result_flag(tile, group), epoch);
    }

    // Tells that this rank has begun, pushes, and waits for results of its tiles that others computed.
    __device__ void communicate(u32 part, u32 parts, ParcelProducer<RingAttentionRoles>& fill, ParcelConsumer<RingAttentionRoles>& drain) const {
        const auto told = peers(communicator);
        if (part == 0) told.acknowledge_all(begun, epoch);
        const u32 targets = parameters.targets | (parameters.hosted_blocks ? only(parameters.host_rank) : 0);
#pragma unroll 1
        for (int q = 0; q < W; ++q) {
            if (targets >> q & 1) told.wait(q, begun, epoch - 1);
        }
        ParcelSender<W, RingAttentionRoles> sender(arena, parameters.flags, fill, drain);
        const u32 share = parameters.heads / parameters.key_heads, each = pieces() + share * parameters.hosted_blocks;
        for (u32 index = part; index < parameters.batch * parameters.key_heads * each; index += parts) {
            const u32 line = index / each, number = index % each, batch = line / parameters.key_heads, head = line % parameters.key_heads;
            const u32 row = parameters.depth * element_bytes, value_row = parameters.value_depth * element_bytes;
            if (number < pieces()) {
                if (parameters.targets == 0) continue;
                const u32 token = number * parameters.piece_tokens, end = min(token + parameters.piece_tokens, parameters.length);
                const u64 first = (u64(gathered_batch(arena.rank, batch)) * parameters.key_heads + head) * parameters.length;
                sender.send(&parameters.parcels_k, head, batch, token, end, row, parameters.gathered_k_at + first * row, Signal{parameters.targets});
                sender.send(&parameters.parcels_v, head, batch, token, end, value_row, parameters.gathered_v_at + first * value_row,
                            Signal{parameters.targets, piece_flag(line, number), epoch});
            } else {
                const u32 own = head * share + (number - pieces()) / parameters.hosted_blocks;
                const u32 block = parameters.first_hosted + (number - pieces()) % parameters.hosted_blocks;
                const u32 token = block * Shape::queries, end = min(token + Shape::queries, parameters.length);
                const u64 first = (u64(guest_batch(batch)) * parameters.heads + own) * parameters.length;
                sender.send(&parameters.parcels_q, own, batch, token, end, row, parameters.guest_q_at + first * row,
                            Signal{only(parameters.host_rank), query_flag(own, batch, block), epoch});
            }
        }
        sender.finish();
        const u32 results = lines() * parameters.hosted_blocks * Shape::roles.consumer_groups;
        for (u32 index = part; index < results; index += parts) {
            const u32 block = index / Shape::roles.consumer_groups % parameters.hosted_blocks, line = index / Shape::roles.consumer_groups / parameters.hosted_blocks;
            told.wait(parameters.host_rank, result_flags() + (line * blocks() + parameters.first_hosted + block) * Shape::roles.consumer_groups + index % Shape::roles.consumer_groups,
                      epoch);
        }
    }

    // Flags of an arena, for tiles of `blocks` a head and `pieces` pieces a key head.
    __device__ u32 result_flags() const { return 1 + parameters.batch * parameters.key_heads * pieces() + lines() * blocks(); }

  private:
    using Sharded::begun, Sharded::peers, Sharded::lines, Sharded::blocks, Sharded::pieces, Sharded::shard_steps, Sharded::steps;
    using Sharded::begins_piece, Sharded::piece_flag, Sharded::gathered_batch;

    __device__ bool is_guest(const Tile& tile) const { return tile.owner != arena.rank; }
    __device__ int key_head(int head) const { return head / static_cast<int>(parameters.heads / parameters.key_heads); }
    __device__ int guest_batch(u32 batch) const { return static_cast<int>((epoch & 1) * parameters.batch + batch); }

    // Flags: one of beginnings; of pieces; of guests' queries, one a tile; of their results, one a group.
    __device__ u32 tile_number(u32 head, u32 batch, u32 block) const { return (batch * parameters.heads + head) * blocks() + block; }
    __device__ u32 query_flag(u32 head, u32 batch, u32 block) const {
        return 1 + parameters.batch * parameters.key_heads * pieces() + tile_number(head, batch, block);
    }
    __device__ u32 query_flag(const Tile& tile) const { return query_flag(tile.head, tile.batch, tile.query / Shape::queries); }
    __device__ u32 result_flag(const Tile& tile, u32 group) const {
        return result_flags() + tile_number(tile.head, tile.batch, tile.query / Shape::queries) * Shape::roles.consumer_groups + group;
    }
};

}  // namespace peerlane
