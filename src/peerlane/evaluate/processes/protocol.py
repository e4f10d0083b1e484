"""Messages between the supervisor and the rank processes: length-prefixed JSON over Unix sockets. Nothing is ever unpickled.

:mod:`peerlane.evaluate.wire` has the requests and answers that messages stand for. Whatever a candidate's process sends is untrusted: a
frame that is too long or is no JSON object ends the conversation.
"""

import json
import re
import socket
import struct

from peerlane.errors import ProtocolError
from peerlane.evaluate.messages import Message

MAX_MESSAGE_BYTES = 16 << 20
_HEADER = struct.Struct("<I")
_to_json = json.JSONEncoder(separators=(",", ":")).encode  # made once: that takes as long as to encode a short message
_SURROGATE = re.compile(rb"\\ud", re.IGNORECASE)


def encode(message: Message) -> bytes:
    """One frame: four bytes of length, then JSON. Raises :class:`ProtocolError` for a message that is too long or nested too deeply."""
    try:
        body = _to_json(message).encode()
    except RecursionError:
        raise ProtocolError("message is nested too deeply to be JSON") from None
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(body)} bytes: expected at most {MAX_MESSAGE_BYTES}")
    return _HEADER.pack(len(body)) + body


class Channel:
    """One end of a conversation over a connected stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def limit_sending(self, seconds: int) -> None:
        """Makes :meth:`send` raise OSError from now on if the other side does not read for this long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))

    def send(self, message: Message) -> None:
        """Sends one message; raises OSError if the other side is gone."""
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Sends what :func:`encode` made; raises OSError if the other side is gone."""
        self.socket.sendall(frame)

    def feed(self, *, block: bool = False) -> bool:
        """Reads what has arrived, which may be nothing; False at the end of the stream."""
        try:
            chunk = self.socket.recv(1 << 20, 0 if block else socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        self._buffer += chunk
        return bool(chunk)

    def pop(self) -> Message | None:
        """The next complete message that was read, or None; raises :class:`ProtocolError` for anything that is not one."""
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"frame of {length} bytes: expected at most {MAX_MESSAGE_BYTES}")
        if len(self._buffer) < _HEADER.size + length:
            return None
        body = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
        del self._buffer[: _HEADER.size + length]
        try:
            message = json.loads(body.decode())  # strictly UTF-8: of bytes, loads lets surrogates pass, and guesses other encodings
            if _SURROGATE.search(body):  # those without a partner are valid JSON, but cannot be encoded when a result is written
                message = json.loads(json.dumps(message, ensure_ascii=False).encode(errors="replace"))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"frame is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise ProtocolError(f"frame holds a {type(message).__name__}: expected an object")
        return message

    def receive(self) -> Message | None:
        """Blocks for the next message; None at the end of the stream. For rank processes."""
        while (message := self.pop()) is None:
            if not self.feed(block=True):
                return None
        return message

    def close(self) -> None:
        self.socket.close()
