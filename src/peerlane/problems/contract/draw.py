"""Random inputs for one slot on one rank.

Contents (what is in the tensors) come from two generators: one private to the rank, one equal on all ranks. They are seeded
from a secret and are new for every slot of every block. Layout (split sizes, ragged lengths: everything that decides a shape or
a host-side number) comes from ``layout``, which is public, equal on all ranks and constant for a slot, so that slots keep their
shapes when their contents change.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

RANDOM = "random"
INTEGER = "integer"
_SHARED = -1  # in place of a rank: contents that all ranks draw alike

_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23  # of float32


def _seed(*parts: object) -> int:
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


def seeded_generator(device: torch.device, seed: int) -> torch.Generator:
    """On the device; for the meta device, where nothing is drawn, one on the CPU."""
    return torch.Generator(device="cpu" if device.type == "meta" else device).manual_seed(seed)


@dataclass(frozen=True)
class _Numbers:
    """Compared as they are written: 1 is not 1.0, and 0.0 is not -0.0."""

    written: str
    values: Any = field(compare=False)


def constant(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``torch.tensor(values, dtype, device)``, not to be changed in place: copied to the device once, for that takes the host as long as
    drawing something, and cannot be captured."""
    return _constant(_Numbers(repr(values), values), device, dtype)


@functools.lru_cache(maxsize=4096)  # many more than one block has: captured graphs read them
def _constant(numbers: _Numbers, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.tensor(numbers.values, device=device, dtype=dtype)


class BlockGenerators:
    """The two generators of a block, from which its slots are drawn one behind the other, in place of two new ones for every slot.

    Work that draws from them can be captured into a CUDA graph and replayed for another block: seeds are then read from device memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.private, self.shared = seeded_generator(device, 0), seeded_generator(device, 0)
        self.odd = torch.zeros((), device=device)
        """1 in a block of odd number"""

    def begin(self, *, secret: str, case_key: str, block: int, rank: int) -> None:
        """What is drawn from now on is of this block."""
        self.private.manual_seed(_seed(secret, case_key, block, rank))
        self.shared.manual_seed(_seed(secret, case_key, block, _SHARED))
        self.odd.fill_(block % 2)


class Draw:
    """A source of tensors for :attr:`Problem.inputs`.

    Attributes:
        kind: ``"random"`` or ``"integer"``. In an integer draw every float tensor holds small integers, few enough that all partial sums
            are exact in the working dtype; the answer is then compared bit for bit.
        device: where the tensors live; on the meta device they have shapes and no contents.
        generators: of the block, begun for it, where its slots are drawn in their order; by default those of this slot alone.
    """

    def __init__(
        self,
        *,
        secret: str,
        case_key: str,
        slot: int,
        block: int,
        rank: int,
        kind: str = RANDOM,
        device: torch.device | str = "cpu",
        generators: BlockGenerators | None = None,
    ) -> None:
        self.kind = kind
        self.device = torch.device(device)
        self.generators = generators
        self._seeds = (secret, case_key, block, slot)
        self._owner = rank

    @functools.cached_property
    def layout(self) -> random.Random:
        """Decides shapes and host-side numbers: equal on all ranks, constant for a slot, not secret."""
        _, case_key, _, slot = self._seeds
        return random.Random(_seed("layout", case_key, slot))

    @property
    def fixed(self) -> bool:
        """Whether nobody has asked for ``layout``, so that every slot has what was drawn here in the same shapes."""
        drawn = vars(self)
        return "layout" not in drawn and ("shared" not in drawn or self.shared.fixed)

    @functools.cached_property
    def shared(self) -> Draw:
        """A Draw whose contents are equal on all ranks. All of them must draw the same from it, one behind the other, whatever they use:
        slots may be drawn from one generator."""
        secret, case_key, block, slot = self._seeds
        same = {"kind": self.kind, "device": self.device, "generators": self.generators}
        return type(self)(secret=secret, case_key=case_key, slot=slot, block=block, rank=_SHARED, **same)  # type: ignore[arg-type]

    @functools.cached_property
    def _generator(self) -> torch.Generator:
        if self.generators is not None:
            return self.generators.shared if self._owner == _SHARED else self.generators.private
        return seeded_generator(self.device, _seed(*self._seeds, self._owner))

    @property
    def integer(self) -> bool:
        """True when this draw is to be exact in the working dtype."""
        return self.kind == INTEGER

    def normal(self, shape: Sequence[int], dtype: torch.dtype, *, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        """N(shift, scale^2), drawn in float32 and rounded to ``dtype``."""
        # CUDA kernels draw narrow floats in float32 and round them on the way out. Those of CPUs draw in the narrow dtype: too coarse.
        one_kernel = self.device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
        values = torch.empty(tuple(shape), device=self.device, dtype=dtype if one_kernel else torch.float32)
        return values.normal_(shift, scale, generator=self._generator).to(dtype)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, *, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """U[low, high), drawn in float32 and rounded to ``dtype``."""
        values = torch.empty(tuple(shape), device=self.device, dtype=torch.float32)
        return values.uniform_(low, high, generator=self._generator).to(dtype)

    def apart(self, shape: Sequence[int], *, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """Like :meth:`uniform` in float32, but in the lower or the upper 35 % of the range, by turns from block to block.

        For what decides the size of an answer of a few numbers: the answers of two successive calls must not agree by chance.
        """
        secret, case_key, block, slot = self._seeds
        turn = _seed("turn", secret, case_key, slot) % 2
        odd: int | torch.Tensor = block % 2 if self.generators is None else self.generators.odd
        start = low + 0.65 * (high - low) * (odd - turn) ** 2
        return self.uniform(shape, torch.float32, high=0.35 * (high - low)).add_(start)

    def integers(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers in [low, high), stored in any dtype that can hold them."""
        values = torch.randint(low, high, tuple(shape), generator=self._generator, device=self.device, dtype=torch.int64)
        return values.to(dtype)

    def bits(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Random bit patterns of ``dtype``: NaN payloads, infinities and signed zeros included. For answers that only move data."""
        word = _BYTES[dtype.itemsize]
        info = torch.iinfo(word)
        low, high = (info.min, info.max) if dtype.itemsize == 8 else (info.min, info.max + 1)
        words = torch.randint(low, high, tuple(shape), generator=self._generator, device=self.device, dtype=word)
        return words.view(dtype)

    def sparse_signs(self, shape: Sequence[int], dtype: torch.dtype, *, terms: int, limit: int = 256) -> torch.Tensor:
        """Entries in {-1, 0, 1}, sparse enough that a sum of ``terms`` products of two such tensors stays exact.

        The density d makes the standard deviation of the sum, sqrt(terms) d, an eighth of ``limit`` (256: the largest integer up to which
        all integers are exact in bfloat16).
        """
        density = min(2 / 3, limit / 8 / max(terms, 1) ** 0.5)
        uniform = torch.rand(tuple(shape), generator=self._generator, device=self.device, dtype=torch.float32)
        signs = torch.zeros_like(uniform)
        signs[uniform < density / 2] = -1.0
        signs[uniform >= 1 - density / 2] = 1.0
        return signs.to(dtype)

    def octaves(self, shape: Sequence[int], *, most: int = 4) -> torch.Tensor:
        """Powers of two in float32, 2^-most to 2^most, every exponent as often as another.

        For channels that differ in size as those of real activations do: multiplied by these in one operand and divided by them in the
        other, a product and its rounding errors stay what they were, bit for bit, but what is sent between ranks no longer fits a code of
        few bits that has one scale for many neighbours.
        """
        low, high = _EXPONENT_BIAS - most, _EXPONENT_BIAS + most + 1
        exponents = torch.randint(low, high, tuple(shape), generator=self._generator, device=self.device, dtype=torch.int32)
        return exponents.bitwise_left_shift_(_MANTISSA_BITS).view(torch.float32)

    def permutation(self, count: int) -> torch.Tensor:
        """A random permutation of range(count), int64."""
        return torch.randperm(count, generator=self._generator, device=self.device)
