"""Folders of strangers: no link is followed, nothing that is not a regular file is opened, and the rest is judged."""

import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Peerlane
from e2e.runs import RIGHT as GOOD
from peerlane.cli.exit_codes import ExitCode
from peerlane.cli.runs import run_to_judge
from peerlane.common import files
from peerlane.errors import CandidateChanged, CandidateNotFound
from peerlane.evaluate import candidates, discover
from peerlane.evaluate.candidates import candidate_file
from peerlane.sandbox.untrusted_folders import remove_tree

DISCOVER = """
import json, sys
from peerlane.evaluate import discover
notes = []
names = [item.name for item in discover(sys.argv[1:], notes.append)]
print(json.dumps([names, notes]))
"""
SECONDS, BYTES = 20, 2 << 30
PROTECTED = "a secret of the keeper"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a stranger, with a good candidate."""
    made = tmp_path / "in"
    made.mkdir()
    (made / "1_good_pytorch.py").write_text(GOOD)
    return made


def discovered(*paths: Path) -> tuple[list[str], list[str]]:
    """Names and notes of the candidates that are found, by a process of limited time and memory."""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", DISCOVER, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES)),
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    names, notes = json.loads(ran.stdout)
    return names, notes


def socket_file(at: Path, secret: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(at))


def sparse_file(at: Path, secret: Path) -> None:
    with at.open("wb") as file:
        file.truncate(1 << 40)


HOSTILE: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "pipe": (lambda at, secret: os.mkfifo(at), "is a pipe"),
    "endless_device": (lambda at, secret: at.symlink_to("/dev/zero"), "is a link"),
    "link_outside": (lambda at, secret: at.symlink_to(secret), "is a link"),
    "relative_link_outside": (lambda at, secret: at.symlink_to(os.path.relpath(secret, at.parent)), "is a link"),
    "link_to_itself": (lambda at, secret: at.symlink_to(at.name), "is a link"),
    "link_to_nothing": (lambda at, secret: at.symlink_to("gone.py"), "is a link"),
    "socket": (socket_file, "is a socket"),
    "sparse_file": (sparse_file, "expected at most 2097152"),
}
"""What makes a file, given its path and that of a secret, and why it is refused."""


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("named", [False, True])
def test_a_hostile_file_is_refused_by_name(name: str, named: bool, folder: Path, tmp_path: Path) -> None:
    """Found in a folder, or named itself, as by a pattern of the shell."""
    make, reason = HOSTILE[name]
    secret = tmp_path / "secret.py"
    secret.write_text(f"{GOOD}# {PROTECTED}\n")
    make(folder / "1_bad_pytorch.py", secret)
    names, notes = discovered(*(sorted(folder.iterdir()) if named else [folder]))
    assert names == ["1_good_pytorch"]
    assert [("1_bad_pytorch.py" in note, reason in note) for note in notes] == [(True, True)], notes


def test_a_device_node_is_refused_unread(folder: Path) -> None:
    names, notes = discovered(folder / "1_good_pytorch.py", Path("/dev/zero"))
    assert names == ["1_good_pytorch"] and "/dev/zero is a device" in notes[0]


def test_a_linked_folder_is_not_entered(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "1_secret_pytorch.py").write_text(GOOD)
    (folder / "sub").symlink_to(tmp_path / "out")
    names, notes = discovered(folder)
    assert names == ["1_good_pytorch"] and len(notes) == 1 and "sub is a link" in notes[0]


def test_a_folder_that_you_name_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(folder.name)
    assert discovered(tmp_path / "latest") == (["1_good_pytorch"], [])


def test_a_folder_that_becomes_a_link_is_not_followed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapped after the search, before the file is opened."""
    inside, outside = folder / "sub", tmp_path / "out"
    for place in (inside, outside):
        place.mkdir()
        (place / "1_x_pytorch.py").write_text(f"{GOOD}# {place.name}\n")

    def search_and_swap(searched: Path, wanted: Callable[[str], bool]) -> tuple[list[Path], list[str]]:
        found = files.find_files(searched, wanted)
        inside.rename(tmp_path / "gone")
        inside.symlink_to(outside)
        return found

    monkeypatch.setattr(candidates, "find_files", search_and_swap)
    notes: list[str] = []
    assert [item.name for item in discover([str(folder)], notes.append)] == ["1_good_pytorch"]
    assert len(notes) == 1 and "sub is a link" in notes[0]


@pytest.mark.parametrize("name", ["pipe", "link_outside", "endless_device"])
def test_a_file_that_is_swapped_between_check_and_open_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, secret = tmp_path / "1_x_pytorch.py", tmp_path / "secret.py"
    path.write_text(GOOD)
    secret.write_text(PROTECTED)
    real = os.open

    def swap_and_open(opened: Path, flags: int, *rest: int, **options: int | None) -> int:
        path.unlink(missing_ok=True)
        HOSTILE[name][0](path, secret)
        monkeypatch.setattr(os, "open", real)
        return real(opened, flags, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", swap_and_open)
    with pytest.raises(CandidateNotFound, match=r"is a pipe|cannot read .* symbolic links"):
        candidate_file(path)


def test_a_file_that_becomes_a_pipe_while_it_waits_is_not_judged(tmp_path: Path) -> None:
    path = tmp_path / "1_x_pytorch.py"
    path.write_text(GOOD)
    found = candidate_file(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CandidateChanged, match="is a pipe"):
        found.source()


def test_a_hard_link_is_a_file_like_any_other(tmp_path: Path) -> None:
    """Package managers make them; who can make one may read the file, or the kernel was told to allow it."""
    (tmp_path / "one.py").write_text(GOOD)
    os.link(tmp_path / "one.py", tmp_path / "1_x_pytorch.py")
    assert discovered(tmp_path) == (["1_x_pytorch"], [])


def test_a_leased_file_is_not_waited_for(tmp_path: Path) -> None:
    """Its owner could delay whoever opens it by as long as the kernel allows, 45 s by default."""
    (tmp_path / "1_x_pytorch.py").write_text(GOOD)
    (tmp_path / "2_x_pytorch.py").write_text(GOOD)
    owner = os.open(tmp_path / "1_x_pytorch.py", os.O_RDWR)
    try:
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        fcntl.fcntl(owner, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        begin = time.monotonic()
        names, notes = discovered(tmp_path)
        assert time.monotonic() - begin < SECONDS / 2
        assert names == ["2_x_pytorch"] and "1_x_pytorch.py" in notes[0]
    finally:
        os.close(owner)
        signal.signal(signal.SIGIO, signal.SIG_DFL)


def test_deep_and_crowded_folders_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deeper than a path may be long, and more than are looked at."""
    deepest = os.open(folder, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=deepest)
        inner = os.open("d", os.O_RDONLY, dir_fd=deepest)
        os.close(deepest)
        deepest = inner
    os.close(deepest)
    try:
        names, notes = discovered(folder)
        assert names == ["1_good_pytorch"] and len(notes) == 1 and "more than 32 folders deep" in notes[0]
    finally:
        remove_tree(folder / "d")
    monkeypatch.setattr(files, "MOST_ENTRIES", 100)
    for number in range(300):
        (folder / f"1_{number}_pytorch.py").write_text(GOOD)
    found, refused = files.find_files(folder, lambda name: name.endswith(".py"))
    assert len(found) == 100 and "holds more than 100 files" in refused[0]


@pytest.mark.parametrize("name", ["1_a\nb_pytorch.py", "1_\x1b[2J_pytorch.py", "1_\u202e_pytorch.py"])
def test_a_refused_name_cannot_write_to_the_terminal(name: str, folder: Path) -> None:
    """Of a link, a folder and a file alike."""
    (folder / name).symlink_to("/etc/passwd")
    (folder / f"folder{name}").symlink_to("/etc")
    (folder / f"{name}x").mkdir()
    (folder / f"{name}x" / "1_x_pytorch.py").write_text(GOOD)
    names, notes = discovered(folder)
    assert names == ["1_good_pytorch"] and len(notes) == 3 and all(note.isprintable() for note in notes), notes


def test_an_unreadable_file_or_folder_stops_nobody(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "1_good_pytorch.py").write_text(GOOD)
        (folder / "1_secret_pytorch.py").write_text(PROTECTED)
        (folder / "1_secret_pytorch.py").chmod(0)
        (folder / "closed").mkdir(mode=0)
        me = os.geteuid()
        notes: list[str] = []
        if me == 0:
            os.seteuid(65534)  # whom, unlike root, modes stop
        try:
            names = [item.name for item in discover([name], notes.append)]
        finally:
            os.seteuid(me)
        (folder / "closed").chmod(0o700)
    assert names == ["1_good_pytorch"] and len(notes) == 2, notes
    assert all("Permission denied" in note for note in notes)


def test_a_run_of_a_stranger_is_judged_without_its_hostile_files(tmp_path: Path) -> None:
    """PROBLEM/SAMPLE/candidate.py that is a link or a pipe, or lies behind a link."""
    for number in range(4):
        (tmp_path / "in" / "001" / str(number)).mkdir(parents=True)
    (tmp_path / "in" / "001" / "0" / "candidate.py").write_text(GOOD)
    (tmp_path / "in" / "001" / "1" / "candidate.py").symlink_to("/etc/shadow")
    os.mkfifo(tmp_path / "in" / "001" / "2" / "candidate.py")
    (tmp_path / "in" / "001" / "3").rmdir()
    (tmp_path / "in" / "001" / "3").symlink_to(tmp_path / "in" / "001" / "0")
    run = run_to_judge([str(tmp_path / "in")], "somebody")
    assert run is not None and [item.name for item in run.candidates] == ["001/0"]
    expected = ("1/candidate.py is a link", "2/candidate.py is a pipe", "3 is a link")
    assert all(any(said in text for text in run.refused) for said in expected)
    assert len(run.refused) == 3


@pytest.mark.slow
def test_the_rest_is_judged_and_the_exit_code_tells(folder: Path, tmp_path: Path, peerlane: Peerlane) -> None:
    judge = ["--preset", "small", "--world-size", "2", "--device", "cpu", "--mode", "eager", "--out", tmp_path / "out"]
    peerlane("eval", folder, *judge)
    (folder / "1_bad_pytorch.py").symlink_to("/etc/shadow")
    said = peerlane("eval", folder, *judge, code=ExitCode.NOT_CORRECT)
    assert "1_good_pytorch" in said.out and "1_bad_pytorch.py is a link" in said.err and "1 file was refused and not judged" in said.err
