// What host code of kernels takes from torch's header: streams, devices and their properties. Of the libraries' handles there is cuBLAS'.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

namespace at::cuda {

inline std::int64_t getNumGPUs() { return c10::cuda::device_count(); }
inline bool is_available() { return c10::cuda::device_count() > 0; }
cudaDeviceProp* getCurrentDeviceProperties();
cudaDeviceProp* getDeviceProperties(c10::DeviceIndex device);
int warp_size();
bool canDeviceAccessPeer(c10::DeviceIndex device, c10::DeviceIndex peer_device);
c10::Allocator* getCUDADeviceAllocator();
cublasHandle_t getCurrentCUDABlasHandle(bool setup = true);

}  // namespace at::cuda
