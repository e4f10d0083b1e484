"""Host code that uses much of torch's CUDA side in C++: streams, events, the allocator, products, cuBLAS' handle, checks and operators."""

import torch
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <torch/extension.h>
#include <torch/library.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

__global__ void twice(const float* in, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2 * in[i];
}

torch::Tensor side_stream(torch::Tensor x) {  // 2 x
    c10::cuda::CUDAGuard device(x.device());
    const auto side = c10::cuda::getStreamFromPool(true, x.get_device());
    at::cuda::CUDAEvent ready, done;
    ready.record(at::cuda::getCurrentCUDAStream());
    auto out = torch::empty({x.numel()}, torch::TensorOptions().dtype(torch::kFloat32).device(torch::kCUDA));
    {
        c10::cuda::CUDAStreamGuard guard(side);
        ready.block(side);
        twice<<<1, 32, 0, side.stream()>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.numel());
        C10_CUDA_KERNEL_LAUNCH_CHECK();
        c10::cuda::CUDACachingAllocator::recordStream(out.storage().data_ptr(), side);
        out.record_stream(side);
        done.record(side);
    }
    done.block(at::cuda::getCurrentCUDAStream());
    AT_CUDA_CHECK(cudaStreamSynchronize(side));
    c10::cuda::CUDACachingAllocator::raw_delete(c10::cuda::CUDACachingAllocator::raw_alloc(256));
    c10::cuda::CUDACachingAllocator::emptyCache();
    return out;
}

torch::Tensor products(torch::Tensor a, torch::Tensor b) {  // 3 a b
    const float one = 1, beta = 1;
    auto out = at::matmul(a, b) + torch::mm(a, b);
    const auto handle = at::cuda::getCurrentCUDABlasHandle();
    TORCH_CUDABLAS_CHECK(cublasSetStream(handle, at::cuda::getCurrentCUDAStream()));
    const int m = a.size(0), k = a.size(1), n = b.size(1);
    TORCH_CUDABLAS_CHECK(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, n, m, k, &one, b.data_ptr<float>(), n, a.data_ptr<float>(), k, &beta,
                                     out.data_ptr<float>(), n));
    return out;
}

struct Captured {  // adds 1, doubles, and takes the largest, in one graph
    torch::Tensor x, out, largest, place;
    cudaGraphExec_t graph = nullptr;
    explicit Captured(torch::Tensor x) : x(x) {
        const auto stream = at::cuda::getCurrentCUDAStream();
        cudaGraph_t made;
        out = torch::empty_like(x), largest = torch::empty({}, x.options()), place = torch::empty({}, x.options().dtype(torch::kLong));
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
        auto sum = x + 1;
        twice<<<1, 32, 0, stream>>>(sum.data_ptr<float>(), out.data_ptr<float>(), x.numel());
        out.add_(x);
        at::max_out(largest, place, out, 0);
        cudaStreamEndCapture(stream, &made);
        cudaGraphInstantiate(&graph, made, 0);
    }
    std::vector<torch::Tensor> run(int times) {
        for (int i = 0; i < times; ++i) cudaGraphLaunch(graph, at::cuda::getCurrentCUDAStream());
        return {out, largest};
    }
    torch::Tensor squared() { return x * x; }
};
"""

BINDING = """PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("products", &products);
    py::class_<Captured>(m, "Captured").def(py::init<torch::Tensor>()).def("run", &Captured::run).def("squared", &Captured::squared);
}
TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("side_stream(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) { m.impl("side_stream", &side_stream); }
"""

extension = load_inline("torch_cpp", "", SOURCE + BINDING)


def solution(x, a, b):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = extension.products(a, b)
    graph.replay()
    product = replayed.clone()
    a.mul_(2)
    graph.replay()
    captured = extension.Captured(x)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        squared = captured.squared()
    x.add_(1)
    graph.replay()
    out, largest = captured.run(2)
    return torch.ops.torch_cpp.side_stream(x), product, replayed, squared, out, largest
