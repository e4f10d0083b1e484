// Left operands in pieces: what kernels share that gather A from all ranks while they multiply.
//
// This rank's A is pushed to every other rank in pieces of some rows and columns, with a flag behind each. Who pushes, the launch says: a warp of
// every compute block, by loads and stores, which costs no SM and needs all of them to fill a port; or communicator blocks, by bulk copies
// of whole rows, of which a dozen do. Pieces are sent in the order in which tiles use them: rows in groups, as many as all blocks work on at a
// time, and within a group its first columns first.
//
// What is gathered is double-buffered by the launch's epoch. A rank that finishes launch e has had pieces of launch e from every other rank, which
// had therefore finished launch e - 1: what launch e - 1 gathered may be written over in launch e + 1. These may be launches of different sizes
// (`products/capacity.py`).
//
// Who pushes waits for nobody, and communicator blocks are the first ones, so compute blocks always get what they wait for.
#pragma once

#include <peerlane/comm.cuh>
#include <peerlane/products/gemm.cuh>

namespace peerlane {

// Parameters have
//   GroupedTiles pieces        in the order in which they are sent
//   u32 m, k, row_bytes        of a rank's A: its rows (for a rank, with `scatters`), its columns, and from a row to the next, here and where it is gathered
//   u32 piece_rows             of the piece that one signal speaks for; divides a block's rows of a tile
//   u32 header_bytes           in front of each row's columns; they go with the first piece
//   u32 piece_columns          all of them if communicator blocks push, else that or a multiple of a step's depth
//   u32 communicator_blocks    0: a warp of every compute block pushes
//   const char* local          this rank's A
//   u64 gathered_memory        in the arena: (k, m, 2 W), third index buffer * W + source, in slots that lie `slot_bytes` apart
//   u64 slot_bytes
//   u64 flags, epochs          in the arena: Peers::flag_bytes(pieces.count()); u32[max_epoch_blocks]
// `most_together`: pieces that share a fence at most.
template <class Shape, int W, bool scatters, class Parameters, u32 most_together = 1>
struct GatheredPieces : Shape {
    const Parameters& parameters;
    const Arena& arena;
    const u32 epoch;

    // By all threads: advances the epoch.
    __device__ GatheredPieces(const Parameters& p, const Arena& a)
        : parameters(p), arena(a), epoch(next_epoch(reinterpret_cast<u32*>(a.local(p.epochs)))) {}

    // The spare warp of a compute block: own pieces straight to every other rank. A fence waits for what its SM has under way, which never pauses
    // here. So ever more pieces may share one: the first ones are told of soon, and there are few fences in all.
    __device__ void communicate(u32 part, u32 parts) const {
        if (parameters.communicator_blocks > 0) return;
        const u32 count = parameters.pieces.count();
        for (u32 index = part, together = 1; index < count; index += together * parts, together = min(2 * together, most_together)) {
            const u32 left = (count - index + parts - 1) / parts, now = together < left ? together : left;
            for (u32 i = 0; i < now; ++i) {
                with_piece(index + i * parts, [&](u32, u64 at, const Rows& rows) { push(at, rows); });
            }
            peers(communicator).signal_all_slots(now, [&](u32 i) { return flag_of_piece(index + i * parts); }, epoch);
        }
    }

    // A communicator block's first warp: own rows into the ring, in chunks that fill its slots.
    __device__ void fetch(u32 part, u32 parts, InputProducer<Shape>& in) const {
        each_chunk(part, parts, [&](u32, u64 at, u32 bytes, bool) {
            in.fill(bytes, [&](auto& slot, u64* full) { ptx::bulk_load(&slot, parameters.local + at, bytes, full); });
        });
    }

    // The second: from the ring to every other rank. Half of the slots are on their way out.
    __device__ void send(u32 part, u32 parts, SenderInput<Shape>& in) const {
        constexpr int in_flight = Shape::input_slots / 2;
        StoreQueue<W, in_flight> queue(arena, parameters.flags, Warp{}, communicator);
        int held = 0;
        each_chunk(part, parts, [&](u32 flag, u64 at, u32 bytes, bool last) {
            queue.store_all(gathered_place(at), &in.wait(), bytes);
            if (last) {
                queue.end_step(Signal{every_rank, flag, epoch});
            } else {
                queue.end_step();
            }
            if (held == in_flight) {
                in.release();
            } else {
                ++held;
            }
        });
        queue.flush();
    }

  protected:
    __device__ void push(u64 at, const Rows& rows) const {
        if constexpr (scatters) {
            const u64 shard_bytes = u64(parameters.m) * parameters.row_bytes;
            for (int k = 1; k < W; ++k) {
                const int q = rank_after<W>(arena.rank, k);
                peers(communicator).store_rows(q, gathered_place(at), parameters.local + q * shard_bytes + at, rows);
            }
        } else {
            peers(communicator).store_all(gathered_place(at), parameters.local + at, rows);
        }
    }
    // Where in every arena rank `source`'s rows of this launch lie.
    __device__ u64 gathered_memory_of(u32 source) const { return parameters.gathered_memory + slot_of(source) * parameters.slot_bytes; }
    __device__ u64 gathered_place(u64 at) const { return gathered_memory_of(arena.rank) + at; }
    __device__ int slot_of(u32 source) const { return static_cast<int>((epoch & 1) * W + source); }
    __device__ Peers<W, Warp> peers(Role role) const { return {arena, parameters.flags, {}, role}; }
    // Until `source` has sent what pieces of this column have of the block's rows from `row` on.
    __device__ void wait_for_rows(u32 row, u32 column, int source) const {
        if (row >= parameters.m) return;  // a block of a cluster whose rows the tile does not have
        const u32 rows = min(parameters.m - row, u32(Shape::block_rows));
        const u32 pieces = (rows + parameters.piece_rows - 1) / parameters.piece_rows;
        peers(storer).wait_slots(source, flag_of(row / parameters.piece_rows, column), pieces, epoch);
    }
    __device__ u32 flag_of(u32 row, u32 column) const { return column * parameters.pieces.rows + row; }
    // use(flag, first byte in the shard, rows) for every `parts`-th piece.
    template <class Use>
    __device__ void each_piece(u32 part, u32 parts, const Use& use) const {
        for (u32 index = part; index < parameters.pieces.count(); index += parts) with_piece(index, use);
    }
    template <class Use>
    __device__ void with_piece(u32 index, const Use& use) const {
        const auto [row, column] = parameters.pieces.at(index);
        const u32 first_row = row * parameters.piece_rows, end_byte = parameters.header_bytes + (column + 1) * parameters.piece_columns * element_bytes;
        const u32 first_byte = column == 0 ? 0 : end_byte - parameters.piece_columns * element_bytes;
        const u32 rows = min(parameters.piece_rows, parameters.m - first_row);
        const u32 bytes = (column + 1 == parameters.pieces.columns ? parameters.row_bytes : end_byte) - first_byte;
        use(flag_of(row, column), u64(first_row) * parameters.row_bytes + first_byte, Rows{rows, bytes, parameters.row_bytes});
    }
    __device__ u32 flag_of_piece(u32 index) const {
        const auto [row, column] = parameters.pieces.at(index);
        return flag_of(row, column);
    }
    // use(flag, first byte, bytes, whether it is the piece's last) for each chunk of these pieces, of whole rows, as long as each other.
    template <class Use>
    __device__ void each_chunk(u32 part, u32 parts, const Use& use) const {
        each_piece(part, parts, [&](u32 flag, u64 at, const Rows& rows) {
            const u64 end = at + u64(rows.count) * rows.stride;
            const u64 chunks = (end - at + sizeof(typename Shape::Input) - 1) / sizeof(typename Shape::Input);
            const u64 vectors = (end - at) / sizeof(Vec16), most = (vectors + chunks - 1) / chunks * sizeof(Vec16);
            for (; at < end; at += most) {
                const u32 bytes = static_cast<u32>(end - at < most ? end - at : most);
                use(flag, at, bytes, at + bytes == end);
            }
        });
    }
};

}  // namespace peerlane
