"""Matrix products of cuBLAS on emulated ranks: torch computes them on the CPU. Their matrices are copied as ``cudaMemcpyAsync`` copies, so
that copies of memory that other ranks use take part in races."""

import ctypes
from collections.abc import Callable, Sequence

import torch

from peerlane.emulator.cuda_graphs import recorded
from peerlane.emulator.ptx_front_end import NOT_KNOWN, UnknownPtx

_WORDS = ("a", "b", "c", "m", "n", "k", "lda", "ldb", "ldc", "stride_a", "stride_b", "stride_c")
_NUMBERS = ("batch", "transposes_a", "transposes_b", "type_a", "type_b", "type_c")
_TYPES = {0: torch.float32, 1: torch.float64, 2: torch.float16, 3: torch.int8, 10: torch.int32, 14: torch.bfloat16}
"""by cudaDataType"""
Move = Callable[[str, Sequence[tuple[int, int]], int, int], None]


class Product(ctypes.Structure):
    """The operands of a call of cuBLAS (``cuda_host/product.h``). Matrices are stored by columns, one behind the other by strides."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in _WORDS),
        *((name, ctypes.c_int32) for name in _NUMBERS),
        ("alpha", ctypes.c_double),
        ("beta", ctypes.c_double),
    )


def multiply(asked: Product, move: Move) -> None:
    """Does what a call asks for. ``move`` copies rows of bytes: name, places with their pitches, width and height."""
    name, kinds = asked.name.decode(), (asked.type_a, asked.type_b, asked.type_c)
    if unknown := [kind for kind in kinds if kind not in _TYPES]:
        raise UnknownPtx(f"{name} of cudaDataType {unknown[0]} {NOT_KNOWN}")
    types = [_TYPES[kind] for kind in kinds]
    wide = next((kind for kind in (torch.float64, torch.int32) if kind in types), torch.float32)
    alpha, beta = asked.alpha, asked.beta
    if wide is torch.int32:
        alpha, beta = int(alpha), int(beta)

    def copy(matrix: torch.Tensor, at: int, pitch: int, *, back: bool = False) -> torch.Tensor:
        """Copies a matrix to one of one column behind the other, or back."""
        places = [(matrix.data_ptr(), matrix.shape[1] * matrix.itemsize), (at, pitch * matrix.itemsize)]
        move(name, places[::-1] if back else places, matrix.shape[1] * matrix.itemsize, matrix.shape[0])
        return matrix

    def one(a: int, b: int, c: int) -> None:
        sizes_a, sizes_b = (asked.m, asked.k)[:: 1 if asked.transposes_a else -1], (asked.k, asked.n)[:: 1 if asked.transposes_b else -1]
        given_a = copy(torch.empty(sizes_a, dtype=types[0]), a, asked.lda)
        given_b = copy(torch.empty(sizes_b, dtype=types[1]), b, asked.ldb)
        result = torch.empty((asked.n, asked.m), dtype=types[2])
        if beta:
            copy(result, c, asked.ldc)

        def act() -> None:
            x = given_a if asked.transposes_a else given_a.t()
            y = given_b if asked.transposes_b else given_b.t()
            product = (x.to(dtype=wide) @ y.to(dtype=wide)).t() * alpha
            result.copy_(product + beta * result.to(dtype=wide) if beta else product)

        if not recorded(act):
            act()
        copy(result, c, asked.ldc, back=True)

    for number in range(asked.batch):
        places = [asked.a, asked.b, asked.c]
        strides = [asked.stride_a * types[0].itemsize, asked.stride_b * types[1].itemsize, asked.stride_c * types[2].itemsize]
        one(*(place + number * stride for place, stride in zip(places, strides, strict=True)))
