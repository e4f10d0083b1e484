"""The examples of NCCL's device API, and a broken twin of each: by one change, with the verdicts that it may get on emulated ranks."""

from pathlib import Path

from device.nvshmem_candidates import Twin

EXAMPLES = Path(__file__).parents[2] / "examples" / "nccl"
PROMPT = Path(__file__).parents[2] / "src/peerlane/generate/prompts/examples/difference_nccl.py"
_SYNC = "    barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);"
_RACE = ("unstable",)
ON_GPUS = ("unstable", "wrong_result", "correct")
"""Verdicts that a twin may get there, where a race may be won."""

TWINS = (
    Twin(
        "1_relaxed_barrier_nccl",
        "1_allreduce_nccl.py",
        f"{_SYNC}\n    const ELEMENT* sums",
        f"{_SYNC.replace('acq_rel', 'relaxed')}\n    const ELEMENT* sums",
        _RACE,
        EXAMPLES,
    ),
    Twin("8_no_barrier_behind_stores_nccl", "8_alltoall_nccl.py", f"{_SYNC}  // all messages have arrived", "", _RACE, EXAMPLES),
    Twin(
        "12_no_barrier_at_the_end_nccl",
        "12_allgather_gemm_nccl.py",
        f"{_SYNC}  // nobody reads this rank's shard any more",
        "",
        _RACE,
        EXAMPLES,
    ),
    Twin(
        "27_reads_rows_of_other_blocks_nccl",
        "27_moe_all2all_primitive_nccl.py",
        "(row - begin) % gridDim.x != blockIdx.x",
        "(row - first) % gridDim.x != blockIdx.x",
        _RACE,
        EXAMPLES,
    ),
    Twin(
        "87_meets_other_blocks_nccl",
        "87_conv2d_patch_parallel_halo_nccl.py",
        "ncclTeamTagLsa(), blockIdx.x);",
        "ncclTeamTagLsa(), (blockIdx.x + comm.lsaRank) % gridDim.x);",
        _RACE,
        EXAMPLES,
    ),
)
