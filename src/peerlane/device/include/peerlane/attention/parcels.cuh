// Rows of heads pushed to other ranks by the spare warp of a compute block, through a little shared memory: tensor copies in, bulk stores out.
#pragma once

#include <peerlane/comm.cuh>
#include <peerlane/tiles/roles.cuh>
#include <peerlane/tiles/tile.cuh>

namespace peerlane {

struct alignas(line_bytes) Parcel {
    char data[4096];

    // Rows of `row_bytes` in a parcel, a box of its map; mirrors `peerlane.device.attention.shards.parcel_tokens`.
    __device__ static u32 rows(u32 row_bytes) { return min(256u, static_cast<u32>(sizeof(Parcel)) / row_bytes); }
};

// What a kernel (SendsParcels) has of them: one comes in, one goes out, one has gone out and may still be read.
constexpr int parcels_at_once = 3;

template <int W, class Kernel>
class ParcelSender {
  public:
    __device__ ParcelSender(const Arena& arena, u64 flags, ParcelProducer<Kernel>& fill, ParcelConsumer<Kernel>& drain)
        : arena_(arena), fill_(fill), drain_(drain), queue_(arena, flags, Warp{}, communicator) {}

    // Tokens [token, end) of a head, rows of `row_bytes`, to the ranks of `signal`: row t to `line` + t rows of their arenas. The signal is given
    // behind the last of them, if it has a number; a number for all that was sent before it.
    __device__ void send(const TensorMap* map, u32 head, u32 batch, u32 token, u32 end, u32 row_bytes, u64 line, const Signal& signal) {
        const u32 step = Parcel::rows(row_bytes);
        for (; token < end; token += step) {
            fill_.fill(step * row_bytes, [&](Parcel& parcel, u64* full) {
                ptx::tensor_load(&parcel, map, full, 0, static_cast<int>(head), static_cast<int>(token), static_cast<int>(batch));
            });
            push();
            target_ = line + u64(token) * row_bytes, bytes_ = min(step, end - token) * row_bytes;
            news_ = token + step < end ? Signal{signal.ranks} : signal;
        }
    }

    // All has been sent and told.
    __device__ void finish() {
        push();
        queue_.flush();
    }

  private:
    __device__ void push() {
        if (bytes_ == 0) return;
        const Parcel& parcel = drain_.wait();
#pragma unroll 1
        for (int k = 1; k < W; ++k) {
            const int q = rank_after<W>(arena_.rank, k);
            if (news_.ranks >> q & 1) queue_.store(q, target_, &parcel, bytes_);
        }
        queue_.end_step(news_.number ? news_ : Signal{});
        if (held_) drain_.release();
        held_ = true;
    }

    const Arena& arena_;
    ParcelProducer<Kernel>& fill_;
    ParcelConsumer<Kernel>& drain_;
    StoreQueue<W, 1, Warp> queue_;
    u64 target_ = 0;  // of the parcel that has not gone out yet
    u32 bytes_ = 0;
    Signal news_{};
    bool held_ = false;  // a parcel is on its way out
};

}  // namespace peerlane
