// Attention over a sequence that lies in equal shards on all ranks, each of which computes its part of the heads for the whole sequence, in one launch.
//
// Queries, keys and values of every head are pushed to the rank that computes it, by the spare warp of every compute block, through a little shared
// memory, with a flag behind each piece. Tiles wait for the pieces they need, those of their own rank lie where they were. Each result is
// stored straight into the result of the rank whose tokens it belongs to, which lies in the arena. Nothing is exchanged before or behind.
//
// What is pushed is double-buffered by the launch's epoch. Every rank tells all when it begins a launch; by then its launches before have ended.
// A rank pushes in launch e to ranks that have begun e - 1, and so have finished e - 2, which used the same buffer. It stores results of launch e
// for queries that came in launch e: their owner has begun it, and its stream has done what read the result of e - 1.
#pragma once

#include <peerlane/attention/shards.cuh>

namespace peerlane {

// Parameters have, with maps of (depth, heads, tokens, batch), innermost first, and operands in the order q, k, v,
//   TensorMap own[3], parcels[3]      this rank's; parcels: for copies of a parcel
//   TensorMap gathered[3]             pushed here: a rank's heads, with batches (buffer * W + source) * batch + entry
//   TensorMap out[max_ranks]          the results of all ranks
//   float scale                       of scores, as powers of two
//   u32 batch, heads, length, depth   heads: of a rank; length: of a shard
//   u32 causal, lines_at_once, piece_tokens
// and in the arena
//   u64 gathered_q_at, gathered_k_at, gathered_v_at
//   u64 flags, epochs, claims         claims: u32[2]
template <class Shape, int W, class Parameters>
struct UlyssesAttentionRoles : ShardedAttention<Shape, W, Parameters> {
    using Sharded = ShardedAttention<Shape, W, Parameters>;
    using Sharded::Sharded;
    using typename Sharded::Tile;
    using Sharded::parameters, Sharded::arena, Sharded::epoch;

    __device__ u32 tile_count() const { return lines() * W * blocks(); }

    // Heads in groups. In a group own queries come first, for the others have to come; under a causal mask those with most keys.
    __device__ Tile tile(u32 index) const {
        const auto [group, line, place] = LineTile::at(index, lines(), W * blocks(), parameters.lines_at_once);
        const u32 from = parameters.causal ? W - 1 - place / blocks() : rank_after<W>(arena.rank, static_cast<int>(place / blocks()));
        const u32 block = parameters.causal ? blocks() - 1 - place % blocks() : place % blocks();
        const int query = static_cast<int>(block * Shape::queries), owner = static_cast<int>(from);
        return {{query, static_cast<int>(line % parameters.heads), static_cast<int>(line / parameters.heads), steps(owner, query)}, owner};
    }

    // From this rank's keys on; under a causal mask from the queries' own back to the first.
    __device__ AttentionStep step(const Tile& tile, u32 number) const {
        const u32 shard = shard_steps();
        int source = rank_after<W>(arena.rank, static_cast<int>(number / shard));
        u32 block = number % shard;
        if (parameters.causal) {
            const u32 own = tile.steps - tile.owner * shard;
            source = number < own ? tile.owner : static_cast<int>(tile.owner - 1 - (number - own) / shard);
            block = number < own ? number : (number - own) % shard;
        }
        const int key = static_cast<int>(block * Shape::keys);
        const bool diagonal = parameters.causal && source == tile.owner;
        return {source, key, static_cast<int>(parameters.length) - key, diagonal ? tile.query - key : no_diagonal};
    }

    __device__ void load(const Tile& tile, InputProducer<UlyssesAttentionRoles>& in, KeptProducer<UlyssesAttentionRoles>& kept, ReadyConsumer& ready) const {
        const auto take_token = [&] {
            ready.wait();
            ready.release();
        };
        const auto copy = [&](int operand, auto& buffer, u64* full, int source, int token) {
            if (source == arena.rank) {
                buffer.load(parameters.own + operand, full, Place4(0, arena.rank * parameters.heads + tile.head, token, tile.batch));
            } else {
                buffer.load(parameters.gathered + operand, full, Place4(0, tile.head, token, gathered_batch(source, tile.batch)));
            }
        };
        if (tile.owner != arena.rank) take_token();
        kept.fill(Shape::Kept::bytes, [&](auto& queries, u64* full) { copy(0, queries, full, tile.owner, tile.query); });
        load_blocks<Shape>(
            *this, tile, in,
            [&](const AttentionStep& step) {
                if (begins_piece(step)) take_token();
            },
            [&](auto& block, u64* full, const AttentionStep& step) { copy(1, block, full, step.source, step.key); },
            [&](auto& block, u64* full, const AttentionStep& step) { copy(2, block, full, step.source, step.key); });
    }

    // For the queries and pieces that `load` takes tokens for, in that order.
    __device__ void watch(const Tile& tile, ReadyProducer& ready) const {
        const u32 line = tile.batch * parameters.heads + tile.head;
        const auto give_token = [&] {
            ready.acquire();
            ready.commit();
        };
        if (tile.owner != arena.rank) {
            peers(storer).wait(tile.owner, query_flag(line, tile.query / Shape::queries), epoch);
            give_token();
        }
        const auto pieces = [&](const AttentionStep& step) { return begins_piece(step) ? piece_flag(line, step.key / parameters.piece_tokens) : no_flag; };
        watch_blocks(*this, tile, peers(storer), epoch, pieces, give_token);
    }

    __device__ void compute(const Tile& tile, u32 group, InputConsumer<UlyssesAttentionRoles>& in, KeptConsumer<UlyssesAttentionRoles>& kept,
                            OutputProducer<UlyssesAttentionRoles>& out) const {
        OnlineSoftmax<Shape> state;
        attend(state, *this, tile, group, parameters.scale, in, kept);
        emit_attention(state, out);
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<UlyssesAttentionRoles>& out) const {
        const int head = static_cast<int>(arena.rank * parameters.heads) + tile.head;
        store_attention<Shape>(out, parameters.out + tile.owner, Place4(0, head, tile.query + 64 * static_cast<int>(group), tile.batch));
        if (tile.owner != arena.rank) peers(storer).signal(tile.owner, result_flag(tile.batch * parameters.heads + tile.head, tile.query / 64 + group), epoch);
    }

    // Tells that this rank has begun, pushes, and waits for this rank's results of all others.
    __device__ void communicate(u32 part, u32 parts, ParcelProducer<UlyssesAttentionRoles>& fill, ParcelConsumer<UlyssesAttentionRoles>& drain) const {
        const auto told = peers(communicator);
        if (part == 0) told.acknowledge_all(begun, epoch);
#pragma unroll 1
        for (int k = 1; k < W; ++k) told.wait(rank_after<W>(arena.rank, k), begun, epoch - 1);
        ParcelSender<W, UlyssesAttentionRoles> sender(arena, parameters.flags, fill, drain);
        const u32 each = together() ? 1 : pieces() + blocks(), row = parameters.depth * element_bytes;
        for (u32 index = part; index < lines() * each * (W - 1); index += parts) {
            const u32 to = rank_after<W>(arena.rank, 1 + static_cast<int>(index % (W - 1)));
            const u32 line = index / (W - 1) / each, number = index / (W - 1) % each, batch = line / parameters.heads, head = line % parameters.heads;
            const auto send = [&](int operand, u64 gathered_at, u32 token, u32 tokens, const Signal& signal) {
                const u64 first = (u64(gathered_batch(arena.rank, batch)) * parameters.heads + head) * parameters.length;
                sender.send(parameters.parcels + operand, to * parameters.heads + head, batch, token, min(token + tokens, parameters.length), row,
                            gathered_at + first * row, signal);
            };
            const bool queries = number < blocks(), keys = together() || !queries;
            if (queries) {
                const Signal signal = keys ? Signal{only(to)} : Signal{only(to), query_flag(line, number), epoch};
                send(0, parameters.gathered_q_at, number * Shape::queries, Shape::queries, signal);
            }
            if (keys) {
                const u32 piece = together() ? 0 : number - blocks(), token = piece * parameters.piece_tokens;
                send(1, parameters.gathered_k_at, token, parameters.piece_tokens, Signal{only(to)});
                send(2, parameters.gathered_v_at, token, parameters.piece_tokens, Signal{only(to), piece_flag(line, piece), epoch});
            }
        }
        sender.finish();
        const u32 results = lines() * stored_blocks();
        for (u32 index = part; index < results * (W - 1); index += parts) {
            told.wait(rank_after<W>(arena.rank, 1 + static_cast<int>(index / results)), result_flag(index % results / stored_blocks(), index % stored_blocks()), epoch);
        }
    }

  private:
    using Sharded::begun, Sharded::peers, Sharded::lines, Sharded::blocks, Sharded::pieces, Sharded::shard_steps, Sharded::steps;
    using Sharded::begins_piece, Sharded::piece_flag, Sharded::gathered_batch;

    __device__ u32 stored_blocks() const { return blocks() * Shape::roles.consumer_groups; }

    // Queries, keys and values of a short line go behind each other, with one flag.
    __device__ bool together() const { return blocks() == 1 && pieces() == 1; }

    // Flags: one of beginnings; of pieces; of queries, one a tile; of results, one a group.
    __device__ u32 query_flag(u32 line, u32 block) const { return together() ? piece_flag(line, 0) : 1 + lines() * pieces() + line * blocks() + block; }
    __device__ u32 result_flag(u32 line, u32 block) const { return 1 + lines() * (pieces() + blocks()) + line * stored_blocks() + block; }
};

}  // namespace peerlane
