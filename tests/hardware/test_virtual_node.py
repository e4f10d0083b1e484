"""Virtual nodes, with a stand-in for the MPS daemon: a process that lives until it is told to quit."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from peerlane.errors import HarnessError, UsageError
from peerlane.hardware import topology, virtual_node
from peerlane.hardware.mps_watcher import PID_FILE, is_alive, processes
from peerlane.hardware.topology import Gpu
from peerlane.hardware.virtual_node import MpsDaemon, VirtualNode, available_sharing, share_gpus

DAEMON = f"""#!/bin/sh
pid="$CUDA_MPS_PIPE_DIRECTORY/{PID_FILE}"
if [ "$1" = -d ]; then
    if [ -n "$FAILS" ]; then echo "no GPU" >&2; echo "cannot start" >"$CUDA_MPS_LOG_DIRECTORY/control.log"; exit 1; fi
    setsid sh -c 'echo $$ >"$CUDA_MPS_PIPE_DIRECTORY/{PID_FILE}"; exec sleep 300' >/dev/null 2>&1 </dev/null &
    if [ -n "$DEAF" ]; then
        ln -s "$(command -v sleep)" "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-server"
        setsid "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-server" 300 >/dev/null 2>&1 </dev/null &
    fi
    exit 0
fi
read command
case $command in
    get_server_list) [ -e "$CUDA_MPS_LOG_DIRECTORY/status" ] && echo 4711 ;;
    "get_client_list 4711") printf '31\n32\n' ;;
    "terminate_client"*) echo "$command" >>"$CUDA_MPS_LOG_DIRECTORY/terminated" ;;
    "get_server_status 4711") head -n 1 "$CUDA_MPS_LOG_DIRECTORY/status"; sed -i 1d "$CUDA_MPS_LOG_DIRECTORY/status" ;;
esac
if [ "$command" = quit ] && [ -z "$DEAF" ]; then kill "$(cat "$pid")"; fi
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / virtual_node.CONTROL
    program.parent.mkdir()
    program.write_text(DAEMON)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr(virtual_node.tempfile, "tempdir", str(tmp_path))
    return program


def pid_of(daemon: MpsDaemon) -> int:
    return int((daemon.folder / "pipe" / PID_FILE).read_text())


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def test_a_daemon_and_its_folder_end_with_the_context() -> None:
    with MpsDaemon() as first, MpsDaemon() as second:
        assert first.is_alive() and second.is_alive() and first.folder != second.folder
        pid = pid_of(first)
        assert first.environment["CUDA_MPS_PIPE_DIRECTORY"] == str(first.folder / "pipe")
        first.close()
        assert not is_alive(pid) and not first.folder.exists() and second.is_alive()
    assert not second.folder.exists()


def test_a_deaf_daemon_is_killed_with_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEAF", "1")
    with MpsDaemon() as daemon:
        assert within(5.0, lambda: len(processes(daemon.folder)) == 2)
        pids = processes(daemon.folder)
        assert pid_of(daemon) in pids
    assert not any(is_alive(pid) for pid in pids) and not daemon.folder.exists()


OWNER = """
import os, sys, time
from peerlane.hardware import virtual_node
virtual_node.tempfile.tempdir = sys.argv[1]
with virtual_node.MpsDaemon() as daemon:
    if os.fork() == 0:  # a fork keeps the watcher's pipe open
        print(os.getpid(), daemon.folder, (daemon.folder / "pipe" / "nvidia-cuda-mps-control.pid").read_text().strip(), flush=True)
    time.sleep(300)
"""


def test_nothing_is_left_of_a_daemon_whose_owner_was_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    fork, folder, pid = owner.stdout.readline().split()
    try:
        assert is_alive(int(pid))
        owner.kill()
        owner.wait()
        assert within(10.0, lambda: not is_alive(int(pid)) and not Path(folder).exists())
    finally:
        os.kill(int(fork), signal.SIGKILL)
        owner.stdout.close()


def test_a_daemon_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(HarnessError, match="left with 1 and no daemon: no GPU; its log ends with: cannot start"), MpsDaemon():
        pass
    assert not list(tmp_path.glob("peerlane-mps-*"))


def test_ranks_get_their_device_and_a_name_of_their_own() -> None:
    node = VirtualNode(8, 2, "mps")
    with node.daemon() as daemon:
        environments = [node.rank_environment(rank, daemon) for rank in range(8)]
    assert [node.device_index(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    assert len({environment["NCCL_HOSTID"] for environment in environments}) == 8
    assert environments[0] | {"NCCL_HOSTID": ""} == {
        "NCCL_HOSTID": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "CUDA_MPS_PIPE_DIRECTORY": environments[1]["CUDA_MPS_PIPE_DIRECTORY"],
        "CUDA_MPS_LOG_DIRECTORY": environments[1]["CUDA_MPS_LOG_DIRECTORY"],
        "PEERLANE_RANKS_PER_GPU": "4",
    }
    assert node.describe() == {"node_kind": "virtual", "ranks_per_gpu": 4, "sharing": "mps", "baseline": "peerlane"}
    assert VirtualNode(4, 4, "time_slices").describe()["node_kind"] == "node"


def test_a_daemon_and_its_clients_name_gpus_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(index, "a GPU", f"GPU-{index}{index}", 1) for index in range(3))
    known = replace(topology.discover(), gpus=gpus)
    monkeypatch.setattr(topology, "discover", lambda: replace(known, gpus=topology.visible(gpus, os.environ["CUDA_VISIBLE_DEVICES"])))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in MpsDaemon().environment
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert MpsDaemon().environment["CUDA_VISIBLE_DEVICES"] == "GPU-22,GPU-11"


def test_without_mps_ranks_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_sharing() == "mps"
    monkeypatch.setenv("PATH", "/nowhere")
    assert available_sharing() == "time_slices"
    node = VirtualNode(4, 1, available_sharing())
    with node.daemon() as daemon:
        assert daemon is None and "CUDA_MPS_PIPE_DIRECTORY" not in node.rank_environment(0, daemon)
    with pytest.raises(UsageError, match="no nvidia-cuda-mps-control on PATH"), MpsDaemon():
        pass


@pytest.mark.parametrize(
    ("ranks", "gpus", "ranks_per_gpu", "used"),
    [
        *((4, 4, None, 4), (4, 8, None, 4), (4, 1, None, 1), (4, 3, None, 2), (6, 4, None, 3), (5, 4, None, 1), (4, 0, None, None)),
        *((4, 4, 4, 1), (4, 4, 2, 2), (4, 4, 1, 4), (8, 2, 4, 2), (2, 1, 4, 1), (6, 8, 4, 2), (4, 1, 2, None), (4, 2, 1, None)),
    ],
)
def test_ranks_are_spread_evenly(ranks: int, gpus: int, ranks_per_gpu: int | None, used: int | None) -> None:
    node = share_gpus(ranks, gpus, ranks_per_gpu)
    assert (None if node is None else node.gpus) == used


def test_a_plan_knows_the_clients_of_a_server_and_time_slices() -> None:
    assert VirtualNode(8, 1, "mps").most_groups == 6 and VirtualNode(4, 1, "mps").most_groups == 12
    assert VirtualNode(4, 1, "mps").patience == 1 and VirtualNode(4, 1, "time_slices").patience == 4


def test_a_daemon_restarts_when_a_fault_of_its_server_stays() -> None:
    with MpsDaemon() as daemon:
        pid, status = pid_of(daemon), daemon.folder / "log" / "status"
        daemon.await_ready()
        status.write_text("FAULT\nINITIALIZING\nACTIVE\n")
        daemon.await_ready()
        assert status.read_text() == "" and pid_of(daemon) == pid
        status.write_text("FAULT\n" * 1000)
        daemon.await_ready(0.2)
        assert pid_of(daemon) != pid and not is_alive(pid) and not status.exists() and daemon.is_alive()


def test_what_clients_run_is_ended_and_nothing_else() -> None:
    with MpsDaemon() as daemon:
        daemon.terminate([31])
        assert not (daemon.folder / "log" / "terminated").exists(), "there is no server"
        (daemon.folder / "log" / "status").write_text("ACTIVE\n")
        daemon.terminate([30, 31])
        assert (daemon.folder / "log" / "terminated").read_text() == "terminate_client 4711 31\n"


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(UsageError, match="5 ranks on 2 GPUs"):
        VirtualNode(5, 2, "mps")
