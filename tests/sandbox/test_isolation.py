"""Which tier a machine gives, and how: decisions, the sandbox's command, caches and the system call filter. No candidate runs here."""

import errno
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from peerlane.errors import UsageError
from peerlane.evaluate.processes.fork_client import memory_file
from peerlane.sandbox import confine, isolation, linux, seccomp, untrusted_folders
from peerlane.sandbox.caches import CacheSlot, RunFolders
from peerlane.settings import candidate_caches, passes_to_ranks

ROOT = Path(__file__).resolve().parents[2]
probe = isolation.probe_measures
SHA = "a" * 64


def machine(monkeypatch: pytest.MonkeyPatch, **lacking: str) -> None:
    reasons = {**dict.fromkeys(probe(()), ""), **lacking}
    monkeypatch.setattr(isolation, "probe_measures", lambda sandbox: reasons)


def test_every_measure_is_tried_and_none_breaks_the_probe() -> None:
    """Whatever this machine is: a container, another user, an old kernel."""
    before = linux.set_dumpable(True)
    try:
        reasons = isolation.choose(None, "cpu").missing
        assert set(reasons) <= set(probe(())) and all(reasons.values())
        assert linux.set_dumpable(True), "the probes leave the process that asks alone"
    finally:
        linux.set_dumpable(before)


def test_the_best_of_two_tiers_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    found = isolation.choose(None, "cpu")
    assert found.tier == "L1" and set(found.measures) == {*probe(()), confine.CLEAN_ENVIRONMENT} and not found.missing
    machine(monkeypatch, landlock_files="the kernel has none", loopback_only="not permitted")
    found = isolation.choose(None, "cpu")
    assert (found.tier, found.measures) == ("L0", ())
    assert "unverified" in found.describe() and "the kernel has none" in found.describe()
    with pytest.raises(UsageError, match=r"isolation L1 is not possible .* the kernel has none.*--isolation L0"):
        isolation.choose("L1", "cpu")


def test_every_measure_is_documented() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "isolation.md").read_text(), re.MULTILINE))
    assert documented == {*probe(()), confine.CLEAN_ENVIRONMENT, confine.BUBBLEWRAP}


def test_what_is_not_promised_may_be_missing_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, loopback_only="not permitted")
    found = isolation.choose("L1", "cpu")
    assert confine.LOOPBACK_ONLY not in found.measures and found.missing == {confine.LOOPBACK_ONLY: "not permitted"}
    assert found.describe().endswith("without loopback_only")


@pytest.mark.parametrize(("device", "tier"), [("cpu", "L1"), ("cuda", "L0")])
def test_signals_are_stopped_by_user_or_by_landlock(monkeypatch: pytest.MonkeyPatch, device: str, tier: str) -> None:
    """On GPUs all ranks have one user, or the driver does not let them share memory."""
    machine(monkeypatch, landlock_signals="version 3")
    assert isolation.choose(None, device).tier == tier


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_two_groups_have_one_user(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """On GPUs that holds for builders, which see none."""
    machine(monkeypatch)
    found = isolation.choose("L1", device)
    one = found.confine("builder", ())
    assert confine.OWN_UID in one.measures and one.uid in isolation.USERS
    assert found.confine("builder", set(isolation.USERS) - {one.uid}).uid == one.uid, "the only one that is not taken"
    ranks = found.confine("candidate", ())
    assert (confine.OWN_UID in ranks.measures) == (ranks.uid in isolation.USERS) == (device == "cpu")


def test_without_a_user_to_spare_builders_have_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, own_uid="peerlane was not started as root")
    found = isolation.choose("L1", "cuda")
    assert found.confine("builder", ()) == found.confine("candidate", ()) and found.confine("builder", ()).uid == 0


def test_a_probe_that_cannot_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    reasons = probe.__wrapped__(())
    assert all("could not be tried" in reason and "/nowhere/python" in reason for reason in reasons.values())
    monkeypatch.setattr(isolation, "probe_measures", lambda sandbox: reasons)
    assert isolation.choose(None, "cpu").tier == "L0"


def test_no_bubblewrap_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="apt-get install bubblewrap"):
        isolation.choose("L2", "cpu")


def test_bubblewrap_that_fails_gives_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no namespaces for you >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"no namespaces for you.*--isolation L1"):
        isolation.choose("L2", "cpu")


def test_the_sandbox_shows_what_is_read_and_hides_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bwrap").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = isolation.sandbox_command([Path("/home/ada/kernels"), Path("/tmp"), Path("/opt/kernels")])
    assert {"--unshare-pid", "--unshare-net", "--die-with-parent"} < set(command)
    tmpfs = {command[place + 1] for place, word in enumerate(command) if word == "--tmpfs"}
    bound = {command[place + 1] for place, word in enumerate(command) if word == "--ro-bind"} - {os.devnull}  # over hidden files
    assert {"/tmp", "/home"} <= tmpfs
    assert bound == {"/", "/home/ada/kernels"}, "a hidden folder is not shown whole, and what is not hidden needs no showing"
    found = isolation.Isolation("L2", confine.Confinement(), {}, command)
    tail = found.command([Path("/w")], [Path("/r")])[len(command) :]
    assert tail == ["--ro-bind", "/r", "/r", "--bind", "/w", "/w", sys.executable]


@pytest.mark.parametrize(
    "name", ["PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NCCL_NVLS_ENABLE", "TORCH_HOME", "LC_ALL", "PEERLANE_X"]
)
def test_variables_that_ranks_need(name: str) -> None:
    assert passes_to_ranks(name)


@pytest.mark.parametrize("name", ["AWS_PROFILE", "HF_TOKEN", "NVIDIA_API_KEY", "SSH_AUTH_SOCK", "PYTHON_KEYRING_PASSWORD", "DATABASE_URL"])
def test_variables_that_are_nobodys_business(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x")
    machine(monkeypatch)
    assert name not in isolation.choose("L1", "cpu").environment()
    assert name in isolation.choose("L0", "cpu").environment()


def test_what_a_rank_has_to_know_travels() -> None:
    confinement = confine.Confinement((confine.SECCOMP,), 7)
    assert confine.Confinement.from_json(asdict(confinement)) == confinement


@pytest.mark.parametrize(("role", "gpus"), [("candidate", True), ("builder", False)])
def test_who_compiles_may_use_no_gpu(role: str, gpus: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Others are timed meanwhile."""
    allowed: list[str] = []
    monkeypatch.setattr(confine.glob, "glob", lambda pattern: [pattern.replace("*", "0")])
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    monkeypatch.setattr(confine.linux, "landlock", lambda writable, readable, keep_signals: allowed.extend(writable))
    monkeypatch.chdir(tmp_path)
    confine.Confinement((confine.LANDLOCK_FILES,)).enter_group(role, "cpu", str(tmp_path), [str(tmp_path)])
    assert "/dev/null" in allowed and ("/dev/nvidia0" in allowed) == ("/dev/dri/render0" in allowed) == gpus


# --- caches ---


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunFolders:
    monkeypatch.setenv("PEERLANE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return RunFolders(confined=True)


def slot(folders: RunFolders) -> CacheSlot:
    made = folders.slot()
    assert made is not None
    return made


def test_a_cache_comes_back_at_the_same_path(folders: RunFolders) -> None:
    first = slot(folders)
    path = first.admit(SHA)
    assert path.resolve().is_relative_to(first.folder), "inside the only folder that the group may write"
    (path / "library.so").write_bytes(b"compiled")
    first.release()
    assert not path.exists() and not first.folder.exists()
    second = slot(folders)
    assert second.admit(SHA) == path and (path / "library.so").read_bytes() == b"compiled"
    other = slot(folders)
    assert list(other.admit("b" * 64).iterdir()) == []
    other.release()
    second.release()
    assert [item.name for item in (candidate_caches() / "kept").iterdir()] == [SHA], "an empty cache is not kept"
    folders.remove()
    assert list((candidate_caches() / "runs").iterdir()) == []


def test_two_groups_of_one_candidate_do_not_share(folders: RunFolders) -> None:
    first, second = slot(folders), slot(folders)
    one, two = first.admit(SHA), second.admit(SHA)
    assert one != two
    for number, path in enumerate((one, two)):
        (path / "who").write_text(str(number))
    second.release()
    first.release()
    assert (candidate_caches() / "kept" / SHA / "who").read_text() == "1", "the first that ends keeps its own"
    assert list((candidate_caches() / "links").iterdir()) == []


def test_a_killed_run_leaves_nothing_in_the_way(folders: RunFolders) -> None:
    slot(folders).admit(SHA)
    folders.remove()  # what the fork server does when the supervisor is gone
    again = RunFolders(confined=True)
    assert slot(again).admit(SHA) == candidate_caches() / "links" / SHA


@pytest.mark.parametrize("left", ["a link", "a file"])
def test_what_is_left_in_the_place_of_a_cache_is_not_kept(left: str, folders: RunFolders) -> None:
    """The folder around it belongs to the group too."""
    first = slot(folders)
    place = first.admit(SHA).resolve()
    place.rmdir()
    if left == "a link":
        place.symlink_to("/nonexistent")
    else:
        place.touch()
    first.release()
    assert not first.folder.exists() and list((candidate_caches() / "kept").iterdir()) == []


@pytest.mark.parametrize("left", ["a link", "a file"])
def test_files_of_an_earlier_version_are_replaced_by_a_cache(left: str, folders: RunFolders) -> None:
    kept = candidate_caches() / "kept" / SHA
    if left == "a link":
        kept.symlink_to("/nonexistent")
    else:
        kept.touch()
    assert list(slot(folders).admit(SHA).iterdir()) == [] and not kept.is_symlink() and not kept.exists()


def test_unconfined_candidates_share_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEERLANE_CACHE_DIR", str(tmp_path))
    folders = RunFolders(confined=False)
    assert folders.slot() is None and not candidate_caches().exists()
    folders.remove()


def test_a_cache_folder_that_is_a_file_is_the_users_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PEERLANE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="set PEERLANE_CACHE_DIR to a folder"):
        RunFolders(confined=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_cache_belongs_to_the_group_that_has_it(folders: RunFolders, tmp_path: Path) -> None:
    """Every group is another user."""
    (foreign := tmp_path / "foreign").touch()
    for user in (61184, 61186):
        place = slot(folders)
        os.chown(place.folder, user, user)
        path = place.admit(SHA)
        (path / "built").mkdir(exist_ok=True)
        (path / "built" / "library.so").touch()
        if not (path / "link").exists():
            (path / "link").symlink_to(foreign)
            (path / "same").hardlink_to(foreign)
        owners = {item.name: item.lstat().st_uid for item in (path, *path.resolve().rglob("*"))}
        if user == 61186:
            assert owners == {**dict.fromkeys(("built", "library.so", "link"), user), path.name: 0, "same": 0}
            assert path.stat().st_uid == user
        place.release()
    assert foreign.stat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_cache_that_cannot_be_given_on_is_not_kept(folders: RunFolders) -> None:
    for user, levels in ((61184, 100), (61186, 0)):
        place = slot(folders)
        os.chown(place.folder, user, user)
        path = place.admit(SHA)
        assert list(path.iterdir()) == [] and path.stat().st_uid == user
        nest(path, levels)
        place.release()


# --- folders that candidates have written to ---


def nest(folder: Path, levels: int) -> None:
    """Paths of that length do not exist: one level after the other."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=here)
        deeper = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(os.open("file", os.O_CREAT, dir_fd=here))
    os.close(here)


def test_any_folder_can_be_removed(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    for path in (folder, other):
        path.mkdir()
    (other / "file").touch()
    nest(folder, 3 * sys.getrecursionlimit())
    (folder / "link").symlink_to(other)
    (folder / "shut" / "in").mkdir(parents=True)
    (folder / "shut" / "in" / "file").touch()
    for path in (folder / "shut" / "in", folder / "shut"):
        path.chmod(0)
    untrusted_folders.remove_tree(folder)
    assert not folder.exists() and (other / "file").exists()
    (tmp_path / "to").symlink_to(other)
    for path in (folder, tmp_path / "to"):
        untrusted_folders.remove_tree(path)  # nothing is there, or nothing that may be removed
    assert (other / "file").exists()


def test_a_memory_file_can_be_emptied_whole() -> None:
    """Though its size is sealed; far behind the arenas too."""
    fd = memory_file("test")
    try:
        size, far = os.fstat(fd).st_size, 1 << 41
        for place in (0, far):
            os.pwrite(fd, b"left", place)
        linux.empty_file(fd)
        assert os.pread(fd, 4, 0) == os.pread(fd, 4, far) == bytes(4)
        assert (os.fstat(fd).st_size, os.fstat(fd).st_blocks) == (size, 0)
    finally:
        os.close(fd)


# --- the filter ---


def judged(machine: str, number: int, first: int = 0, architecture: int | None = None) -> int:
    """What the filter says to a system call: 0 to let it pass, else its error number."""
    _, own = seccomp._MACHINES[machine]
    data = struct.pack("<iIQQ", number, own if architecture is None else architecture, 0, first)
    code = list(struct.iter_unpack("<HBBI", seccomp.program(machine)))
    place, register = 0, 0
    while True:
        kind, if_true, if_false, value = code[place]
        if kind == 0x06:
            return 0 if value == 0x7FFF0000 else value & 0xFFFF
        if kind == 0x20:
            (register,), jump = struct.unpack_from("<I", data, value), 0
        else:
            holds = {0x15: register == value, 0x35: register >= value, 0x45: bool(register & value)}[kind]
            jump = if_true if holds else if_false
        place += 1 + jump


CALLS: Mapping[str, Mapping[str, int]] = {
    "x86_64": {"read": 0, "ptrace": 101, "clone": 56, "socket": 41, "kill": 62, "prlimit64": 302, "shmget": 29, "sched_setaffinity": 203},
    "aarch64": {
        "read": 63,
        "ptrace": 117,
        "clone": 220,
        "socket": 198,
        "kill": 129,
        "prlimit64": 261,
        "shmget": 194,
        "sched_setaffinity": 122,
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_filter(name: str) -> None:
    calls = CALLS[name]
    assert judged(name, calls["read"]) == judged(name, calls["kill"]) == 0
    assert judged(name, calls["ptrace"]) == judged(name, calls["shmget"]) == errno.EPERM
    assert judged(name, calls["prlimit64"]) == 0, "its own limits"
    assert judged(name, calls["prlimit64"], 1) == judged(name, calls["prlimit64"], 0xFFFFFFFF) == errno.EPERM
    assert judged(name, calls["sched_setaffinity"], 1) == 0, "libraries place their own threads by number"
    assert judged(name, calls["read"], architecture=0x40000003) == errno.ENOSYS, "32-bit programs have other numbers"
    assert judged(name, calls["read"] | 0x40000000) == judged(name, 435) == errno.ENOSYS
    threads = 0x3D0F00
    assert judged(name, calls["clone"], threads) == 0
    assert judged(name, calls["clone"], threads | linux.CLONE_NEWUSER) == errno.EPERM
    for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
        assert judged(name, calls["socket"], family) == 0
    for family in (socket.AF_PACKET, 40):
        assert judged(name, calls["socket"], family) == errno.EAFNOSUPPORT


def test_filter_of_an_unknown_machine() -> None:
    with pytest.raises(OSError, match="no system call filter for sparc64: expected x86_64 or aarch64"):
        seccomp.program("sparc64")


MOVES = """
import os, sys
from peerlane.sandbox import linux

folder = sys.argv[1]
linux.no_new_privileges()
linux.landlock([folder], readable=["/"], keep_signals=True)
linux.landlock(None, keep_signals=True)
os.makedirs(f"{folder}/key/new")
open(f"{folder}/key/new/file", "w").close()
os.replace(f"{folder}/key/new/file", f"{folder}/key/file")
"""


def test_ranks_move_files_between_folders_of_their_cache(tmp_path: Path) -> None:
    """As Triton does with all that it compiles."""
    assert not probe(())[confine.LANDLOCK_SIGNALS], "this test needs Landlock, as isolation L1 does"
    subprocess.run([sys.executable, "-c", MOVES, str(tmp_path)], check=True)
    assert (tmp_path / "key" / "file").exists()
