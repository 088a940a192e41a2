from __future__ import annotations

import gzip
import io
import os
import threading

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from batchrun.errors import BatchrunError, Exit
from batchrun.intake import jsonl
from batchrun.intake.jsonl import OversizedLine, is_plain, open_input, read_lines, spool
from batchrun.records import Line

FORMATS = {
    "gzip": gzip.compress,
    "gzip in two members": lambda data: gzip.compress(data[:7]) + gzip.compress(data[7:]),
    "zstd": zstandard.compress,
    "zstd in two frames": lambda data: zstandard.compress(data[:7]) + zstandard.compress(data[7:]),
    "zstd without a size": lambda data: zstandard.ZstdCompressor(write_content_size=False).compress(data),
}


def lines_of(data, **options):
    return list(read_lines(io.BytesIO(data), **options))


class Trickle(io.BytesIO):
    """A pipe: gives fewer bytes than asked for."""

    def read(self, size=-1):
        return super().read(min(size, 3))


@given(
    st.binary(max_size=200) | st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\x85", b"\xe2\x80\xa8"])).map(b"".join)
)
def test_lines_joined_again_are_the_input(data):
    lines = lines_of(data)
    assert b"\n".join(line.data for line in lines) + (b"\n" if data.endswith(b"\n") else b"") == data
    assert [line.number for line in lines] == list(range(1, len(lines) + 1))
    for line in lines:
        assert data[line.offset : line.offset + len(line.data)] == line.data
        assert b"\n" not in line.data


@given(st.binary(max_size=60).map(lambda data: data.replace(b"\x00", b"\n")), st.integers(0, 12), st.integers(1, 40))
def test_however_it_arrives_a_line_is_whole_or_measured(data, cap, block):
    whole = [
        Line(at, data.index(part) if part else 0, part) if len(part) <= cap else OversizedLine(at, 0, len(part))
        for at, part in enumerate(data.split(b"\n"), 1)
    ]
    if not whole[-1][2]:
        whole.pop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "BLOCK_BYTES", block)
        found = lines_of(data, max_line_bytes=cap)
    assert [(type(line), line.number, line[2]) for line in found] == [
        (type(line), line.number, line[2]) for line in whole
    ]
    sizes = [line.length if isinstance(line, OversizedLine) else len(line.data) for line in found]
    assert [line.offset for line in found] == [sum(sizes[:at]) + at for at in range(len(sizes))]


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\r", "\x1c", "\x1d", "\x1e", "\x00"])
def test_only_a_newline_ends_a_line(inside):
    data = f"a{inside}b\nc".encode()
    assert [line.data for line in lines_of(data)] == [f"a{inside}b".encode(), b"c"]


def test_a_bom_a_carriage_return_and_a_missing_newline_stay_as_they_are():
    assert lines_of(b"\xef\xbb\xbf{}\r\n\n{}") == [
        Line(1, 0, b"\xef\xbb\xbf{}\r"),
        Line(2, 7, b""),
        Line(3, 8, b"{}"),
    ]


def test_reading_goes_on_where_it_left_off():
    data = b"one\ntwo\nthree\n"
    stream = io.BytesIO(data)
    stream.seek(4)
    assert list(read_lines(stream, offset=4, number=2)) == [Line(2, 4, b"two"), Line(3, 8, b"three")]


def test_a_pipe_that_gives_three_bytes_at_a_time_gives_the_same_lines():
    assert list(read_lines(Trickle(b"abcdefgh\nij\n\nk"))) == lines_of(b"abcdefgh\nij\n\nk")


def test_a_long_line_is_skipped_without_being_held():
    class Endless(io.RawIOBase):
        left = 64

        def read(self, size=-1):
            self.left -= 1
            return b"x" * size if self.left > 0 else b"\nend\n" if self.left == 0 else b""

    import tracemalloc

    tracemalloc.start()
    found = list(read_lines(Endless(), max_line_bytes=2 * 1024 * 1024))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [OversizedLine(1, 0, 63 * 1024 * 1024), Line(2, 63 * 1024 * 1024 + 1, b"end")]
    assert peak < 8 * 1024 * 1024


@pytest.mark.parametrize("form", FORMATS)
def test_compressed_inputs_are_known_by_their_first_bytes(form, tmp_path):
    data = b'{"prompt":"a"}\n{"prompt":"b"}\n'
    path = tmp_path / "rows.jsonl"
    path.write_bytes(FORMATS[form](data))
    with open_input(path) as stream:
        assert stream.read() == data
    assert not is_plain(path)


def test_a_plain_input_is_read_as_it_is_whatever_its_name(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(b"{}\n")
    with open_input(path) as stream:
        assert stream.read() == b"{}\n"
    assert is_plain(path)


def test_an_empty_input_has_no_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"")
    with open_input(path) as stream:
        assert list(read_lines(stream)) == []
    assert is_plain(path)


def test_a_named_pipe_is_read_once_and_not_by_offset(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(gzip.compress(b"{}\n"),))
    writer.start()
    assert not is_plain(path)
    with open_input(path) as stream:
        assert stream.read() == b"{}\n"
    writer.join()


@pytest.mark.parametrize("form", ["gzip", "zstd"])
def test_a_compressed_input_cut_at_any_byte_is_an_error_and_never_a_shorter_input(form, tmp_path):
    whole = FORMATS[form](bytes(range(256)) * 4)
    path = tmp_path / "rows.jsonl"
    for cut in range(4, len(whole)):
        path.write_bytes(whole[:cut])
        with open_input(path) as stream, pytest.raises(BatchrunError, match="cut short") as caught:
            stream.read()
        assert caught.value.exit_code == Exit.INPUT
        assert caught.value.hint


@pytest.mark.parametrize("form", ["gzip", "zstd"])
def test_a_damaged_compressed_input_is_an_error(form, tmp_path):
    whole = bytearray(
        gzip.compress(os.urandom(5000))
        if form == "gzip"
        else zstandard.ZstdCompressor(write_checksum=True).compress(os.urandom(5000))
    )
    whole[2500] ^= 0xFF
    path = tmp_path / "rows.jsonl"
    path.write_bytes(whole)
    with open_input(path) as stream, pytest.raises(BatchrunError, match="damaged") as caught:
        stream.read()
    assert caught.value.exit_code == Exit.INPUT


@pytest.mark.parametrize("form", ["gzip", "zstd"])
def test_what_follows_the_compressed_data_is_no_input(form, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(FORMATS[form](b"{}\n") + b'{"prompt":"plain"}\n')
    with open_input(path) as stream, pytest.raises(BatchrunError) as caught:
        stream.read()
    assert caught.value.exit_code == Exit.INPUT


@pytest.mark.parametrize("form", ["gzip", "zstd"])
def test_a_decompression_bomb_stops_at_the_cap(form, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(FORMATS[form](bytes(50_000_000)))
    assert path.stat().st_size < 100_000
    read = []
    with open_input(path, max_decoded_bytes=5_000_000) as stream, pytest.raises(BatchrunError) as caught:
        read.extend(len(block) for block in iter(lambda: stream.read(1_000_000), b""))
    assert sum(read) <= 5_000_000
    assert caught.value.exit_code == Exit.INPUT
    assert "more than 5,000,000 bytes" in caught.value.message


def test_a_decoded_input_of_just_the_cap_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(zstandard.compress(bytes(5000)))
    with open_input(path, max_decoded_bytes=5000) as stream:
        assert len(stream.read()) == 5000


@pytest.mark.parametrize("what", ["missing", "folder"])
def test_a_path_that_cannot_be_read_is_a_usage_error(what, tmp_path):
    path = tmp_path if what == "folder" else tmp_path / "none.jsonl"
    for read in (open_input, is_plain):
        with pytest.raises(BatchrunError, match="cannot read") as caught:
            read(path)
        assert caught.value.exit_code == Exit.USAGE


@given(st.binary(max_size=500))
def test_spooling_copies_every_byte(data):
    target = io.BytesIO()
    spool(Trickle(data), target)
    assert target.getvalue() == data
