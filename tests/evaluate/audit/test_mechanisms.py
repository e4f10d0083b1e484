"""What audited calls and loaded code say about mechanisms. Kernels that were loaded and did not run are decoys, and called that."""

from peerlane.evaluate import wire
from peerlane.evaluate.audit.activity import activity
from peerlane.evaluate.audit.mechanisms import LoadedKernel, loaded_kernels, mechanisms

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name: str, *found: str, origin: str = "peerlane.device") -> LoadedKernel:
    return LoadedKernel(name, origin, frozenset(found))


def said(host: dict[str, int], device: dict[str, int], *loaded: LoadedKernel) -> dict[str, str]:
    return {item.name: item.confidence for item in mechanisms([activity(host, device)], loaded)}


def test_a_kernel_that_ran() -> None:
    ran = kernel("push", "tma", "sm_load_store")
    assert said({}, {"push": 1}, ran) == {"sm_load_store": "possible", "tma": "seen"}


def test_a_decoy_is_loaded_and_not_seen() -> None:
    decoy = kernel("push", "tma", "nvls", "sm_load_store")
    assert said({"c10d::allreduce_": 1}, {ALL_REDUCE: 1}, decoy) == {
        "sm_load_store": "loaded",
        "tma": "loaded",
        "nvls": "loaded",
        "nccl": "seen",
    }


def test_seen_outweighs_loaded() -> None:
    found = mechanisms([activity({}, {"b": 1})], [kernel("a", "tma"), kernel("b", "tma"), kernel("c", "tma")])
    assert [(item.name, item.confidence, item.evidence) for item in found] == [("tma", "seen", "instructions in peerlane.device kernel b")]


def test_copies() -> None:
    assert said({}, {"Memcpy PtoP (Device -> Device)": 1, "Memcpy DtoD (Device -> Device)": 1}) == {"copy_engine": "seen"}
    assert said({"cudaMemcpyPeerAsync": 1}, {"Memcpy DtoD (Device -> Device)": 1}) == {"copy_engine": "seen"}
    assert said({}, {"Memcpy DtoD (Device -> Device)": 1}) == {"copy_engine": "possible"}
    assert said({}, {"Memcpy HtoD (Pageable -> Device)": 1}) == {}


def test_a_kernel_of_unknown_code_may_do_anything() -> None:
    (found,) = mechanisms([activity({}, {"mystery": 1})], [])
    assert (found.name, found.confidence) == ("sm_load_store", "possible") and "mystery" in found.evidence
    assert said({}, {"nvjet_tst_128x256": 1, "void at::native::fill<int>(int)": 1}) == {}


def test_gloo_and_nccl_by_their_operators() -> None:
    assert said({"c10d::send": 1, "gloo:send": 1}, {}) == {"gloo": "seen"}
    assert said({"nccl:_all_gather_base": 1}, {}) == {"nccl": "seen"}


def test_unknown_mechanisms_are_left_out() -> None:
    loaded = loaded_kernels([wire.LoadedKernel("k", "triton", ["telepathy", "tma"])])
    assert said({}, {"k": 1}, *loaded) == {"tma": "seen"}
