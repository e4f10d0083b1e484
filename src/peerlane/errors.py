"""The exception tree.

PeerlaneError
├── UsageError            the caller asked for something that cannot be (exit code 2)
│   ├── UnknownProblem
│   ├── UnknownPreset
│   ├── CandidateNotFound
│   └── FileRefused       a file of somebody else's is a link, no regular file, too large or unreadable
├── CandidateChanged      a candidate's file is no longer what it was when the run began
├── MissingDependency     an optional part is not installed; the message names the install command
├── HarnessError          peerlane itself failed (exit code 4)
│   └── RunStopped        a run ended before it was done; carries the results that it has
├── DeviceError           a device-side failure
│   ├── CompileError      device source did not compile
│   ├── LaunchError       a kernel could not be launched
│   ├── DeviceTimeout     waits for other ranks have ended: one was too long, or a rank has died
│   └── EmulatedFault     the emulator stopped a kernel
└── ProtocolError         a rank process spoke out of turn

Every message says what was wrong, what was got, what was expected and what to do next.
"""

from collections.abc import Sequence
from typing import Any


class PeerlaneError(Exception):
    """Base of all errors that peerlane raises on purpose."""


class UsageError(PeerlaneError, ValueError):
    """The request itself is wrong; nothing was run. A ValueError too, as programs expect of torch.distributed."""


class UnknownProblem(UsageError):
    """No problem has this number."""


class UnknownPreset(UsageError):
    """The problem has no preset of this name."""


class CandidateNotFound(UsageError):
    """The candidate path does not exist or holds no candidate."""


class FileRefused(UsageError):
    """A file that others may have written is a link, is no regular file, is too large, or cannot be read."""


class CandidateChanged(PeerlaneError):
    """A candidate's file is no longer what it was when the run began; it was not judged."""


class CaseTooLarge(PeerlaneError):
    """A case needs more GPU memory than there is; nothing was judged on it."""


class MissingDependency(PeerlaneError):
    """An optional dependency is absent; the message names the command that installs it."""


class HarnessError(PeerlaneError):
    """A failure of peerlane itself; no candidate is to blame."""


class RunStopped(HarnessError):
    """A run ended before everything was judged. ``results`` holds what was, the last of which may not have been stored."""

    def __init__(self, why: str, results: Sequence[Any]) -> None:
        super().__init__(why)
        self.results = results


class DeviceError(PeerlaneError):
    """A failure on, or on the way to, the device."""


class CompileError(DeviceError):
    """Device source did not compile; the message holds the compiler's log."""


class LaunchError(DeviceError):
    """A kernel could not be loaded or launched."""


class DeviceTimeout(DeviceError):
    """Waits for other ranks have ended: one was too long, or a rank has died. The message says who waited for whom, and for what."""


class EmulatedFault(DeviceError):
    """The emulator stopped a kernel: a deadlock, a trap, an illegal address."""


class ProtocolError(PeerlaneError):
    """A rank process sent something that is not a valid message."""
