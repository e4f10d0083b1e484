"""The life of a rank process: serves requests until it is told to exit. The fork server forks it with torch imported."""

import atexit
import gc
import os
import sys
import traceback
from typing import Any

from peerlane import settings
from peerlane.device.host.arena import faults
from peerlane.emulator.ranks import RankFailure
from peerlane.errors import EmulatedFault
from peerlane.evaluate import messages
from peerlane.evaluate.messages import PerRank
from peerlane.evaluate.processes.protocol import Channel
from peerlane.evaluate.ranks.builder import Builder
from peerlane.evaluate.ranks.candidate import CandidateRank
from peerlane.evaluate.ranks.emulated import EmulatedCandidate
from peerlane.evaluate.ranks.rank import RankProcess, classify
from peerlane.evaluate.ranks.trusted import TrustedRank

_KINDS: dict[str, type[RankProcess]] = {"trusted": TrustedRank, "builder": Builder, "candidate": CandidateRank}


def _kind(config: dict[str, Any]) -> type[RankProcess]:
    return EmulatedCandidate if "emulated_ranks" in config else _KINDS[config["role"]]


def _set_environment(config: dict[str, Any], rank: int) -> None:
    """The variables that launchers set, for code that reads them."""
    size, gpus = config["world_size"], config.get("gpu_of_rank")
    local = rank if gpus is None else gpus[rank]  # what programs take for the number of their GPU
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    os.environ.setdefault(settings.WAIT_LIMIT, str(settings.CANDIDATE_WAIT_S))
    os.environ.update(config.get("environment", {}))
    if "rank_environment" in config:
        os.environ.update(config["rank_environment"][rank])


def _error(error: BaseException, default: messages.ErrorKind) -> messages.RankError:
    rank = error.rank if isinstance(error, RankFailure) else None
    cause = error.error if isinstance(error, RankFailure) else error
    kind, text = classify(cause, default), "".join(map(messages.shortened, traceback.format_exception(cause, limit=-12)))
    if kind == "cuda_error" and not isinstance(cause, EmulatedFault):  # which says it itself, with source lines
        text = "\n".join([text, *faults()])
    return messages.RankError(kind, text, rank)


def serve(config: dict[str, Any], rank: int, channel: Channel, memory_fd: int) -> int:
    """The life of a rank process; returns its exit status."""
    _set_environment(config, rank)
    me = _kind(config)(config, rank, memory_fd)
    receive, send, handlers = channel.receive, channel.send, me.handlers
    read_request, answer_message = messages.read_request, messages.answer_message
    me.send = send
    while (message := receive()) is not None:
        request, arguments = read_request(message)
        try:
            handler = handlers[request.op]
            result = handler(**arguments) if isinstance(arguments, dict) else PerRank(handler(**each) for each in arguments)
            answer = answer_message(request, result)
        except BaseException as error:
            answer = messages.error_message(_error(error, request.failure_kind))
        send(answer)
        if me.leaving:
            break
    gc.collect()
    if (pools := sys.modules.get("concurrent.futures.process")) is not None:
        pools._python_exit()  # as Python does first: multiprocessing's function waits for the processes of pools
    atexit._run_exitfuncs()
    return 0
