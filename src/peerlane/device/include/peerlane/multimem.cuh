// reduce, all_reduce, signal_all and barrier by multicast, where the arena has a multicast address; by the ordinary ones elsewhere.
//
// Nothing in peerlane gives an arena such an address, so these forms are compiled and their PTX is checked, but they have never run. They do
// as much as their namesakes in peers.cuh, with the same order, except that the sum's order of additions is the switch's.
#pragma once

#include <peerlane/peers.cuh>
#include <peerlane/ptx_multimem.cuh>

namespace peerlane {

template <class E>
__device__ inline Vec16 multimem_load_sum(const char* address);
template <>
__device__ inline Vec16 multimem_load_sum<BFloat16>(const char* address) { return ptx::multimem_load_sum_bf16(address); }
template <>
__device__ inline Vec16 multimem_load_sum<Float16>(const char* address) { return ptx::multimem_load_sum_f16(address); }
template <>
__device__ inline Vec16 multimem_load_sum<Float32>(const char* address) { return ptx::multimem_load_sum_f32(address); }

template <int W, class Team = Block>
class MulticastPeers : public Peers<W, Team> {
    using Base = Peers<W, Team>;

  public:
    using Base::Base;

    // Whole vectors by multicast, the bytes behind them as in Peers.
    template <class E>
    __device__ void reduce(char* target, u64 source, u64 bytes) const {
        const u64 whole = this->arena_.multicast != nullptr ? bytes / sizeof(Vec16) * sizeof(Vec16) : 0;
        for (u64 at = this->team_.thread() * sizeof(Vec16); at < whole; at += this->team_.size() * sizeof(Vec16)) {
            const Vec16 sum = multimem_load_sum<E>(this->arena_.multicast + source + at);
            store_words(target, at, whole, sum.word);
        }
        if (whole != bytes) Base::template reduce<E>(target + whole, source + whole, bytes - whole);
    }

    template <class E>
    __device__ void all_reduce(u64 range, u64 bytes) const {
        const u64 whole = this->arena_.multicast != nullptr ? bytes / sizeof(Vec16) * sizeof(Vec16) : 0;
        const Part own = part_of(whole / sizeof(Vec16), this->arena_.rank, W);
        for (u64 v = own.first + this->team_.thread(); v < own.end; v += this->team_.size()) {
            char* place = this->arena_.multicast + range + v * sizeof(Vec16);
            ptx::multimem_store(place, multimem_load_sum<E>(place));
        }
        if (whole != bytes) Base::template all_reduce<E>(range + whole, bytes - whole);
    }

    // One store tells all ranks; the flag that the caller gets from itself is not looked at.
    __device__ void signal_all(u32 slot, u32 number) const {
        if (this->arena_.multicast == nullptr) return Base::signal_all(slot, number);
        this->finish_stores();
        if (this->team_.thread() != 0) return;
        this->release();
        ptx::multimem_store_flag(reinterpret_cast<u32*>(this->arena_.multicast + flag_offset<W>(this->flags_, slot, this->arena_.rank)), number);
    }

    __device__ void barrier(u32 slot, u32 number) const {
        signal_all(slot, number);
        this->wait_all(slot, number);
    }
};

}  // namespace peerlane
