"""Host side of ``peerlane/tiles/roles.cuh``: the shape of a launch, and whether its blocks can all be resident.

Blocks of a fused kernel wait for other ranks' blocks. One that is not resident can not be waited for, so a grid that does not fit is
refused before it is launched, rather than found out by a deadline."""

from dataclasses import dataclass

from peerlane.errors import LaunchError

GROUP_THREADS = 128
SHARED_LIMIT_BYTES = 232448
"""Dynamic shared memory that a block of compute capability 9.0 can have."""

# Per SM of compute capability 9.0 (CUDA programming guide, technical specifications per compute capability).
_SM_THREADS, _SM_BLOCKS, _SM_REGISTERS, _SM_SHARED_BYTES = 2048, 32, 65536, 233472
_RESERVED_SHARED_BYTES = 1024  # of every block
_WARP_REGISTER_UNIT = 256


@dataclass(frozen=True)
class BlockNeeds:
    """What one block takes of an SM. ``registers`` are per thread, as the compiler reports them."""

    threads: int
    registers: int
    shared_bytes: int

    def per_sm(self) -> int:
        """Blocks that one SM can hold."""
        warps = -(-self.threads // 32)
        warp_registers = -(-self.registers * 32 // _WARP_REGISTER_UNIT) * _WARP_REGISTER_UNIT
        return min(
            _SM_BLOCKS,
            _SM_THREADS // (warps * 32),
            _SM_REGISTERS // max(1, warp_registers * warps),
            _SM_SHARED_BYTES // (self.shared_bytes + _RESERVED_SHARED_BYTES) if self.shared_bytes <= SHARED_LIMIT_BYTES else 0,
        )


def require_resident(name: str, grid: int, needs: BlockNeeds, sm_count: int) -> None:
    """Raise LaunchError unless ``grid`` blocks fit on ``sm_count`` SMs that run nothing else."""
    limit = needs.per_sm() * sm_count
    if grid > limit:
        raise LaunchError(
            f"kernel {name!r}: {grid} blocks wait for other ranks, but only {limit} can be resident "
            f"({needs.per_sm()} per SM on {sm_count} SMs, each of {needs.threads} threads with {needs.registers} registers and "
            f"{needs.shared_bytes} bytes of shared memory); launch at most {limit} blocks and let each do more tiles"
        )
