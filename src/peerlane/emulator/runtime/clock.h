// Vector clocks, shared between threads until they differ.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace peerlane::emulator {

using Clock = std::int32_t;  // signed, because every CPU has a vector maximum for it
using Actor = std::uint16_t;

template <class T>
class Ref {
  public:
    Ref() = default;
    explicit Ref(T* target) : target_(target) {
        if (target_) ++target_->references;
    }
    Ref(const Ref& other) : Ref(other.target_) {}
    Ref(Ref&& other) noexcept : target_(std::exchange(other.target_, nullptr)) {}
    Ref& operator=(Ref other) noexcept {
        std::swap(target_, other.target_);
        return *this;
    }
    ~Ref() {
        if (target_ && --target_->references == 0) T::discard(target_);
    }
    T* get() const { return target_; }
    T* operator->() const { return target_; }
    T& operator*() const { return *target_; }
    explicit operator bool() const { return target_ != nullptr; }
    bool operator==(const Ref& other) const = default;

  private:
    T* target_ = nullptr;
};

// The last clock of each actor that is known to have happened. Clocks go on from schedule to schedule: whatever an earlier schedule did
// lies below the floor, so nothing has to be cleared between schedules. No vector at all means the floor for every actor.
struct Vector {
    std::uint32_t references, size, capacity;
    Vector* next;
    Clock clock[];

    inline static Clock floor = 0;
    inline static std::uint32_t actors = 0;

    static Ref<Vector> make(std::uint32_t size) {
        Vector* made = spare_;
        if (made && made->capacity >= size) {
            spare_ = made->next;
        } else {
            const std::uint32_t capacity = (std::max(size, actors) + 255) / 256 * 256;
            made = static_cast<Vector*>(std::malloc(sizeof(Vector) + capacity * sizeof(Clock)));
            if (!made) std::abort();
            made->capacity = capacity;
        }
        made->references = 0;
        made->size = size;
        return Ref<Vector>(made);
    }
    static void discard(Vector* vector) {
        if (vector->capacity < actors) {
            std::free(vector);
        } else {
            vector->next = spare_;
            spare_ = vector;
        }
    }

  private:
    inline static Vector* spare_ = nullptr;
};

inline Clock at(const Ref<Vector>& vector, Actor actor) { return vector && actor < vector->size ? vector->clock[actor] : Vector::floor; }

// The vector with another clock for one actor; changed in place if nobody else holds it.
inline void set(Ref<Vector>& vector, Actor actor, Clock clock) {
    const std::uint32_t size = vector ? vector->size : 0;
    if (!vector || vector->references > 1 || actor >= vector->capacity || actor >= size) {
        Ref<Vector> copy = Vector::make(std::max<std::uint32_t>({size, actor + 1u, Vector::actors}));
        if (size) std::memcpy(copy->clock, vector->clock, size * sizeof(Clock));
        std::fill(copy->clock + size, copy->clock + copy->size, Vector::floor);
        vector = std::move(copy);
    }
    vector->clock[actor] = clock;
}

// The larger of each two clocks; and bits that are set if that is not x, or not y, throughout.
struct Differs {
    Clock from_x, from_y;
};
#if defined(__x86_64__)
__attribute__((target_clones("avx2", "default")))
#endif
inline Differs larger(const Clock* x, const Clock* y, Clock* __restrict z, std::uint32_t count) {
    Differs differs{0, 0};
    for (std::uint32_t i = 0; i < count; ++i) {
        z[i] = x[i] > y[i] ? x[i] : y[i];
        differs.from_x |= z[i] ^ x[i];
        differs.from_y |= z[i] ^ y[i];
    }
    return differs;
}

inline Ref<Vector> join(const Ref<Vector>& a, const Ref<Vector>& b) {
    if (a == b || !b) return a;
    if (!a) return b;
    const Ref<Vector>& longer = a->size >= b->size ? a : b;
    const Ref<Vector>& shorter = a->size >= b->size ? b : a;
    Ref<Vector> sum = Vector::make(longer->size);
    const std::uint32_t common = shorter->size;
    const Clock* x = longer->clock;
    Clock* z = sum->clock;
    const Differs differs = larger(x, shorter->clock, z, common);
    if (!differs.from_x) return longer;
    if (!differs.from_y && longer->size == common) return shorter;
    std::copy(x + common, x + longer->size, z + common);
    return sum;
}

// What a thread knows to have happened: for its own accesses, and for asynchronous operations that it would start. A proxy fence copies the
// first to the others; everything that hands knowledge on hands on all three.
//
// `fenced` is what came before sequentially consistent fences of the whole system. All such fences have one order. So who reads what was stored
// behind such a fence, by whichever thread, and then does one himself, follows all that came before the first.
//
// The last two are for programs that rely on more than PTX promises: that the end of a launch is a release and an acquire for the whole
// system. `boundary` is what launches did that ended before a flag was sent, or before this launch began, with or without fences. `reads`, which
// counts from the next launch on, is what other blocks knew when they sent flags: their loads have returned values by then.
struct View {
    enum Kind { ordinary, async_shared, async_global, fenced, boundary, reads, kinds };
    Ref<Vector> seen[kinds];

    void absorb(const View& other) {
        for (int kind = 0; kind < kinds; ++kind) seen[kind] = join(seen[kind], other.seen[kind]);
    }
};

// A view that does not change any more and is handed around.
struct Snapshot {
    View view;
    std::uint32_t references = 0;

    explicit Snapshot(View from) : view(std::move(from)) {}
    static void discard(Snapshot* snapshot) { delete snapshot; }
};

}  // namespace peerlane::emulator
