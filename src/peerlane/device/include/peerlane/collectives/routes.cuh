// Whose work a sum in two trips is. The tensor is cut into shares, one per owner. Every rank gives each owner its term of the share, owners add,
// and send the sum to whoever takes. two_shot.cuh does so by packets, relay.cuh through rings of tiles.
//
//   AllReduceRoute   all own and take                                    bytes per port: 2 (W - 1) / W of the tensor each way
//   ReduceRoute      the root takes; the others own, and keep theirs     once the tensor into the root's port, not W - 1 times
//
// A route has a number of owners, share_of(rank) (-1 for who owns none), takes(rank), and keeps(rank): who copies its own tensor to `out`. Who takes
// gets sums from every other rank, all of which own.
#pragma once

#include <peerlane/ptx/ptx.cuh>

namespace peerlane {

// The share of a rank where all but the root own one; -1 for the root.
__device__ inline int share_beside(int root, int rank) { return rank == root ? -1 : rank - (rank > root); }

template <int W>
struct AllReduceRoute {
    __device__ u32 owners() const { return W; }
    __device__ int share_of(int rank) const { return rank; }
    __device__ bool takes(int) const { return true; }
    __device__ bool keeps(int) const { return false; }
};

template <int W>
struct ReduceRoute {
    int root;

    __device__ u32 owners() const { return W - 1; }
    __device__ int share_of(int rank) const { return share_beside(root, rank); }
    __device__ bool takes(int rank) const { return rank == root; }
    __device__ bool keeps(int rank) const { return rank != root; }
};

}  // namespace peerlane
