"""Runs one job in a process of its own: a crash of device code ends this process only. Standard library alone, so that it starts fast.

python _child.py JOB SECONDS      JOB is a JSON file beside the bytes it names; prints the findings as JSON, and writes the pages that the
                                  last schedule has written to the file that the job names for them; SIGPROF ends it after so many
                                  seconds of processor time
"""

import ctypes
import json
import mmap
import os
import signal
import sys
from pathlib import Path

PAGE_BYTES = 4096


class _Region(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("rank", ctypes.c_int64),
        ("expected", ctypes.c_void_p),
        ("unwritten", ctypes.c_uint32),
        ("any_order", ctypes.c_uint32),
        ("multicast", ctypes.POINTER(ctypes.c_uint64)),
        ("multicast_count", ctypes.c_uint64),
    )


class _Content(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("data", ctypes.c_void_p))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("argument_count", ctypes.c_uint32),
        *((name, ctypes.c_uint32) for name in ("rank", "stream", "shared_bytes", "cluster", "resident_blocks")),
        *((name, ctypes.c_uint32 * 3) for name in ("grid", "block")),
        *((name, ctypes.c_uint32) for name in ("dependent", "in_order")),
    )


class _Run(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("regions", ctypes.POINTER(_Region)),
        ("contents", ctypes.POINTER(_Content)),
        ("launches", ctypes.POINTER(_Launch)),
        ("faults", ctypes.POINTER(ctypes.c_int32)),
        ("globals", ctypes.POINTER(ctypes.c_int32)),
        *((f"{name}_count", ctypes.c_uint32) for name in ("region", "content", "launch", "fault", "global")),
        *((name, ctypes.c_uint32) for name in ("first_schedule", "schedules")),
        ("progress", ctypes.POINTER(ctypes.c_uint32)),
    )


def main() -> str:
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[2]))
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    with open(job["data"], "r+b") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = ctypes.addressof(ctypes.c_char.from_buffer(data))

    def address(place: int | None) -> int | None:
        return None if place is None else start + place

    program = ctypes.CDLL(job["program"])
    multicasts = [(ctypes.c_uint64 * len(r["multicast"]))(*r["multicast"]) for r in job["regions"]]
    regions = [
        _Region(
            *(r["begin"], r["end"], r["rank"], address(r["expected"]), r["unwritten"], r["any_order"]),
            *(ctypes.cast(to, ctypes.POINTER(ctypes.c_uint64)), len(to)),
        )
        for r, to in zip(job["regions"], multicasts, strict=True)
    ]
    contents = [_Content(c["begin"], c["bytes"], address(c["data"])) for c in job["contents"]]
    pointers = [(ctypes.c_void_p * max(len(item["arguments"]), 1))(*map(address, item["arguments"])) for item in job["launches"]]
    launches = [
        _Launch(
            ctypes.cast(getattr(program, "peerlane_launch_" + item["kernel"]), ctypes.c_void_p).value,
            ctypes.addressof(arguments),
            len(item["arguments"]),
            *(item[name] for name in ("rank", "stream", "shared_bytes", "cluster", "resident_blocks")),
            *((ctypes.c_uint32 * 3)(*item[name]) for name in ("grid", "block")),
            *(item[name] for name in ("dependent", "in_order")),
        )
        for item, arguments in zip(job["launches"], pointers, strict=True)
    ]
    with open(job["progress"], "r+b") as file:
        shared = mmap.mmap(file.fileno(), 4)
    over = ctypes.c_uint32.from_buffer(shared)
    run = _Run(
        job["base"],
        job["seed"],
        (_Region * max(len(regions), 1))(*regions),
        (_Content * max(len(contents), 1))(*contents),
        (_Launch * len(launches))(*launches),
        (ctypes.c_int32 * max(len(job["faults"]), 1))(*job["faults"]),
        (ctypes.c_int32 * max(len(job["globals"]), 1))(*job["globals"]),
        len(regions),
        len(contents),
        len(launches),
        len(job["faults"]),
        len(job["globals"]),
        job["first_schedule"],
        job["schedules"],
        ctypes.pointer(over),
    )
    program.peerlane_emulator_run.restype = ctypes.c_char_p
    said: str = program.peerlane_emulator_run(ctypes.byref(run)).decode()
    if job["memory"] is not None:
        with open(job["memory"], "wb") as pages:
            for page in json.loads(said)["dirty"]:
                pages.write(ctypes.string_at(job["base"] + page * PAGE_BYTES, PAGE_BYTES))
    return said


# What device code prints goes to stderr, apart from the answer.
with os.fdopen(os.dup(1), "w") as answer:
    os.dup2(2, 1)
    answer.write(main())
