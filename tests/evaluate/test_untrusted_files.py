"""Folders of strangers: no link is followed, nothing that is not a regular file is opened, and the rest is judged."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from peerlane.cli._console import ExitCode

GOOD = """\
import torch.distributed as dist


def solution(tensor):
    out = tensor.clone()
    dist.all_reduce(out)
    return out
"""
DISCOVER = """
import json, sys
from peerlane.evaluate import discover
notes = []
names = [item.name for item in discover(sys.argv[1:], notes.append)]
print(json.dumps([names, notes]))
"""
SECONDS, BYTES = 20, 2 << 30
PROTECTED = "a secret of the keeper"


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


def pipe(at: Path, secret: Path) -> None:
    os.mkfifo(at)


def endless_device(at: Path, secret: Path) -> None:
    at.symlink_to("/dev/zero")


def link_outside(at: Path, secret: Path) -> None:
    at.symlink_to(secret)


def relative_link_outside(at: Path, secret: Path) -> None:
    at.symlink_to(os.path.relpath(secret, at.parent))


def link_to_itself(at: Path, secret: Path) -> None:
    at.symlink_to(at.name)


def link_to_nothing(at: Path, secret: Path) -> None:
    at.symlink_to("gone.py")


def socket_file(at: Path, secret: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(at))


def sparse_file(at: Path, secret: Path) -> None:
    with at.open("wb") as file:
        file.truncate(1 << 40)


Hostile = Callable[[Path, Path], None]


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (pipe, "is a pipe"),
        (endless_device, "is a link"),
        (link_outside, "is a link"),
        (relative_link_outside, "is a link"),
        (link_to_itself, "is a link"),
        (link_to_nothing, "is a link"),
        (socket_file, "is a socket"),
        (sparse_file, "expected at most 2097152"),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_hostile_file_is_refused_by_name(hostile: Hostile, reason: str, named: bool, tmp_path: Path) -> None:
    """Found in a folder, or named itself, as by a pattern of the shell."""
    folder = tmp_path / "in"
    folder.mkdir()
    secret = tmp_path / "secret.py"
    secret.write_text(f"{GOOD}# {PROTECTED}\n")
    (folder / "1_good_pytorch.py").write_text(GOOD)
    hostile(folder / "1_bad_pytorch.py", secret)
    names, notes = discovered(*(sorted(folder.iterdir()) if named else [folder]))
    assert names == ["1_good_pytorch"]
    assert [("1_bad_pytorch.py" in note, reason in note) for note in notes] == [(True, True)], notes


def test_a_device_node_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "1_good_pytorch.py").write_text(GOOD)
    names, notes = discovered(tmp_path / "1_good_pytorch.py", Path("/dev/zero"))
    assert names == ["1_good_pytorch"] and "/dev/zero is a device" in notes[0]


def test_a_linked_folder_is_not_entered(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "1_secret_pytorch.py").write_text(GOOD)
    (tmp_path / "in" / "1_good_pytorch.py").write_text(GOOD)
    (tmp_path / "in" / "sub").symlink_to(tmp_path / "out")
    names, notes = discovered(tmp_path / "in")
    assert names == ["1_good_pytorch"] and len(notes) == 1 and "sub is a link" in notes[0]


def test_a_folder_that_you_name_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1_good_pytorch.py").write_text(GOOD)
    (tmp_path / "latest").symlink_to("in")
    assert discovered(tmp_path / "latest") == (["1_good_pytorch"], [])


@pytest.mark.slow
def test_the_rest_is_judged_and_the_exit_code_tells(
    tmp_path: Path, peerlane: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "1_good_pytorch.py").write_text(GOOD)
    judge = ["--preset", "small", "--world-size", "2", "--device", "cpu", "--mode", "eager", "--out", tmp_path / "out"]
    assert peerlane("eval", folder, *judge) == ExitCode.OK
    (folder / "1_bad_pytorch.py").symlink_to("/etc/shadow")
    capsys.readouterr()
    assert peerlane("eval", folder, *judge) == ExitCode.NOT_CORRECT
    said = capsys.readouterr()
    assert "1_good_pytorch" in said.out and "1_bad_pytorch.py is a link" in said.err and "1 file was refused and not judged" in said.err
