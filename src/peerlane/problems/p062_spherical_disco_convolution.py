"""Problem 62: discrete-continuous (DISCO) convolution on the sphere, over a grid of ranks along latitude and longitude."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import sphere_answers
from peerlane.problems.families.collective import FP32
from peerlane.problems.families.matmul import ACCUMULATION
from peerlane.problems.families.sphere import crossing_points, disks, mixed, place_of, reach, shares, span
from peerlane.problems.families.sphere import grid_of as _grid


def _exchange(blocks: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup | None) -> Sequence[torch.Tensor]:
    """Sends the q-th block to rank q of the group; returns what each of them sends here, of these shapes."""
    if len(blocks) == 1:
        return blocks
    sizes = [torch.Size(shape).numel() for shape in shapes]
    sent = torch.cat([block.flatten() for block in blocks])
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [block.numel() for block in blocks], group=group)
    return [part.view(tuple(shape)) for part, shape in zip(torch.split(received, sizes), shapes, strict=True)]


def reference(
    x: torch.Tensor,
    psi: torch.Tensor,
    weight: torch.Tensor,
    groups: int,
    nlon_out: int,
    nlon_in: int,
    azimuth_group: dist.ProcessGroup | None = None,
    polar_group: dist.ProcessGroup | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    azimuths, azimuth = dist.get_world_size(azimuth_group), dist.get_rank(azimuth_group)
    polars, polar = dist.get_world_size(polar_group), dist.get_rank(polar_group)
    batch, channels, rows, _ = x.shape
    taps, nlat_out, _ = psi.shape
    channel_shares, column_shares, row_shares = shares(channels, azimuths), shares(nlon_out, azimuths), shares(nlat_out, polars)

    # All longitudes of some of the channels, instead of all channels at some longitudes.
    shapes: list[tuple[int, ...]] = [(batch, channel_shares[azimuth], rows, columns) for columns in shares(nlon_in, azimuths)]
    circles = torch.cat(list(_exchange(torch.split(x, channel_shares, 1), shapes, azimuth_group)), 3)
    circles = circles.permute(2, 3, 0, 1).flatten(2)  # (row, longitude, batch and channel)

    k, h, column = psi.indices()
    filters = torch.sparse_coo_tensor(
        torch.stack([k * nlat_out + h, column]), psi.values(), (taps * nlat_out, rows * nlon_in), is_coalesced=True, check_invariants=False
    )
    step = nlon_in // nlon_out
    turned = [torch.sparse.mm(filters, circles.roll(-q * step, 1).flatten(0, 1)) for q in range(nlon_out)]
    y = torch.stack(turned).view(nlon_out, taps, nlat_out, batch, channel_shares[azimuth])

    # Other ranks' latitudes add to these rows of the output.
    shape: tuple[int, ...] = (nlon_out, taps, row_shares[polar], batch, channel_shares[azimuth])
    y = torch.stack(list(_exchange(torch.split(y, row_shares, 2), [shape] * polars, polar_group))).sum(0)

    # Back to all channels at some longitudes.
    shapes = [(column_shares[azimuth], *shape[1:4], count) for count in channel_shares]
    y = torch.cat(list(_exchange(torch.split(y, column_shares), shapes, azimuth_group)), 4)
    return mixed(y, weight, bias, groups)


def process_groups(case: pc.Case) -> pc.GroupLayout:
    """With ``case["none"]`` a group that is the whole world is passed as None."""
    azimuths, least = _grid(case)[0], 2 if case.params.get("none") else 1
    along = [list(range(first, first + azimuths)) for first in range(0, case.world_size, azimuths)]
    across = [list(range(first, case.world_size, azimuths)) for first in range(azimuths)]
    return {name: groups for name, groups in (("azimuth", along), ("polar", across)) if len(groups) >= least}


def _random_rows(case: pc.Case) -> int:
    """Output rows that random filters reach; with ``empty``, all but the first."""
    return int(case["nlat_out"] - case.params.get("empty", False))


def _random_taps(case: pc.Case, polar: int) -> int:
    """Taps of a random filter bank in one band of latitudes: 3 of 10 of :func:`_random_rows`; with ``empty``, the last band has none."""
    if case.params.get("empty") and polar == _grid(case)[1] - 1:
        return 0
    rows = len(span(case["nlat_in"], _grid(case)[1], polar))
    return int(case["taps"] * _random_rows(case) * rows * case["nlon_in"] * 3 // 10)


def _filters(case: pc.Case, polar: int, draw: pc.Draw) -> torch.Tensor:
    """The filters within one band of latitudes, equal on the ranks of an azimuth group. ``case["support"]``:

    * ``random``: taps anywhere; with ``empty``, none in the last band, and none for output row 0;
    * ``public``: per filter and output row four taps in one input row of every band;
    * ``disk``: all within ``case["cutoff"]`` input rows of the output point: wide near the poles.

    Disks and public taps are turned by a longitude in some calls. Values make the sums over all bands of unit variance.
    """
    taps, nlat_out, nlon_in = case["taps"], case["nlat_out"], case["nlon_in"]
    polars = _grid(case)[1]
    band = span(case["nlat_in"], polars, polar)
    columns = len(band) * nlon_in
    shape = (taps, nlat_out, columns)
    turn = draw.integers(0, 2, (1,))
    if case["support"] == "random":
        rows = _random_rows(case)
        code = draw.permutation(taps * rows * columns)[: _random_taps(case, polar)].sort().values
        k, h, column = code // (rows * columns), code // columns % rows + nlat_out - rows, code % columns
        values = draw.normal(code.shape, FP32, scale=(0.3 * case["nlat_in"] * nlon_in) ** -0.5)
    elif case["support"] == "public":
        k, h, tap = torch.meshgrid(*(torch.arange(n, device=draw.device) for n in (taps, nlat_out, 4)), indexing="ij")
        column = (h - band.start) % len(band) * nlon_in + ((h + tap * (k + 1) + turn) % nlon_in).sort(-1).values
        k, h, column = k.flatten(), h.flatten(), column.flatten()
        values = draw.normal(k.shape, FP32, scale=(4 * polars) ** -0.5)
    else:
        h, row, offset, in_disk = disks(nlat_out, case["nlat_in"], nlon_in, case["cutoff"], band.start, band.stop, draw.device)
        code, order = ((h * len(band) + row) * nlon_in + (offset + turn) % nlon_in).sort()
        k = torch.arange(taps, device=draw.device).repeat_interleave(code.numel())
        h, column = (code // columns).repeat(taps), (code % columns).repeat(taps)
        values = draw.normal(k.shape, FP32) * in_disk[order].repeat(taps).rsqrt()
    return torch.sparse_coo_tensor(torch.stack([k, h, column]), values, shape, is_coalesced=True, check_invariants=False)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """x of N(0, 1) times ``case["scale"]``; weight of variance 1 / fan-in and bias of the output's scale, equal on all ranks."""
    (azimuths, polars), (azimuth, polar) = _grid(case), place_of(case, rank)
    scale = case.params.get("scale", 1.0)
    rows, columns = span(case["nlat_in"], polars, polar), span(case["nlon_in"], azimuths, azimuth)
    x = draw.normal((case["batch"], case["channels"], len(rows), len(columns)), FP32, scale=scale)
    inner = case["channels"] // case["groups"]
    weight = draw.shared.normal((case["outputs"], inner, case["taps"]), FP32, scale=(inner * case["taps"]) ** -0.5)
    bias = draw.shared.normal((case["outputs"],), FP32, scale=scale) if case.params.get("bias", True) else None
    for band in range(polars):  # one after the other, so that they differ
        drawn = _filters(case, band, draw.shared)
        if band == polar:
            filters = drawn
    named = process_groups(case)
    azimuth_group, polar_group = (pc.GroupRef(name) if name in named else None for name in ("azimuth", "polar"))
    return x, filters, weight, case["groups"], case["nlon_out"], case["nlon_in"], azimuth_group, polar_group, bias


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    value = sphere_answers.finished(inputs, rank, sphere_answers.total_of(case, inputs, rank))
    magnitude = sphere_answers.finished(inputs, rank, sphere_answers.total_of(case, inputs, rank, absolute=True), absolute=True)
    return pc.Expected("output", value, FP32, magnitude=magnitude)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """Two sums in float32, in any order: over a filter's taps (thousands near a pole), and over channels and filters.

    Normwise the longer of them leaves about 0.2 sqrt(n) u, 8e-7 for the 4000 taps of a polar disk. TensorFloat32 leaves 3e-4.
    """
    return {"output": pc.Tolerance(magnitude=ACCUMULATION, normwise=4e-6)}


def _widths(case: pc.Case, polar: int) -> torch.Tensor:
    """:func:`reach` from all output rows into one band, for disks."""
    band = span(case["nlat_in"], _grid(case)[1], polar)
    return reach(case["nlat_out"], case["nlat_in"], case["nlon_in"], case["cutoff"])[:, band.start : band.stop]


def _nnz(case: pc.Case, polar: int) -> int:
    """Stored taps of one band."""
    if case["support"] == "random":
        return _random_taps(case, polar)
    if case["support"] == "public":
        return int(case["taps"] * case["nlat_out"] * 4)
    return int(case["taps"] * (2 * _widths(case, polar) + 1).clamp(0, case["nlon_in"]).sum())


def _joined_rows(case: pc.Case, polar: int) -> int:
    """Pairs of an output row and an input row of one band that a filter joins, at least."""
    if case["support"] == "disk":
        return int((_widths(case, polar) >= 0).sum())
    return int(case["nlat_out"] if case["support"] == "public" else 0)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """x, the filters (24 bytes of indices and 4 of value a tap) and the output cross memory once; y need not exist.

    Per pair of rows that a filter joins there is at least one multiplication per output point and channel, however wide the filter: a
    Fourier transform along the circle makes do with two. Channels may be mixed before or after, on the smaller grid.
    """
    (azimuths, polars), (azimuth, polar) = _grid(case), place_of(case, rank)
    sizes = (case["nlat_in"], case["nlon_in"], case["nlat_out"], case["nlon_out"])
    points_in = len(span(sizes[0], polars, polar)) * len(span(sizes[1], azimuths, azimuth))
    points_out = len(span(sizes[2], polars, polar)) * len(span(sizes[3], azimuths, azimuth))
    inward, outward = crossing_points(case["support"], sizes, case.params.get("cutoff", 0.0), (azimuths, polars), (azimuth, polar))
    batch, channels, outputs = case["batch"], case["channels"], case["outputs"]
    inner, narrow = channels // case["groups"], min(channels, outputs)
    mixing = 2 * batch * outputs * inner * case["taps"] * min(points_in, points_out)
    turning = 2 * batch * narrow * case["taps"] * _joined_rows(case, polar) * sizes[3] / azimuths
    parameters = outputs * (inner * case["taps"] + case.params.get("bias", True))
    return pc.Cost(
        hbm_bytes=4 * (batch * (channels * points_in + outputs * points_out) + parameters) + 28 * _nnz(case, polar),
        egress_bytes=4 * batch * narrow * outward,
        ingress_bytes=4 * batch * narrow * inward,
        flops={"fp32": mixing + turning},
    )


def _direct_sums(case: pc.Case, rank: int) -> pc.Steps:
    """Every tap of every output point in turn; the sums of a filter are stored before channels are mixed."""
    (azimuths, _), (_, polar), least = _grid(case), place_of(case, rank), cost(case, rank)
    sums = case["batch"] * case["channels"] * case["taps"] * case["nlat_out"] * case["nlon_out"] / azimuths
    direct = 2 * case["batch"] * case["channels"] * _nnz(case, polar) * case["nlon_out"] / azimuths
    mixing = 2 * sums * case["outputs"] / case["groups"]
    return (
        pc.step("exchange of rows", link=max(least.egress_bytes, least.ingress_bytes), barriers=1),
        pc.step("sums of taps", hbm=least.hbm_bytes + 4 * sums, flops={"fp32": direct}),
        pc.step("mixing of channels", hbm=least.hbm_bytes + 4 * sums, flops={"fp32": mixing}),
    )


def _small(label: str, **params: Any) -> pc.CaseSpec:
    sizes = {"batch": 2, "channels": 5, "outputs": 4, "groups": 1, "taps": 3, "azimuth": 2}
    sphere = {"nlat_in": 7, "nlon_in": 10, "nlat_out": 5, "nlon_out": 10, "support": "random"}
    return pc.case(label, FP32, **{**sizes, **sphere, **params})


PRESETS = (
    pc.preset(
        "small",
        "uneven splits of all axes; steps 1 to 3; groups; disks around the poles; bands without taps; long and flat grids of ranks",
        _small("uneven"),
        _small("step_2", nlon_out=5, channels=6, outputs=6, groups=2),
        _small("step_3_all_azimuth", nlon_in=27, nlon_out=9, channels=9, azimuth="world", none=True),
        _small("all_polar", nlat_in=9, nlat_out=9, azimuth=1),
        _small("depthwise", channels=6, outputs=6, groups=6),
        _small("disks", support="disk", cutoff=1.5, nlat_in=9, nlat_out=9, nlon_in=12, nlon_out=12),
        _small("disks_step_2", support="disk", cutoff=2.2, nlat_in=13, nlat_out=7, nlon_in=16, nlon_out=8, bias=False),
        _small("empty_band", nlat_in=17, nlat_out=9, empty=True, azimuth=1),
        _small("public_taps", support="public", nlat_in=8, nlat_out=8, nlon_in=16, nlon_out=16),
        _small("large_no_bias", scale=1e4, bias=False),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 128 x 256 points, 8 channels, 4 taps per filter, row and band",
        pc.case(
            "fp32",
            FP32,
            batch=32,
            channels=8,
            outputs=8,
            groups=1,
            taps=3,
            azimuth=2,
            nlat_in=128,
            nlon_in=256,
            nlat_out=128,
            nlon_out=256,
            support="public",
        ),
    ),
    pc.preset(
        "production_local_operator_1deg",
        "a local neural operator, 181 x 360 points to 180 x 360: 128 channels, 7 filters on disks of 3 rows",
        pc.case(
            "fp32",
            FP32,
            batch=4,
            channels=128,
            outputs=128,
            groups=1,
            taps=7,
            azimuth=2,
            nlat_in=181,
            nlon_in=360,
            nlat_out=180,
            nlon_out=360,
            support="disk",
            cutoff=3.0,
        ),
    ),
    pc.preset(
        "production_fourcastnet3_encoder",
        "73 fields on 721 x 1440 points to 256 channels on 360 x 720",
        pc.case(
            "fp32",
            FP32,
            batch=1,
            channels=73,
            outputs=256,
            groups=1,
            taps=9,
            azimuth=2,
            nlat_in=721,
            nlon_in=1440,
            nlat_out=360,
            nlon_out=720,
            support="disk",
            cutoff=3.0,
        ),
    ),
    pc.preset(
        "production_fourcastnet3_local_block",
        "641 channels on 360 x 720 points, depthwise",
        pc.case(
            "fp32",
            FP32,
            batch=1,
            channels=641,
            outputs=641,
            groups=641,
            taps=9,
            azimuth=2,
            nlat_in=360,
            nlon_in=720,
            nlat_out=360,
            nlon_out=720,
            support="disk",
            cutoff=3.0,
        ),
    ),
)


_ARCS = pc.where(lambda c: _grid(c)[0] > 1)
_BANDS = pc.where(lambda c: _grid(c)[1] > 1)
_FULL_BANDS = pc.where(lambda c: _grid(c)[1] > 1 and (not c.params.get("empty")))
_STEPPED = pc.where(lambda c: bool(c["nlon_in"] > c["nlon_out"]))
_GROUPED = pc.where(lambda c: 1 < c["groups"] < c["channels"])
_BIASED = pc.where(lambda c: c.params.get("bias", True))

PROBLEM = pc.Problem(
    id=62,
    slug="spherical_disco_convolution",
    title="Discrete-continuous convolution on the sphere, over a grid of ranks",
    category="geometric_spatial",
    parallelism=("spatial",),
    origin="torch-harmonics' distributed DiscreteContinuousConvS2, as in FourCastNet 3 and local neural operators",
    summary=(
        "The sphere's rows are split over polar_group and its longitudes over azimuth_group (None: the world): ceil(n / ranks) each and "
        "the rest for the last rank; floor, if that were none. x (B, C, rows, longitudes) is the rank's part; psi, a coalesced sparse COO "
        "tensor (K, nlat_out, rows nlon_in), the K filters of every output row within the rank's rows, equal within azimuth_group. "
        "y[b, c, k, h, q] is the sum over all the sphere's points (i, j) of psi[k, h, i, j] x[b, c, i, (j + q s) mod nlon_in] with s = "
        "nlon_in // nlon_out; the output's channel o is the sum over c of its group and k of weight[o, c, k] y[b, c, k, h, q], plus "
        "bias[o]. Returns the rank's rows and longitudes of it, (B, C_out, rows, longitudes), in float32 throughout."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    attainable=pc.Algorithm("direct sums, then a product", "Ocampo et al., DISCO convolutions, 2023", _direct_sums),
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("own_longitudes", "zeros at other ranks' longitudes", sphere_answers.own_arc, _ARCS),
        pc.wrong("own_rows", "the rank's own rows only", sphere_answers.own_band, _BANDS),
        pc.wrong("last_band_dropped", "without the last rank of the polar group", sphere_answers.last_band_dropped, _FULL_BANDS),
        pc.wrong("turned_backwards", "x turned the other way", sphere_answers.backwards),
        pc.wrong("step_ignored", "outputs at neighbouring longitudes", sphere_answers.wrong(step=1), _STEPPED),
        pc.wrong("longitudes_from_zero", "every rank's outputs begin at longitude 0", sphere_answers.wrong(from_zero=True), _ARCS),
        pc.wrong("circle_cut", "nothing beyond the last longitude", sphere_answers.wrong(closed=False)),
        pc.wrong(
            "filters_reversed", "weights for the filters in reverse order", lambda c: sphere_answers.remixed(c, weight=lambda w: w.flip(2))
        ),
        pc.wrong("channels_interleaved", "groups of every n-th channel", sphere_answers.channels_interleaved, _GROUPED),
        pc.wrong("bias_ignored", "without bias", lambda c: sphere_answers.remixed(c, biased=False), _BIASED),
        pc.wrong(
            "tensor_float32",
            "channels mixed in TensorFloat32",
            lambda c: sphere_answers.remixed(c, y=sphere_answers.tensor_float32, weight=sphere_answers.tensor_float32),
        ),
    ),
    alternative_solutions=pc.alternatives(bands_reversed=sphere_answers.bands_reversed, mixed_before_the_sum=sphere_answers.mixed_first),
    process_groups=process_groups,
    notes=(
        "The public benchmark draws weight, bias and psi anew on every rank. Here weight and bias are equal on all ranks and psi within "
        "an azimuth group, as in a model, so that channels may be mixed before any exchange.",
        "The public filters have 4 taps in a row that is far away in latitude; production filters here fill disks, which are wide in "
        "longitude near the poles, and need only a few rows of the neighbours. All K filters hold the whole disk, as Zernike and Morlet "
        "bases do.",
        "psi's indices differ from call to call: filters are turned by one longitude in some, as if the output's grid began there.",
        "The reference sums over the polar group by an exchange of the rows that each rank keeps; the public one all-reduces all rows.",
        "A group of one rank is passed as such, and so is one that is the whole world, but in small/step_3_all_azimuth as None.",
    ),
)
