"""Launches of declared kernels on a group that launches nothing: what is loaded once, kept, told apart and forgotten."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from peerlane.device.host.declare import MAX_EPOCH_BLOCKS, U32, BoundLaunches, DeclaredKernel, Epochs, LocalKernel, Pointer, layouts
from peerlane.device.host.group import Group
from peerlane.emulator.ranks import EmulatedRanks
from peerlane.errors import LaunchError, UsageError


@dataclass
class Loads:
    """Stands for ``group.kernel``: writes down what is loaded, and what launches would have passed."""

    defines: list[Mapping[str, str | int]] = field(default_factory=list)
    launched: list[bytes] = field(default_factory=list)

    def __call__(self, source: str, name: str, *, defines: Mapping[str, str | int], on_failure: object = None) -> "Loads":
        self.defines.append(defines)
        return self

    def bind(self, grid: int, block: int, args: Sequence[Any], *, shared_bytes: int = 0, cluster: int = 1) -> Any:
        return lambda: self.launched.append(bytes(args[-1]))


@pytest.fixture
def group() -> Group:
    """Of two ranks."""
    return EmulatedRanks(2).groups({"all": [[0, 1]]})[0]["all"]


@pytest.fixture
def loads(group: Group, monkeypatch: pytest.MonkeyPatch) -> Loads:
    found = Loads()
    monkeypatch.setattr(group, "kernel", found)
    return found


def numbers(first: int, second: int) -> bytes:
    return first.to_bytes(4, "little") + second.to_bytes(4, "little")


PAIR = LocalKernel("pair", "// source", first=U32, second=U32)


def test_a_local_kernel_is_loaded_once_for_its_macros_alone(group: Group, loads: Loads) -> None:
    for kind in ("short", "long", "short"):
        PAIR.bind(group, grid=1, block=32, defines={"KIND": kind})
    assert loads.defines == [{"KIND": "short"}, {"KIND": "long"}], "its cubin is the same in groups of any size"


def test_a_grid_has_an_epoch_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: Group = EmulatedRanks(1).groups({"all": [[0]]})[0]["all"]
    monkeypatch.setattr(alone, "kernel", Loads())
    counted = DeclaredKernel("counted", "// source", epochs=Epochs())
    counted.bind(alone, grid=MAX_EPOCH_BLOCKS, block=32)
    PAIR.bind(alone, grid=MAX_EPOCH_BLOCKS + 1, block=32)
    with pytest.raises(LaunchError, match=f"got {MAX_EPOCH_BLOCKS + 1} blocks: expected at most {MAX_EPOCH_BLOCKS}"):
        counted.bind(alone, grid=MAX_EPOCH_BLOCKS + 1, block=32)


def test_a_launch_made_again_leaves_the_first_one_as_it_is(group: Group, loads: Loads) -> None:
    first = PAIR.bind(group, grid=1, block=32, first=1, second=2)
    again = first.again(second=3)
    first.set(first=4)
    again()
    first()
    assert loads.launched == [numbers(1, 3), numbers(4, 2)]


def test_a_local_kernel_has_nothing_in_an_arena(group: Group, loads: Loads) -> None:
    with pytest.raises(UsageError, match="declare it as a DeclaredKernel"):
        LocalKernel("epochs", "// source", epochs=Epochs()).bind(group, grid=1, block=32)
    with pytest.raises(UsageError, match="runs on one rank alone"):
        PAIR.bind(group, grid=1, block=32).addresses("first")


def test_kept_launches_are_bounded_and_bound_once(group: Group, loads: Loads) -> None:
    bound = list[int]()
    launches: BoundLaunches[int] = BoundLaunches(most=2)
    reserved = PAIR.reserve(group)

    def get(key: int) -> None:
        def bind() -> Any:
            bound.append(key)
            return reserved.bind(grid=1, block=32, first=key, second=0)

        launches.get(key, bind)()

    for key in (1, 2, 1, 3, 2):
        get(key)
    assert bound == [1, 2, 3, 2] and launches.find(1) is None
    assert loads.launched == [numbers(key, 0) for key in (1, 2, 1, 3, 2)]


def test_layouts_tell_tensors_at_one_address_apart(group: Group) -> None:
    tensor = torch.zeros(4, 4, dtype=torch.bfloat16)
    others = tensor.t(), tensor.view(2, 8), tensor.view(torch.float16)
    assert layouts(group, tensor) == layouts(group, tensor.view(4, 4))
    assert len({layouts(group, one) for one in (tensor, *others)}) == 4


def test_a_kernel_says_which_source_its_author_wrote() -> None:
    kernel = DeclaredKernel("copies", "#include <peerlane/comm.cuh>\n// body", x=Pointer())
    assert kernel.text == "#include <peerlane/comm.cuh>\n// body" and "struct Copies" in kernel.source


def test_threads_of_a_group_launch_what_they_have_set(group: Group, loads: Loads) -> None:
    bound, launched = PAIR.bind(group, grid=1, block=32, first=0, second=0), list[tuple[str, bytes]]()

    def slow(arguments: Any) -> Any:
        def launch() -> None:
            time.sleep(0.001)  # in which another thread could set its own
            launched.append((threading.current_thread().name, bytes(arguments)))

        return launch

    bound._launch = slow(bound._arguments)

    def work(number: int) -> None:
        for _ in range(20):
            bound(first=number, second=number)

    threads = [threading.Thread(target=work, args=(number,), name=str(number)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(launched) == [("1", numbers(1, 1))] * 20 + [("2", numbers(2, 2))] * 20
