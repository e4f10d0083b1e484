"""Gradients of attention over a sequence that is sharded across ranks, by the kernels of ``attention_backward.cuh``.

Each rank gets some heads of the whole sequence, computes their gradients, and sends them back. So 7 (W - 1) / W shards of one tensor move,
where gathering dout, q, k and v moves 4 (W - 1). Every rank has the same work under a causal mask. Heads come
in pieces, which travel while others are computed."""

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from peerlane.device.attention.backward import PADDING, Gradients, attention_backward, gradients, pad_numbers, query_numbers
from peerlane.device.attention.forward import Sizes, aligned, supports
from peerlane.device.attention.head_exchange import HeadShape, head_exchange
from peerlane.device.collectives.communicator import Communicator, communicator
from peerlane.device.collectives.reductions import Reduction
from peerlane.device.host.group import Group, per_group
from peerlane.device.host.group_of import group_of
from peerlane.device.host.side_stream import side_stream
from peerlane.errors import UsageError

_SCORES_AT_ONCE = 1 << 28
_MEAN = Reduction("avg")
_TILE, _FILLS = 128, 1.5
"""Rows of a large tile of the kernels; how many tiles of a piece there should be for each SM."""


def attend_over_ranks_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logarithms: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    group: Group | dist.ProcessGroup | None = None,
    replicas: Group | dist.ProcessGroup | None = None,
) -> Gradients:
    """Collective: gradients of :func:`peerlane.device.attention.ring.attend_over_ranks` with respect to this rank's q, k and v.

    All tensors are this rank's shards; ``out`` and ``logarithms`` are what it returned. Gradients are the same in every call.

    Where the ranks divide the key heads, each rank computes some heads of the whole sequence, and the results lie in the arena, valid until
    the next call of this shape. Otherwise shards are gathered and each rank computes its own. What the tensor cores' kernel does not take,
    such as float32, is computed by torch. With ``replicas`` gradients are averaged over the ranks of that group, which hold the same shards
    of other sequences."""
    several = None if replicas is None or (copies := group_of(replicas)).world_size == 1 else communicator(copies)
    ring = group_of(group)
    if not supports(q, k, v):
        if len({tensor.shape for tensor in (dout, q, k, v)}) > 1:
            raise UsageError(
                f"gradients of attention in {q.dtype} with q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}: "
                "expected one shape; repeat shared key heads, or convert the tensors to bfloat16"
            )
        return _average(
            several, _wide(ring, (dout, q, k, v), logarithms, (dout.float() * out.float()).sum(-1).transpose(1, 2), scale, causal)
        )
    if ring.world_size == 1:
        return _average(several, attention_backward(dout, q, k, v, out, logarithms, scale=scale, causal=causal, group=ring))
    numbers = own_numbers(ring, q.shape[0], q.shape[2], -(-q.shape[1] // PADDING) * PADDING)
    known = Known(dout, q, k, v, query_numbers(ring, dout, out, logarithms, numbers), scale, causal)
    if k.shape[2] % ring.world_size == 0:
        return _by_heads(ring, known, several)
    return _average(several, _gathered(ring, known))


@per_group
def own_numbers(ring: Group, batch: int, heads: int, padded: int) -> torch.Tensor:
    """Memory for the numbers of a rank's queries, the same in every call."""
    return torch.empty((2, batch, heads, padded), dtype=torch.float32, device=ring.device)


@dataclass(frozen=True)
class Known:
    """What this rank knows: its shards, the numbers of its queries, and how scores are made."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    numbers: torch.Tensor
    scale: float | None
    causal: bool


def _average(replicas: Communicator | None, gradients: Gradients) -> Gradients:
    """The gradients, averaged in place."""
    if replicas is not None:
        for gradient in gradients:
            replicas.all_reduce(gradient, reduction=_MEAN)
    return gradients


def pieces(shape: HeadShape, world_size: int, sm_count: int) -> int:
    """How many pieces a rank's heads come in: the more, the more of the exchanges is hidden, while tiles of a piece fill the SMs."""
    tiles = shape.batch * (shape.heads // world_size) * -(-world_size * shape.length // _TILE)
    return next((n for n in (8, 4, 2) if shape.key_heads // world_size % n == 0 and tiles >= _FILLS * n * sm_count), 1)


def _by_heads(ring: Group, own: Known, replicas: Communicator | None) -> Gradients:
    """Each rank computes its heads of the whole sequence. All pieces are sent at once; each is computed while others travel."""
    sent = {name: aligned(getattr(own, name)) for name in ("dout", "q", "k", "v")} | {"numbers": own.numbers}
    q, k, v = own.q, own.k, own.v
    shape = HeadShape(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype)
    shape = replace(shape, pieces=pieces(shape, ring.world_size, ring.sm_count))
    exchange, side = head_exchange(ring, shape), side_stream(ring, q.is_cuda)
    arrivals = []
    side.follow()
    with side():
        for piece in range(shape.pieces):
            exchange.send(piece, sent)
            arrivals.append(side.behind())
    kept = []  # until the current stream is behind the side stream, which reads them
    for piece, arrival in enumerate(arrivals):
        arrival()
        known = exchange.arrived(piece)
        sizes = Sizes.of(known["q"], known["k"], own.causal, 0)
        # By two kernels: tiles of the fused one wait for each other, which costs more than it saves beside exchanges that hold SMs.
        (dq,) = gradients(ring, known, sizes, own.scale, of_keys=False)
        dk, dv = gradients(ring, known, sizes, own.scale, of_keys=True)
        kept.append((dq, dk, dv))
        side.follow()
        with side():
            exchange.bring(piece, _average(replicas, kept[-1]))
    side.behind()()
    return exchange.results


def _gathered(ring: Group, own: Known) -> Gradients:
    """Two gathers, and gradients of this rank's shard, for heads that the ranks do not divide."""
    length, tensors = own.q.shape[1], (own.dout, own.q, own.k, own.v)
    # Tokens outermost, so that the shards behind each other are one sequence.
    rows = torch.cat([tensor.transpose(0, 1).flatten(2) for tensor in tensors], 2)
    sequence = _gather(ring, rows).flatten(0, 1)
    parts = torch.split(sequence, [tensor.shape[2] * tensor.shape[3] for tensor in tensors], 2)
    shapes = [(ring.world_size * length, *tensor.transpose(0, 1).shape[1:]) for tensor in tensors]
    all_dout, all_q, all_k, all_v = (part.view(shape).transpose(0, 1) for part, shape in zip(parts, shapes, strict=True))
    numbers = pad_numbers(_gather(ring, own.numbers[..., :length].contiguous()).permute(1, 2, 3, 0, 4).flatten(3))
    first = ring.rank * length  # of this rank's tokens in the sequence
    queries = {"q": own.q, "dout": own.dout, "k": all_k, "v": all_v, "numbers": own.numbers}
    keys = {"q": all_q, "dout": all_dout, "k": own.k, "v": own.v, "numbers": numbers}
    (dq,) = gradients(ring, queries, Sizes.of(own.q, all_k, own.causal, first), own.scale, of_keys=False)
    dk, dv = gradients(ring, keys, Sizes.of(all_q, own.k, own.causal, -first), own.scale, of_keys=True)
    return dq, dk, dv


def _gather(group: Group, own: torch.Tensor) -> torch.Tensor:
    """Every rank's tensor, in rank order."""
    return own.unsqueeze(0) if group.world_size == 1 else communicator(group).all_gather(own)


def _wide(
    ring: Group, own: tuple[torch.Tensor, ...], logarithms: torch.Tensor, delta: torch.Tensor, scale: float | None, causal: bool
) -> Gradients:
    """Returns the gradients by torch, in float32, some heads at a time. ``own``: dout, q, k and v, with one number of heads."""
    q = own[1]
    factor = q.shape[3] ** -0.5 if scale is None else scale
    shards, numbers = _gather(ring, torch.stack(own)), _gather(ring, torch.stack((logarithms, delta)))
    results = torch.empty((3, *q.shape), dtype=q.dtype, device=q.device)
    length, heads = q.shape[1:3]
    step = max(1, _SCORES_AT_ONCE // (q.shape[0] * length**2))
    for first in range(0, heads, step):
        part = slice(first, first + step)
        # (W, 4, B, h, S, D) in float32, and (W, 2, B, h, S, 1)
        wide, known = shards[:, :, :, :, part].transpose(3, 4).float(), numbers[:, :, :, part].unsqueeze(-1)
        sums = torch.zeros_like(wide[0, :3])
        for other in range(ring.world_size):
            if not causal or other <= ring.rank:  # own queries
                ds, _ = _weights(wide[ring.rank], known[ring.rank], wide[other], factor, causal and other == ring.rank)
                sums[0] += torch.matmul(ds, wide[other, 2])
            if not causal or other >= ring.rank:  # own keys
                ds, p = _weights(wide[other], known[other], wide[ring.rank], factor, causal and other == ring.rank)
                sums[1] += torch.matmul(ds.transpose(-1, -2), wide[other, 1])
                sums[2] += torch.matmul(p.transpose(-1, -2), wide[other, 0])
        sums[:2] *= factor
        results[:, :, :, part] = sums.transpose(2, 3).to(q.dtype)
    return results[0], results[1], results[2]


def _weights(
    queries: torch.Tensor, numbers: torch.Tensor, keys: torch.Tensor, scale: float, masked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the scores of one shard's queries with another's keys, without the scale, and their weights, (B, h, S, S).

    ``queries`` and ``keys`` hold dout, q, k and v of a shard, ``numbers`` logarithms and delta."""
    scores = torch.matmul(queries[1], keys[2].transpose(-1, -2)) * scale
    if masked:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1), -math.inf)
    p = scores.sub_(numbers[0]).exp_()
    return torch.matmul(queries[0], keys[3].transpose(-1, -2)).sub_(numbers[1]).mul_(p), p
