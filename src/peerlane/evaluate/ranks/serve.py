"""The life of a rank process: serves requests until it is told to exit. The fork server forks it with torch imported."""

from __future__ import annotations

import atexit
import gc
import os
import traceback
from typing import Any

from peerlane.device.emulator.ranks import RankFailure
from peerlane.device.host.arena import faults
from peerlane.errors import EmulatedFault
from peerlane.evaluate.processes.protocol import ERROR_CHARACTERS, Channel, Message
from peerlane.evaluate.ranks.builder import Builder
from peerlane.evaluate.ranks.candidate import CandidateRank
from peerlane.evaluate.ranks.emulated import EmulatedCandidate
from peerlane.evaluate.ranks.rank import Rank, classify
from peerlane.evaluate.ranks.trusted import TrustedRank

_KINDS: dict[str, type[Rank]] = {"trusted": TrustedRank, "builder": Builder, "candidate": CandidateRank}


def _kind(config: dict[str, Any]) -> type[Rank]:
    return EmulatedCandidate if "emulated_ranks" in config else _KINDS[config["role"]]


def _set_environment(config: dict[str, Any], rank: int) -> None:
    """The variables that launchers set, for code that reads them."""
    size, gpus = config["world_size"], config.get("gpu_of_rank")
    local = rank if gpus is None else gpus[rank]  # what programs take for the number of their GPU
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    os.environ.update(config.get("environment", {}))
    if "rank_environment" in config:
        os.environ.update(config["rank_environment"][rank])


def _error(kind: str, error: BaseException) -> Message:
    text = "".join(traceback.format_exception(error, limit=-12))
    if kind == "cuda_error" and not isinstance(error, EmulatedFault):  # which says it itself, with source lines
        text = "\n".join([text, *faults()])
    return {"ok": False, "error": {"kind": kind, "message": text[-ERROR_CHARACTERS:]}}


def serve(config: dict[str, Any], rank: int, channel: Channel, memory_fd: int) -> int:
    """The life of a rank process; returns its exit status."""
    _set_environment(config, rank)
    me = _kind(config)(config, rank, memory_fd)
    receive, send, handlers = channel.receive, channel.send, me.handlers
    me.tell = send
    while (request := receive()) is not None:
        try:
            answer: Message = {"ok": True, **handlers[request["op"]](request)}
        except BaseException as error:
            cause = error.error if isinstance(error, RankFailure) else error
            answer = _error(classify(cause, request.get("blame", "runtime_error")), cause)
            if isinstance(error, RankFailure):
                answer["error"]["rank"] = error.rank
        send(answer)
        if me.leaving:
            break
    gc.collect()
    atexit._run_exitfuncs()
    return 0
