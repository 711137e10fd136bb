"""The header reader: what it accepts, and that all else is a CheckpointError naming file and tensor."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from moqext import _C, CheckpointError
from moqext.reader.files.tensor_header import (
    DTYPE_BITS,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_RANK,
    TensorInfo,
    read_header,
    read_unusual,
)

from .work import each

DATA = Path(__file__).parent / "data" / "checkpoints"
GENUINE = sorted(DATA.glob("**/*.safetensors"))


def entry(dtype: Any, shape: Any, *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def file_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A file; a header given as bytes is written as it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.safetensors"


def refused(path: Path, content: bytes) -> CheckpointError:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert caught.value.file == path
    assert str(path) in str(caught.value)
    return caught.value


@each("path", GENUINE)
def test_genuine_headers_agree_with_the_safetensors_package(path: Path) -> None:
    content = path.read_bytes()
    header = read_header(path)
    assert header.holes == ()
    theirs = dict(deserialize(content))
    assert header.tensors.keys() == theirs.keys()
    for name, info in header.tensors.items():
        assert (info.name, info.file) == (name, path)
        assert (info.dtype, list(info.shape)) == (theirs[name]["dtype"], theirs[name]["shape"])
        assert content[info.begin : info.end] == bytes(theirs[name]["data"])
        assert info.nbytes == info.end - info.begin


def test_offsets_are_made_absolute(path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "a": entry("F32", [2, 1], 4, 12), "b": entry("U8", [4], 0, 4)}
    content = file_bytes(header, bytes(range(12)))
    path.write_bytes(content)
    tensors, metadata, holes, _ = read_header(path)
    assert metadata == {"format": "pt"}
    assert holes == ()
    assert list(tensors) == ["a", "b"]
    assert content[tensors["a"].begin : tensors["a"].end] == bytes(range(4, 12))
    assert content[tensors["b"].begin : tensors["b"].end] == bytes(range(4))
    assert tensors["a"].numel == 2


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"a": entry("F32", [], 0, 4)},
        {"a": entry("F32", [0], 0, 0)},
        {"a": entry("F32", [0, 2**59], 0, 0), "b": entry("U8", [0], 0, 0)},
        {"a": entry("U8", [1] * MAX_RANK, 0, 1)},
        {"a": entry("F4", [2, 3], 0, 3)},
        {"a": entry("F8_E8M0", [3], 0, 3)},
        {"\u00e9\u4e2d\U0001f642": entry("U8", [1], 0, 1)},
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}     \n',
    ],
)
def test_unusual_but_right(path: Path, header: Any) -> None:
    path.write_bytes(file_bytes(header, bytes(8)))
    tensors = read_header(path).tensors
    if isinstance(header, dict):
        assert {name: list(info.shape) for name, info in tensors.items()} == {
            name: value["shape"] for name, value in header.items()
        }


def test_holes_are_told(path: Path) -> None:
    header = {"a": entry("U8", [1], 2, 3), "e": entry("U8", [0], 9, 9), "b": entry("U8", [1], 4, 5)}
    content = file_bytes(header, bytes(10))
    path.write_bytes(content)
    start = len(content) - 10
    assert read_header(path).holes == tuple((start + b, start + e) for b, e in [(0, 2), (3, 4), (5, 10)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (b"\x02\0\0\0", "4 bytes"),
        (file_bytes({}, length=3), "claims 3 bytes, the file has 2"),
        (file_bytes({}, length=2**64 - 1), "claims 18446744073709551615 bytes"),
        (file_bytes({"a": entry("U8", [1], 0, 1)}, b"x")[:-8], "claims"),
        (file_bytes(b""), "the header is empty"),
        (file_bytes(b' {"a":1}'), "must start with '{'"),
        (file_bytes(b"[]"), "must start with '{'"),
        (file_bytes(b"{"), "not JSON"),
        (file_bytes(b"{} {}"), "not JSON"),
        (file_bytes(b"{'a':1}"), "not JSON"),
        (file_bytes(b"\xef\xbb\xbf{}"), "must start with '{'"),
        (file_bytes(b'{"\xff":1}'), "not UTF-8"),
        (file_bytes(b"{\0}"), "not JSON"),
        (file_bytes(b'{"a":' + b"[" * 200_000), "nested too deeply"),
        (file_bytes(b'{"a":' * 200_000), "nested too deeply"),
        (file_bytes(b'{"a":' + b"9" * 10_000 + b"}"), "not JSON"),
        (file_bytes({"__metadata__": []}), "__metadata__ must be an object, found an array"),
        (file_bytes({"__metadata__": {"n": 1}}), "__metadata__['n'] must be a string, found a number"),
        (file_bytes(b'{"__metadata__":{"n":"1","n":"2"}}'), "__metadata__ has key 'n' twice"),
    ],
)
def test_malformed_files(path: Path, content: bytes, message: str) -> None:
    error = refused(path, content)
    assert message in str(error)
    assert error.tensor is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "the entry must be an object, found null"),
        ([], "the entry must be an object, found an array"),
        ({}, "exactly dtype, shape and data_offsets"),
        ({"dtype": "U8", "shape": [1]}, "exactly dtype, shape and data_offsets"),
        (entry("U8", [4], 0, 4) | {"extra": 1}, "exactly dtype, shape and data_offsets"),
        (entry(8, [4], 0, 4), "dtype must be a string, found a number"),
        (entry(None, [4], 0, 4), "dtype must be a string, found null"),
        (entry("U8", 4, 0, 4), "shape must be an array, found a number"),
        (entry("U8", {"0": 4}, 0, 4), "shape must be an array, found an object"),
        (entry("U8", ["4"], 0, 4), "shape must hold integers"),
        (entry("U8", [4.0], 0, 4), "shape must hold integers"),
        (entry("U8", [True, 4], 0, 4), "shape must hold integers"),
        (entry("U8", [-4], 0, 4), "shape must hold integers"),
        (entry("U8", [-2, -2], 0, 4), "shape must hold integers"),
        (entry("U8", [2**63], 0, 4), "shape must hold integers"),
        (entry("U8", [10**4000], 0, 4), "shape must hold integers"),
        (entry("U8", [1] * (MAX_RANK + 1), 0, 1), "33 entries"),
        (entry("U8", [2**32, 2**32], 0, 0), "absurdly large"),
        (entry("U8", [2**32, 2**32, 2**62], 0, 4), "absurdly large"),
        (entry("U8", [0, 2**62, 2**62], 0, 0), "absurdly large"),
        (entry("X9", [2**60], 0, 4), "absurdly large"),
        (entry("U8", [4]), "[begin, end]"),
        (entry("U8", [4], 0), "[begin, end]"),
        (entry("U8", [4], 0, 4, 8), "[begin, end]"),
        (entry("U8", [4], 4, 0), "begin <= end"),
        (entry("U8", [4], -4, 0), "data_offsets must hold integers"),
        (entry("U8", [4], 0, 4.0), "data_offsets must hold integers"),
        (entry("U8", [4], 0, float("nan")), "data_offsets must hold integers"),
        (entry("U8", [float("inf")], 0, 4), "shape must hold integers"),
        (float("inf"), "the entry must be an object, found a number"),
        (entry("U8", [4], "0", "4"), "data_offsets must hold integers"),
        (entry("U8", [4], 2**70, 2**70 + 4), "data_offsets must hold integers"),
        (entry("U8", [4], 6, 10), "end at 10, the file has 9 bytes"),
        (entry("U8", [2**40], 0, 2**40), "end at 1099511627776"),
        (entry("U8", [3], 0, 4), "takes 3 bytes, data_offsets span 4"),
        (entry("F32", [4], 0, 4), "takes 16 bytes, data_offsets span 4"),
        (entry("F32", [], 0, 0), "takes 4 bytes, data_offsets span 0"),
        (entry("F4", [7], 0, 4), "takes 3.5 bytes, data_offsets span 4"),
        (entry("U8", [3], 3, 6), "overlap tensor 'before', which ends at"),
    ],
)
def test_malformed_tensors_are_named(path: Path, value: object, message: str) -> None:
    header = {"before": entry("U8", [4], 0, 4), "bad one": value}
    if "overlap" not in message:
        header["before"] = entry("U8", [0], 0, 0)
    error = refused(path, file_bytes(header, bytes(9)))
    assert message in str(error)
    assert error.tensor == "bad one"
    assert len(str(error)) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("text", "tensor"),
    [
        (b'{"a":1,"b":2,"a":3}', "a"),
        (b'{"a":{"dtype":"U8","dtype":"F32","shape":[4],"data_offsets":[0,4]}}', "a"),
        (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "\ud800"),
    ],
)
def test_repeated_and_unspellable_names(path: Path, text: bytes, tensor: str) -> None:
    error = refused(path, file_bytes(text, bytes(4)))
    assert error.tensor == tensor
    str(error).encode()


def test_a_header_over_the_limit_is_not_read(path: Path) -> None:
    with open(path, "wb") as stream:
        stream.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{")
        stream.truncate(MAX_HEADER_BYTES + 1000)  # sparse
    with pytest.raises(CheckpointError, match="at most 100000000") as caught:
        read_header(path)
    assert caught.value.file == path


def test_what_is_not_a_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    (tmp_path / "directory.safetensors").mkdir()
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "nowhere")
    for name in ("pipe", "directory", "dangling", "absent"):
        file = tmp_path / f"{name}.safetensors"
        with pytest.raises(CheckpointError) as caught:
            read_header(file)
        assert caught.value.file == file


def changed(content: bytes, change: tuple[str, float, bytes]) -> bytes:
    """`content` with bytes replaced, inserted or removed at a place, or cut off there."""
    kind, where, what = change
    at = int(where * len(content))
    if kind == "cut":
        return content[:at]
    if kind == "insert":
        return content[:at] + what + content[at:]
    if kind == "remove":
        return content[:at] + content[at + len(what) :]
    return content[:at] + what + content[at + len(what) :]


CHANGES = st.tuples(
    st.sampled_from(["replace", "insert", "remove", "cut"]),
    st.floats(0, 1) | st.floats(0, 0.05),  # the header is the first bytes
    st.binary(min_size=1, max_size=4)
    | st.sampled_from([b"-", b"9", b"0", b'"', b"[", b"]", b"{", b"}", b",", b":", b"null", b"e9", b"\\"]),
)


@settings(max_examples=250)
@given(source=st.sampled_from(GENUINE), changes=st.lists(CHANGES, min_size=1, max_size=4))
@example(source=GENUINE[0], changes=[("cut", 0.0, b"x")])
def test_changed_genuine_files_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, source: Path, changes: list[tuple[str, float, bytes]]
) -> None:
    content = source.read_bytes()
    for change in changes:
        content = changed(content, change)
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except CheckpointError as refusal:
        error = refusal
    else:
        error = None
    if error:
        assert error.file == path
        return
    for info in header.tensors.values():
        assert 8 <= info.begin <= info.end <= len(content)
    claimed = sum(info.nbytes for info in header.tensors.values()) + sum(e - b for b, e in header.holes)
    assert claimed == len(content) - 8 - int.from_bytes(content[:8], "little")


def read_usual(text: bytes, path: Path, size: int) -> Any:
    """Reads a header in C; None where that leaves it to the other reader."""
    return _C.read_tensor_header(text, TensorInfo, path, LENGTH_BYTES + len(text), size, DTYPE_BITS)


@each("path", GENUINE)
def test_genuine_headers_are_usual(path: Path) -> None:
    content = path.read_bytes()
    text = content[8 : 8 + int.from_bytes(content[:8], "little")]
    found = read_usual(text, path, len(content))
    assert found == read_unusual(text, path, len(content))
    assert list(found[0]) == list(read_header(path).tensors)
    with pytest.raises(AttributeError):
        next(iter(found[0].values())).begin = 0


SIZES = st.integers(0, 9) | st.sampled_from(
    [2**31, 2**60, 2**63 - 1, 2**63, 2**64, 10**30, -1, 1.0, "1", None]
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "F4", "X9", "", "BF16"]) | st.just(8),
        "shape": st.lists(SIZES, max_size=4) | st.lists(st.integers(0, 3), max_size=3),
        "data_offsets": st.tuples(st.integers(0, 20), st.integers(0, 64)) | st.lists(SIZES, max_size=3),
    },
    optional={"extra": st.none()},
)
NAMES = st.text('ab.é𝄞\ud800\n"\\', max_size=4)
RIGHT = st.lists(st.integers(0, 3), max_size=3).map(
    lambda shape: {"dtype": "U8", "shape": shape, "data_offsets": [0, math.prod(shape)]}
)
METADATA = st.dictionaries(NAMES, NAMES, max_size=2) | st.just({"n": 1}) | st.none()


@settings(max_examples=250)
@given(
    tensors=st.dictionaries(NAMES, RIGHT | RIGHT | ENTRIES, max_size=3),
    metadata=METADATA,
    indent=st.sampled_from([None, 0, 1]),
    ascii=st.booleans(),
    change=st.none() | CHANGES,
)
@example({"a": entry("U8", [2**63 - 1, 0], 0, 0)}, {}, None, True, None)
@example({"a": entry("U8", [2**60 - 1], 0, 0)}, {}, None, True, None)
@example({"a": entry("X9", [2**30, 2**30], 0, 0)}, {}, None, True, None)
def test_both_readers_agree(tensors: Any, metadata: Any, indent: Any, ascii: bool, change: Any) -> None:
    """Reader in C and reader in Python agree; a header that Python refuses is not read in C."""
    header = tensors if metadata is None else {"__metadata__": metadata, **tensors}
    text = json.dumps(header, indent=indent, ensure_ascii=ascii).encode(errors="surrogatepass")
    if change:
        text = changed(text, change)
    path, size = Path("some.safetensors"), len(text) + 72
    found = read_usual(text, path, size)
    try:
        expected = read_unusual(text, path, size)
    except CheckpointError:
        assert found is None
    else:
        assert found is None or found == expected


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (b'{"b":%s,"a":%s}', ["b", "a"]),
        (b' {"b" : %s ,\n\t"a":%s\r} ', ["b", "a"]),
        (b'{"__metadata__":{"format":"pt"},"\xc3\xa9":%s,"":%s}', ["\u00e9", ""]),
        (b'{"a":%s,"__metadata__":{},"b":%s}', ["a", "b"]),
        (b'{"a":%s,"a":%s}', None),
        (b'{"\\u0061":%s,"b":%s}', None),
        (b'{"a":%s,"\xff":%s}', None),
        (b'{"a":%s,"b":%s,}', None),
        (b'{"a":%s "b":%s}', None),
        (b'{,"a":%s,"b":%s}', None),
        (b'{"a":%s,"b":%s}}', None),
        (b'{"__metadata__":{},"a":%s,"__metadata__":{},"b":%s}', None),
        (b'{"__metadata__":{"n":"1","n":"2"},"a":%s,"b":%s}', None),
        (b'{"__metadata__":null,"a":%s,"b":%s}', None),
    ],
)
def test_what_is_usual(text: bytes, names: list[str] | None) -> None:
    text = text.replace(b"%s", b'{"shape":[],"data_offsets":[0,1],"dtype":"U8"}')
    found = read_usual(text, Path("some.safetensors"), len(text) + 9)
    assert names is None if found is None else list(found[0]) == names
