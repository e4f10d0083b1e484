"""Copies of a block's outputs do what the long way does, for everything that a call may return."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from peerlane.evaluate.memory import slots
from peerlane.evaluate.memory.output_copies import OutputCopies
from peerlane.evaluate.memory.slots import OutputRegions, describe_answer, place_slots
from peerlane.problems.contract.tree import Tree, leaves

CPU = torch.device("cpu")


def regions_of(expected: Tree, updates: dict[str, int] | None = None) -> OutputRegions:
    layout, size = place_slots([describe_answer(expected)] * 2)
    return OutputRegions(torch.zeros(size, dtype=torch.uint8), layout, CPU, updates)


ONE = torch.arange(6.0).reshape(2, 3)
PAIR = (ONE, torch.arange(4.0))
RETURNED: dict[str, tuple[Tree, Tree]] = {
    "a tensor": (ONE, ONE + 1),
    "transposed": (ONE, (ONE + 1).t().contiguous().t()),
    "a parameter": (ONE, torch.nn.Parameter(ONE + 1)),
    "with a gradient": (ONE, (ONE + 1).requires_grad_()),
    "lazily negative": (ONE, torch.complex(ONE, ONE + 1).conj().imag),
    "another dtype": (ONE, ONE.double()),
    "another shape": (ONE, ONE[:1]),
    "no tensor": (ONE, None),
    "a tuple": (PAIR, (ONE + 1, torch.arange(4.0) + 1)),
    "a list for a tuple": (PAIR, [ONE + 1, torch.arange(4.0)]),
    "two dtypes": ((ONE, torch.arange(4)), (ONE + 1, torch.arange(4) + 1)),
    "one too few": (PAIR, (ONE,)),
    "a dict": ({"a": ONE, "b": ONE}, {"b": ONE + 2, "a": ONE + 1}),
    "complex": (torch.complex(ONE, ONE), torch.complex(ONE, ONE + 1).conj()),
    "four tensors": ([ONE] * 4, [ONE + 1, ONE + 2, ONE + 3, ONE + 4]),
    "not waited for": (ONE, AsyncCollectiveTensor(ONE + 1)),
    "two that are not waited for": (PAIR, [AsyncCollectiveTensor(ONE + 1), AsyncCollectiveTensor(torch.arange(4.0))]),
    "empty": (torch.empty(0), torch.empty(0)),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_copy_is_what_the_long_way_takes(name: str) -> None:
    expected, returned = RETURNED[name]
    quick, long = regions_of(expected), regions_of(expected)
    found = OutputCopies(quick, CPU).take(1, returned, ())
    assert [tensor.data_ptr() for tensor in found] == [tensor.data_ptr() for tensor in long.take(1, returned, ())]
    assert all(torch.equal(a, b) for a, b in zip(quick.views[1], long.views[1], strict=True))
    assert _structure(quick.descriptions[1]) == _structure(long.descriptions[1])
    assert all(not region.any() for region in quick.views[0])
    assert not any(region.requires_grad for region in quick.views[1])


def _structure(description: dict[str, Any]) -> dict[str, Any]:
    """Without strides, which a region does not keep."""
    bare = {key: value for key, value in description.items() if key != "stride"}
    return {**bare, "items": [_structure(item) for item in bare["items"]]} if "items" in bare else bare


def test_updated_arguments_are_copied_too() -> None:
    regions = regions_of((ONE, {"state": ONE}), {"state": 0})
    OutputCopies(regions, CPU).take(0, ONE + 1, (ONE + 2,))
    assert [int(region[0, 0]) for region in regions.views[0]] == [1, 2]


def test_what_is_as_expected_is_not_described_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = regions_of(PAIR)
    copies, refused = OutputCopies(regions, CPU), list[Callable[..., Any]]()
    monkeypatch.setattr(OutputRegions, "take", lambda *_: refused.append(OutputRegions.take))
    copies.take(0, (ONE + 1, torch.arange(4.0)), ())
    assert not refused and [int(leaf.sum()) for leaf in leaves(regions.views[0])] == [21, 6]


class _Lazy(AsyncCollectiveTensor):
    def trigger_wait(self) -> torch.Tensor:
        raise AssertionError("code of a subclass ran")

    wait = trigger_wait


def test_the_result_of_a_functional_collective_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The region is filled from the tensor inside it, so nobody else would wait. Code of a subclass does not run."""
    regions, waits = regions_of(ONE), list[torch.Tensor]()
    monkeypatch.setattr(slots, "_wait", lambda tensor: waits.append(tensor) or tensor)
    OutputCopies(regions, CPU).take(0, AsyncCollectiveTensor(ONE + 1), ())
    assert len(waits) == 1
    assert torch.equal(regions.views[0][0], ONE + 1)
    assert OutputCopies(regions, CPU).take(1, _Lazy(ONE + 2), ()) == []
    assert regions.descriptions[1] == {"kind": "other", "type": "_Lazy (a tensor subclass: return a plain tensor)"}
    assert len(waits) == 1
    assert not regions.views[1][0].any()


def test_a_dict_may_be_built_in_any_order_and_has_names_for_keys() -> None:
    class Name:
        def __str__(self) -> str:
            return "a"

    regions = regions_of({"a": torch.zeros(2), "b": torch.zeros(3)})
    regions.take(0, {"b": torch.full((3,), 3.0), "a": torch.full((2,), 2.0)}, ())
    assert [view.tolist() for view in regions.views[0]] == [[2.0, 2.0], [3.0, 3.0, 3.0]]
    assert regions.descriptions[0]["keys"] == ["a", "b"]
    regions.take(0, {"b": torch.zeros(3), "c": torch.zeros(2)}, ())
    assert regions.descriptions[0]["keys"] == ["b", "c"]
    regions.take(0, {Name(): torch.zeros(2), "b": torch.zeros(3), "a": torch.zeros(2)}, ())
    assert regions.descriptions[0] == {"kind": "other", "type": "dict with a key of type Name"}
