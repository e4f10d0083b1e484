"""Settings of a service: folder, ranks, limits, and the tokens that it accepts."""

import hmac
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerlane.common.place import Device
from peerlane.errors import UsageError
from peerlane.sandbox.isolation import Tier
from peerlane.settings import PoolSettings

ANYONE = "anyone"
"""the owner of all jobs of a service without tokens"""
_SHORTEST = 16


@dataclass(frozen=True)
class ServiceSettings:
    """Limits and machine of a service.

    Attributes:
        folder: of the queue and of ``results.jsonl``; one service at a time may use it.
        world_size: number of ranks of every evaluation.
        device, isolation, ranks_per_gpu: as in :class:`EvaluationPlan`.
        queue_limit: jobs that may wait; more are refused with 429.
        share: part of the queue that one token may fill, where there are several.
        drain_s: seconds that a running evaluation may take after SIGTERM; then it is put back.
        check: whether the node is checked before it takes work.
        judges: candidates that are judged side by side where nothing is timed; see :class:`PoolSettings`.
    """

    folder: Path
    world_size: int = 4
    device: Device = "cpu"
    isolation: Tier | None = None
    ranks_per_gpu: int = 0
    queue_limit: int = 256
    share: float = 0.5
    drain_s: float = 120.0
    check: bool = True
    judges: int | None = None

    def evaluator_options(self) -> dict[str, Any]:
        """Keyword arguments of :class:`.Evaluator`."""
        options = {name: getattr(self, name) for name in ("world_size", "device", "isolation", "ranks_per_gpu")}
        return options | {"pool_settings": PoolSettings(judged_at_a_time=self.judges)}

    def __post_init__(self) -> None:
        if self.judges is not None and self.judges < 1:
            raise UsageError(f"--judges got {self.judges}: expected at least 1")
        if self.queue_limit < 1:
            raise UsageError(f"--queue-limit got {self.queue_limit}: expected at least 1")
        if not 0 < self.share <= 1:
            raise UsageError(f"--share got {self.share:g}: expected a part of the queue, above 0 and at most 1")
        if self.drain_s < 0:
            raise UsageError(f"--drain got {self.drain_s:g}: expected seconds, 0 or more")


@dataclass(frozen=True)
class Tokens:
    """Accepted tokens: pairs of a name and a secret. Without any, everybody may ask."""

    pairs: tuple[tuple[str, str], ...] = ()

    def owner(self, authorization: str) -> str | None:
        """The name that belongs to an ``Authorization`` header; None if it holds no accepted token. Takes the same time for all."""
        if not self.pairs:
            return ANYONE
        found = None
        for name, secret in self.pairs:
            if hmac.compare_digest(authorization.encode("utf-8", "replace"), f"Bearer {secret}".encode()):
                found = name
        return found


def read_tokens(from_environment: str | None, file: Path | None) -> Tokens:
    """The tokens of the environment and of a file: a line each, a secret, or a name and a secret. Raises :class:`UsageError`."""
    pairs = [("default", from_environment)] if from_environment else []
    if file is not None:
        pairs += _read_file(file)
    for name, secret in pairs:
        if len(secret) < _SHORTEST:
            raise UsageError(
                f"the token {name!r} has {len(secret)} characters: expected at least {_SHORTEST}, such as from `openssl rand -hex 16`"
            )
    if len({name for name, _ in pairs}) < len(pairs) or len({secret for _, secret in pairs}) < len(pairs):
        raise UsageError("two tokens have the same name or the same secret: expected each to be different")
    return Tokens(tuple(pairs))


def _read_file(file: Path) -> list[tuple[str, str]]:
    try:
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UsageError(f"--token-file {file}: other users can read it; run `chmod 600 {file}`")
        lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise UsageError(f"--token-file {file}: cannot be read: {error.strerror}") from None
    pairs = []
    for number, words in enumerate(lines, 1):
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise UsageError(f"--token-file {file}, line {number}: expected a token, or a name and a token, got {len(words)} words")
        pairs.append((words[0], words[1]) if len(words) == 2 else (f"line{number}", words[0]))
    if not pairs:
        raise UsageError(f"--token-file {file}: expected a line per token, got none")
    return pairs
