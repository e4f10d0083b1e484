"""Frames between the supervisor and ranks: what is sent arrives, and what a hostile rank sends is refused without harm."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerlane.errors import ProtocolError
from peerlane.evaluate.processes.protocol import MAX_MESSAGE_BYTES, Channel, Message, encode

text = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)
messages = st.dictionaries(text, values, max_size=5)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, Channel]]:
    """A bare socket, and a channel at its other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        yield ours, Channel(theirs)


@given(st.lists(messages, min_size=1, max_size=4), st.integers(1, 50))
def test_round_trip_in_pieces(sent: list[Message], piece: int) -> None:
    """Messages arrive whole and in order, however the stream is cut."""
    stream = b"".join(encode(message) for message in sent)
    received = []
    with pair() as (far, channel):
        for start in range(0, len(stream), piece):
            far.sendall(stream[start : start + piece])
            assert channel.feed()
            while (message := channel.pop()) is not None:
                received.append(message)
    assert received == sent


def test_nothing_to_read_does_not_block() -> None:
    with pair() as (_, channel):
        assert channel.feed() and channel.pop() is None


def test_end_of_stream() -> None:
    with pair() as (far, channel):
        far.sendall(encode({"last": 1})[:-1])
        far.close()
        assert channel.feed() and channel.pop() is None
        assert not channel.feed()
        assert channel.receive() is None


def test_oversize() -> None:
    with pytest.raises(ProtocolError, match="expected at most"):
        encode({"much": "x" * MAX_MESSAGE_BYTES})
    with pair() as (far, channel):
        far.sendall(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
        channel.feed()
        with pytest.raises(ProtocolError, match="expected at most"):
            channel.pop()


@pytest.mark.parametrize(
    "body",
    [
        *[b"", b"[1, 2]", b"null", b"17", b'"ok"', b'{"ok": tru', b"\xff\xfe", b'{"a": ' + b"9" * 5000 + b"}", b"[" * 200_000],
        *[b'{"a": "\xed\xa0\x80"}', '{"a": "\ud800"}'.encode("utf-16", "surrogatepass"), '{"a": 1}'.encode("utf-32")],
    ],
    ids=["empty", "list", "null", "number", "string", "cut", "not_utf8", "endless_number", "deep", "surrogate", "utf16", "utf32"],
)
def test_garbage_is_refused(body: bytes) -> None:
    with pair() as (far, channel):
        far.sendall(struct.pack("<I", len(body)))
        far.sendall(body)
        while channel.feed() and len(channel._buffer) < 4 + len(body):
            pass
        with pytest.raises(ProtocolError):
            channel.pop()


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_protocol_error(stream: bytes) -> None:
    with pair() as (far, channel):
        far.sendall(stream + b"\0" * 4)
        channel.feed()
        try:
            while (message := channel.pop()) is not None:
                assert isinstance(message, dict)
        except ProtocolError:
            pass


@pytest.mark.parametrize("word", ["lone \ud800", "\udfff lone", "pair \U0001f600", "plain"])
def test_what_arrives_can_be_written(word: str) -> None:
    with pair() as (far, channel):
        far.sendall(encode({word: [word]}))
        channel.feed()
        message = channel.pop()
    assert message is not None
    (key,) = message
    assert key.encode() and message[key][0].encode()
    if "lone" not in word:
        assert message == {word: [word]}
