"""The four places where ranks run, and the names that plans and records give them."""

from __future__ import annotations

from typing import get_args

import pytest

from peerlane.common.place import CPU, EMULATED, GPUS, VIRTUAL, Device, NodeKind, Place
from peerlane.results.identity import NodeClass


def test_every_device_and_every_class_of_machine_is_a_place() -> None:
    assert [Place.of(device) for device in get_args(Device)] == [GPUS, CPU, EMULATED]
    assert [Place.of_kind(kind) for kind in get_args(NodeKind)] == [GPUS, VIRTUAL, CPU, EMULATED]
    assert [Place.of(device, shared=True) for device in get_args(Device)] == [VIRTUAL, CPU, EMULATED], "only GPUs are shared"


def test_speed_is_measured_where_there_are_gpus_and_nowhere_else() -> None:
    for place in (CPU, GPUS, VIRTUAL, EMULATED):
        assert bool(place.untimed) == (not place.has_gpus)
        assert place.groups == (2 if place.has_gpus else 1), "a second group is for timing"


@pytest.mark.parametrize(
    ("device", "shared", "place"),
    [
        ("cuda", {}, GPUS),
        ("cuda", {"ranks_per_gpu": 1}, GPUS),
        ("cuda", {"ranks_per_gpu": 2, "sharing": "mps", "baseline": "peerlane"}, VIRTUAL),
        ("cpu", {}, CPU),
        ("emulated", {}, EMULATED),
    ],
)
def test_a_class_of_machine_knows_its_place(device: Device, shared: dict[str, object], place: Place) -> None:
    found = NodeClass.of({"gpus": [{"name": "NVIDIA H200"}], "virtual_node": shared}, device)
    assert found.place is place and found.kind == place.kind
    if not place.has_gpus:
        assert str(found) == place.title
