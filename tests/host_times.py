"""Measures the host time of calls on this CPU: the real path of the backend and of operators down to a CUDA driver that does nothing.

python tests/host_times.py [--profile all_reduce]        CPU microseconds a call; the Python part alone, no driver, no GPU
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import ctypes
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from peerlane import ops
from peerlane.device.backend import routing
from peerlane.device.backend.ordering import CudaLane
from peerlane.device.collectives.communicator import Communicator
from peerlane.device.host import cuda_bindings, cuda_group, launch
from peerlane.device.host.cuda_group import CudaGroup
from peerlane.device.host.jit import Cubin
from peerlane.device.host.lane import lane_of
from peerlane.device.host.layout import Layout
from peerlane.device.host.tensor_map import TensorMap
from peerlane.device.host.waits import WaitRecord
from peerlane.ops import groups, norms, products
from ranks.pool import RankPool

CPU = torch.device("cpu")
CALLS = 2000


class Stream:
    """A stream that orders nothing, with the layers of Python that torch's has."""

    cuda_stream, device, stream_id, device_index, device_type = 1, CPU, 1, 0, 1

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None: ...


class Event:
    cuda_event = 1

    def wait(self, stream: Stream | None = None) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True


class Entered:
    """torch.cuda.StreamContext, which asks for two streams and sets one each way."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = torch.cuda.current_stream(None)
        torch.cuda.set_stream(self.stream)  # type: ignore[arg-type]

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self.before)


class Driver:
    """Every call succeeds and does nothing."""

    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUfunction_attribute = cuda_bindings.driver().CUfunction_attribute

    def __getattr__(self, name: str) -> Any:
        answer = (0, 32) if "Get" in name or "Create" in name else (0,)
        return lambda *args: answer

    def cuStreamGetCaptureInfo(self, stream: Any) -> tuple[int, int, int]:
        return 0, 0, 0

    def cuLaunchKernel(self, *args: Any) -> tuple[int]:
        return (0,)


class Ranks(CudaGroup):
    """Rank 0 of two, alone."""

    def __init__(self) -> None:
        super().__init__(0, 2, CPU, SimpleNamespace())  # type: ignore[arg-type]
        self.sm_count, self.lane = 132, lane_of(CPU)

    def exchange(self, value: Any) -> list[Any]:
        self.cache.exchanged()
        return [value, value]

    def agree(self, number: int) -> list[int]:
        return [number, number]

    def encode(self, spec: Any) -> TensorMap:
        return TensorMap()

    def allocate(self, nbytes: int, name: str = "") -> Any:
        whole = torch.empty(nbytes + 4096, dtype=torch.uint8)
        base = -(-whole.data_ptr() // 1024) * 1024
        begin = base - whole.data_ptr()
        tensor = lambda offset, size: whole[begin + offset : begin + offset + size]  # noqa: E731
        record = WaitRecord()
        return SimpleNamespace(
            bases=[base, base], fault=ctypes.addressof(record), record=record, layout=Layout(nbytes), tensor=tensor, close=whole.size
        )


class StubProvider:
    device_type = "cpu"
    lanes: dict[torch.device, CudaLane] = {}  # noqa: RUF012

    def open(self, group: Any, device: torch.device) -> Any:
        return Communicator(Ranks()).serving_backend()

    def serves_messages(self, seats: Any) -> bool:
        return False

    def close(self, group: Any) -> None: ...

    def device_of(self, group: Any) -> None:
        return None

    def lane(self, device: torch.device) -> CudaLane:
        return self.lanes.setdefault(device, CudaLane(device))


def with_no_gpu(patches: contextlib.ExitStack) -> None:
    """Puts stand-ins in the place of torch.cuda and of the driver."""
    main, driver = Stream(), Driver()
    for target, name, value in (
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "current_stream", lambda device=None: main),
        (torch.cuda, "set_stream", lambda stream: None),
        (torch.cuda, "device", lambda device: contextlib.nullcontext()),
        (torch.cuda, "stream", Entered),
        (torch.cuda, "Stream", lambda **_: Stream()),
        (torch.cuda, "Event", Event),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 1),
        (torch._C, "_cuda_getCurrentStream", lambda device: (1, 0, 1)),
        (torch._C, "_cuda_isCurrentStreamCapturing", lambda: False),
        (torch._C, "_cuda_setStream", lambda stream_id, device_index, device_type: None),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
        (cuda_bindings, "driver", lambda: driver),
        (launch, "module_of", lambda cubin, device: None),
        (cuda_group, "_compiled", lambda source, defines: Cubin(Path("/dev/null"), "sm_90a", compiled_here=False)),
    ):
        patches.enter_context(mock.patch.object(target, name, value, create=True))


def calls(rank: int) -> dict[str, Callable[[], Any]]:
    t, wide, bf16 = torch.ones(4096), torch.ones(8192), torch.bfloat16
    x, weight = torch.ones(8, 4096, dtype=bf16), torch.ones(4096, dtype=bf16)
    a, b = torch.ones(64, 512, dtype=bf16), torch.ones(512, 1024, dtype=bf16)
    of_backend = {
        "all_reduce": lambda **way: dist.all_reduce(t, **way),
        "all_gather_into_tensor": lambda **way: dist.all_gather_into_tensor(wide, t, **way),
        "reduce_scatter_tensor": lambda **way: dist.reduce_scatter_tensor(t, wide, **way),
        "all_to_all_single": lambda **way: dist.all_to_all_single(t, t, **way),
        "broadcast": lambda **way: dist.broadcast(t, 0, **way),
    }
    tall = torch.cat([b, b])
    if rank:
        return dict(of_backend)
    return (
        of_backend
        | {f"{name}, async": lambda call=call: call(async_op=True) for name, call in of_backend.items()}
        | {
            "ops.all_reduce": lambda: ops.all_reduce(x),
            "ops.gemm_all_reduce": lambda: ops.gemm_all_reduce(a, b),
            "ops.gemm_reduce_scatter": lambda: ops.gemm_reduce_scatter(a, b),
            "ops.all_gather_gemm": lambda: ops.all_gather_gemm(a, tall),
            "ops.all_reduce_rms_norm": lambda: ops.all_reduce_rms_norm(x, weight, x),
        }
    )


def repeated(call: Callable[[], Any]) -> None:
    for _ in range(CALLS):
        call()


def measure(rank: int, world: int, profiled: str) -> dict[str, float]:
    times = {}
    with contextlib.ExitStack() as patches:
        with_no_gpu(patches)
        kit = Ranks()
        groups._joined[groups.existing("")] = kit, ""
        for module in (products, norms, ops, ops.transport):
            for name in ("kit_group", "_kit"):
                if hasattr(module, name):
                    patches.enter_context(mock.patch.object(module, name, lambda x, name: groups.joined(groups.existing(name))))
        for name, call in calls(rank).items():
            call()
            if rank or (profiled and name != profiled):
                continue
            if profiled:
                profile = cProfile.Profile()
                profile.runcall(repeated, call)
                pstats.Stats(profile).sort_stats("tottime").print_stats(35)
            repeated(call)
            best = []
            for _ in range(5):
                begin = time.process_time_ns()
                repeated(call)
                best.append((time.process_time_ns() - begin) / CALLS / 1e3)
            times[name] = sorted(best)[len(best) // 2]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="", help="a call whose functions are listed by their time")
    profiled = parser.parse_args().profile
    routing.use_provider(StubProvider())
    pool = RankPool(2, "peerlane")
    found, _ = pool.run(measure, profiled, timeout=300.0)
    pool.close()
    for name, us in found.items():
        print(f"{name:34s} {us:7.1f} us")


if __name__ == "__main__":
    main()
