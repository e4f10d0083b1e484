"""No process of a candidate is there once its group has ended, whatever it starts and whatever tells the group from everybody else."""

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.runs import GOOD, judge, marked, marked_processes, processes_named
from peerlane.evaluate import node
from peerlane.sandbox import confine, isolation, process_tree

COMET = """
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>
int main(int count, char** words) {
    prctl(PR_SET_NAME, words[1]);
    for (int left = 40000; left > 0; left--) {
        if (fork() > 0) _exit(0);
        usleep(300);
    }
}
"""
LEAVES_A_COMET = '''
"""All-reduce; at the end of rank 0 a process is left that starts its successor and ends, over and over, for twenty seconds."""

import atexit
import subprocess
import time

import torch.distributed as dist


def leave():
    subprocess.Popen([{program!r}, {sign!r}], start_new_session=True)
    time.sleep(0.1)  # until it has begun


if dist.get_rank() == 0:
    atexit.register(leave)


def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total
'''
LEADER_KILLER = """
import ctypes
import os
import signal
import time

import torch.distributed as dist

if dist.get_rank() == 0 and os.fork() == 0:
    ctypes.CDLL(None).prctl(15, b"{sign}", 0, 0, 0)
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)


def solution(tensor):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
"""


@pytest.mark.parametrize("without", [confine.OWN_UID, confine.LANDLOCK_SIGNALS])
def test_a_process_that_is_never_there_when_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    """Where signals are kept to a group, or where it has a user of its own."""
    found = isolation.choose(None, "cpu")
    measures = tuple(name for name in found.measures if name != without)
    weaker = replace(found, confinement=confine.Confinement(measures), builders=measures)
    if {confine.OWN_UID, confine.LANDLOCK_SIGNALS} & set(measures):
        monkeypatch.setattr(node, "choose", lambda *_: weaker)
    sign = f"comet{os.getpid()}."
    path = tmp_path / "1_comet_pytorch.py"
    program = tmp_path / "comet"
    subprocess.run(["cc", "-O2", "-static", "-xc", "-", "-o", program], input=COMET.encode(), check=True)
    path.write_text(LEAVES_A_COMET.format(program=str(program), sign=sign))
    assert judge(path)[0].correct
    if found.tier != "L0":
        assert [seen for _ in range(20) if (seen := processes_named(sign))] == [], "one look is not enough"


@pytest.mark.parametrize("tier", [None, "L0"])
def test_the_leader_is_out_of_reach(tier: isolation.Tier | None, tmp_path: Path) -> None:
    """Where it is not, its death takes the ranks along; the daemon that loses its adoptive parent does not get away either."""
    sign = f"left{os.getpid()}."
    path = tmp_path / "1_kills_leader_pytorch.py"
    path.write_text(LEADER_KILLER.format(sign=sign))
    with marked(tmp_path.as_posix()):
        killed, good = judge(path, GOOD, isolation=tier)
    assert killed.verdict.kind == ("integrity_failure" if killed.isolation == "L0" else "runtime_error")
    assert good.correct
    assert processes_named(sign) == [] == marked_processes(tmp_path.as_posix())


class Kills:
    """Stands for os.kill: what was sent to whom. Nothing is sent, and 0 is refused if the parent is out of reach."""

    def __init__(self, out_of_reach: bool) -> None:
        self.out_of_reach, self.sent = out_of_reach, list[tuple[int, int]]()

    def __call__(self, pid: int, number: int) -> None:
        self.sent.append((pid, number))
        if number == 0 and self.out_of_reach:
            raise PermissionError


@pytest.mark.parametrize("measure", [confine.OWN_UID, confine.LANDLOCK_SIGNALS])
def test_a_trusted_leader_kills_its_descendants_only(monkeypatch: pytest.MonkeyPatch, measure: str) -> None:
    monkeypatch.setattr(os, "kill", kills := Kills(out_of_reach=True))
    monkeypatch.setattr(confine, "kill_user", lambda _: pytest.fail("it has no user of its own"))
    confine.Confinement((measure,), 61184).kill_group("trusted")
    confine.Confinement().kill_group("candidate")
    assert kills.sent == []


def test_nothing_is_killed_where_more_than_a_group_is_in_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", kills := Kills(out_of_reach=False))
    confine.Confinement((confine.LANDLOCK_SIGNALS,)).kill_group("candidate")
    assert kills.sent == [(os.getppid(), 0)]
    monkeypatch.setattr(os, "kill", kills := Kills(out_of_reach=True))
    confine.Confinement((confine.LANDLOCK_SIGNALS,)).kill_group("candidate")
    assert kills.sent == [(os.getppid(), 0), (-1, signal.SIGKILL)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")
def test_the_processes_of_one_user_are_killed() -> None:
    one, neighbour, root = (subprocess.Popen(["sleep", "60"], user=user, group=user) for user in (61180, 61182, 0))
    try:
        process_tree.kill_user(61180)
        assert one.wait(10) == -signal.SIGKILL
        time.sleep(0.1)
        assert neighbour.poll() is None and root.poll() is None
    finally:
        for process in (one, neighbour, root):
            process.kill()
            process.wait()
