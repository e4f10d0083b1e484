// The experts of a mixture on their ranks, in two kernels: tokens go to their experts' ranks, through the gated layer there, through the layer behind
// it, and home, where they are added with their weights.
//
// A token goes to `k` experts; experts are cut into groups of one set of weights, G of them on each rank, and a token goes to a group once, with the
// sum of its weights. The groups of all ranks are numbered in order. Counts are exchanged inside the first kernel, and all sizes follow from them
// on the device.
//
// A rank keeps the rows that it gets by group and source, its own first, each source's part in whole units of 64 rows and each group's in whole
// tiles, so that a unit belongs to one group and one source. A warp of every block pushes rows, with a flag for every eight of them; tiles wait for
// the rows that they use. The results of a unit go straight to its source, and a flag behind each tile of it. Behind its last tile every warp of the
// consumers waits for what comes home, and adds up some tokens.
//
// Between calls: a rank stores at a peer only when the peer has told its counts, that is begun the call. The peer's stream has then done what used
// the rows and results of the call before. Tables of counts take turns: a rank that tells its counts of call e + 2 has had those of call e + 1 from
// every rank, which have then done with call e.
#pragma once

#include <peerlane/comm.cuh>
#include <peerlane/products/grouped_gemm.cuh>
#include <peerlane/moe/moe.cuh>

namespace peerlane {

constexpr u32 unit_rows = 64, piece_rows = 8;
constexpr u32 max_groups = 512;  // of all ranks
constexpr u32 nowhere = ~0u;

__device__ inline u32 units_of(u32 rows) { return (rows + unit_rows - 1) / unit_rows; }

// Where everything lies, from all ranks' counts (W, groups of all ranks); shared memory of a block.
template <int W>
struct ExpertLayout {
    u32 unit[max_groups];       // own group g, i-th source: first unit of its rows here
    u32 count[max_groups];      // and rows
    u32 home[max_groups];       // and first unit of them in the source's own numbers
    u32 target[max_groups];     // group d of all: first unit of this rank's rows there
    u32 first_row[max_groups];  // and first of this rank's rows
    u32 tiles[max_groups + 1];  // own group g: tiles of rows before it
    u32 returned[max_groups + 1];  // group d of all: first unit that comes home of it, in this rank's numbers

    // By all threads of a block. `tile_units` units make a tile.
    __device__ void fill(const u32* counts, u32 own, u32 rank, u32 tile_units) {
        const auto units = [&](u32 source, u32 group) { return units_of(counts[source * W * own + group]); };
        const auto tiles_of = [&](u32 group) {
            u32 sum = 0;
            for (u32 s = 0; s < W; ++s) sum += units(s, group);
            return (sum + tile_units - 1) / tile_units;
        };
        // The first unit of a source's rows for a group, at its rank.
        const auto unit_of = [&](u32 source, u32 group) {
            const u32 owner = group / own;
            u32 at = 0;
            for (u32 g = owner * own; g < group; ++g) at += tiles_of(g) * tile_units;
            for (u32 s = owner; s % W != source; ++s) at += units(s % W, group);
            return at;
        };
        for (u32 d = threadIdx.x; d < W * own; d += blockDim.x) {
            target[d] = unit_of(rank, d);
            first_row[d] = 0;
            for (u32 before = 0; before < d; ++before) first_row[d] += counts[rank * W * own + before];
            const u32 group = rank * own + d / W, source = (rank + d % W) % W;
            unit[d] = unit_of(source, group);
            count[d] = counts[source * W * own + group];
            home[d] = 0;
            for (u32 before = 0; before < group; ++before) home[d] += units(source, before);
        }
        for (u32 g = threadIdx.x; g <= own; g += blockDim.x) {
            tiles[g] = 0;
            for (u32 before = 0; before < g; ++before) tiles[g] += tiles_of(rank * own + before);
        }
        for (u32 d = threadIdx.x; d <= W * own; d += blockDim.x) {
            returned[d] = 0;
            for (u32 before = 0; before < d; ++before) returned[d] += units(rank, before);
        }
        __syncthreads();
    }

    // Of nothing, where counts have not come: no tiles, nothing to send, nothing to wait for.
    __device__ void clear() {
        for (u32 i = threadIdx.x; i <= max_groups; i += blockDim.x) {
            tiles[i] = returned[i] = 0;
            if (i < max_groups) unit[i] = count[i] = home[i] = target[i] = first_row[i] = 0;
        }
        __syncthreads();
    }

    // What a unit of a group here holds: some rows of a source, whose unit `home` it is; or padding, of source -1.
    struct Unit {
        int source;
        u32 rows, home;
    };
    __device__ Unit at(u32 group, u32 number, u32 rank) const {
        for (u32 i = group * W; i < group * W + W; ++i) {
            const u32 within = number - unit[i];
            if (number >= unit[i] && within < units_of(count[i])) {
                const u32 rows = count[i] - within * unit_rows;
                return {static_cast<int>((rank + i % W) % W), rows < unit_rows ? rows : unit_rows, home[i] + within};
            }
        }
        return {-1, 0, 0};
    }
};

// A tile of rows of one group: `row` counts all rows here, `column` columns of tiles.
struct ExpertTile {
    u32 group;
    int row, column;
};

// Rows of all groups in one order of tiles.
template <int W>
__device__ inline ExpertTile expert_tile(const ExpertLayout<W>& layout, u32 columns, int tile_rows, u32 index) {
    const auto [group, row, column] = group_tile(layout.tiles, columns, index);
    return {group, (static_cast<int>(layout.tiles[group]) + row) * tile_rows, column};
}

// ---- first kernel: to the experts, and act = silu(rows gate^T + gate_bias) * (rows up^T + up_bias) -------------------------------------------
//
// Parameters have
//   TensorMap rows, gate, up, act  (h, rows, 1); (h, inner, G) twice, boxes of half a tile's columns; (inner, rows, 1)
//   const char* x; const long long* experts; const char* weights   tokens (t, h), their experts and the weights (t, k), in the elements' type
//   const char *gate_bias, *up_bias                                (G, inner), or null
//   u32* places, float* sums      (t, k): the number of the token's row at the expert's group, nowhere if an earlier slot has it; its weight
//   u32 tokens, k, h, inner, own  own: groups of a rank
//   u32 share, first              experts of a group; the first group that experts are numbered from
//   u64 row_memory, table, list   in the arena: rows; u32[2][W][groups]; u32[tokens k]
//   u64 flags, epochs             slots: 1 + two for each block + one for each eight rows
template <class Shape, int W, class Parameters>
struct ExpertsUp : Shape {
    using Tile = ExpertTile;
    static constexpr bool watches_ahead = true;  // rows come from communicators, which wait for no tile
    static constexpr int half = Shape::columns / 2;
    static constexpr u32 only_one = 0;
    struct Half {
        static constexpr int columns = half;
        using Sum = SumTile<half>;
    };
    const Parameters& parameters;
    const Arena& arena;
    ExpertLayout<W>& layout;
    const u32 epoch;
    bool whole;  // all counts and numbers have come

    // By all threads: numbers rows, exchanges counts.
    __device__ ExpertsUp(const Parameters& p, const Arena& a, ExpertLayout<W>& shared)
        : parameters(p), arena(a), layout(shared), epoch(next_epoch(reinterpret_cast<u32*>(a.local(p.epochs)))) {
        const Peers<W> peers(arena, parameters.flags);
        const u32 groups = W * parameters.own;
        u32* counts = table() + arena.rank * groups;
        each_row_number([&](u32, u32, u32) {}, [&](u32 group, u32 rows) { counts[group] = rows; });
        meet_blocks(peers, arena, 1, epoch);
        if (blockIdx.x == 0) {
            for (u32 i = threadIdx.x; i < W * groups; i += blockDim.x) {
                const int q = i / groups;
                const u64 at = parameters.table + ((epoch & 1) * W + arena.rank) * groups * 4 + i % groups * 4;
                if (q != arena.rank) *reinterpret_cast<u32*>(arena.peer(q, at)) = counts[i % groups];
            }
            peers.signal_all(0, epoch);
        }
        peers.wait_all(0, epoch);
        whole = block_arrived(arena);
        if (whole) {
            layout.fill(table(), parameters.own, arena.rank, Shape::rows / unit_rows);
            u32* list = reinterpret_cast<u32*>(arena.local(parameters.list));
            each_row_number([&](u32 group, u32 token, u32 row) { list[layout.first_row[group] + row] = token; }, [](u32, u32) {});
        }
        meet_blocks(peers, arena, 1 + gridDim.x, epoch);
        whole = block_arrived(arena);
        if (!whole) layout.clear();
    }

    __device__ u32 tile_count() const { return layout.tiles[parameters.own] * columns(); }
    __device__ Tile tile(u32 index) const { return expert_tile<W>(layout, columns(), Shape::rows, index); }

    __device__ void watch(const Tile& tile, ReadyProducer& ready) const {
        const Peers<W, Warp> peers(arena, parameters.flags, {}, storer);
        for (u32 u = 0; u < Shape::rows / unit_rows; ++u) {
            const u32 number = tile.row / unit_rows + u;
            const auto unit = layout.at(tile.group, number, arena.rank);
            if (unit.source >= 0) peers.wait_slots(unit.source, piece_slot(number, 0), (unit.rows + piece_rows - 1) / piece_rows, epoch);
        }
        ready.acquire();
        ready.commit();
    }

    __device__ void load(const Tile& tile, InputProducer<Shape>& in, ReadyConsumer& ready) const {
        ready.wait();
        ready.release();
        for (u32 k = 0; k < parameters.h; k += Shape::depth) {
            in.fill(sizeof(typename Shape::Operands), [&](auto& slot, u64* full) {
                slot.operands.a.load(&parameters.rows, full, {static_cast<int>(k), tile.row, 0});
                const int column = tile.column * half, group = static_cast<int>(tile.group);
                ptx::tensor_load(slot.operands.b.data, &parameters.gate, full, static_cast<int>(k), column, group);
                ptx::tensor_load(slot.operands.b.data + half * 128, &parameters.up, full, static_cast<int>(k), column, group);
            });
        }
    }

    __device__ void compute(const Tile& tile, u32 group, InputConsumer<Shape>& in, OutputProducer<Shape>& out) const {
        typename Shape::Sum sum;
        multiply_steps<Shape>(sum, group, Shape::steps(parameters.h), in);
        SumTile<half> act;
#pragma unroll
        for (int i = 0; i < half / 2; ++i) {
            const u32 column = tile.column * half + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            const float gate = sum.value[i] + bias(parameters.gate_bias, tile.group, column);
            const float up = sum.value[half / 2 + i] + bias(parameters.up_bias, tile.group, column);
            act.value[i] = activate<Activation::silu>(gate) * up;
        }
        emit<Half>(act, out);
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<Shape>& out) const {
        store_sum<Half>(out, &parameters.act, {tile.column * half, tile.row + Shape::first_row(group), 0});
    }

    // Rows go to their groups in pieces of eight. The consumers, who have no rows yet, send a piece each; then the spare warps send the rest.
    __device__ void prepare(u32 part, u32 parts) const { send(part, only_one, consumer); }
    __device__ void communicate(u32 part, u32 parts) const { send(4 * Shape::roles.consumer_groups * parts + part, parts, communicator); }

  private:
    // Pieces first, first + step, ... of all, or that one alone.
    __device__ void send(u32 first, u32 step, Role role) const {
        if (!whole) return;
        const Peers<W, Warp> peers(arena, parameters.flags, {}, role);
        const u32 groups = W * parameters.own, bytes = parameters.h * element_bytes;
        const u32* counts = table() + arena.rank * groups;
        const u32* list = reinterpret_cast<const u32*>(arena.local(parameters.list));
        u32 piece = first;  // of those from this group on
        for (u32 i = 0; i < groups; ++i) {
            const u32 d = (arena.rank * parameters.own + i) % groups, rows = counts[d], pieces = (rows + piece_rows - 1) / piece_rows;
            const int owner = d / parameters.own;
            for (; piece < pieces; piece += step) {
                const u32 end = min((piece + 1) * piece_rows, rows);
                for (u32 row = piece * piece_rows; row < end; ++row) {
                    const u64 to = parameters.row_memory + (u64(layout.target[d]) * unit_rows + row) * bytes;
                    copy_bytes(Warp{}, arena.peer(owner, to), parameters.x + u64(list[layout.first_row[d] + row]) * bytes, bytes);
                }
                peers.signal(owner, piece_slot(layout.target[d], piece), epoch);
                if (step == only_one) return;
            }
            piece -= pieces;
        }
    }
    __device__ u32 columns() const { return (parameters.inner + half - 1) / half; }
    __device__ u32* table() const { return reinterpret_cast<u32*>(arena.local(parameters.table)) + (epoch & 1) * W * W * parameters.own; }
    __device__ u32 piece_slot(u32 unit, u32 piece) const { return 1 + 2 * gridDim.x + unit * (unit_rows / piece_rows) + piece; }
    __device__ float bias(const char* biases, u32 group, u32 column) const {
        if (biases == nullptr || column >= parameters.inner) return 0;
        return element_of<typename Shape::E>(biases, u64(group) * parameters.inner + column);
    }
    // use(group, token, number) for the rows of this rank, done(group, rows) for each group; block b has groups b, b + grid, ...
    template <class Use, class Done>
    __device__ void each_row_number(const Use& use, const Done& done) const {
        __shared__ u32 scratch[32];
        const u32 warp = threadIdx.x / warp_threads, k = parameters.k;
        for (u32 group = blockIdx.x; group < W * parameters.own; group += gridDim.x) {
            u32 number = 0;
            for (u32 begin = 0; begin < parameters.tokens; begin += blockDim.x) {
                const u32 token = begin + threadIdx.x;
                u32 slot = nowhere;
                float weight = 0;
                for (u32 i = 0; i < k && token < parameters.tokens; ++i) {
                    const u64 at = u64(token) * k + i;
                    if (parameters.first + static_cast<u32>(parameters.experts[at]) / parameters.share != group) continue;
                    weight += element_of<typename Shape::E>(parameters.weights, at);
                    if (slot == nowhere) {
                        slot = i;
                    } else {
                        parameters.places[at] = nowhere;
                    }
                }
                const u32 rows = __ballot_sync(0xffffffffu, slot != nowhere);
                __syncthreads();
                if (Warp{}.thread() == 0) scratch[warp] = __popc(rows);
                __syncthreads();
                u32 own = number + __popc(rows & ((1u << Warp{}.thread()) - 1));
                for (u32 w = 0; w < blockDim.x / warp_threads; ++w) {
                    if (w < warp) own += scratch[w];
                    number += scratch[w];
                }
                if (slot == nowhere) continue;
                parameters.places[u64(token) * k + slot] = own;
                parameters.sums[u64(token) * k + slot] = weight;
                use(group, token, own);
            }
            if (threadIdx.x == 0) done(group, number);
        }
    }
};

// ---- second kernel: rows = act down^T + down_bias, home, and y = sum of weight * row for each token -----------------------------------------------
//
// Parameters have
//   TensorMap act, down, back[max_ranks]  (inner, rows, 1); (inner, h, G); every rank's rows that come home, by units: (h, rows, 1)
//   const u32 *counts, *places; const float* sums; const long long* experts   of the first kernel; `counts` has both tables
//   const u32* ended              of the first kernel's arena: the word at ended_at
//   const char* down_bias         (G, h), or null
//   char* y                       (t, h)
//   u32 tokens, k, h, inner, own, share, first
//   u64 home                      in the arena: what `back` describes
//   u64 flags, epochs             a slot for each unit that comes home and each column of tiles; epochs go as those of the first kernel
template <class Shape, int W, class Parameters>
struct ExpertsDown : Shape {
    using Tile = ExpertTile;
    const Parameters& parameters;
    const Arena& arena;
    ExpertLayout<W>& layout;
    const u32 epoch;

    __device__ ExpertsDown(const Parameters& p, const Arena& a, ExpertLayout<W>& shared)
        : parameters(p), arena(a), layout(shared), epoch(next_epoch(reinterpret_cast<u32*>(a.local(p.epochs)))) {
        if (block_arrived(parameters.ended)) {  // all blocks of the first kernel have had all counts, or none uses them
            layout.fill(parameters.counts + (epoch & 1) * W * W * parameters.own, parameters.own, arena.rank, Shape::rows / unit_rows);
        } else {
            layout.clear();
        }
    }

    __device__ u32 tile_count() const { return layout.tiles[parameters.own] * columns(); }
    __device__ Tile tile(u32 index) const { return expert_tile<W>(layout, columns(), Shape::rows, index); }

    __device__ void load(const Tile& tile, InputProducer<Shape>& in) const {
        for (u32 k = 0; k < parameters.inner; k += Shape::depth) {
            load_step<Shape>(in, {&parameters.act, tile.row, static_cast<int>(k), 0},
                             {&parameters.down, tile.column * Shape::columns, static_cast<int>(k), static_cast<int>(tile.group)});
        }
    }

    __device__ void compute(const Tile& tile, u32 group, InputConsumer<Shape>& in, OutputProducer<Shape>& out) const {
        typename Shape::Sum sum;
        multiply_steps<Shape>(sum, group, Shape::steps(parameters.inner), in);
        if (parameters.down_bias != nullptr) {
#pragma unroll
            for (int i = 0; i < Shape::columns / 2; ++i) {
                const u32 column = tile.column * Shape::columns + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
                if (column < parameters.h) {
                    sum.value[i] += element_of<typename Shape::E>(parameters.down_bias, u64(tile.group) * parameters.h + column);
                }
            }
        }
        emit<Shape>(sum, out);
    }

    __device__ void store(const Tile& tile, u32 group, OutputConsumer<Shape>& out) const {
        const auto unit = layout.at(tile.group, (tile.row + Shape::first_row(group)) / unit_rows, arena.rank);
        store_sum<Shape>(out, {tile.column * Shape::columns, static_cast<int>(unit.home * unit_rows), 0}, [&](const auto& store) {
            if (unit.source >= 0) store(&parameters.back[unit.source]);
        });
        if (unit.source >= 0) peers().signal(unit.source, unit.home * columns() + tile.column, epoch);
    }

    __device__ void conclude(u32 part, u32 parts) const {
        constexpr int at_once = 4;  // rows of a token that are on their way
        for (int k = 0; k < W; ++k) {
            const int q = rank_after<W>(arena.rank, k);
            const u32 first = layout.returned[q * parameters.own], end = layout.returned[(q + 1) * parameters.own];
            peers(consumer).wait_slots(q, first * columns(), (end - first) * columns(), epoch);
        }
        for (u32 token = part; token < parameters.tokens; token += parts) {
            each_column(parameters.h, [&](u32 column) {
                float sum[row_lanes] = {}, term[at_once][row_lanes], weight[at_once];
                for (u32 first = 0; first < parameters.k; first += at_once) {
                    u32 rows[at_once];
#pragma unroll
                    for (int i = 0; i < at_once; ++i) {
                        const u32 slot = token * parameters.k + first + i;
                        rows[i] = first + i < parameters.k ? parameters.places[slot] : nowhere;
                        if (rows[i] == nowhere) continue;
                        rows[i] += layout.returned[parameters.first + static_cast<u32>(parameters.experts[slot]) / parameters.share] * unit_rows;
                        weight[i] = parameters.sums[slot];
                    }
                    load_together<typename Shape::E, at_once>(
                        arena.local(parameters.home), parameters.h,
                        [&](int i, u32& row, u32& at) { row = rows[i], at = rows[i] == nowhere ? parameters.h : column; }, term);
#pragma unroll
                    for (int i = 0; i < at_once; ++i) {
                        for (int e = 0; e < row_lanes; ++e) sum[e] += rows[i] == nowhere ? 0 : weight[i] * term[i][e];
                    }
                }
                RowOf<typename Shape::E>(parameters.y, token, parameters.h).store(column, sum);
            });
        }
    }

  private:
    __device__ Peers<W, Warp> peers(Role role = storer) const { return {arena, parameters.flags, {}, role}; }
    __device__ u32 columns() const { return (parameters.h + Shape::columns - 1) / Shape::columns; }
};

}  // namespace peerlane
