"""The output of ranks, which their leader reads from pipes, and whose end is kept. A candidate can print for ever and fill nothing."""

from __future__ import annotations

import os

KEPT_BYTES = 1 << 16
"""of what each rank printed last"""
_CHUNK_BYTES = 1 << 16  # what a pipe holds
_DRAIN_CHUNKS = 64  # at most so many at a time: a rank may be printing faster than anybody reads


class LogTail:
    """The end of what comes out of a pipe, in a memory file that never holds more than twice ``KEPT_BYTES``."""

    def __init__(self, pipe: int, file: int) -> None:
        self._pipe, self._file, self._size = pipe, file, 0
        os.set_blocking(pipe, False)

    def fileno(self) -> int:
        return self._pipe

    def pump(self) -> bool:
        """Takes what the pipe holds now; False once nobody can write to it any more."""
        for _ in range(_DRAIN_CHUNKS):
            try:
                chunk = os.read(self._pipe, _CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._append(chunk)
        return True

    def _append(self, chunk: bytes) -> None:
        if self._size + len(chunk) > 2 * KEPT_BYTES:
            kept = os.pread(self._file, KEPT_BYTES, max(0, self._size - KEPT_BYTES))
            os.ftruncate(self._file, 0)
            self._size = os.pwrite(self._file, kept, 0)
        self._size += os.pwrite(self._file, chunk, self._size)

    def close(self) -> None:
        os.close(self._pipe)
