"""The gated delta rule: its recurrence, the same in chunks, and the error model of what computes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families.matmul import BF16, FLOP_UNIT, FP32

# Tokens that are prepared together before the state runs through them: bounds memory. A multiple of every chunk's size.
_SEGMENT = 2048
_SIZE = "the scale of an output: its error if each token of the recurrence were rounded once to relative precision 1"


@dataclass(frozen=True)
class Tokens:
    """Consecutive tokens of some sequences (all leading axes), ready for the recurrence, in one floating dtype.

    With M the state (K, V), zero before the first token:
    M <- diag(exp(log_decay_t)) M; u_t = beta_t (v_t - M^T k_t); M <- M + k_t u_t^T; o_t = M^T q_t.

    Attributes:
        q, k: (..., L, K), normalised and scaled.
        v: (..., L, V).
        log_decay: (..., L, K), or (..., L, 1) where all channels decay alike; not positive.
        beta: (..., L, 1).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor

    def chunked(self, size: int) -> Tokens:
        """With (chunks, size) in place of L; the last chunk is filled with tokens that change nothing."""
        length = self.q.shape[-2]
        chunks = -(-length // size)

        def split(tensor: torch.Tensor) -> torch.Tensor:
            padded = torch.nn.functional.pad(tensor, (0, 0, 0, chunks * size - length))
            return padded.view(*tensor.shape[:-2], chunks, size, tensor.shape[-1])

        return Tokens(split(self.q), split(self.k), split(self.v), split(self.log_decay), split(self.beta))


def normalised(x: torch.Tensor, floor: float) -> torch.Tensor:
    """x / max(|x|, floor) along the last axis."""
    size: torch.Tensor = x.norm(dim=-1, keepdim=True)
    return x / size.clamp(min=floor)


def recurrence(tokens: Tokens, *, corrected: bool = True, read_first: bool = False) -> torch.Tensor:
    """o (..., L, V) token by token, as the definition has it.

    Two mistakes: if not ``corrected``, u_t = beta_t v_t, which is linear attention; ``read_first``, o_t misses the write of token t.
    """
    state = torch.zeros((*tokens.q.shape[:-2], tokens.q.shape[-1], tokens.v.shape[-1]), dtype=tokens.q.dtype, device=tokens.q.device)
    outputs = []
    for t in range(tokens.q.shape[-2]):
        key, query = tokens.k[..., t, :, None], tokens.q[..., t, :, None]
        state = state * torch.exp(tokens.log_decay[..., t, :, None])
        held = (state * key).sum(-2) if corrected else 0.0
        written = tokens.beta[..., t, :] * (tokens.v[..., t, :] - held)
        after = state + key * written.unsqueeze(-2)
        outputs.append(((state if read_first else after) * query).sum(-2))
        state = after
    return torch.stack(outputs, -2)


def _decayed_products(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor, matmul: Callable[..., torch.Tensor]) -> torch.Tensor:
    """sum over c of a[i, c] b[j, c] exp(total[i, c] - total[j, c]) for j <= i within every chunk, and zero above the diagonal.

    Decay by channel is divided among the factors, about the middle of its range, which the chunk's size keeps within the dtype's.
    """
    if total.shape[-1] == 1:
        difference = total - total.transpose(-1, -2)
        future = torch.ones(difference.shape[-2:], dtype=torch.bool, device=a.device).triu_(1)
        return matmul(a, b.transpose(-1, -2)) * torch.exp(difference.masked_fill(future, -torch.inf))
    centred = total - 0.5 * (total[..., :1, :] + total[..., -1:, :])
    return matmul(a * torch.exp(centred), (b * torch.exp(-centred)).transpose(-1, -2)).tril()


def chunked_delta_rule(
    tokens: Callable[[slice], Tokens],
    length: int,
    *,
    first: int = 0,
    matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
    with_scale: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o of the tokens from ``first`` on, of ``length`` from the start of the sequence; ``tokens`` prepares some of them.

    Within a chunk that begins with state M, with G_t the decay since then and A_ts = k_t^T (G_t / G_s) k_s, the writes u solve the
    unit triangular system u_t + beta_t sum_{s < t} A_ts u_s = beta_t (v_t - M^T G_t k_t), all tokens at once; only M passes from chunk to
    chunk (Yang et al., "Gated Delta Networks", and "Kimi Linear" for decay by channel).

    The second result, if asked for, is the scale (..., tokens, 1) of the elements of o, which add q_c M_cv over c: the root of the sum of
    q_c^2 |M_c|^2 / V, where |M_c| is the largest norm of a row of M before and after the chunk, and of what the chunk writes into it.
    """
    state: torch.Tensor | None = None
    outputs, scales = [], []
    for start in range(0, length, _SEGMENT):
        part = tokens(slice(start, min(start + _SEGMENT, length)))
        if state is None:
            state = part.q.new_zeros((*part.q.shape[:-2], part.q.shape[-1], part.v.shape[-1]))
        needed = start + part.q.shape[-2] > first
        for step in _chunks(part.chunked(_chunk_size(part)), matmul):
            writes = step.writes - matmul(step.erasers, state)
            after = step.decay * state + matmul(step.carriers, writes)
            if needed:
                outputs.append(matmul(step.readers, state) + matmul(step.weights, writes))
            if needed and with_scale:
                written = (step.keys.abs() * writes.norm(dim=-1, keepdim=True)).amax(-2)
                largest = torch.stack([state.norm(dim=-1), after.norm(dim=-1), written]).amax(0)
                scales.append((step.queries * largest.unsqueeze(-2)).norm(dim=-1, keepdim=True) * state.shape[-1] ** -0.5)
            state = after
    # Segments are multiples of chunks, so that filling occurs at the very end alone.
    skipped = first // _SEGMENT * _SEGMENT
    kept = slice(first - skipped, length - skipped)
    return torch.cat(outputs, -2)[..., kept, :], torch.cat(scales, -2)[..., kept, :] if with_scale else None


def sized_delta_rule(
    tokens: Callable[[slice], Tokens], shards: Sequence[torch.Tensor], length: int, *, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """o as :func:`chunked_delta_rule` gives it, and the scale (..., tokens, V) of its elements, where channels of v differ in size.

    ``shards``: v (B, L, heads, V) of the ranks whose tokens make up the sequence. Every channel of every head is divided by its root mean
    square, and o and the scale are multiplied by it, for o is linear in v.
    """
    squares = torch.stack([torch.linalg.vector_norm(v, dim=(0, 1), dtype=torch.float64) for v in shards]).square().sum(0)
    sizes = torch.where(squares > 0, squares.sqrt(), 1.0).unsqueeze(-2)

    def equal(part: slice) -> Tokens:
        plain = tokens(part)
        return dataclasses.replace(plain, v=plain.v / sizes)

    o, scale = chunked_delta_rule(equal, length, first=first, with_scale=True)
    assert scale is not None
    return o * sizes, scale * sizes


def _chunk_size(tokens: Tokens) -> int:
    """64, but 32 for decay by channel in float32: the inverse of a chunk's decay, e^-5 a token at worst, must be finite."""
    return 32 if tokens.log_decay.shape[-1] > 1 and tokens.q.dtype == FP32 else 64


@dataclass(frozen=True)
class _Chunk:
    """What turns the state before a chunk into its outputs and the state after it: see :func:`chunked_delta_rule`.

    writes (C, V) if the state were zero; erasers (C, K), which take the state away from them; readers (C, K) and weights (C, C), which give
    outputs from the state and the writes; carriers (K, C), which add the writes to the decayed state; decay (K, 1) or (1, 1);
    the tokens' queries and keys (C, K).
    """

    writes: torch.Tensor
    erasers: torch.Tensor
    readers: torch.Tensor
    weights: torch.Tensor
    carriers: torch.Tensor
    decay: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor


def _chunks(tokens: Tokens, matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Iterator[_Chunk]:
    total = tokens.log_decay.cumsum(-2)
    last = total[..., -1:, :]
    system = (tokens.beta * _decayed_products(tokens.k, tokens.k, total, matmul)).tril(-1)
    right = tokens.beta * torch.cat([tokens.v, tokens.k * torch.exp(total)], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    writes, erasers = solved.split([tokens.v.shape[-1], tokens.k.shape[-1]], -1)
    readers = tokens.q * torch.exp(total)
    weights = _decayed_products(tokens.q, tokens.k, total, matmul)
    carriers = (tokens.k * torch.exp(last - total)).transpose(-1, -2)
    decay = torch.exp(last).transpose(-1, -2)
    axis = tokens.q.dim() - 3
    parts = (writes, erasers, readers, weights, carriers, decay, tokens.q, tokens.k)
    for one in zip(*(part.unbind(axis) for part in parts), strict=True):
        yield _Chunk(*one)


def remembers(case: pc.Case) -> bool:
    """Whether earlier ranks' tokens make a difference: they are neither overwritten nor have they decayed."""
    return case.params.get("pattern") not in ("repeated", "fast")


def chunked_steps(states: int, tokens: float, moved: float, ranks: int, depths: tuple[int, int], dtype: torch.dtype) -> pc.Steps:
    """Steps of a chunked delta rule along sharded sequences: a rank has so many states (K, V), and ``tokens`` of all of them.

    Chunks have 64 tokens. Each rank finds the state that its tokens leave, with their transition (K, K), passes both on, and runs again
    from the state before. Sources: Yang et al., "Gated Delta Networks", and flash-linear-attention, which has a kernel for each step.
    ``moved``: bytes of all arguments and results. The latency of a chunk's dependent products is not measured, and left out.
    """
    (key, value), chunk, size, unit = depths, 64, dtype.itemsize, FLOP_UNIT[dtype]
    solved, kept = tokens * (key + value) * size, tokens * key * value * size / chunk
    return (
        pc.step("chunks apart", hbm=moved + solved, flops={unit: tokens * (2 * chunk * (3 * key + value) + chunk**2)}),
        pc.step("state and transition of the shard", hbm=solved + tokens * key * size, flops={unit: tokens * 4 * key * (key + value)}),
        pc.step("states from rank to rank", link=states * key * (key + value) * size * (ranks > 1), barriers=ranks - 1),
        pc.step("states of all chunks", hbm=2 * solved + kept, flops={unit: tokens * 4 * key * value}),
        pc.step("outputs", hbm=2 * solved + kept, flops={unit: 2 * tokens * (key * value + chunk * (key + value))}),
    )


def rounded_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product of bfloat16 operands accumulated in float32, as tensor cores compute it."""
    return torch.matmul(a.to(BF16).to(FP32), b.to(BF16).to(FP32))


def delta_tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """The magnitude is the scale of an output's elements, see :func:`sized_delta_rule`.

    In bfloat16 tensor cores round q, k, u, the state and the weights, k and u more than once, each of which leaves 0.43 u (1.7e-3) of the
    scale on average: 5e-3 in all, and the largest of a million elements has five times that; the bounds are three to four times as large.
    In float32 the roundings of sums within chunks and of decays remain: 1e-6 at most, and more in a long sequence that does not decay.
    """
    u = pc.UNIT_ROUNDOFF[case.dtype]
    if case.dtype == BF16:
        return {"output": pc.Tolerance(relative=2 * u, magnitude=20 * u, normwise=1.75e-2, size=_SIZE)}
    return {"output": pc.Tolerance(relative=2 * u, magnitude=3e-5, normwise=1.5e-5, size=_SIZE)}
