"""Numbers that kernels tell the host while they run on."""

import ctypes
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peerlane.device.collectives import counts
from peerlane.device.collectives.counts import HostWords
from peerlane.device.host.waits import Waits
from peerlane.errors import DeviceError, DeviceTimeout


@pytest.fixture
def group() -> Any:
    return SimpleNamespace(device=torch.device("cpu"), waits=Waits())


def tell(words: HostWords, numbers: list[int], stamp: int) -> None:
    """As a kernel does: numbers first."""
    words.words[1:] = torch.tensor(numbers)
    ctypes.c_uint32.from_address(words.words.data_ptr()).value = stamp


def test_the_host_reads_the_numbers_of_its_latest_call(group: Any) -> None:
    words = HostWords(group, 2)
    tell(words, [3, 4], words.stamp())
    assert words.read() == [3, 4]
    tell(words, [5, 6], words.stamp())
    assert words.read() == [5, 6]


def test_the_host_waits_until_numbers_have_come(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "_POLLS", 1 << 40)
    words = HostWords(group, 1)
    stamp = words.stamp()

    def later() -> None:
        time.sleep(0.05)
        tell(words, [7], stamp)

    kernel = threading.Thread(target=later)
    kernel.start()
    assert words.read() == [7]
    kernel.join()


def test_numbers_of_the_call_before_are_not_taken(group: Any) -> None:
    words = HostWords(group, 1)
    tell(words, [8], words.stamp())
    words.stamp()
    with pytest.raises(DeviceError, match="without the numbers of call 2"):
        words.read()


def test_a_stop_of_the_group_is_told(group: Any) -> None:
    words = HostWords(group, 1)
    words.stamp()
    group.waits.stop("rank 1 is gone")
    with pytest.raises(DeviceTimeout, match="rank 1 is gone"):
        words.read()
