"""Reads zip files of strangers: neither their table of members nor a member takes more memory than its limit."""

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from peerlane.common.files import open_regular
from peerlane.errors import UsageError

_MOST_BYTES, _MOST_DIRECTORY_BYTES = 1 << 30, 16 << 20
_END, _LONGER_END_BYTES, _END_BYTES, _MOST_COMMENT_BYTES = b"PK\5\6", 20, 22, 1 << 16
"""The mark and sizes of the records at the end of an archive, and of the comment behind them."""
_METHODS = {zipfile.ZIP_BZIP2: "bzip2", zipfile.ZIP_LZMA: "LZMA"}
_BROKEN = (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, ValueError, EOFError, struct.error, zlib.error)


@contextmanager
def opened(path: Path) -> Iterator[tuple[BufferedReader, zipfile.ZipFile]]:
    """Opens a regular file and the archive in it; raises UsageError for anything else, and for a file that is too large."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES or _directory_bytes(file, size) > _MOST_DIRECTORY_BYTES:
            raise UsageError(f"{path} is too large for a bundle: expected a file of `peerlane bundle`")
        try:
            archive = zipfile.ZipFile(file)
        except _BROKEN as error:
            raise UsageError(f"{path} is no bundle ({error}): expected a file of `peerlane bundle`") from None
        with archive:
            yield file, archive


def _directory_bytes(file: BufferedReader, size: int) -> int:
    """The size of the table of members, from the record at the end of the file. zipfile would read millions of them into the memory."""
    last = _LONGER_END_BYTES + _END_BYTES + _MOST_COMMENT_BYTES
    tail = os.pread(file.fileno(), last, max(0, size - last))
    at = len(tail) - _END_BYTES
    if at < 0 or not (tail.startswith(_END, at) and tail.endswith(b"\0\0")):  # as zipfile looks for it
        at = tail.rfind(_END)
    if tail.startswith(b"PK\6\7", max(0, at - _LONGER_END_BYTES)):  # zip64, which no bundle needs
        return _MOST_DIRECTORY_BYTES + 1
    return int.from_bytes(tail[at + 12 : at + 16], "little") if at >= 0 else 0


def read_member(archive: zipfile.ZipFile, path: Path, name: str, limit: int) -> bytes:
    """The bytes of a member: never more than its header announces, which must be within the limit. Raises UsageError.

    Only what `peerlane bundle` writes is decompressed: zipfile bounds the output of deflate, and not that of other methods.
    """
    where = f"{name} in {path}"
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise UsageError(f"{where} is missing; ask its author for another copy") from None
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        method = _METHODS.get(info.compress_type, f"method {info.compress_type}")
        raise UsageError(f"{where} is compressed by {method}: expected deflate, as `peerlane bundle` writes it")
    if info.file_size > limit:
        raise UsageError(f"{where} has {info.file_size:,} bytes: expected at most {limit:,}")
    try:
        with archive.open(info) as member:
            return member.read(info.file_size)
    except _BROKEN as error:
        raise UsageError(f"{where} cannot be decompressed ({error}); ask its author for another copy") from None
