"""What a confined candidate can do to the evaluator and to the machine: nothing; and what it must still be able to do for itself.

Every attack is tried wherever the tests run, and has to fail where a measure that stops it is in force. Which measures those are depends on
the kernel, the container and the user: the evaluator says so, and the tests hold it to its word.
"""

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from e2e.runs import DEADLINES, GOOD, STRESS, within
from peerlane import problems
from peerlane.errors import UsageError
from peerlane.evaluate import EvaluationPlan, Result, candidates, evaluate
from peerlane.evaluate.evaluator import Silent
from peerlane.sandbox import confine, isolation
from peerlane.sandbox.hidden_files import keep_from_candidates
from peerlane.sandbox.process_tree import descendants
from peerlane.settings import cache_dir, candidate_caches

REPORT = "what happened: "
ROOT = Path(__file__).resolve().parents[2]

ATTACKER = '''
import ctypes, json, os, signal, socket, subprocess, tempfile, threading
import torch
import torch.distributed as dist

AIMS = json.loads({aims!r})
STARTED_IN, SCRATCH = os.getcwd(), tempfile.gettempdir()
libc = ctypes.CDLL(None, use_errno=True)


def strangers():
    """The supervisor, the fork server, and the ranks and leaders of other groups: told, for it may not see them."""
    told = ""
    while not told.endswith("}}"):  # it is being written, for the candidate beside this one
        with open(AIMS["processes"]) as file:
            told = file.read()
    parents = {{int(pid): parent for pid, parent in json.loads(told).items()}}
    leader = os.getppid()
    fork_server = parents[leader]
    others = [pid for pid, parent in parents.items() if parent == fork_server and pid != leader]
    return {{"supervisor": [AIMS["supervisor"]], "fork server": [fork_server],
            "trusted": [pid for pid, parent in parents.items() if parent in others] + others}}


def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")


def attach(pid):
    checked(libc.ptrace(16, pid, None, None))
    libc.ptrace(17, pid, None, None)


def vm_read(pid):
    buffer = ctypes.create_string_buffer(8)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    checked(libc.process_vm_readv(pid, vector, 1, vector, 1, 0))


def append(path):
    with open(path, "ab") as file:
        file.write(b"x")


def connect(address):
    with socket.create_connection(tuple(address), timeout=5):
        pass


def send(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect(tuple(address))


def publish(name):
    with open("/proc/self/environ", "rb") as file:
        if name not in os.environ and name.encode() not in file.read():
            raise OSError("not there")


def new_user_namespace():
    if (child := os.fork()) == 0:
        os._exit(int(libc.unshare(0x10000000) != 0))
    if os.waitpid(child, 0)[1]:
        raise OSError("refused")


def attacks():
    for who, pids in strangers().items():
        for pid in pids:
            yield f"signal {{who}}", lambda: os.kill(pid, AIMS["signal"])
            if AIMS["signal"]:
                yield f"trace {{who}}", lambda: attach(pid)
            yield f"read memory of {{who}}", lambda: open(f"/proc/{{pid}}/mem", "rb").close()
            yield f"read memory of {{who}} by system call", lambda: vm_read(pid)
            yield f"read environment of {{who}}", lambda: open(f"/proc/{{pid}}/environ", "rb").read(1) or checked(-1)
            yield f"take a file of {{who}}", lambda: os.close(os.open(f"/proc/{{pid}}/fd/0", os.O_RDONLY))
    for path in AIMS["files"]:
        yield "append to a file", lambda: append(path)
        yield "cut a file", lambda: os.truncate(path, 0)
        yield "remove a file", lambda: os.unlink(path)
        yield "add a file", lambda: append(os.path.join(os.path.dirname(path), "new"))
        yield "replace a file", lambda: os.rename(path, path + ".old")
    yield "read another candidate", lambda: open(AIMS["rival"]).close()
    for path in AIMS["hidden"]:
        yield "read a hidden file", lambda: open(path).read(1)
    for path in AIMS["devices"]:
        yield "open a device", lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    yield "open a source file", lambda: os.close(os.open(AIMS["source"], os.O_WRONLY))
    yield "reach the machine's loopback", lambda: connect(AIMS["listener"])
    yield "reach the network", lambda: send(["192.0.2.1", 9])
    for pid in sum(strangers().values(), []):
        yield "see the evaluator's processes", lambda: os.stat(f"/proc/{{pid}}")
    yield "open a setting of the kernel", lambda: open("/proc/sys/kernel/core_pattern", "a").close()
    yield "leave shared memory", lambda: append(AIMS["shared"])
    yield "see secrets", lambda: publish(AIMS["secret"])
    yield "make namespaces", new_user_namespace
    yield "become root", lambda: os.setuid(0) if os.getuid() else os.chown(AIMS["files"][0], 1, 1)


def uses():
    def write_here():
        append("relative"), tempfile.TemporaryFile().close(), append(os.path.join(os.environ["PEERLANE_CACHE_DIR"] + "-mine"))

    def listen():
        with socket.create_server(("127.0.0.1", 0)) as server:
            connect(server.getsockname())

    def thread():
        worker = threading.Thread(target=lambda: None)
        worker.start()
        worker.join()

    def child():
        assert subprocess.run(["/bin/sh", "-c", "exit 7"]).returncode == 7
        sleeper = subprocess.Popen(["/bin/sh", "-c", "sleep 100"])
        sleeper.kill()
        assert sleeper.wait() < 0

    def duplicate_of_neighbour():
        pids = [None] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        reader, writer = os.pipe()
        fds = [None] * len(pids)
        dist.all_gather_object(fds, reader)
        neighbour = (dist.get_rank() + 1) % len(pids)
        pidfd = os.pidfd_open(pids[neighbour])
        checked(libc.syscall(438, pidfd, fds[neighbour], 0))
        dist.barrier()

    return {{"write here": write_here, "listen": listen, "thread": thread, "child": child,
            "shared memory": lambda: torch.ones(3).share_memory_(), "neighbour": duplicate_of_neighbour}}


def outcome(action):
    try:
        action()
    except BaseException as error:
        return f"{{type(error).__name__}}: {{error}}"
    return "done"


def solution(tensor):
    done = {{}}
    for name, attack in attacks():
        done.setdefault(name, set()).add(outcome(attack).partition(":")[0])
    used = {{name: outcome(use) for name, use in uses().items()}}
    attacks_ = {{name: sorted(done[name]) for name in done}}
    raise RuntimeError({report!r} + json.dumps({{"attacks": attacks_, "uses": used, "started in": STARTED_IN, "scratch": SCRATCH}}))
'''

_OTHERS = ("supervisor", "fork server", "trusted")
_MEMORY = ("trace {}", "read memory of {}", "read memory of {} by system call", "read environment of {}", "take a file of {}")
STOPPED_BY = {
    **{f"signal {who}": {confine.OWN_UID, confine.LANDLOCK_SIGNALS} for who in _OTHERS},
    **{form.format(who): {confine.NOT_DUMPABLE} for form in _MEMORY for who in _OTHERS},
    "read another candidate": {confine.BUBBLEWRAP},
    "open a source file": {confine.LANDLOCK_FILES},
    "read a hidden file": {confine.LANDLOCK_FILES, confine.BUBBLEWRAP},
    "open a device": {confine.LANDLOCK_FILES},
    **{f"{what} a file": {confine.LANDLOCK_FILES} for what in ("append to", "cut", "remove", "add", "replace")},
    "reach the machine's loopback": {confine.LOOPBACK_ONLY},
    "reach the network": {confine.LOOPBACK_ONLY},
    "see secrets": {confine.CLEAN_ENVIRONMENT},
    "make namespaces": {confine.SECCOMP},
    "become root": {confine.NO_CAPABILITIES},
    "see the evaluator's processes": {confine.GUARDED_PROC},
    "open a setting of the kernel": {confine.GUARDED_PROC, confine.LANDLOCK_FILES, confine.OWN_UID},
    "leave shared memory": set(),  # it may try: see the test of what it leaves
}

HARMFUL = re.compile(r"^trace |(to|cut|remove|add|replace) a file$")  # not tried where nothing stops them


@dataclass
class Attacked:
    """What there was to attack, and the results of the attacker and of the good candidate behind it.

    ``caller`` is the folder in which peerlane was started.
    """

    way: isolation.Isolation
    files: dict[Path, bytes]
    shared: Path
    caller: Path
    attacker: Result
    good: Result

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.attacker.verdict.message.rpartition(REPORT)[2])
        return found


class Told(Silent):
    """Writes the parents of the run's processes into a file, before the candidate is called. Numbers are those that it would see."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def phase(self, candidate: str, problem: int, preset: str, world_size: int, phase: str) -> None:
        parents = {}
        for pid in descendants(os.getpid()):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended, before its file was opened or before it was read
                fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
                parents[pid] = int(fields["PPid"]), int(fields["NSpid"].split()[-1])
        inside = {pid: number for pid, (_, number) in parents.items()}
        self.path.write_text(json.dumps({number: inside.get(parent, parent) for parent, number in parents.values()}))


def possible(tier: isolation.Tier) -> bool:
    try:
        isolation.choose(tier, "cpu")
    except UsageError:
        return False
    return True


def attack(folder: Path, monkeypatch: pytest.MonkeyPatch, tier: isolation.Tier | None) -> Attacked:
    caller = folder / "caller"
    caller.mkdir()
    monkeypatch.chdir(caller)
    monkeypatch.setenv("PEERLANE_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("PEERLANE_TEST_API_TOKEN", "not for candidates")
    out = folder / "out"
    foreign = candidate_caches() / "kept" / ("0" * 64) / "library.so"
    ceilings = cache_dir() / "ceilings" / "this.json"
    results = out / "results.jsonl"
    for path in (foreign, ceilings, results):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    token = folder / "tokens"
    token.write_text("not for candidates")
    keep_from_candidates(token)
    (folder / "processes.json").write_text("{}")  # what is made later beside a hidden file cannot be read
    files = {path: path.read_bytes() for path in (foreign, ceilings)}
    shared = Path("/dev/shm") / f"peerlane-test-{os.getpid()}-{tier}"
    handed_in = folder.parent / f"{folder.name}-candidates"
    handed_in.mkdir()
    path, rival = handed_in / "1_attacker_pytorch.py", handed_in / GOOD.name
    rival.write_bytes(GOOD.read_bytes())
    monkeypatch.syspath_prepend(folder)  # which the sandbox shows, so that there is something to attack
    way = isolation.choose(tier, "cpu")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        aims = {
            "processes": str(folder / "processes.json"),
            "supervisor": os.getpid(),
            "signal": signal.SIGKILL if way.tier != "L0" else 0,
            "files": [str(item) for item in (*files, results)] if way.tier != "L0" else [],
            "source": problems.__file__,
            "hidden": [str(item) for item in (results, token, ROOT / "results" / "README.md", *(ROOT / ".git").glob("HEAD"))],
            "devices": ["/dev/ptmx", *(str(path) for path in Path("/dev").iterdir() if path.is_block_device())],
            "rival": str(rival),
            "listener": listener.getsockname(),
            "shared": str(shared),
            "secret": "PEERLANE_TEST_API_TOKEN",
        }
        path.write_text(ATTACKER.format(aims=json.dumps(aims), report=REPORT))
        plan = EvaluationPlan(
            [candidates.candidate_file(item) for item in (path, rival)],
            presets=("small",),
            world_sizes=(2,),
            out=out,
            deadlines=replace(DEADLINES, first_call=30.0),
            isolation=tier,
            stress=STRESS,
        )
        with within(600):
            attacker, good = evaluate(plan, Told(folder / "processes.json"))
    return Attacked(way, files, shared, caller, attacker, good)


@pytest.fixture(scope="module", params=[None, *filter(possible, ("L0", "L2"))])
def attacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """An attack at the default tier, at L0, which needs nothing of the machine, and at L2, where this machine can give it."""
    with pytest.MonkeyPatch.context() as patch:
        found = attack(tmp_path_factory.mktemp("attacked"), patch, request.param)
        yield found
        found.shared.unlink(missing_ok=True)


def test_attacks_fail(attacked: Attacked) -> None:
    report = attacked.report["attacks"]
    expected = {name for name in STOPPED_BY if attacked.way.tier != "L0" or not HARMFUL.search(name)}
    assert set(report) == expected
    in_force = set(attacked.way.measures)
    assert {name: outcomes for name, outcomes in report.items() if STOPPED_BY[name] & in_force and "done" in outcomes} == {}
    for path, contents in attacked.files.items():
        assert path.read_bytes() == contents
        assert not (path.parent / "new").exists()


def test_a_confined_candidate_can_work(attacked: Attacked) -> None:
    assert set(attacked.report["uses"].values()) == {"done"}, attacked.report["uses"]


def test_it_starts_in_a_scratch_folder_that_is_gone_with_it(attacked: Attacked) -> None:
    """At L0, which promises nothing about files, it starts where the caller is; there is what it wrote by a relative path."""
    started_in = Path(attacked.report["started in"])
    if attacked.way.tier == "L0":
        assert started_in == attacked.caller
        assert [path.name for path in attacked.caller.iterdir()] == ["relative"]
        return
    assert str(started_in) == attacked.report["scratch"]
    assert not started_in.exists()
    assert list(attacked.caller.iterdir()) == []


def test_what_it_leaves_in_shared_memory_is_gone(attacked: Attacked) -> None:
    in_force = attacked.way.measures
    assert attacked.shared.exists() == (confine.PRIVATE_SHM not in in_force and confine.BUBBLEWRAP not in in_force)


def test_verdicts_and_the_next_candidate(attacked: Attacked) -> None:
    assert attacked.attacker.verdict.kind == "runtime_error"
    assert attacked.good.correct, attacked.good.verdict
    for result in (attacked.attacker, attacked.good):
        assert (result.isolation, result.environment["isolation_measures"]) == (attacked.way.tier, list(attacked.way.measures))
