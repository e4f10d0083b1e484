// The CUDA runtime and torch's CUDA side as C++ of emulated ranks find them. Kernels are registered here and launched by Python; device memory
// is mapped where the emulator has it, so that one address serves host and kernels. What a rank has asked for is over when the call returns.

#include "product.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
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
enum Graph { graph_begins, graph_ends, graph_replays, graph_asks };

// ---- what Python gives

// Callbacks return 0, or 1 where Python has an exception to raise once the C++ code has returned.
struct Python {
    int (*launch)(const char* kernel, int module, const unsigned* grid, const unsigned* block, void** arguments, std::uint64_t shared,
                  unsigned cluster, int dependent);
    int (*copy)(std::uint64_t to, std::uint64_t to_pitch, std::uint64_t from, std::uint64_t from_pitch, std::uint64_t width, std::uint64_t height);
    int (*set)(std::uint64_t to, std::uint64_t pitch, int value, std::uint64_t width, std::uint64_t height);
    std::uint64_t (*variable)(int module, const char* name);
    int (*exported)(std::uint64_t address);
    int (*occupancy)(int module, const char* kernel, int threads, std::uint64_t shared);
    int (*attributes)(int module, const char* kernel, int* registers_static_and_local_bytes);
    int (*multiply)(const Product* product);
    int (*word)(std::uint64_t address, std::uint32_t value, int condition);  // -1: write
    int (*graph)(int act, int number);
    int (*sm_count)();
    int (*world_size)();
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
    std::size_t shared = 48 << 10;  // the most dynamic bytes that it may be launched with
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

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments, std::size_t shared, unsigned cluster = 1,
                   bool dependent = false) {
    const Kernel& kernel = kernel_at(function);
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z) return error(cudaErrorInvalidConfiguration);
    if (std::uint64_t(block.x) * block.y * block.z > 1024) return error(cudaErrorInvalidConfiguration);
    if (shared > kernel.shared) return error(cudaErrorInvalidValue);
    const unsigned grids[] = {grid.x, grid.y, grid.z}, blocks[] = {block.x, block.y, block.z};
    done(python.launch(kernel.name.c_str(), kernel.module, grids, blocks, arguments, shared, cluster, dependent));
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
// The number of the rank's GPU.
signed char peerlane_device() { return static_cast<signed char>(rank < 0 ? 0 : rank); }
int peerlane_enter(int number) { return std::exchange(rank, number); }
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
    kernels[host] = {*reinterpret_cast<int*>(module), name, 48 << 10};
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
    return launch(kernel, grid, block, arguments, shared);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, std::size_t shared, cudaStream_t) {
    return launch(function, grid, block, arguments, shared);
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t code) {
    static const std::unordered_map<int, const char*> names{
        {cudaSuccess, "cudaSuccess"},
        {cudaErrorInvalidValue, "cudaErrorInvalidValue"},
        {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration"},
        {cudaErrorInvalidDevice, "cudaErrorInvalidDevice"},
        {cudaErrorMissingConfiguration, "cudaErrorMissingConfiguration"},
        {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled"},
    };
    const auto found = names.find(code);
    return found == names.end() ? "an error of the CUDA runtime" : found->second;
}
const char* cudaGetErrorString(cudaError_t code) { return code == cudaSuccess ? "no error" : cudaGetErrorName(code); }

// Launches.
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** arguments, std::size_t shared, cudaStream_t) {
    return launch(function, grid, block, arguments, shared);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
    unsigned cluster = 1;
    bool dependent = false;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const cudaLaunchAttribute& attribute = config->attrs[i];
        if (attribute.id == cudaLaunchAttributeClusterDimension) {
            const auto& size = attribute.val.clusterDim;
            if (size.y * size.z != 1) peerlane_missing("a cluster of several dimensions");
            cluster = size.x;
        } else if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
            dependent = attribute.val.programmaticStreamSerializationAllowed;
        } else if (attribute.id == cudaLaunchAttributeProgrammaticEvent || attribute.id == cudaLaunchAttributeLaunchCompletionEvent ||
                   attribute.id == cudaLaunchAttributeDeviceUpdatableKernelNode) {
            peerlane_missing(("launch attribute " + std::to_string(attribute.id)).c_str());
        }
    }
    return launch(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, cluster, dependent);
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
    kernel_at(function);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || value > python.shared_bytes) return error(cudaErrorInvalidValue);
    const std::lock_guard<std::mutex> lock(registry);
    kernels[function].shared = value;
    return cudaSuccess;
}
cudaError_t cudaFuncSetCacheConfig(const void*, cudaFuncCache) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
    const Kernel kernel = kernel_at(function);
    int known[3];
    done(python.attributes(kernel.module, kernel.name.c_str(), known));
    *attributes = {};
    attributes->numRegs = known[0], attributes->sharedSizeBytes = known[1], attributes->localSizeBytes = known[2];
    attributes->maxDynamicSharedSizeBytes = static_cast<int>(kernel.shared), attributes->maxThreadsPerBlock = 1024;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads, std::size_t shared, unsigned) {
    const Kernel kernel = kernel_at(function);
    const int found = python.occupancy(kernel.module, kernel.name.c_str(), threads, shared);
    if (found < 0) done(1);
    *blocks = found;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads, std::size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

// Memory.
cudaError_t cudaMalloc(void** address, std::size_t bytes) {
    *address = bytes ? memory.take(bytes) : nullptr;
    if (bytes) std::memset(*address, 0, bytes);
    return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
    if (address) memory.give_back(address);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** address, std::size_t bytes, cudaStream_t) { return cudaMalloc(address, bytes); }
cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }
cudaError_t cudaMallocManaged(void** address, std::size_t bytes, unsigned) { return cudaMalloc(address, bytes); }
cudaError_t cudaMallocHost(void** address, std::size_t bytes) { return cudaMalloc(address, bytes); }
cudaError_t cudaHostAlloc(void** address, std::size_t bytes, unsigned) { return cudaMalloc(address, bytes); }
cudaError_t cudaFreeHost(void* address) { return cudaFree(address); }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
    *device = host;
    return memory.holds(host) ? cudaSuccess : error(cudaErrorInvalidValue);
}
cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width, std::size_t height,
                         cudaMemcpyKind);
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
    return cudaMemcpy2D(to, bytes, from, bytes, bytes, 1, cudaMemcpyDefault);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemcpyPeer(void* to, int, const void* from, int, std::size_t bytes) { return cudaMemcpy(to, from, bytes, cudaMemcpyDefault); }
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, cudaStream_t) {
    return cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
}
cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width, std::size_t height,
                         cudaMemcpyKind) {
    if (width > to_pitch || width > from_pitch) return error(cudaErrorInvalidPitchValue);
    if (width && height) done(python.copy(number(to), to_pitch, number(from), from_pitch, width, height));
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy2D(to, to_pitch, from, from_pitch, width, height, kind);
}
cudaError_t cudaMemset2D(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height) {
    if (width > pitch) return error(cudaErrorInvalidPitchValue);
    if (width && height) done(python.set(number(to), pitch, value & 255, width, height));
    return cudaSuccess;
}
cudaError_t cudaMemset2DAsync(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height, cudaStream_t) {
    return cudaMemset2D(to, pitch, value, width, height);
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) { return cudaMemset2D(to, bytes, value, bytes, 1); }
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) { return cudaMemset(to, value, bytes); }
void peerlane_multiply(const Product* product) { done(python.multiply(product)); }
// Hints.
cudaError_t cudaMemPrefetchAsync(const void*, std::size_t, cudaMemLocation, unsigned, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemAdvise(const void*, std::size_t, cudaMemoryAdvise, cudaMemLocation) { return cudaSuccess; }
cudaError_t cudaStreamSetAttribute(cudaStream_t, cudaStreamAttrID, const cudaStreamAttrValue*) { return cudaSuccess; }
cudaError_t cudaCtxResetPersistingL2Cache() { return cudaSuccess; }
cudaError_t cudaDeviceSetLimit(cudaLimit, std::size_t) { return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
    *address = reinterpret_cast<void*>(address_of(symbol));
    return cudaSuccess;
}
cudaError_t cudaGetSymbolSize(std::size_t* bytes, const void* symbol) {
    address_of(symbol);
    *bytes = variables.at(symbol).bytes;
    return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, std::size_t bytes, std::size_t offset, cudaMemcpyKind kind) {
    return cudaMemcpy(reinterpret_cast<void*>(address_of(symbol) + offset), from, bytes, kind);
}
cudaError_t cudaMemcpyToSymbolAsync(const void* symbol, const void* from, std::size_t bytes, std::size_t offset, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpyToSymbol(symbol, from, bytes, offset, kind);
}
cudaError_t cudaMemcpyFromSymbol(void* to, const void* symbol, std::size_t bytes, std::size_t offset, cudaMemcpyKind kind) {
    return cudaMemcpy(to, reinterpret_cast<void*>(address_of(symbol) + offset), bytes, kind);
}
cudaError_t cudaMemcpyFromSymbolAsync(void* to, const void* symbol, std::size_t bytes, std::size_t offset, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpyFromSymbol(to, symbol, bytes, offset, kind);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    *attributes = {};
    attributes->type = memory.holds(address) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    attributes->devicePointer = memory.holds(address) ? const_cast<void*>(address) : nullptr;
    return cudaSuccess;
}
CUresult cuMemGetAddressRange(CUdeviceptr* base, std::size_t* bytes, CUdeviceptr address) {
    std::uint64_t begin = 0;
    const Block* block = memory.find(address, begin);
    if (!block) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = begin;
    if (bytes) *bytes = block->bytes;
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    if (attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) return cuMemGetAddressRange(static_cast<CUdeviceptr*>(value), nullptr, address);
    if (attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE) return cuMemGetAddressRange(nullptr, static_cast<std::size_t*>(value), address);
    peerlane_missing(("cuPointerGetAttribute(" + std::to_string(attribute) + ")").c_str());
}

// Peers.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
    std::uint64_t begin = 0;
    Block* block = memory.find(number(address), begin);
    if (!block) return error(cudaErrorInvalidValue);
    block->exported = block->kept = true;
    done(python.exported(begin));
    IpcHandle made{};
    std::memcpy(made.magic, ipc_magic, sizeof made.magic);
    made.address = begin;
    std::memcpy(handle, &made, sizeof made);
    return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned) {
    IpcHandle made;
    std::memcpy(&made, &handle, sizeof made);
    if (std::memcmp(made.magic, ipc_magic, sizeof made.magic)) return error(cudaErrorInvalidValue);
    *address = reinterpret_cast<void*>(made.address);
    return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void*) { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attribute, int, int) {
    if (attribute != cudaDevP2PAttrAccessSupported && attribute != cudaDevP2PAttrNativeAtomicSupported)
        peerlane_missing(("cudaDeviceGetP2PAttribute(" + std::to_string(attribute) + ")").c_str());
    *value = 1;
    return cudaSuccess;
}

// Devices. Each rank has one, which has the number of the rank.
cudaError_t cudaGetDevice(int* device) {
    *device = peerlane_device();
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) {
    *count = python.world_size();
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaMemGetInfo(std::size_t*, std::size_t*) { peerlane_missing("cudaMemGetInfo"); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    const std::unordered_map<int, int> known{
        {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, python.shared_bytes},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, python.shared_bytes + 1024},
        {cudaDevAttrMultiProcessorCount, python.sm_count()},
        {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
        {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
        {cudaDevAttrMaxRegistersPerBlock, 65536},
        {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrCooperativeLaunch, 1},
        {cudaDevAttrUnifiedAddressing, 1},
        {cudaDevAttrCanMapHostMemory, 1},
        {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
        {cudaDevAttrClusterLaunch, 1},
        {cudaDevAttrConcurrentKernels, 1},
        {cudaDevAttrGlobalL1CacheSupported, 1},
        {cudaDevAttrLocalL1CacheSupported, 1},
        {cudaDevAttrManagedMemory, 1},
        {cudaDevAttrMaxBlockDimX, 1024},
        {cudaDevAttrMaxBlockDimY, 1024},
        {cudaDevAttrMaxBlockDimZ, 64},
        {cudaDevAttrMaxGridDimX, 2147483647},
        {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxGridDimZ, 65535},
        {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
        {cudaDevAttrMemoryPoolsSupported, 1},
        {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
        {cudaDevAttrStreamPrioritiesSupported, 1},
        {cudaDevAttrTotalConstantMemory, 64 << 10},
    };
    const auto found = known.find(attribute);
    if (found == known.end()) peerlane_missing(("cudaDeviceGetAttribute(" + std::to_string(attribute) + ")").c_str());
    *value = found->second;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    std::strcpy(properties->name, "emulated NVIDIA H100");
    properties->totalGlobalMem = std::size_t(80) << 30;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = python.shared_bytes;
    properties->sharedMemPerMultiprocessor = python.shared_bytes + 1024;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->major = 9;
    properties->multiProcessorCount = python.sm_count();
    properties->cooperativeLaunch = properties->unifiedAddressing = 1;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

// Streams and events. What they are asked for is over.
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    *stream = reinterpret_cast<cudaStream_t>(new char);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete reinterpret_cast<char*>(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* argument) {
    if (python.graph(graph_asks, 0)) peerlane_missing("cudaLaunchHostFunc in a capture");
    function(argument);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = python.graph(graph_asks, 0) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, std::size_t*) {
    if (id) *id = 1;
    return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    done(python.graph(graph_begins, 0) < 0);
    return cudaSuccess;
}
// Graphs have numbers. One that is instantiated stays as it was captured.
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
    const std::intptr_t made = python.graph(graph_ends, 0);
    done(made < 0);
    *graph = reinterpret_cast<cudaGraph_t>(made);
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
    *made = reinterpret_cast<cudaGraphExec_t>(graph);
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) { return cudaGraphInstantiate(made, graph, 0); }
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
    done(python.graph(graph_replays, static_cast<int>(number(graph))) < 0);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
// Words that a stream writes behind a fence, and waits for.
CUresult cuStreamWriteValue32_v2(CUstream, CUdeviceptr address, cuuint32_t value, unsigned) {
    done(python.word(address, value, -1));
    return CUDA_SUCCESS;
}
CUresult cuStreamWaitValue32_v2(CUstream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    done(python.word(address, value, flags & 3));
    return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
    for (const char* version : {"_v2", ""})
        if ((*function = dlsym(RTLD_DEFAULT, (std::string(name) + version).c_str()))) {
            if (result) *result = cudaDriverEntryPointSuccess;
            return cudaSuccess;
        }
    peerlane_missing(name);
}
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags, cudaDriverEntryPointQueryResult* result) {
    return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, result);
}
CUresult cuGetErrorString(CUresult code, const char** said) {
    *said = code == CUDA_SUCCESS ? "no error" : "an error of the CUDA driver";
    return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult code, const char** said) { return cuGetErrorString(code, said); }
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int number) {
    *device = number;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    return static_cast<CUresult>(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = reinterpret_cast<cudaEvent_t>(new char);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete reinterpret_cast<char*>(event);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) { stop("cudaEventElapsedTime is not known to the emulator, which measures no times"); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
}

// ---- torch

namespace c10::cuda {
namespace {
CUDAStream stream_of(DeviceIndex device) {
    return CUDAStream(CUDAStream::UNCHECKED, Stream(Stream::DEFAULT, Device(DeviceType::CUDA, device < 0 ? peerlane_device() : device)));
}
}  // namespace
CUDAStream getCurrentCUDAStream(DeviceIndex device) { return stream_of(device); }
CUDAStream getDefaultCUDAStream(DeviceIndex device) { return stream_of(device); }
CUDAStream getStreamFromPool(const bool, DeviceIndex device) { return stream_of(device); }
CUDAStream getStreamFromPool(const int, DeviceIndex device) { return stream_of(device); }
CUDAStream getStreamFromExternal(cudaStream_t, DeviceIndex device) { return stream_of(device); }
void setCurrentCUDAStream(CUDAStream) {}
cudaStream_t CUDAStream::stream() const { return nullptr; }
std::ostream& operator<<(std::ostream& out, const CUDAStream& stream) { return out << stream.unwrap(); }

DeviceIndex device_count() noexcept { return static_cast<DeviceIndex>(python.world_size()); }
DeviceIndex device_count_ensure_non_zero() { return device_count(); }
DeviceIndex current_device() { return peerlane_device(); }
void set_device(DeviceIndex, const bool) {}
void device_synchronize() {}
void warn_or_error_on_sync() {}
cudaError_t GetDeviceCount(int* count) { return cudaGetDeviceCount(count); }
cudaError_t GetDevice(DeviceIndex* device) {
    *device = peerlane_device();
    return cudaSuccess;
}
cudaError_t SetDevice(DeviceIndex, const bool) { return cudaSuccess; }
cudaError_t MaybeSetDevice(DeviceIndex) { return cudaSuccess; }
DeviceIndex ExchangeDevice(DeviceIndex) { return peerlane_device(); }
DeviceIndex MaybeExchangeDevice(DeviceIndex) { return peerlane_device(); }
void SetTargetDevice() {}
bool hasPrimaryContext(DeviceIndex) { return true; }
void c10_cuda_check_implementation(const std::int32_t code, const char* file, const char* function, const std::uint32_t line, const bool) {
    if (code != cudaSuccess) {
        const std::string name = cudaGetErrorName(static_cast<cudaError_t>(code));
        stop("CUDA error: " + name + " (" + function + ", " + file + ":" + std::to_string(line) + ")");
    }
}
namespace CUDACachingAllocator {
namespace {
// Takes and gives back memory; no stream has to be recorded, and no cache emptied.
struct RanksAllocator final : CUDAAllocator {
    using Index = c10::DeviceIndex;
    DataPtr allocate(std::size_t bytes) override { return ::allocator.allocate(bytes); }
    DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
    void* raw_alloc(std::size_t bytes) override { return memory.take(bytes); }
    void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t) override { return memory.take(bytes); }
    void raw_delete(void* address) override { release(address); }
    void recordStream(const DataPtr&, CUDAStream) override {}
    void emptyCache(MempoolId_t) override {}
    void init(int) override {}
    bool initialized() override { return true; }
    void enable(bool) override {}
    bool isEnabled() const override { return true; }
    std::string name() override { return "peerlane"; }
    void enablePeerAccess(Index, Index) override {}
    void* getBaseAllocation(void* address, std::size_t* bytes) override {
        std::uint64_t begin = 0;
        const Block* block = memory.find(number(address), begin);
        if (!block) stop("getBaseAllocation got an address that is not of the rank's memory");
        if (bytes) *bytes = block->bytes;
        return reinterpret_cast<void*>(begin);
    }
    cudaError_t memcpyAsync(void* to, int, const void* from, int, std::size_t bytes, cudaStream_t, bool) override {
        return cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
    }
#define MISSING(result, name, ...) \
    result name(__VA_ARGS__) override { peerlane_missing("c10::cuda::CUDACachingAllocator::" #name); }
    MISSING(CachingDeviceAllocator::DeviceStats, getDeviceStats, Index)
    MISSING(void, resetAccumulatedStats, Index)
    MISSING(void, resetPeakStats, Index)
    MISSING(double, getMemoryFraction, Index)
    MISSING(void, setMemoryFraction, double, Index)
    MISSING(std::vector<StreamSegmentSize>, getExpandableSegmentSizes, Index)
    MISSING(void, cacheInfo, Index, std::size_t*)
    MISSING(SnapshotInfo, snapshot, MempoolId_t, bool)
    MISSING(void, beginAllocateToPool, Index, MempoolId_t, std::function<bool(cudaStream_t)>)
    MISSING(void, endAllocateToPool, Index, MempoolId_t)
    MISSING(void, releasePool, Index, MempoolId_t)
    MISSING(ShareableHandle, shareIpcHandle, void*)
    MISSING(std::shared_ptr<void>, getIpcDevPtr, std::string)
    MISSING(void, recordHistory, bool, CreateContextFn, std::size_t, RecordContext, bool, const std::vector<std::string>&)
    MISSING(void, attachOutOfMemoryObserver, OutOfMemoryObserver)
    MISSING(void, attachOomRejectionObserver, OomRejectionObserver)
    MISSING(void, attachAllocatorTraceTracker, AllocatorTraceTracker)
    MISSING(std::shared_ptr<AllocatorState>, getCheckpointState, Index, MempoolId_t)
    MISSING(CheckpointDelta, setCheckpointPoolState, Index, std::shared_ptr<AllocatorState>)
#undef MISSING
} ranks;
}  // namespace
std::atomic<CUDAAllocator*> allocator{&ranks};
}  // namespace CUDACachingAllocator
}  // namespace c10::cuda

// Guards of torch's own operators, whose tensors are on the CPU. With a device, autograd would start a thread for it and forbid forks.
struct NoDevice : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
    c10::DeviceIndex deviceCount() const noexcept override { return 0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, NoDevice)

namespace at::cuda {
cudaDeviceProp* getDeviceProperties(c10::DeviceIndex device) {
    static cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, device);
    return &properties;
}
cudaDeviceProp* getCurrentDeviceProperties() { return getDeviceProperties(peerlane_device()); }
int warp_size() { return 32; }
bool canDeviceAccessPeer(c10::DeviceIndex, c10::DeviceIndex) { return true; }
c10::Allocator* getCUDADeviceAllocator() { return &allocator; }
}  // namespace at::cuda
