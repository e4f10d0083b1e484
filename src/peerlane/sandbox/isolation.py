"""The three tiers that keep candidates from the machine and from the evaluator: what each needs, and what this machine can give.

L0: processes of their own and deadlines. L1: the kernel keeps candidates from the evaluator's processes and files. L2: L1 inside one
bubblewrap sandbox that holds all ranks. docs/isolation.md says what remains possible in each.
"""

import functools
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from peerlane.common.place import Place
from peerlane.errors import UsageError
from peerlane.sandbox import confine
from peerlane.sandbox.confine import Confinement
from peerlane.sandbox.hidden_files import hidden_paths
from peerlane.settings import passes_to_ranks, problem_folders

Tier = Literal["L0", "L1", "L2"]

# What L1 promises, and the measures of which one must be there.
_PROMISES: Mapping[str, tuple[str, ...]] = {
    "programs gain no privileges": (confine.NO_NEW_PRIVILEGES,),
    "the evaluator's memory cannot be read": (confine.NOT_DUMPABLE,),
    "candidates have no capabilities": (confine.NO_CAPABILITIES,),
    "candidates cannot signal the evaluator": (confine.LANDLOCK_SIGNALS, confine.OWN_UID),
    "candidates cannot set the evaluator's limits": (confine.SECCOMP, confine.OWN_UID),
    "candidates cannot write files of others, nor each other's caches": (confine.LANDLOCK_FILES,),
}
USERS = range(61184, 65520, 2)  # of those without an account; the odd one behind each is its executioner's, see processes.kill_user
_HIDDEN = ("/tmp", "/var/tmp", "/run", "/home", "/root", "/mnt", "/media", "/srv")
_PROBE_S = 60.0
_INSTALL_BUBBLEWRAP = "apt-get install bubblewrap (or your distribution's package of that name)"


@dataclass(frozen=True)
class Isolation:
    """A tier and how it is made here.

    Attributes:
        tier: ``L0``, ``L1`` or ``L2``.
        confinement: for the processes of the run.
        missing: measures that are not in force, and why not.
        sandbox: the command that the process bearing all ranks is run with; empty below L2.
        builders: names of the measures that are in force for builders; on GPUs more than for ranks.
    """

    tier: Tier
    confinement: Confinement
    missing: Mapping[str, str] = field(hash=False)
    sandbox: tuple[str, ...] = ()
    builders: tuple[str, ...] = ()

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of what is in force; see docs/isolation.md."""
        return self.confinement.measures

    def confine(self, role: str, taken: Collection[int]) -> Confinement:
        """Returns the confinement of one more group. If it has a user of its own, that is none of ``taken``."""
        measures = self.builders if role == "builder" else self.measures
        hidden = tuple(hidden_paths()) if confine.LANDLOCK_FILES in measures else ()
        return Confinement(measures, draw_user(taken) if confine.OWN_UID in measures else 0, hidden)

    def environment(self) -> dict[str, str]:
        """The variables that the processes of the run get: from L1 on, none that is not known to be needed."""
        return dict(os.environ) if self.tier == "L0" else {name: value for name, value in os.environ.items() if passes_to_ranks(name)}

    def command(self, writable: Iterable[Path], readable: Iterable[Path]) -> list[str]:
        """The start of a command line that runs this Python, in the sandbox if there is one, which has these folders of the run in it."""
        if not self.sandbox:
            return [sys.executable]
        shared = [("--ro-bind", path) for path in readable] + [("--bind", path) for path in writable]
        return [*self.sandbox, *(word for option, path in shared for word in (option, str(path), str(path))), sys.executable]

    def describe(self) -> str:
        if self.tier == "L0":
            why = "".join(f"; no {name}: {in_short(reason)}" for name, reason in self.missing.items())
            return f"L0 (unverified): own processes and deadlines{why}"
        absent = f"; without {', '.join(self.missing)}" if self.missing else ""
        return f"{self.tier}: confined by the kernel{', in a sandbox' if self.tier == 'L2' else ''}{absent}"


def in_short(reason: str) -> str:
    """The first and the last line: of an exception with its traceback, whose it is and what it says."""
    lines = reason.splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


NO_ISOLATION = Isolation("L0", Confinement(), {})


def draw_user(taken: Collection[int] = ()) -> int:
    """A user for a group of candidate processes: nobody else runs as this one, so that no candidate can slow down or kill another."""
    return secrets.choice([uid for uid in USERS if uid not in taken])


def choose(tier: Tier | None, device: str) -> Isolation:
    """The tier that was asked for, or for None the best of L0 and L1 that this machine gives.

    Args:
        tier: raises :class:`UsageError` if the machine cannot give it.
        device: ``cuda`` or ``cpu``: the ranks'.
    """
    if tier == "L0":
        return NO_ISOLATION
    if tier == "L2":
        sandbox = sandbox_command(_python_folders())
        reasons = probe_measures(sandbox)
    else:
        sandbox, reasons = (), probe_measures(())
    measures, missing = _select(reasons, device)
    lacking = {promise: needed for promise, needed in _PROMISES.items() if not set(needed) & set(measures)}
    if lacking:
        if tier is None:
            return Isolation("L0", Confinement(), missing)
        told = "; ".join(f"{promise} ({', '.join(f'{name}: {missing[name]}' for name in needed)})" for promise, needed in lacking.items())
        raise UsageError(
            f"isolation {tier} is not possible on this machine. Missing: {told}. Use a machine with Landlock (Linux 6.12; as root, "
            "with CPU ranks, Linux 6.2 does), or --isolation L0 for candidates that you trust"
        )
    if tier == "L2":
        measures = (*measures, confine.BUBBLEWRAP)
    builders = (*measures, confine.OWN_UID) if confine.OWN_UID not in measures and not reasons[confine.OWN_UID] else measures
    return Isolation(tier or "L1", Confinement(measures), missing, sandbox, builders)


def _select(reasons: Mapping[str, str], device: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The measures to take, and why the others are not taken."""
    missing = {name: reason for name, reason in reasons.items() if reason}
    if Place.of(device).has_gpus and confine.OWN_UID not in missing:
        missing[confine.OWN_UID] = "the NVIDIA driver lets processes of one user only share memory"
    measures = [name for name in reasons if name not in missing]
    return (*measures, confine.CLEAN_ENVIRONMENT), missing


@functools.cache
def probe_measures(sandbox: tuple[str, ...]) -> Mapping[str, str]:
    """Every measure, and why it cannot be taken in a process that is started with this command."""
    script = "import json, sys; from peerlane.sandbox import confine; print(json.dumps(confine.try_measures(int(sys.argv[1]))))"
    command = [*sandbox, sys.executable, "-P", "-c", script, str(draw_user())]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PROBE_S, check=False)
        said = ran.stderr.strip()[-500:]
        reasons = json.loads(ran.stdout) if ran.returncode == 0 else {}
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        said, reasons = str(error), {}
    if reasons:
        return dict(reasons)
    if sandbox:
        raise UsageError(
            f"isolation L2 is not possible here: bubblewrap cannot make its sandbox ({said or 'no reason given'}). In a container, allow "
            "user namespaces and mounts (docker run --cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt "
            "apparmor=unconfined), or use --isolation L1"
        )
    names = dict.fromkeys(name for needed in _PROMISES.values() for name in needed)
    return dict.fromkeys(names, f"could not be tried: {said or 'no reason given'}")


# --- the sandbox of L2 ---


def _python_folders() -> list[Path]:
    """Returns the folders of this Python, its packages, compilers and the user's own problems."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    found = [
        sys.prefix,
        sys.base_prefix,
        os.path.dirname(os.path.realpath(sys.executable)),
        *sys.path,
        *homes,
        *map(str, problem_folders()),
    ]
    return [Path(path) for path in found if path and os.path.exists(path)]


def sandbox_command(readable: Iterable[Path]) -> tuple[str, ...]:
    """The bubblewrap command, without the folders that are writable and what it is to run.

    Processes, network, names and shared memory are the sandbox's own. The file system is read-only, and homes, temporary folders and the
    sockets of services are hidden, except for what is ``readable``. Raises :class:`UsageError` if bubblewrap is not installed.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise UsageError(f"isolation L2 needs bubblewrap, and there is no bwrap on PATH: {_INSTALL_BUBBLEWRAP}; or use --isolation L1")
    hidden = [path for path in _HIDDEN if os.path.isdir(path) and not os.path.islink(path)]
    shown = {os.path.abspath(path) for path in readable} | {os.path.realpath(path) for path in readable}
    below = sorted(path for path in shown if any(path.startswith(f"{folder}/") for folder in hidden))
    nodes = [path for path in confine.device_nodes() if re.match(r"/dev/(nvidia|dri)", path)]
    return (
        program,
        *("--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-ipc", "--die-with-parent", "--cap-add", "ALL"),
        *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
        *(word for path in nodes for word in ("--dev-bind", path, path)),
        *(word for path in hidden for word in ("--tmpfs", path)),
        *(word for path in below for word in ("--ro-bind", path, path)),
        *(word for path in hidden_paths() for word in (("--tmpfs", path) if os.path.isdir(path) else ("--ro-bind", os.devnull, path))),
    )
