"""The convolutions of problems 62 and 72 on emulated ranks: shapes that the problems' small cases leave out, and broken twins."""

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch

from device.judged import judge_case, require_correct
from device.runs import run_call, run_calls
from device.twins import twin, use_twin
from peerlane.device import compile_cubin, group_of
from peerlane.device.host.element_types import element_type
from peerlane.device.host.roles import SHARED_LIMIT_BYTES
from peerlane.device.tools.lint import lint
from peerlane.problems.families.conv import from_zigzag, zigzag_shard
from peerlane.solutions import p087_conv2d_patch_parallel_halo as border_rows
from peerlane.solutions.families import gated_convolution as direct
from peerlane.solutions.families import long_convolution, sphere_exchange, sphere_mixing, sphere_taps
from representatives import first

BF16 = torch.bfloat16
PUBLISHED = {
    "evo2_mr": direct.Shape(1, 4096, 32768, 2, 256, 128, BF16),
    "pkb": direct.Shape(1, 1024, 1024, 2, 1024, 4096, BF16),
    "sweep_1024": direct.Shape(1, 1024, 512, 2, 1024, 2048, BF16),
    "sweep_16384 of 8 ranks": direct.Shape(1, 1024, 8192, 2, 1024, 8192, BF16),
    "512 taps": direct.Shape(1, 4096, 32768, 2, 4096, 512, BF16),
}


def convolved(world_size: int, shape: direct.Shape, tiling: tuple[int, int] | str | None = None) -> float:
    """The largest error of all ranks, relative to the largest result; ``tiling`` is of blocks of four warps, channels and steps, or a word
    for transforms."""
    torch.manual_seed(0)
    local, zigzag = shape.length * shape.pieces, shape.pieces == 2
    ranks, drawn = range(world_size), (shape.batch, shape.channels, local)
    x1, x2, v = ([torch.randn(drawn).to(shape.dtype) for _ in ranks] for _ in range(3))
    h, bias = torch.randn(shape.filters, shape.taps).to(shape.dtype), torch.randn(shape.channels).to(shape.dtype)

    def call(x1: torch.Tensor, x2: torch.Tensor, v: torch.Tensor, h: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        group, out = group_of(), v.new_empty((shape.batch, local, shape.channels))
        if isinstance(tiling, str):
            return long_convolution.convolve_by_transforms(group, long_convolution.Inputs(x1, x2, v, h, bias), zigzag)
        chosen = None
        if tiling is not None:
            group.max_threads = 256
            chosen = direct.Tiling.of(shape, *tiling, 4)
        launch = direct.gated_convolution(group, shape, chosen)
        assert launch is not None
        launch(x1=x1, x2=x2, v=v, h=h, bias=bias, out=out)
        return out

    got = run_call(call, [(x1[q], x2[q], v[q], h.clone(), bias.clone()) for q in ranks])
    parts = [(gate * value).double() for gate, value in zip(x2, v, strict=True)]
    z = from_zigzag(parts, -1) if zigzag else torch.cat(parts, -1)
    size, filters = 2 * z.shape[-1], h.double().repeat_interleave(shape.group_dim, 0)
    y = torch.fft.irfft(torch.fft.rfft(z, n=size) * torch.fft.rfft(filters, n=size), n=size)[..., : z.shape[-1]]
    y += z * bias.double().unsqueeze(-1)
    wanted = [x1[q].double() * (zigzag_shard(y, q, world_size, -1) if zigzag else y.chunk(world_size, -1)[q]) for q in ranks]
    scale = max(float(one.abs().max()) for one in wanted)
    return max(float((one.double().transpose(1, 2) - right).abs().max()) / scale for one, right in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("world_size", "shape", "tiling", "most"),
    [
        (2, direct.Shape(1, 4, 600, 2, 4, 127, BF16), None, 0.01),
        (3, direct.Shape(2, 6, 152, 2, 3, 127, BF16), None, 0.01),
        (4, direct.Shape(1, 4, 77, 1, 2, 200, torch.float32), None, 1e-6),
        (2, direct.Shape(1, 4, 700, 2, 4, 1300, BF16), (2, 2), 0.01),
        (2, direct.Shape(1, 34, 36, 2, 2, 144, torch.float32), "transforms", 1e-6),
        (4, direct.Shape(2, 4, 250, 1, 4, 999, torch.float32), "transforms", 1e-6),
    ],
    ids=["inner_tiles", "shared_filters", "history_of_several_ranks", "several_tiles_of_a_channel", "many_rows", "longer_transforms"],
)
def test_a_convolution_is_right(world_size: int, shape: direct.Shape, tiling: tuple[int, int] | str | None, most: float) -> None:
    assert convolved(world_size, shape, tiling) < most


@pytest.mark.parametrize("label", first(["contiguous_odd_bf16", "short_bf16"]))
def test_long_filters_go_through_transforms(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MOST_TAPS", 0)
    require_correct(judge_case(72, label, schedules=1))


def races(call: Callable[..., torch.Tensor], given: Sequence[tuple[torch.Tensor, ...]], sm_count: int | None = None) -> bool:
    """Whether anything is found in launches of two calls in a row, between which the host reads the result."""
    return bool(run_calls(lambda rank: call, [given] * 2, schedules=4, sm_count=sm_count).kinds)


def send_values(x2: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    exchange = long_convolution.exchange_of(group_of(), (1, 4, 6), 2, 1, torch.float32)
    exchange.send(x=v, gate=x2, first=0)
    return exchange.rows


def send_values_and_fetch(x2: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    send_values(x2, v)
    exchange, out = long_convolution.exchange_of(group_of(), (1, 4, 6), 2, 1, torch.float32), v.new_empty((1, 6, 4))
    exchange.fetch(gate=v, out=out, first=0)
    return out


def send_arcs(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    exchange = sphere_exchange.arc_exchange(group_of(), (1, 2, 2, 6), 12, 12)
    exchange.send(x=x, chosen=chosen, first=0, end=2)
    assert exchange.arcs is not None
    return exchange.arcs


def turn_rows(x: torch.Tensor) -> torch.Tensor:
    launch, points = border_rows.turned_rows(group_of(), tuple(x.shape), 1, x.dtype)
    launch(x=x)
    return points


@pytest.mark.parametrize("label", ["disks", pytest.param("step_2", marks=pytest.mark.long)])
def test_responses_are_mixed_some_latitudes_at_a_time(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sphere_taps, "MOST_MIXED", 0)
    monkeypatch.setattr(sphere_taps, "RESPONSE_BYTES", 1000)
    require_correct(judge_case(62, label, schedules=1))


@pytest.mark.parametrize("sizes", [(2, 2, 5, 71, 9), (1, 1, 130, 136, 131)], ids=str)
def test_channels_are_mixed_as_in_float32(sizes: tuple[int, int, int, int, int]) -> None:
    images, groups, outputs, terms, points = sizes
    torch.manual_seed(0)
    x, weight, bias = torch.randn(images, groups, terms, points), torch.randn(groups * outputs, terms), torch.randn(groups * outputs)

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(images, groups * outputs, points + 7)
        sphere_mixing.mix(group_of(), x, sphere_mixing.Mixing(weight, groups, bias), y, 4)
        return y

    got = run_call(call, [(x, weight, bias)])[0].view(images, -1, points + 7)
    exact = torch.einsum("got,igtp->igop", weight.view(groups, outputs, terms).double(), x.double()).flatten(1, 2) + bias.double().view(
        -1, 1
    )
    assert (got[..., 4:-3] - exact).norm() < 2e-7 * exact.norm()
    assert not got[..., :4].any() and not got[..., -3:].any()


@pytest.mark.parametrize(
    ("call", "lost"),
    [
        (send_values, ""),
        (send_values, "peers.barrier(1 + blockIdx.x, epoch);"),
        (send_values_and_fetch, ""),
        (send_values_and_fetch, "peers.wait_all(0, epoch);\n    }"),
        (send_arcs, ""),
        (send_arcs, "peers.barrier(1 + blockIdx.x, epoch);"),
        (send_arcs, "peers.wait_all(0, epoch);"),
        (turn_rows, ""),
        (turn_rows, "peers.wait(before, 0, epoch);"),
        (turn_rows, "peers.wait(before, 1 + blockIdx.x, epoch);"),
    ],
)
def test_an_exchange_needs_every_step(call: Callable[..., torch.Tensor], lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {send_arcs: (sphere_exchange, "SPHERE_SEND"), turn_rows: (border_rows, "TURNED_ROWS")}
    module, kernel = kernels.get(call, (long_convolution, "HYENA_EXCHANGE"))
    if lost:
        use_twin(monkeypatch, module, kernel, lost, lost.partition(";")[2])
    given: Sequence[tuple[torch.Tensor, ...]]
    if call is turn_rows:
        given = [(torch.randn(1, 8, 2, 6).bfloat16(),) for _ in range(2)]
    elif call is send_arcs:
        given = [(torch.randn(1, 2, 2, 6), torch.tensor([1, 0], dtype=torch.int32).repeat(2, 2, 1)) for _ in range(2)]
    else:
        given = [(torch.randn(1, 4, 6), torch.randn(1, 4, 6)) for _ in range(2)]
    assert races(call, given) == bool(lost)


@pytest.mark.parametrize("waits", [True, False])
def test_results_are_fetched_when_their_owner_has_written_them(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one block of a launch writes results itself, in place of the kernel before it."""
    body = "if (args.fetches) {"
    write = "for (u32 i = threadIdx.x; i < args.count; i += blockDim.x) arena.local(args.rows)[i] += 1;"
    kernel = twin(long_convolution.HYENA_EXCHANGE, body, body + write)
    if not waits:
        kernel = twin(kernel, "peers.wait_all(0, epoch);\n        fetch", "fetch")
    monkeypatch.setattr(long_convolution, "HYENA_EXCHANGE", kernel)
    given = [(torch.randn(1, 4, 6), torch.randn(1, 4, 6)) for _ in range(2)]
    assert races(send_values_and_fetch, given, sm_count=1) != waits


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "label", "module", "kernel", "old", "new"),
    [
        (72, "short_bf16", direct, "GATED_CONVOLUTION", "if (edge) peers.wait_all(1 + item.unit, epoch), ", "if (edge) "),
        (72, "delay_bf16", direct, "GATED_CONVOLUTION", "peers.signal(arena.rank, 1 + unit, epoch);", ""),
        (72, "short_bf16", direct, "GATED_CONVOLUTION", "peers.wait_all(0, epoch);", ""),
        (62, "disks", sphere_exchange, "SPHERE_CHOOSE", "groups = (width + together - 1) / together", "groups = width / together"),
    ],
)
def test_a_broken_twin_is_refused(
    number: int, label: str, module: ModuleType, kernel: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_twin(monkeypatch, module, kernel, old, new)
    assert not judge_case(number, label, schedules=3).correct


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_filters_fit_into_shared_memory(name: str) -> None:
    shape = PUBLISHED[name]
    tiling = direct.tiling_of(shape, 2, 8)
    assert tiling is not None and 2 * tiling.shared_bytes <= SHARED_LIMIT_BYTES
    assert tiling.stretch <= shape.length and 16 * tiling.steps * tiling.history_segments >= shape.taps


def test_a_filter_that_fits_nowhere_has_no_tiling() -> None:
    assert direct.tiling_of(direct.Shape(1, 1024, 65536, 2, 1024, 131072, BF16), 2, 8) is None


@pytest.mark.parametrize("name", ["evo2_mr", "sweep_1024"])
def test_the_direct_kernel_obeys_the_rules_of_memory_order(name: str) -> None:
    shape = PUBLISHED[name]
    tiling = direct.tiling_of(shape, 2, 8)
    assert tiling is not None
    macros = {"WARPS": 8, "TEAMS": 2, "PIECES": 2, "ALIGNED": 1, "MATRIX_TYPE": direct.MATRIX_TYPES[BF16], "ELEMENT": element_type(BF16)}
    cubin = compile_cubin(direct.GATED_CONVOLUTION.source, defines={**tiling.defines(), **macros, "WORLD_SIZE": 8}, arch="sm_90a")
    assert lint(cubin.ptx()) == []


@pytest.mark.parametrize(
    ("sizes", "mode"), [((641, 641, 641, 9), "folded"), ((8, 8, 1, 3), "mixed"), ((6, 12, 6, 5), "mixed"), ((128, 128, 1, 7), "responses")]
)
def test_what_becomes_of_responses_depends_on_the_shape(sizes: tuple[int, int, int, int], mode: str) -> None:
    form = sphere_taps.form_of(*sizes)
    assert form.mode == mode
    assert (1 if mode == "folded" else form.filters) * form.channels <= sphere_taps.MOST_SUMS
