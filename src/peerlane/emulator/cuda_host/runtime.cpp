// The CUDA runtime and torch's CUDA side as C++ of emulated ranks find them. Kernels are registered here and launched by Python; device memory
// is mapped where the emulator has it, so that one address serves host and kernels. What a rank has asked for is over when the call returns.

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr std::uint64_t page_bytes = 4096;

// ---- what Python gives

// Callbacks return 0, or 1 where Python has an exception to raise once the C++ code has returned.
struct Python {
    int (*launch)(const char* kernel, int module, const unsigned* grid, const unsigned* block, void** arguments, std::uint64_t shared,
                  unsigned cluster);
    int (*copy)(std::uint64_t to, std::uint64_t from, std::uint64_t bytes);
    int (*set)(std::uint64_t to, int value, std::uint64_t bytes);
    std::uint64_t (*variable)(int module, const char* name);
    int sm_count;
    int shared_bytes;
} python;

thread_local int rank = -1;
thread_local int loading = -1;  // the module whose library is being loaded
thread_local cudaError_t last_error = cudaSuccess;

[[noreturn]] void stop(const std::string& why) { throw std::runtime_error(why); }
void done(int failed) {
    if (failed) stop("peerlane: the launch failed");
}
cudaError_t error(cudaError_t code) { return code == cudaSuccess ? code : last_error = code; }

// ---- memory

struct Block {
    std::uint64_t bytes = 0;  // asked for
    std::uint64_t room = 0;   // pages
    int rank = -1;
    bool exported = false;    // other ranks may use it
    bool kept = false;        // a kernel has seen it: its address is never given again
    bool live = false;
};

class Memory {
  public:
    std::uint64_t begin = 0, end = 0;

    void open(std::uint64_t base, std::uint64_t bytes) {
        const auto flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
        if (mmap(reinterpret_cast<void*>(base), bytes, PROT_READ | PROT_WRITE, flags, -1, 0) != reinterpret_cast<void*>(base))
            stop("the address range of the ranks' memory is taken");
        begin = next_ = base;
        end = base + bytes;
    }
    bool holds(const void* address) const {
        const auto place = reinterpret_cast<std::uint64_t>(address);
        return begin <= place && place < end;
    }
    void* take(std::uint64_t bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const std::uint64_t room = (bytes + page_bytes - 1) / page_bytes * page_bytes;
        auto& free = free_[room];
        std::uint64_t at = next_;
        if (free.empty()) {
            if (next_ + room + page_bytes > end) stop("emulated ranks have no memory left");
            next_ += room + page_bytes;  // and a page between them
        } else {
            at = free.back();
            free.pop_back();
        }
        blocks_[at] = {bytes, room, rank, false, false, true};
        return reinterpret_cast<void*>(at);
    }
    void give_back(void* address) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = blocks_.find(reinterpret_cast<std::uint64_t>(address));
        if (found == blocks_.end() || !found->second.live) return;
        found->second.live = false;
        if (found->second.kept) return;
        if (found->second.room > 16 * page_bytes) madvise(address, found->second.room, MADV_DONTNEED);
        free_[found->second.room].push_back(found->first);
        blocks_.erase(found);
    }
    // The block that holds an address; its begin is put into `at`.
    Block* find(std::uint64_t address, std::uint64_t& at) {
        const std::lock_guard<std::mutex> lock(mutex_);
        auto found = blocks_.upper_bound(address);
        if (found == blocks_.begin()) return nullptr;
        --found;
        if (address >= found->first + std::max<std::uint64_t>(found->second.bytes, 1)) return nullptr;
        at = found->first;
        return &found->second;
    }

  private:
    std::uint64_t next_ = 0;
    std::map<std::uint64_t, Block> blocks_;
    std::unordered_map<std::uint64_t, std::vector<std::uint64_t>> free_;  // by room
    std::mutex mutex_;
} memory;

c10::Allocator* ordinary = nullptr;

void release(void* address) {
    if (memory.holds(address)) return memory.give_back(address);
    if (address) ordinary->raw_deleter()(address);
}

// Tensors that a rank makes lie where kernels see them.
struct RankAllocator : c10::Allocator {
    c10::DataPtr allocate(std::size_t bytes) override {
        if (rank < 0 || bytes == 0) return ordinary->allocate(bytes);
        void* address = memory.take(bytes);
        return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
} allocator;

// ---- kernels and variables

struct Kernel {
    int module;
    std::string name;
};
struct Variable {
    int module;
    std::string name;
    std::size_t bytes;
};
std::mutex registry;
std::unordered_map<const void*, Kernel> kernels;  // by the address of the host's function
std::unordered_map<const void*, Variable> variables;
std::vector<int*> handles;

const Kernel& kernel_at(const void* function) {
    const std::lock_guard<std::mutex> lock(registry);
    const auto found = kernels.find(function);
    if (found == kernels.end()) stop("cudaLaunchKernel got a function that is no kernel of this library");
    return found->second;
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments, std::size_t shared, unsigned cluster) {
    const Kernel& kernel = kernel_at(function);
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z) return error(cudaErrorInvalidConfiguration);
    if (std::uint64_t(block.x) * block.y * block.z > 1024) return error(cudaErrorInvalidConfiguration);
    const unsigned grids[] = {grid.x, grid.y, grid.z}, blocks[] = {block.x, block.y, block.z};
    done(python.launch(kernel.name.c_str(), kernel.module, grids, blocks, arguments, shared, cluster));
    return cudaSuccess;
}

std::uint64_t address_of(const void* variable) {
    const std::lock_guard<std::mutex> lock(registry);
    const auto found = variables.find(variable);
    if (found == variables.end()) stop("a __device__ variable that is none of this library");
    const std::uint64_t at = python.variable(found->second.module, found->second.name.c_str());
    if (!at) done(1);
    return at;
}

std::uint64_t number(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

struct Configuration {
    dim3 grid, block;
    std::size_t shared;
    cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

struct IpcHandle {
    char magic[16];
    std::uint64_t address;
};
constexpr char ipc_magic[16] = "peerlane memory";

}  // namespace

// ---- for Python

extern "C" {
void peerlane_open(std::uint64_t base, std::uint64_t bytes, const Python* callbacks) {
    python = *callbacks;
    memory.open(base, bytes);
    ordinary = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&allocator, 100);
}
void peerlane_enter(int number) { rank = number; }
void peerlane_load(int module) { loading = module; }
std::uint64_t peerlane_take(std::uint64_t bytes) { return number(memory.take(bytes)); }
// Moves a storage to where kernels see it.
void peerlane_adopt(c10::StorageImpl* storage) {
    if (memory.holds(storage->data()) || !storage->nbytes()) return;
    void* address = memory.take(storage->nbytes());
    std::memcpy(address, storage->data(), storage->nbytes());
    storage->set_data_ptr({address, address, &release, c10::Device(c10::DeviceType::CPU)});
}
// Keeps the block that holds an address for ever; 0 where there is none.
int peerlane_keep(std::uint64_t address, std::uint64_t* begin, std::uint64_t* bytes, int* owner, int* exported) {
    Block* block = memory.find(address, *begin);
    if (!block) return 0;
    block->kept = true;
    *bytes = block->bytes, *owner = block->rank, *exported = block->exported;
    return 1;
}

[[noreturn]] void peerlane_missing(const char* name) { stop(std::string(name) + " is not known to the emulator; nothing was run"); }

// ---- the runtime

void** __cudaRegisterFatBinary(void*) {
    const std::lock_guard<std::mutex> lock(registry);
    handles.push_back(new int(loading));
    return reinterpret_cast<void**>(handles.back());
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void** module, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
    const std::lock_guard<std::mutex> lock(registry);
    kernels[host] = {*reinterpret_cast<int*>(module), name};
}
void __cudaRegisterVar(void** module, char* host, char*, const char* name, int, std::size_t bytes, int, int) {
    const std::lock_guard<std::mutex> lock(registry);
    variables[host] = {*reinterpret_cast<int*>(module), name, bytes};
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream) {
    configurations.push_back({grid, block, shared, stream});
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
    if (configurations.empty()) return error(cudaErrorMissingConfiguration);
    const Configuration& top = configurations.back();
    *grid = top.grid, *block = top.block, *shared = top.shared, *static_cast<cudaStream_t*>(stream) = top.stream;
    configurations.pop_back();
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared, cudaStream_t) {
    return launch(kernel, grid, block, arguments, shared, 1);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, std::size_t shared, cudaStream_t) {
    return launch(function, grid, block, arguments, shared, 1);
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
}

// ---- torch

namespace c10::cuda {
namespace {
CUDAStream stream_of(DeviceIndex device) {
    return CUDAStream(CUDAStream::UNCHECKED, Stream(Stream::DEFAULT, Device(DeviceType::CUDA, device < 0 ? 0 : device)));
}
}  // namespace
CUDAStream getCurrentCUDAStream(DeviceIndex device) { return stream_of(device); }
CUDAStream getDefaultCUDAStream(DeviceIndex device) { return stream_of(device); }
cudaStream_t CUDAStream::stream() const { return nullptr; }
}  // namespace c10::cuda
