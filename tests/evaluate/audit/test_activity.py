"""Names that the profiler records, sorted: kernels by whose they are, copies by their ends, operators of communication."""

import pytest

from peerlane.evaluate.audit.activity import activity, kernel_kind, most_per_call

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >"
    "(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
KINDS = {
    ALL_REDUCE: "nccl",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "nccl",
    "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymkDevWorkArgs4K)": "nccl",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": "nccl",
    ADD: "aten",
    "at::cuda::(anonymous namespace)::spin_kernel(long)": "aten",
    "void at_cuda_detail::cub::DeviceScanKernel<int>(int*)": "aten",
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT": "library",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x4_nn_align8>(cutlass::Params)": "library",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas": "library",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>)": "library",
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn": "library",
    "void gemv2T_kernel_val<int, int, float>(cublasGemvParamsEx<int>)": "library",
    "void regular_fft<256u, EPT<16u>, 16u, 16u>(kernel_arguments_t<unsigned int>)": "library",
    "triton_poi_fused_add_0": "triton",
    "fused_rms_norm": "triton",
    "two_shot": "own",
    "my_gemm_all_reduce": "own",
    "void (anonymous namespace)::push<c10::BFloat16, 4>(c10::BFloat16*, at::PackedTensorAccessor32<float, 1ul>)": "own",
}


@pytest.mark.parametrize("name", KINDS)
def test_whose_a_kernel_is(name: str) -> None:
    assert kernel_kind(name, {"fused_rms_norm"}) == KINDS[name]


def test_a_call_of_nccl() -> None:
    host = {"c10d::allreduce_": 1, "nccl:all_reduce": 1, "aten::clone": 1, "aten::copy_": 1, "cudaLaunchKernelExC": 1, "cudaMemcpyAsync": 1}
    found = activity(host, {ALL_REDUCE: 1, "Memcpy DtoD (Device -> Device)": 1, "Memset (Device)": 2})
    assert found.operators == {"c10d::allreduce_": 1, "nccl:all_reduce": 1} and found.other == 4
    assert found.kernels == {ALL_REDUCE: 1} and found.copies == {"same_gpu": 1} and found.memsets == 2
    assert found.forbidden() == ("c10d::allreduce_", "nccl:all_reduce", ALL_REDUCE)


def test_nccl_without_torch_is_seen_by_its_kernels() -> None:
    assert activity({"aten::empty": 1, "cuLaunchKernelEx": 1}, {ALL_REDUCE: 1}).forbidden() == (ALL_REDUCE,)


def test_own_kernels_with_a_library_s_matrix_product_are_allowed() -> None:
    host = {"aten::mm": 1, "cudaLaunchKernelExC": 1, "cuLaunchKernel": 1}
    found = activity(host, {"nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT": 1, "two_shot": 1, "Memcpy PtoP (Device -> Device)": 3})
    assert found.forbidden() == () and found.copies == {"peer": 3} and found.device_events == 5


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("symm_mem::one_shot_all_reduce", False),
        ("symm_mem::multimem_all_gather_out", False),
        ("symm_mem::fused_all_gather_matmul", False),
        ("symm_mem::nvshmem_put", False),
        ("symm_mem::get_remote_tensors", True),
        ("symm_mem::stream_write_value32_", True),
        ("c10d::send", False),
        ("gloo:barrier", False),
        ("peerlane:all_reduce", False),
        ("_c10d_functional::wait_tensor", True),
        ("aten::all_gather_of_my_own", True),
    ],
)
def test_symmetric_memory_may_be_used_and_its_collectives_may_not(name: str, allowed: bool) -> None:
    assert (activity({name: 1}, {}).forbidden() == ()) == allowed


def test_a_peer_copy_is_one_however_the_device_records_it() -> None:
    assert activity({"cudaMemcpyPeerAsync": 2}, {"Memcpy DtoD (Device -> Device)": 2}).copies == {"peer": 2, "same_gpu": 2}
    assert activity({"cudaMemcpyPeerAsync": 2}, {"Memcpy PtoP (Device -> Device)": 2}).copies == {"peer": 2}
    assert activity({}, {"Memcpy HtoD (Pageable -> Device)": 1, "Memcpy DtoH (Device -> Pinned)": 1}).copies == {"host": 2}


def test_copying_outputs_is_not_the_candidate_s() -> None:
    block = activity(
        {"aten::copy_": 4}, {ADD: 4, "two_shot": 4, "Memcpy DtoD (Device -> Device)": 4, "Memcpy PtoP (Device -> Device)": 8}, calls=4
    )
    kept = block.without_snapshots()
    assert kept.kernels == {"two_shot": 4} and kept.copies == {"peer": 8} and kept.calls == 4


def test_counts_are_per_call_and_rounded_up() -> None:
    assert most_per_call([{"own": 8, "aten": 1}, {"own": 1}], [4, 1]) == {"aten": 1, "own": 2}
    assert most_per_call([], []) == {}
