"""What the attention problems share: the ring, scores in float64 piece by piece, right and wrong ways to compute it, grids of groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import FP32, FP64

_SIZE = "the sum of p |v| over the keys, for the probabilities p of the softmax"

# Bytes of scores that are held at a time; a softmax needs about three times as much.
SCORE_BYTES = 2**29


def exchange(blocks: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> tuple[list[torch.Tensor], list[dist.Work]]:
    """Starts to send contiguous blocks to the next rank of the ring, and to receive the previous rank's into new tensors."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    incoming = [torch.empty_like(block) for block in blocks]
    transfers = [dist.P2POp(dist.isend, block, group=group, group_peer=(rank + 1) % world) for block in blocks]
    transfers += [dist.P2POp(dist.irecv, block, group=group, group_peer=(rank - 1) % world) for block in incoming]
    return incoming, dist.batch_isend_irecv(transfers)


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Attention over a sequence that is sharded over the group in rank order, in float32, rounded once: the summary of problem 54."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    queries = q.transpose(1, 2).to(FP32)  # (B, h, S, D), as everything below
    blocks = [k.contiguous(), v.contiguous()]
    output = queries.new_zeros(*queries.shape[:-1], v.shape[-1])
    maximum = queries.new_full((*queries.shape[:-1], 1), -math.inf)
    total = torch.zeros_like(maximum)
    future = queries.new_ones(q.shape[1], k.shape[1], dtype=torch.bool).triu_(1) if causal else None
    for step in range(world):
        if step + 1 < world:
            incoming, requests = exchange(blocks, group)
        owner = (rank - step) % world
        if not causal or owner <= rank:
            keys, values = (block.transpose(1, 2).to(FP32) for block in blocks)
            scores = torch.matmul(queries, keys.transpose(-1, -2)).mul_(scale)
            if future is not None and owner == rank:
                scores.masked_fill_(future, -math.inf)
            # Online softmax: what has been summed so far is rescaled to the new maximum.
            new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
            scores.sub_(new_maximum).exp_()
            rescale = torch.exp(maximum - new_maximum)
            total = total * rescale + scores.sum(-1, keepdim=True)
            output = output * rescale + torch.matmul(scores, values)
            maximum = new_maximum
        if step + 1 < world:
            for request in requests:
                request.wait()
            blocks = incoming
    return (output / total).to(q.dtype).transpose(1, 2).contiguous()


def key_heads(k: torch.Tensor, heads: slice, query_heads: int) -> torch.Tensor:
    """The key heads (B, S, n, D) of some query heads; k (B, S, h_kv, D), where h / h_kv consecutive query heads share one."""
    if k.shape[2] == query_heads:
        return k[:, :, heads]
    index = torch.arange(heads.start, heads.stop, device=k.device) // (query_heads // k.shape[2])
    return k.index_select(2, index)


def score_pieces(
    q: torch.Tensor, k: torch.Tensor, *, scale: float, offset: int | None, work: torch.dtype = FP64, score_bytes: int = SCORE_BYTES
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Scaled scores of q (B, S_q, h, D) with k (B, S_k, h_kv, D): heads, queries, and their scores (B, heads, queries, S_k).

    A piece's scores take no more than ``score_bytes``, if one query of one head does not. With an ``offset``, key j is masked (-inf) for
    query i if j > i + offset.
    """
    batch, queries, heads, _ = q.shape
    row_bytes = batch * k.shape[1] * work.itemsize
    head_step = min(heads, max(1, score_bytes // (row_bytes * max(queries, 1))))
    row_step = max(1, score_bytes // (row_bytes * head_step))
    positions = torch.arange(k.shape[1], device=q.device)
    for first_head in range(0, heads, head_step):
        chosen = slice(first_head, min(first_head + head_step, heads))
        keys = key_heads(k, chosen, heads).permute(0, 2, 3, 1).to(work)
        for first in range(0, queries, row_step):
            rows = slice(first, min(first + row_step, queries))
            scores = torch.matmul(q[:, rows, chosen].transpose(1, 2).to(work), keys).mul_(scale)
            if offset is not None:
                last_visible = torch.arange(rows.start + offset, rows.stop + offset, device=q.device)
                scores.masked_fill_(positions > last_visible.unsqueeze(-1), -math.inf)
            yield chosen, rows, scores


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool, score_bytes: int = SCORE_BYTES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of q (B, S_q, h, D) to k (B, S_k, h_kv, D) and v (B, S_k, h_kv, D_v), and to |v|: two of (B, S_q, h, D_v), float64.

    Under a causal mask the queries are the last S_q positions of the keys' sequence.
    """
    heads = q.shape[2]
    output = torch.empty((*q.shape[:3], v.shape[-1]), dtype=FP64, device=q.device)
    magnitude = torch.empty_like(output)
    offset = k.shape[1] - q.shape[1] if causal else None
    for chosen, rows, scores in score_pieces(q, k, scale=scale, offset=offset, score_bytes=score_bytes):
        probabilities = torch.softmax(scores, dim=-1)
        values = key_heads(v, chosen, heads).transpose(1, 2).to(FP64)
        output[:, rows, chosen] = torch.matmul(probabilities, values).transpose(1, 2)
        magnitude[:, rows, chosen] = torch.matmul(probabilities, values.abs()).transpose(1, 2)
    return output, magnitude


def softmax_tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """For the magnitude of :func:`attention`, the sum of p_j |v_j|: one u of it for probabilities rounded to the dtype, one for blocks'
    outputs rounded to it.

    Normwise each of these roundings, and that of the output, costs 0.43 u on average (1.7e-3 in bfloat16), and hardly more than u in one
    token and head. In float32 the scores' own error decides: scores up to 100 err by 100 u, the relative error of their weights.
    """
    u = pc.UNIT_ROUNDOFF[case.dtype]
    if case.dtype == FP32:
        return {"output": pc.Tolerance(relative=2 * u, magnitude=128 * u, size=_SIZE)}
    return {"output": pc.Tolerance(relative=2 * u, magnitude=2 * u, normwise=5e-3, rowwise=3 * u, size=_SIZE)}


Blocks = Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""q (B, S, h, D), k (B, S, h_kv, D) and v (B, S, h_kv, D_v) of every rank of a ring, in ring order."""


def visible(place: int, ring: int, causal: bool) -> list[int]:
    """The places of a ring of ``ring`` ranks whose keys the queries at ``place`` see; under a causal mask the last of them is their own."""
    return list(range(place + 1 if causal else ring))


def visible_pairs(place: float, ring: int, local: int, causal: bool) -> float:
    """Pairs of a query at ``place`` and a key that it sees, with ``local`` tokens per rank; at the middle place, a rank's mean."""
    return place * local**2 + local * (local + 1) / 2 if causal else ring * local**2


def ring_traffic(place: int, ring: int, causal: bool) -> tuple[int, int]:
    """How many ranks' blocks must leave and enter a rank: under a causal mask only earlier ranks' blocks are needed."""
    return (ring - 1 - place, place) if causal else (ring - 1, ring - 1)


def shared_traffic(ring: int, causal: bool, keys_values: float, queries_outputs: float) -> float:
    """Bytes out of and into every rank, at least, where ranks share the work evenly. The arguments are the bytes of a rank's shard.

    For each pair of ranks one sends keys and values, or the other sends queries and gets outputs back; under a causal mask half of the
    pairs need neither. Or ranks share the heads (Jacobs et al., DeepSpeed Ulysses, 2023).
    """
    pairs = (ring - 1) / 2 if causal else ring - 1
    return min(pairs * min(keys_values, queries_outputs), (ring - 1) / ring * (keys_values + queries_outputs))


def _by_head(blocks: Blocks, answer: Callable[[Blocks], torch.Tensor]) -> torch.Tensor:
    """``answer`` for one head after the other, so that only one head's scores are held."""
    heads = blocks[0][0].shape[2]
    outputs = []
    for head in range(heads):
        one = slice(head, head + 1)
        outputs.append(answer([(q[:, :, one], key_heads(k, one, heads), key_heads(v, one, heads)) for q, k, v in blocks]))
    return torch.cat(outputs, dim=2)


def _block_scores(blocks: Blocks, place: int, owner: int, causal: bool, scale: float) -> torch.Tensor:
    """Float32 scores (B, h, S, S) of the queries at ``place`` with the owner's keys, masked within their own block if causal."""
    q, k = blocks[place][0].transpose(1, 2).to(FP32), blocks[owner][1].transpose(1, 2).to(FP32)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if causal and owner == place:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1), -math.inf)
    return scores


def dense(blocks: Blocks, place: int, owners: Sequence[int], *, causal: bool, scale: float) -> torch.Tensor:
    """Float32 attention of the queries at ``place`` to the owners' keys, one after the other, rounded to q's dtype."""

    def answer(one: Blocks) -> torch.Tensor:
        scores = torch.cat([_block_scores(one, place, owner, causal, scale) for owner in owners], dim=-1)
        values = torch.cat([one[owner][2] for owner in owners], dim=1).transpose(1, 2).to(FP32)
        return torch.matmul(torch.softmax(scores, dim=-1), values).to(one[place][0].dtype).transpose(1, 2)

    return _by_head(blocks, answer)


def flash(blocks: Blocks, place: int, *, causal: bool, scale: float) -> torch.Tensor:
    """Blockwise, in ring order from the rank itself, with probabilities rounded to q's dtype for their product with v."""
    order = [(place - step) % len(blocks) for step in range(len(blocks))]
    seen = set(visible(place, len(blocks), causal))

    def answer(one: Blocks) -> torch.Tensor:
        dtype = one[place][0].dtype
        output = total = torch.zeros((), device=one[place][0].device)
        maximum = torch.full_like(output, -math.inf)
        for owner in (q for q in order if q in seen):
            scores = _block_scores(one, place, owner, causal, scale)
            new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
            weights, rescale = torch.exp(scores - new_maximum), torch.exp(maximum - new_maximum)
            values = one[owner][2].transpose(1, 2).to(FP32)
            output = output * rescale + torch.matmul(weights.to(dtype).to(FP32), values)
            total = total * rescale + weights.sum(-1, keepdim=True)
            maximum = new_maximum
        return (output / total).to(dtype).transpose(1, 2)

    return _by_head(blocks, answer)


def mean_of_visible(blocks: Blocks, place: int, *, causal: bool) -> torch.Tensor:
    """A wrong answer: the mean of the values that each query sees, as if all scores were equal."""
    equal = [(torch.zeros_like(q), k, v) for q, k, v in blocks]
    return dense(equal, place, visible(place, len(blocks), causal), causal=causal, scale=1.0)


def without_maximum(blocks: Blocks, place: int, *, causal: bool, scale: float, own: bool = False) -> torch.Tensor:
    """A wrong answer where scores are large: exponentials of scores as they are, or less the maximum of the rank's own block."""

    def answer(one: Blocks) -> torch.Tensor:
        seen = visible(place, len(one), causal)
        scores = torch.cat([_block_scores(one, place, owner, causal, scale) for owner in seen], dim=-1)
        if own:
            scores -= _block_scores(one, place, place, causal, scale).amax(-1, keepdim=True)
        weights = scores.exp_()
        values = torch.cat([one[owner][2] for owner in seen], dim=1).transpose(1, 2).to(FP32)
        return (torch.matmul(weights, values) / weights.sum(-1, keepdim=True)).to(one[place][0].dtype).transpose(1, 2)

    return _by_head(blocks, answer)


def mask_inverted(blocks: Blocks, place: int, *, causal: bool, scale: float) -> torch.Tensor:
    """A wrong answer: a causal mask where there should be none, and none where there should be one."""
    return dense(blocks, place, visible(place, len(blocks), not causal), causal=not causal, scale=scale)


@dataclass(frozen=True)
class Grid:
    """The world as a grid of ranks.

    Attributes:
        along: the groups along one axis, ranks ascending.
        across: the groups along the other axis.
    """

    along: list[list[int]]
    across: list[list[int]]

    @classmethod
    def of(cls, case: pc.Case, axis: str, inner: str) -> Grid:
        """``case[axis]``: ranks in a group of the first axis, or ``"world"``. ``case["inner"]``, or else ``inner``: the axis of neighbours.

        The groups of the inner axis are neighbouring ranks, those of the other axis lie as far apart as the inner axis is long.
        """
        world = case.world_size
        size = world if case[axis] == "world" else case[axis]

        def neighbours(count: int) -> list[list[int]]:
            return [list(range(first, first + count)) for first in range(0, world, count)]

        def strided(count: int) -> list[list[int]]:
            return [list(range(first, world, world // count)) for first in range(world // count)]

        if case.params.get("inner", inner) == axis:
            return cls(neighbours(size), strided(world // size))
        return cls(strided(size), neighbours(world // size))

    @property
    def sizes(self) -> tuple[int, int]:
        """Ranks in a group of the first axis, and of the other."""
        return len(self.along[0]), len(self.across[0])

    def lines(self, rank: int) -> tuple[list[int], list[int]]:
        """The two groups that ``rank`` belongs to."""
        along, across = (next(members for members in groups if rank in members) for groups in (self.along, self.across))
        return along, across


def scale_of(case: pc.Case) -> float:
    """The softmax's scale. ``case``: ``scale``, or absent for depth^-0.5."""
    scale: float | None = case.params.get("scale")
    return float(case["depth"] ** -0.5) if scale is None else scale


def local_length(case: pc.Case, ring: int) -> int:
    """Tokens per rank. ``case``: ``local``, or ``length``, the whole sequence's, divided by the ranks of a ring."""
    return int(case["local"] if "local" in case.params else case["length"] // ring)
