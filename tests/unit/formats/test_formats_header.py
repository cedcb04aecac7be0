"""The header reader against spec/cases.md A and B: every case by its number, and the kinds of fault around
it.
"""

from __future__ import annotations

import gc
import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from formats_corpus import entry, file_bytes, parse, spellings

from nobounce import errors
from nobounce.formats import fastscan
from nobounce.formats.header import HEADER_LIMIT, parse_header, read_header, read_header_of
from pace import assert_takes_under

if TYPE_CHECKING:
    from pathlib import Path

A = entry("F32", [1], 0, 4)
ATEXT = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def refused(header: Any, data_nbytes: int = 4, *, strict: bool = True) -> errors.FormatError:
    """The FormatError for this header; it always names the file and an offset or a tensor."""
    with pytest.raises(errors.FormatError) as caught:
        parse(header, data_nbytes, strict=strict)
    assert caught.value.filename == "m.safetensors"
    assert "m.safetensors" in str(caught.value)
    assert caught.value.offset is not None
    assert len(str(caught.value)) < 2000
    return caught.value


def write(tmp_path: Path, raw: bytes) -> str:
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    return str(path)


# ---- A: the declared length and the reading of it


def test_C1_declared_length_beyond_file(tmp_path: Path) -> None:
    path = write(tmp_path, (1000).to_bytes(8, "little") + bytes(52))
    with pytest.raises(errors.FormatError) as caught:
        read_header_of(path)
    assert all(part in str(caught.value) for part in (path, "1000", "60 bytes"))
    assert caught.value.offset == 0


@pytest.mark.parametrize("declared", [HEADER_LIMIT, 1 << 31, 1 << 40, (1 << 64) - 1])
def test_C1_nothing_is_read_or_allocated_for_a_declared_length(declared: int) -> None:
    class Counting(io.BytesIO):
        asked = 0

        def read(self, n: int | None = -1, /) -> bytes:
            Counting.asked += n or 0
            return super().read(n)

    with pytest.raises(errors.FormatError):
        read_header(Counting(declared.to_bytes(8, "little") + bytes(52)), path="m", file_nbytes=60)
    assert Counting.asked <= 512  # the length, and a look at what the file is


def test_C2_header_over_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path, (100_000_001).to_bytes(8, "little") + bytes(52))
    with pytest.raises(
        errors.FormatError, match="header too large: its declared length 100000001 is over the limit"
    ):
        read_header_of(path)
    with pytest.raises(errors.FormatError, match="limit of 10 bytes"):
        read_header_of(write(tmp_path, file_bytes({"a": A}, 4)), limit=10)


@pytest.mark.parametrize("nbytes", [0, 3, 7])
def test_C3_truncated_length(tmp_path: Path, nbytes: int) -> None:
    with pytest.raises(errors.FormatError, match=f"truncated: {nbytes} bytes"):
        read_header_of(write(tmp_path, bytes(nbytes)))


def test_C3_no_descriptor_leaks_in_1000_failing_tries(tmp_path: Path) -> None:
    bad = [write(tmp_path, bytes(7)), str(tmp_path), str(tmp_path / "absent")]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "json").write_bytes(file_bytes("{]"))
    bad += [str(tmp_path / "pipe"), str(tmp_path / "json")]
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(1000):
        with pytest.raises(errors.NobounceError):
            read_header_of(bad[turn % len(bad)])
    assert len(os.listdir("/proc/self/fd")) == before


class Dripping:
    """A stream that gives at most three bytes a call."""

    def __init__(self, raw: bytes) -> None:
        self.stream = io.BytesIO(raw)

    def read(self, n: int, /) -> bytes:
        return self.stream.read(min(n, 3))


def test_C4_a_reader_that_returns_three_bytes_a_call() -> None:
    raw = file_bytes({"a": A}, 4)
    assert read_header(Dripping(raw), path="m", file_nbytes=len(raw)).tensors["a"].nbytes == 4


def test_C4_real_end_of_file_inside_the_header() -> None:
    raw = file_bytes({"a": A}, 4)
    with pytest.raises(errors.FormatError, match="ends inside the header") as caught:
        read_header(Dripping(raw[:20]), path="m", file_nbytes=len(raw))
    assert caught.value.offset == 20


def test_a_descriptor_is_read_by_position_and_left_open(tmp_path: Path) -> None:
    raw = file_bytes({"a": A}, 4)
    fd = os.open(write(tmp_path, raw), os.O_RDONLY)
    try:
        os.lseek(fd, 5, os.SEEK_SET)
        header = read_header(fd, path="m", file_nbytes=len(raw))
        assert header.data_offset == 8 + header.header_nbytes == len(raw) - 4
        assert os.lseek(fd, 0, os.SEEK_CUR) == 5
    finally:
        os.close(fd)


def test_a_short_pread_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = file_bytes({"a": A}, 4)
    real = os.pread
    monkeypatch.setattr(
        os, "pread", lambda fd, n, offset: real(fd, min(n, 7), offset)
    )  # case C66's cap, lowered
    assert read_header_of(write(tmp_path, raw)).tensors["a"].end == 4


def test_an_error_of_the_disk_keeps_its_errno_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, n: int, offset: int) -> bytes:
        raise OSError(5, "no")

    path = write(tmp_path, file_bytes({"a": A}, 4))
    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(errors.FileError, match=r"cannot read the header.*\(EIO\)") as caught:
        read_header_of(path)
    assert (caught.value.errno, caught.value.filename) == (5, path)


# ---- A: metadata


def test_C6_empty_metadata() -> None:
    header = parse({"__metadata__": {}, "a": A}, 4)
    assert (header.metadata, list(header.tensors), header.warnings) == ({}, ["a"], ())


def test_C7_null_metadata_is_absent_with_a_warning() -> None:
    header = parse({"__metadata__": None, "a": A}, 4)
    assert header.metadata == {}
    assert "null" in header.warnings[0]


@pytest.mark.parametrize("value", [0, True, None, 1.5, [], {}, {"dtype": 1}])
def test_C8_metadata_value_that_is_no_string(value: Any) -> None:
    header = {"__metadata__": {"k": value}, "a": A}
    assert "'k'" in str(refused(header))
    assert "expected a string" in str(refused(header))
    lenient = parse(header, 4, strict=False)
    assert lenient.metadata == {"k": json.dumps(value)}
    assert lenient.warnings


@pytest.mark.parametrize("value", ['"x"', "[]", "1", "true", ATEXT])
def test_metadata_that_is_no_object_of_strings(value: str) -> None:
    refused(f'{{"__metadata__":{value},"a":{ATEXT}}}')


def test_C10_a_tensor_called_metadata_never_passes_as_a_tensor() -> None:
    refused({"b": A, "__metadata__": entry("F32", [1], 4, 8)}, 8)
    refused({"__metadata__": A}, 4)


def test_metadata_is_read_wherever_it_stands() -> None:
    for text in (
        f'{{"a":{ATEXT},"__metadata__":{{"k":"v"}}}}',
        f'{{"__metadata__": {{"k": "v"}}, "a":{ATEXT}}}',
    ):
        assert parse(text, 4).metadata == {"k": "v"}
    assert parse({"__metadata__": {"k": "v"}}).tensors == {}


# ---- A: ranges


@pytest.mark.parametrize(("b", "nbytes"), [((4, 12), 12), ((0, 8), 8), ((2, 10), 10)])
def test_C11_overlap_names_both_tensors(b: tuple[int, int], nbytes: int) -> None:
    caught = refused({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], *b)}, nbytes)
    assert "overlaps" in str(caught)
    assert "'a'" in str(caught)
    assert "'b'" in str(caught)


def test_C11_overlap_with_a_tensor_that_is_not_the_neighbour() -> None:
    caught = refused(
        {"long": entry("U8", [9], 0, 9), "in": entry("U8", [2], 1, 3), "on": entry("U8", [5], 4, 9)}, 9
    )
    assert "'long'" in str(caught)


def test_C11_zero_size_inside_another_tensor() -> None:
    assert "'z'" in str(refused({"a": A, "z": entry("F32", [0], 2, 2)}))


def test_C12_gap_before_the_first_tensor() -> None:
    caught = refused({"a": entry("F32", [1], 4, 8)}, 8)
    assert "first byte" in str(caught)
    assert "'a'" in str(caught)


def test_C12_hole_between_tensors_gives_its_place() -> None:
    header = {"a": A, "b": entry("F32", [1], 8, 12)}
    caught = refused(header, 12)
    assert "hole at data offset 4: 4 bytes" in str(caught)
    assert caught.offset == len(file_bytes(header)) + 4


def test_C13_bytes_after_the_last_tensor() -> None:
    assert "5 bytes at the end belong to no tensor" in str(refused({"a": A}, 9))
    assert "1 bytes at the end belong to no tensor" in str(refused({}, 1))


def test_C14_short_file_says_what_is_missing() -> None:
    header = {"a": entry("F32", [4], 0, 16)}
    caught = refused(header, 12)
    assert "missing 4 bytes" in str(caught)
    assert "'a'" in str(caught)
    assert caught.offset == len(file_bytes(header)) + 12


def test_C15_shape_larger_than_range() -> None:
    caught = refused({"a": entry("F32", [1000, 1000], 0, 4)})
    assert "needs 4000000 bytes, its data_offsets hold 4" in str(caught)
    assert caught.tensor == "a"


@pytest.mark.parametrize(
    ("dtype", "shape", "end"),
    [
        ("F32", [1 << 62, 8], 4),
        ("U8", [1 << 32, 1 << 32], 0),
        ("F32", [1 << 62, 1 << 62, 0], 0),
        ("F32", [0, 1 << 62, 1 << 62], 0),
        ("F32", [1 << 62, 0, 1 << 62], 0),
        ("F4", [(1 << 63) + 2], 4),
        ("F4", [4, 1 << 61], 0),
        ("U8", [1 << 64], 0),
        ("U8", [0, 1 << 64], 0),
        ("F64", [1 << 61], 0),
    ],
)
def test_C16_shape_product_overflows(dtype: str, shape: list[int], end: int) -> None:
    assert "overflow" in str(refused({"a": entry(dtype, shape, 0, end)}, end))


@pytest.mark.parametrize("dtype", ["Q9", "", "f32", "F8_E4M3FN", "C128", "I4", " F32", None, 1, ["F32"], {}])
def test_C17_unknown_dtype(dtype: Any) -> None:
    caught = refused({"a": entry(dtype, [1], 1 << 63, (1 << 63) + 4)})
    assert "dtype" in str(caught)
    assert caught.tensor == "a"


@pytest.mark.parametrize(
    ("span", "word"), [([4, 0], "reversed"), ([-4, 0], "negative"), ([0, -4], "negative")]
)
def test_C18_reversed_or_negative_offsets(span: list[int], word: str) -> None:
    assert word in str(refused({"a": entry("F32", [1], *span)}))


@pytest.mark.parametrize("where", ["before", "after"])
def test_C20_NUL_padding_says_use_spaces(where: str) -> None:
    text = json.dumps({"a": A}).encode()
    assert "use spaces" in str(refused(bytes(8) + text if where == "before" else text + bytes(8)))


def test_C20_byte_order_mark() -> None:
    caught = refused(b"\xef\xbb\xbf" + json.dumps({"a": A}).encode())
    assert "byte order mark" in str(caught)
    assert "use spaces" in str(caught)


@pytest.mark.parametrize("padding", [" ", "       ", "\n", "\t\r\n "])
def test_C20_white_space_after_the_json_is_padding(padding: str) -> None:
    assert parse(json.dumps({"a": A}) + padding, 4).tensors["a"].end == 4


def test_C20_white_space_before_the_json_is_refused() -> None:
    assert "begin with '{'" in str(refused(" " + json.dumps({"a": A})))


def test_C21_json_order_differs_from_file_order() -> None:
    tensors = {"b": entry("F32", [1], 4, 8), "z": entry("F32", [0], 4, 4), "a": A}
    for text in spellings(tensors).values():
        header = parse(text, 8)
        assert [(t.name, t.start, t.end) for t in header.tensors.values()] == [
            ("a", 0, 4),
            ("z", 4, 4),
            ("b", 4, 8),
        ]
        assert list(header.tensors) == ["a", "z", "b"]


@pytest.mark.parametrize(
    "name", ["", "a/b.é\n", "\x00", "😀", '"', "\\", "../../etc/passwd", "]},", "x" * 5000, "\x7f"]
)
def test_C22_odd_names(name: str) -> None:
    for text in spellings({name: A, "other": entry("U8", [1], 4, 5)}).values():
        header = parse(text, 5)
        assert header.tensors[name].name == name


def test_C22_control_characters_are_escaped_in_messages() -> None:
    message = str(refused({"a\x1b[31m\n": entry("F32", [2], 0, 4)}))
    assert "\x1b" not in message
    assert "\n" not in message


def test_C23_a_directory_is_named_as_one(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        read_header_of(tmp_path)
    assert isinstance(caught.value, errors.FileError)
    assert str(tmp_path) in str(caught.value)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(errors.FileIsDirectoryError):
            read_header(fd, path=str(tmp_path), file_nbytes=4096)
    finally:
        os.close(fd)


# ---- A: the JSON itself


@pytest.mark.parametrize(
    ("text", "tensor"),
    [
        (f'{{"a":{ATEXT},"a":{ATEXT}}}', "a"),
        (f'{{"a":{ATEXT}, "a":{ATEXT}}}', "a"),
        (f'{{"a":{ATEXT},"\\u0061":{ATEXT}}}', "a"),
        (
            '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            "a",
        ),
        ('{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "a"),
        ('{"a":{"dtype":"F32","shape":[2],"shape":[1],"data_offsets":[0,4]}}', "a"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"data_offsets":[0,4]}}', "a"),
        (f'{{"__metadata__":{{"k":"1","k":"2"}},"a":{ATEXT}}}', None),
        (f'{{"a":{ATEXT},"__metadata__":{{"k":"1","k":"2"}}}}', None),
        (f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{ATEXT}}}', "__metadata__"),
        (f'{{"__metadata__":{{"k":{{"x":1,"x":2}}}},"a":{ATEXT}}}', None),
    ],
)
def test_a_key_given_twice_is_refused_anywhere(text: str, tensor: str | None) -> None:
    for strict in (True, False):
        caught = refused(text, 8 if text.endswith("[4,8]}}") else 4, strict=strict)
        assert caught.tensor == tensor
        assert "twice" in str(caught) or "expected a string" in str(caught)


@pytest.mark.parametrize(
    "value",
    [
        "true",
        "false",
        "1.0",
        "1e0",
        "-0",
        "-1",
        '"1"',
        "null",
        "[1]",
        "NaN",
        "Infinity",
        "-Infinity",
        "01",
        "+1",
        "0x1",
        "{}",
    ]
    + ["9" * 30, "9" * 5000, "1" + "0" * 4400 + ".0", "1e999", "\u0661", "1_0", ""],
)
def test_only_plain_integers_count_as_integers(value: str) -> None:
    for template in (
        '{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[%s,4]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,%s]}}',
        '{"a":{"data_offsets":[0,%s],"dtype":"F32","shape":[1]}}',
    ):
        if not value and 'shape":[%s]' in template:
            continue  # a scalar
        refused(template % value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "1",
        '"x"',
        "{",
        "}",
        "{]",
        "{}x",
        "{}{}",
        "{,}",
        "{'a':1}",
        '{"a":}',
        '{"a"}',
        "\x00",
        "{\x00}",
    ]
    + [
        '{"a":1}',
        '{"a":null}',
        '{"a":[]}',
        '{"a":["F32",[1],[0,4]]}',
        '{"a":"F32"}',
        '{"a":{}}',
        "nul",
        "{NaN:1}",
    ]
    + [
        f'{{"a":{ATEXT},}}',
        f'{{"a":{ATEXT}"b":{ATEXT}}}',
        f'{{,"a":{ATEXT}}}',
        f'{{"a":{ATEXT}',
        f'{{"a":{ATEXT}}}}}',
    ]
    + [
        f'{{"a\n":{ATEXT}}}',
        f'{{"a\\x":{ATEXT}}}',
        f'{{"a":{ATEXT}/**/}}',
        f'{{"__metadata__":{{}}"a":{ATEXT}}}',
    ],
)
def test_a_header_that_is_no_json_object_of_tensors(text: str) -> None:
    refused(text)


@pytest.mark.parametrize(
    "deep", ["[" * 200_000, '{"a":' * 100_000, '{"a":' + "[" * 99_000 + "]" * 99_000 + "}"]
)
def test_deep_nesting_is_a_format_error(deep: str) -> None:
    refused(deep)
    refused('{"__metadata__":' + deep)


@pytest.mark.parametrize("missing", ["dtype", "shape", "data_offsets"])
def test_a_missing_field_is_named(missing: str) -> None:
    assert missing in str(refused({"a": {k: v for k, v in A.items() if k != missing}}))


@pytest.mark.parametrize("span", [[], [0], [0, 4, 4], {"0": 4}, "04", None, 4])
def test_data_offsets_of_another_form(span: Any) -> None:
    refused({"a": {"dtype": "F32", "shape": [1], "data_offsets": span}})


@pytest.mark.parametrize("shape", [None, 1, "1", {}, [[1]], [None], [-1], [-1, -1]])
def test_shapes_of_another_form(shape: Any) -> None:
    assert refused({"a": entry("F32", shape, 0, 4)}).tensor == "a"


@pytest.mark.parametrize("junk", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf"])
def test_invalid_utf8(junk: bytes) -> None:
    raw = b'{"' + junk + b'":' + ATEXT.encode() + b"}"
    caught = refused(raw)
    assert "UTF-8" in str(caught)
    assert caught.offset == 8 + 2


@pytest.mark.parametrize("escape", [r"\ud800", r"\uDC00", r"\udc00\ud800", r"x\ud83d"])
def test_half_a_surrogate_pair_in_a_name(escape: str) -> None:
    refused(f'{{"{escape}":{ATEXT}}}')
    refused(f'{{"__metadata__":{{"k":"{escape}"}},"a":{ATEXT}}}')


def test_a_whole_surrogate_pair_in_a_name() -> None:
    assert list(parse(f'{{"\\ud83d\\ude00":{ATEXT}}}', 4).tensors) == ["😀"]


def test_json_errors_point_at_their_byte() -> None:
    assert refused('{"é": nope}').offset == 8 + len('{"é": '.encode())


def test_tensors_named_like_fields_are_tensors() -> None:
    tensors = {n: entry("U8", [1], i, i + 1) for i, n in enumerate(("dtype", "shape", "data_offsets"))}
    for text in spellings(tensors).values():
        if "\\u0074" not in text:
            assert list(parse(text, 3).tensors) == list(tensors)


# ---- B: zero-size and scalar


def test_C24_zero_size_at_the_end() -> None:
    header = parse({"a": A, "z": entry("F32", [0], 4, 4)}, 4)
    assert header.tensors["z"].nbytes == 0


@pytest.mark.parametrize(
    "tensors",
    [
        {"z": entry("F32", [0], 0, 0), "a": A},
        {"a": A, "z": entry("F32", [2, 0], 4, 4), "b": entry("F32", [1], 4, 8)},
        {"b": entry("F32", [1], 4, 8), "z": entry("F32", [2, 0], 4, 4), "a": A},
        {"z": entry("F32", [0], 0, 0)},
        {"z2": entry("F32", [0], 0, 0), "z1": entry("U8", [0, 5], 0, 0)},
    ],
)
def test_C25_zero_size_anywhere(tensors: dict[str, Any]) -> None:
    header = parse(tensors, max(t["data_offsets"][1] for t in tensors.values()))
    assert header.tensors.keys() == tensors.keys()
    if "z2" in tensors:
        assert list(header.tensors) == ["z2", "z1"]  # equal ranges keep the order of the JSON


def test_C26_file_bytes_and_stream_agree(tmp_path: Path) -> None:
    raw = file_bytes({"z": entry("F32", [0], 0, 0)})
    path = write(tmp_path, raw)
    from_stream = read_header(io.BytesIO(raw), path=path, file_nbytes=len(raw))
    from_bytes = parse_header(raw[8:], path=path, file_nbytes=len(raw), data_offset=len(raw))
    assert read_header_of(path) == from_stream == from_bytes


def test_C28_one_element_in_an_empty_range() -> None:
    assert "needs 4 bytes" in str(refused({"z": entry("F32", [1], 0, 0)}, 0))


def test_C29_scalar() -> None:
    assert parse({"s": entry("F32", [], 0, 4)}, 4).tensors["s"].shape == ()


@pytest.mark.parametrize("padding", range(8))
def test_C56_C70_no_alignment_of_the_data_section_is_assumed(padding: int) -> None:
    text = json.dumps({"u": entry("U8", [3], 0, 3), "f": entry("F32", [2], 3, 11)}) + " " * padding
    header = parse(text, 11)
    assert header.data_offset == 8 + len(text)
    assert (header.tensors["f"].start, header.tensors["f"].end) == (3, 11)


def test_C66_offsets_past_4_GiB() -> None:
    big = 5 << 30
    header = parse({"a": entry("U8", [big], 0, big), "b": entry("F32", [1], big, big + 4)}, big + 4)
    assert header.tensors["b"].start == big
    assert header.data_nbytes == big + 4


# ---- paths


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent") as caught:
        read_header_of(tmp_path / "absent")
    assert isinstance(caught.value, errors.FileError)


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    with pytest.raises(errors.FileError, match="is a pipe; a regular file is needed"):
        read_header_of(tmp_path / "p")


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regular = os.stat(write(tmp_path, b""))
    os.mkfifo(tmp_path / "p")
    monkeypatch.setattr(os, "stat", lambda path: regular)
    signal.alarm(20)  # without O_NONBLOCK the open waits for a writer, for ever
    try:
        with pytest.raises(errors.FileError, match="is a pipe"):
            read_header_of(str(tmp_path / "p"))
    finally:
        signal.alarm(0)


def test_devices_and_sockets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.FileError, match="/dev/zero: is a character device"):
        read_header_of("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        with pytest.raises(errors.FileError, match="is a socket"):
            read_header_of(tmp_path / "s")


def test_a_path_with_a_NUL() -> None:
    with pytest.raises(errors.ArgumentError, match="NUL"):
        read_header_of("a\0b")


def test_a_full_descriptor_table_is_a_named_error(tmp_path: Path) -> None:
    path = write(tmp_path, file_bytes({"a": A}, 4))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, hard))
    try:
        with pytest.raises(OSError):
            while True:
                fillers.append(os.dup(0))
        with pytest.raises(errors.FileError, match="EMFILE"):
            read_header_of(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
    assert read_header_of(path).tensors


# ---- the two ways of reading agree; speed and memory


def test_spellings_agree_and_the_usual_ones_take_the_fast_scan() -> None:
    tensors = {f"layer.{i}": entry("BF16", [i, 2], 2 * i * (i - 1), 2 * i * (i + 1)) for i in range(1, 30)}
    data_nbytes = 2 * 29 * 30
    printed = spellings({"__metadata__": {"format": "pt"}, **tensors})
    headers = {name: parse(text, data_nbytes) for name, text in printed.items()}
    for header in headers.values():
        assert header.tensors == headers["indented"].tensors
        assert header.metadata == {"format": "pt"}
    assert all(fastscan.scan(printed[name]) for name in ("compact", "padded", "spaced"))
    assert fastscan.scan(spellings(tensors)["sorted"])
    assert not fastscan.scan(printed["indented"])


def test_the_fast_scan_leaves_no_byte_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{i}": entry("U8", [1], i, i + 1) for i in range(40)}
    text = json.dumps(tensors, separators=(",", ":"))
    for piece in (1 << 20, 300, 120):
        monkeypatch.setattr(fastscan, "_PIECE", piece)
        whole = fastscan.scan(text)
        assert whole is not None
        assert list(whole.tensors) == list(tensors)
        for at in [m.end() for m in re.finditer("},", text)]:
            for junk in (",", " ", "x", '"', "{}", '"q":1,', ATEXT + ","):
                assert fastscan.scan(text[:at] + junk + text[at:]) is None


def test_pieces_end_where_a_name_looks_like_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastscan, "_PIECE", 200)
    tensors = {f"]}},{i}": entry("U8", [1], i, i + 1) for i in range(40)}
    assert list(parse(tensors, 40).tensors) == list(tensors)


def many(count: int) -> tuple[bytes, int]:
    """A header of `count` expert-like tensors and the bytes of its data."""
    parts, at = [], 0
    for i in range(count):
        rows = i % 7 + 1
        name = f"model.layers.{i // 200}.mlp.experts.{i % 200}.down_proj.weight"
        parts.append(
            f'"{name}":{{"dtype":"BF16","shape":[{rows},64],"data_offsets":[{at},{at + rows * 128}]}}'
        )
        at += rows * 128
    return ("{" + ",".join(parts) + "}").encode(), at


def test_20000_tensors_are_read_fast() -> None:
    raw, data_nbytes = many(20_000)

    def reading() -> float:
        begin = time.perf_counter()
        header = parse_header(raw, path="m", file_nbytes=8 + len(raw) + data_nbytes, data_offset=8 + len(raw))
        seconds = time.perf_counter() - begin
        assert len(header.tensors) == 20_000
        return seconds

    assert_takes_under(0.4, reading, tries=10)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        parse({"a": A}, 4)
        refused("{]")
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


@pytest.mark.thorough
def test_1_300_000_tensors_stay_within_memory() -> None:
    code = """
import resource
from nobounce.formats.header import parse_header, HEADER_LIMIT
entries = (f'"t{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(1_300_000))
raw = ("{" + ",".join(entries) + "}").encode()
assert len(raw) < HEADER_LIMIT
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
header = parse_header(raw, path="m", file_nbytes=8 + len(raw) + 1_300_000, data_offset=8 + len(raw))
assert len(header.tensors) == 1_300_000
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < 700  # MiB, beyond the header's own 85


def test_importing_the_reader_loads_no_array_library() -> None:
    code = """
import sys
import nobounce.formats.header, nobounce.formats.index
assert not {"numpy", "torch", "ml_dtypes"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
