"""All-gather by CUDA IPC: every rank stores its bytes into all ranks' memory, and then the number of the call."""

import torch
import torch.distributed as dist
from utils.cuda_helpers import compile_cuda_extension

SOURCE = r"""
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>

static char* own = nullptr;
static std::vector<void*> opened;
static char** table = nullptr;  // in device memory
static unsigned calls = 0;

// Half of the memory is for odd calls: a rank may be one call ahead of another that still reads.
__global__ void push(char* const* peers, const char* in, int64_t bytes, int64_t half, int rank, int world, unsigned call) {
    char* to = peers[blockIdx.x] + 256 + (call & 1) * half + rank * bytes;
    for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = in[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        *reinterpret_cast<volatile unsigned*>(peers[blockIdx.x] + 4 * rank) = call;
    }
}

__global__ void take(char* const* peers, char* out, int64_t bytes, int64_t half, int rank, unsigned call) {
    const char* mine = peers[rank];
    if (threadIdx.x == 0) {
        while (*reinterpret_cast<const volatile unsigned*>(mine + 4 * blockIdx.x) < call) __nanosleep(20);
        __threadfence_system();
    }
    __syncthreads();
    const char* from = mine + 256 + (call & 1) * half + blockIdx.x * bytes;
    for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) out[blockIdx.x * bytes + i] = from[i];
}

torch::Tensor allocate(int64_t bytes) {
    C10_CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&own), 256 + bytes));
    C10_CUDA_CHECK(cudaMemset(own, 0, 256));
    auto handle = torch::empty({CUDA_IPC_HANDLE_SIZE}, torch::TensorOptions().dtype(torch::kUInt8));
    C10_CUDA_CHECK(cudaIpcGetMemHandle(reinterpret_cast<cudaIpcMemHandle_t*>(handle.data_ptr<uint8_t>()), own));
    return handle;
}

void open_peers(torch::Tensor handles, int64_t rank) {
    for (int64_t r = 0; r < handles.size(0); ++r) {
        void* peer = own;
        if (r != rank) {
            cudaIpcMemHandle_t handle;
            std::memcpy(&handle, handles[r].contiguous().data_ptr<uint8_t>(), sizeof(handle));
            C10_CUDA_CHECK(cudaIpcOpenMemHandle(&peer, handle, cudaIpcMemLazyEnablePeerAccess));
        }
        opened.push_back(peer);
    }
    C10_CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&table), opened.size() * sizeof(void*)));
    C10_CUDA_CHECK(cudaMemcpy(table, opened.data(), opened.size() * sizeof(void*), cudaMemcpyHostToDevice));
}

torch::Tensor all_gather(torch::Tensor x, int64_t half, int64_t rank) {
    const int64_t world = opened.size(), bytes = x.numel() * x.element_size();
    TORCH_CHECK(world * bytes <= half, "too large");
    std::vector<int64_t> shape = x.sizes().vec();
    shape.insert(shape.begin(), world);
    auto out = torch::empty(shape, x.options());
    if (bytes == 0) return out;
    auto stream = at::cuda::getCurrentCUDAStream();
    ++calls;
    push<<<world, 128, 0, stream>>>(table, static_cast<const char*>(x.data_ptr()), bytes, half, rank, world, calls);
    take<<<world, 128, 0, stream>>>(table, static_cast<char*>(out.data_ptr()), bytes, half, rank, calls);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("allocate", &allocate);
    m.def("open_peers", &open_peers);
    m.def("all_gather", &all_gather);
}
"""

extension = compile_cuda_extension("ipc_all_gather", SOURCE)
HALF = 1 << 20
ready = False


def solution(tensor):
    global ready
    if not ready:
        own = extension.allocate(2 * HALF).cpu()
        handles = [None] * dist.get_world_size()
        dist.all_gather_object(handles, own)
        extension.open_peers(torch.stack(handles), dist.get_rank())
        dist.barrier()
        ready = True
    return extension.all_gather(tensor.contiguous(), HALF, dist.get_rank())
