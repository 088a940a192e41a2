"""Bytes → lines. Lines end at 0x0A and nowhere else; memory is bounded whatever the input is."""

from __future__ import annotations

import gzip
import io
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from batchrun.errors import BatchrunError, Exit
from batchrun.records import Line

if TYPE_CHECKING:
    from _typeshed import SupportsRead, WriteableBuffer

__all__ = ["OversizedLine", "is_plain", "open_input", "read_lines", "spool"]

BLOCK_BYTES = 1024 * 1024
MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_DECODED_BYTES = 64 * 1024**3

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

# A zstd block of 4 bytes can stand for 128 KiB: pieces this small decode to at most 32 MiB at a time.
ZSTD_PIECE_BYTES = 1024


class OversizedLine(NamedTuple):
    """A line that was skipped unread because it is too long: ``length`` in bytes, without its 0x0A."""

    number: int
    offset: int
    length: int


def open_input(path: Path, *, max_decoded_bytes: int = MAX_DECODED_BYTES) -> BinaryIO:
    """Opens an input for reading, decoded where its first bytes say gzip or zstd, whatever its name is.

    Reading raises BatchrunError (exit 65) where the compressed data is damaged or cut short, or where it
    decodes to more than ``max_decoded_bytes``. Opening raises it (exit 2) where the path cannot be read.
    """
    source = _open(path)
    magic = source.peek(len(ZSTD_MAGIC))
    if magic.startswith(GZIP_MAGIC):
        decoder: _Decoder = _Gzip(source)
    elif magic.startswith(ZSTD_MAGIC):
        decoder = _Zstd(source)
    else:
        return source
    # The buffer makes short reads full, as the plain file's does.
    return io.BufferedReader(_Decoded(source, decoder, str(path), max_decoded_bytes), BLOCK_BYTES)


def is_plain(path: Path) -> bool:
    """Whether the input's lines can be read again by offset: a regular file that is not compressed."""
    if path.is_fifo() or path.is_char_device():
        return False
    with _open(path) as source:
        return not source.peek(len(ZSTD_MAGIC)).startswith((GZIP_MAGIC, ZSTD_MAGIC))


def _open(path: Path) -> io.BufferedReader:
    try:
        return io.BufferedReader(io.FileIO(path), BLOCK_BYTES)
    except OSError as exc:
        raise BatchrunError(f"cannot read {path}: {exc.strerror}", hint="check the path of INPUT") from exc


def spool(source: BinaryIO, target: BinaryIO) -> None:
    """Copies stdin or a decoded input, byte for byte, to a file whose lines can be read again by offset."""
    shutil.copyfileobj(source, target, BLOCK_BYTES)


def read_lines(
    stream: SupportsRead[bytes], *, offset: int = 0, number: int = 1, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Line | OversizedLine]:
    """Yields the lines of a stream that stands at byte ``offset``, where line ``number`` begins.

    ``data`` is every byte but the 0x0A: a BOM, a trailing CR, U+2028 and its kin stay inside. A last line
    needs no newline. Holds at most ``max_line_bytes`` and two blocks; longer lines come as OversizedLine.
    """
    held: list[bytes] = []
    length = 0
    read = stream.read
    while block := read(BLOCK_BYTES):
        first, *lines = block.split(b"\n")
        length += len(first)
        # Over the cap nothing more is kept, only measured.
        if length <= max_line_bytes:
            held.append(first)
        else:
            held.clear()
        if not lines:
            continue
        if length <= max_line_bytes:
            yield Line(number, offset, b"".join(held) if len(held) > 1 else first)
        else:
            yield OversizedLine(number, offset, length)
        offset += length + 1
        number += 1
        last = lines.pop()
        for data in lines:
            length = len(data)
            if length <= max_line_bytes:
                yield Line(number, offset, data)
            else:
                yield OversizedLine(number, offset, length)
            offset += length + 1
            number += 1
        length = len(last)
        held = [last] if length <= max_line_bytes else []
    if length > max_line_bytes:
        yield OversizedLine(number, offset, length)
    elif length:
        yield Line(number, offset, b"".join(held))


class _Decoder(Protocol):
    """What compressed formats share."""

    errors: tuple[type[Exception], ...]
    """What ``read`` raises where the data is damaged; EOFError where it is cut short."""

    def read(self, size: int, /) -> bytes:
        """Returns at most ``size`` decoded bytes; none at the end."""


class _Gzip:
    def __init__(self, source: BinaryIO) -> None:
        self.errors: tuple[type[Exception], ...] = (gzip.BadGzipFile, zlib.error)
        self._file = gzip.GzipFile(fileobj=source, mode="rb")

    def read(self, size: int) -> bytes:
        return self._file.read(size)


class _Zstd:
    """Frames one after the other. zstandard's own stream reader takes a cut file for a whole one."""

    def __init__(self, source: BinaryIO) -> None:
        import zstandard

        self.errors: tuple[type[Exception], ...] = (zstandard.ZstdError,)
        self._source = source
        self._context = zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._rest = b""
        self._decoded = b""

    def read(self, size: int) -> bytes:
        while not self._decoded:
            piece = self._rest or self._source.read(ZSTD_PIECE_BYTES)
            if not piece:
                if self._frame is not None:
                    raise EOFError
                return b""
            if self._frame is None:
                self._frame = self._context.decompressobj()
            self._decoded = self._frame.decompress(piece)
            self._rest = b""
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = None
        taken, self._decoded = self._decoded[:size], self._decoded[size:]
        return taken


class _Decoded(io.RawIOBase):
    """A decoder as a raw stream: counts what it gives, and turns the library's errors into ours."""

    def __init__(self, source: BinaryIO, decoder: _Decoder, name: str, cap: int) -> None:
        self._source = source
        self._decoder = decoder
        self._name = name
        self._left = cap
        self._cap = cap

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        try:
            data = self._decoder.read(len(view))
        except EOFError as exc:
            raise BatchrunError(
                f"{self._name} is cut short: its compressed data ends too early",
                hint="copy or download the file again",
                exit_code=Exit.INPUT,
            ) from exc
        except self._decoder.errors as exc:
            raise BatchrunError(
                f"{self._name} is damaged: its compressed data cannot be decoded ({exc})",
                hint="copy or download the file again",
                exit_code=Exit.INPUT,
            ) from exc
        self._left -= len(data)
        if self._left < 0:
            raise BatchrunError(
                f"{self._name} decodes to more than {self._cap:,} bytes",
                hint="if that is no mistake, decompress it yourself and submit the plain file",
                exit_code=Exit.INPUT,
            )
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._source.close()
        super().close()
