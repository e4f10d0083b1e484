"""Kernels that wait for peers, from several streams, groups and threads of each rank: every result is right, and nobody locks up.

    PYTHONPATH=src python tests/gpu/check_streams.py --ranks 4 --steps 2000 --out FILE [--scenes ddp groups threads price] [--no-mps]

    ddp       DDP's gradients on the backend's side stream beside operators on the compute stream
    groups    two groups, each on a stream of its own
    threads   two threads, each with a group and a stream; they take turns, so that the order of calls is the same on all ranks
    price     host microseconds of a call: on one stream, on two in turn, and by a launch that takes no lane

Sums are of small integers, hence exact; all of every step are compared on the GPU. Exits with 1 if one was wrong, or a rank did not end.
"""

import os
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from harness import Row, run_on_shared_gpus, script, sharing

from peerlane import ops
from peerlane.device import backend
from peerlane.device.host.lane import lane_of


class Sums:
    """Sums over one group, by the backend or by operators, and how many elements were wrong so far."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, count: int) -> None:
        self.group, self.count, self.device = group, count, device
        self.rank, self.size = group.rank(), group.size()
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def step(self, number: int, *, by_ops: bool) -> None:
        scale = number % 7 + 1
        x = torch.full((self.count,), float((self.rank + 1) * scale), device=self.device)
        if by_ops:
            x = ops.all_reduce(x, self.group)
        else:
            dist.all_reduce(x, group=self.group)
        self.wrong += (x != self.size * (self.size + 1) / 2 * scale).sum()


def ddp(rank: int, device: torch.device, steps: int) -> dict[str, Any]:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(256, 256, bias=False), torch.nn.Linear(256, 256, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(ops.all_reduce(self.first(x)).relu())

    torch.manual_seed(1)
    layer = Layer().to(device)
    model = torch.nn.parallel.DistributedDataParallel(layer, device_ids=[device.index], bucket_cap_mb=0.1)
    optimizer, sums = torch.optim.SGD(model.parameters(), lr=1e-4), Sums(dist.group.WORLD, device, 3000)
    x = torch.randn(64, 256, device=device, generator=torch.Generator(device).manual_seed(rank))
    for step in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        sums.step(step, by_ops=True)
        optimizer.step()
    own = torch.stack([parameter.detach().double().sum() for parameter in layer.parameters()])
    everybody = ops.all_gather(own.float().cpu().to(device)).view(-1, len(own))
    alike, finite = bool((everybody == everybody[0]).all()), bool(everybody.isfinite().all())
    return {"wrong": int(sums.wrong) + (not alike) + (not finite), "alike": alike, "finite": finite}


def of_all_and_of_two(rank: int, device: torch.device, count: int) -> list[Sums]:
    """Sums over all ranks, and over this one and its neighbour, of ``count`` elements."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    return [Sums(dist.group.WORLD, device, 5000), Sums(pairs[rank // 2], device, count)]


def groups(rank: int, device: torch.device, steps: int) -> dict[str, Any]:
    both = of_all_and_of_two(rank, device, 70_000)
    streams = [torch.cuda.Stream(device) for _ in both]
    for step in range(steps):
        for number, (sums, stream) in enumerate(zip(both, streams, strict=True)):
            with torch.cuda.stream(stream):
                sums.step(step, by_ops=bool((step + number) % 2))
    torch.cuda.synchronize(device)
    return {"wrong": sum(int(sums.wrong) for sums in both)}


def threads(rank: int, device: torch.device, steps: int) -> dict[str, Any]:
    both = of_all_and_of_two(rank, device, 5000)
    for sums in both:  # connections and compilation, which are collective
        sums.step(0, by_ops=True)
        sums.step(0, by_ops=False)
    torch.cuda.synchronize(device)
    turn, failed = threading.Condition(), list[BaseException]()
    now = [0]

    def work(number: int) -> None:
        try:
            torch.cuda.set_device(device)
            with torch.cuda.stream(torch.cuda.Stream(device)):
                for step in range(steps):
                    with turn:
                        turn.wait_for(lambda: now[0] % 2 == number or failed)
                        both[number].step(step, by_ops=bool(step % 2))
                        now[0] += 1
                        turn.notify_all()
                torch.cuda.current_stream(device).synchronize()
        except BaseException as error:
            failed.append(error)
            with turn:
                turn.notify_all()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise failed[0]
    return {"wrong": sum(int(sums.wrong) for sums in both)}


def price(rank: int, device: torch.device, steps: int) -> dict[str, Any]:
    from peerlane.device import communicator

    kit, x = communicator(dist.group.WORLD), torch.zeros(256, device=device)
    kit.all_reduce(x)
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def host_us(count: int, calls: int = 200) -> float:
        dist.barrier()
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for call in range(calls):
            with torch.cuda.stream(streams[call % count]):
                kit.all_reduce(x)
        return (time.perf_counter() - begin) / calls * 1e6

    found = {}
    for name, lane, count in (("one stream, no lane", None, 1), ("one stream", lane_of(device), 1), ("two streams", lane_of(device), 2)):
        for launch in kit._launches.values():
            launch._lane = lane
        times = [host_us(count) for _ in range(12)]
        found[name] = [round(value, 2) for value in statistics.quantiles(times[2:], n=4)]
    return {"wrong": 0, **found}


SCENES = {"ddp": ddp, "groups": groups, "threads": threads, "price": price}


def rows_of(scenes: list[str], steps: int, rank: int, ranks: int) -> Iterator[Row]:
    device = torch.device("cuda", torch.cuda.current_device())
    for scene in scenes:
        begin = time.monotonic()
        found = SCENES[scene](rank, device, steps)
        torch.cuda.synchronize(device)
        yield {"scene": scene, **found, "seconds": round(time.monotonic() - begin, 1), "switches": lane_of(device).switches}
    if rank == 0:
        print(backend.report(), flush=True)


if __name__ == "__main__":
    parser = script(__doc__, ranks=4, limit_s=200.0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    options = parser.parse_args()
    how = {"backend": "peerlane", "timeout_s": 30.0, **sharing(options)}
    run_on_shared_gpus(options.ranks, options.out, rows_of, options.scenes, options.steps, **how)
