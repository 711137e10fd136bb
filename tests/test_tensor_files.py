"""The tensors of a directory: which files are read, what is told to be missing, and files that change."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import save_file

from moqext import Checkpoint, CheckpointError, Problem
from moqext.reader.files import shard
from moqext.reader.files import tensor_files as module
from moqext.reader.files.tensor_files import FILES_KEPT, TensorFiles

from .work import assert_linear

DATA = Path(__file__).parent / "data" / "checkpoints"
GENUINE = sorted(path.parent for path in DATA.glob("*/model.safetensors"))
INDEX = "model.safetensors.index.json"


def write(path: Path, **values: int) -> None:
    """A file with one uint8 tensor of four equal elements per name."""
    save_file({name.replace("__", "."): np.full(4, value, np.uint8) for name, value in values.items()}, path)


def write_index(directory: Path, weight_map: object, name: str = INDEX) -> Path:
    path = directory / name
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return path


def by_code(problems: tuple[Problem, ...]) -> dict[str, list[Problem]]:
    codes: dict[str, list[Problem]] = {}
    for problem in problems:
        codes.setdefault(problem.code, []).append(problem)
    return codes


def value(files: TensorFiles, name: str) -> int:
    array = files.tensor(name)
    assert array.shape == (4,)
    assert (array == array[0]).all()
    return int(array[0])


def descriptors(directory: Path) -> int:
    """How many descriptors of this process are open on files in the directory."""
    links = Path("/proc/self/fd").iterdir()
    return sum(os.path.realpath(link).startswith(f"{directory}/") for link in links)


@pytest.fixture
def without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module._extended_dtype.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    yield
    module._extended_dtype.cache_clear()


class TestGenuine:
    EXPECTED = {  # noqa: RUF012
        "F32": np.float32,
        "U8": np.uint8,
        "I8": np.int8,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
    }
    CARRIERS = EXPECTED | {"BF16": np.uint16, "F8_E4M3": np.uint8}

    def compare(self, directory: Path, dtypes: dict[str, type]) -> None:
        theirs = dict(deserialize((directory / "model.safetensors").read_bytes()))
        with TensorFiles(directory) as files:
            assert files.has_weights
            assert files.problems == ()
            assert files.index is None
            assert files.tensors.keys() == theirs.keys()
            for name, info in files.tensors.items():
                array = files.tensor(name)
                assert array.shape == info.shape == tuple(theirs[name]["shape"])
                assert array.dtype == dtypes[info.dtype]
                assert array.tobytes() == bytes(theirs[name]["data"])

    def test_there_are_thirteen(self) -> None:
        assert len(GENUINE) == 13

    @pytest.mark.parametrize("directory", GENUINE, ids=lambda path: path.name)
    def test_equal_to_the_safetensors_package(self, directory: Path) -> None:
        self.compare(directory, self.EXPECTED)

    @pytest.mark.parametrize("directory", GENUINE, ids=lambda path: path.name)
    @pytest.mark.usefixtures("without_ml_dtypes")
    def test_equal_in_carriers_without_ml_dtypes(self, directory: Path) -> None:
        self.compare(directory, self.CARRIERS)

    @pytest.mark.parametrize("directory", GENUINE, ids=lambda path: path.name)
    def test_raw_types_are_the_same_whatever_is_installed(
        self, directory: Path, request: pytest.FixtureRequest
    ) -> None:
        with Checkpoint(directory) as ckpt:
            there = {name: ckpt.tensor(name, raw=True) for name in ckpt.tensors}
            request.getfixturevalue("without_ml_dtypes")
            for name, array in there.items():
                assert array.dtype == ckpt.tensor(name).dtype == self.CARRIERS[ckpt.tensors[name].dtype]
                assert array.tobytes() == ckpt.tensor(name).tobytes()


class TestTensor:
    def test_is_an_array_of_its_own(self, data: Path) -> None:
        files = TensorFiles(data / "checkpoints" / "llama_nvfp4_kvfp8")
        for name in files:
            array, again = files.tensor(name), files.tensor(name)
            assert array.flags.c_contiguous
            assert array.flags.aligned
            array.reshape(-1).view(np.uint8)[...] ^= 0xFF
            assert array.tobytes() != again.tobytes() == files.tensor(name).tobytes()

    def test_larger_than_one_read(
        self, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        values = rng.integers(0, 256, 10_000).astype(np.uint8)
        save_file({"a": values}, tmp_path / "model.safetensors")
        monkeypatch.setattr(shard, "READ_AT_ONCE", 999)
        np.testing.assert_array_equal(TensorFiles(tmp_path).tensor("a"), values)

    def test_every_plain_type(self, tmp_path: Path, rng: np.random.Generator) -> None:
        arrays = {
            code: rng.integers(0, 2, (3, 2)).astype(code)
            for code in ("?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8")
        }
        save_file(arrays, tmp_path / "model.safetensors")
        files = TensorFiles(tmp_path)
        for code, expected in arrays.items():
            array = files.tensor(code)
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(array, expected)

    @pytest.mark.parametrize(
        ("dtype", "extended", "size"),
        [
            ("BF16", ml_dtypes.bfloat16, 2),
            ("F8_E4M3", ml_dtypes.float8_e4m3fn, 1),
            ("F8_E5M2", ml_dtypes.float8_e5m2, 1),
            ("F8_E8M0", ml_dtypes.float8_e8m0fnu, 1),
            ("F8_E4M3FNUZ", ml_dtypes.float8_e4m3fnuz, 1),
            ("F8_E5M2FNUZ", ml_dtypes.float8_e5m2fnuz, 1),
        ],
    )
    def test_every_extended_type(self, tmp_path: Path, dtype: str, extended: type, size: int) -> None:
        self.write_raw(tmp_path, dtype, [8], bytes(range(8 * size)))
        array = TensorFiles(tmp_path).tensor("t")
        assert array.dtype == extended
        assert array.tobytes() == bytes(range(8 * size))

    @pytest.mark.parametrize(("dtype", "shape"), [("F4", [8]), ("F6_E2M3", [4]), ("X9", [5]), ("", [4])])
    def test_a_type_without_an_array_is_refused_only_when_asked_for(
        self, tmp_path: Path, dtype: str, shape: list[int]
    ) -> None:
        self.write_raw(tmp_path, dtype, shape, bytes({"F4": 4, "F6_E2M3": 3}.get(dtype, 4)))
        files = TensorFiles(tmp_path)
        assert files.tensors["t"].dtype == dtype
        (note,) = files.problems
        assert (note.code, note.severity, note.tensor) == ("unreadable_dtype", "note", "t")
        with pytest.raises(CheckpointError, match="cannot be shown as an array") as caught:
            files.tensor("t")
        assert caught.value.file == tmp_path / "model.safetensors"
        assert caught.value.tensor == "t"

    def test_empty_and_scalar(self, tmp_path: Path) -> None:
        arrays = {"empty": np.empty((3, 0, 2), np.float32), "scalar": np.array(2.5, np.float32)}
        save_file(arrays, tmp_path / "model.safetensors")
        files = TensorFiles(tmp_path)
        assert files.tensor("empty").shape == (3, 0, 2)
        assert files.tensor("scalar").shape == ()
        assert files.tensor("scalar") == 2.5

    def test_misaligned_data_is_copied_to_where_it_can_be_read(self, tmp_path: Path) -> None:
        self.write_raw(tmp_path, "F32", [2], np.float32([1.5, -2]).tobytes(), pad=0)
        info = TensorFiles(tmp_path).tensors["t"]
        self.write_raw(tmp_path, "F32", [2], np.float32([1.5, -2]).tobytes(), pad=(1 - info.begin) % 4)
        files = TensorFiles(tmp_path)
        assert files.tensors["t"].begin % 4 == 1
        array = files.tensor("t")
        assert array.flags.aligned
        np.testing.assert_array_equal(array, np.float32([1.5, -2]))

    def test_absent_name(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", a=1)
        with pytest.raises(CheckpointError, match="no such tensor") as caught:
            TensorFiles(tmp_path).tensor("b")
        assert caught.value.tensor == "b"
        assert caught.value.file == tmp_path

    @staticmethod
    def write_raw(directory: Path, dtype: str, shape: list[int], content: bytes, pad: int = 0) -> None:
        header = {"t": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(content)]}}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8 + pad)
        (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)


class TestChangedFiles:
    """Files that are not what they were when their headers were read, before and while they are held open."""

    @pytest.fixture(params=["before", "after"])
    def files(self, request: pytest.FixtureRequest, tmp_path: Path) -> TensorFiles:
        write(tmp_path / "model.safetensors", a=1, b=2)
        files = TensorFiles(tmp_path)
        if request.param == "after":
            assert value(files, "b") == 2
        return files

    def refused(self, files: TensorFiles, message: str) -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            files.tensor("a")
        assert (caught.value.file, caught.value.tensor) == (files.directory / "model.safetensors", "a")

    @pytest.mark.parametrize("size", [0, 20])
    def test_cut_is_an_error_and_no_sigbus(self, files: TensorFiles, size: int) -> None:
        os.truncate(files.directory / "model.safetensors", size)
        self.refused(files, f"has changed.*has {size}")

    def test_grown(self, files: TensorFiles) -> None:
        with open(files.directory / "model.safetensors", "ab") as stream:
            stream.write(b"more")
        self.refused(files, "has changed")

    def test_written_to_in_place(self, files: TensorFiles) -> None:
        path = files.directory / "model.safetensors"
        before = path.stat().st_mtime_ns
        with open(path, "r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"x")
        os.utime(path, ns=(before, before + 1))
        self.refused(files, "has changed.*written to")

    def test_cut_while_it_is_read(self, files: TensorFiles, monkeypatch: pytest.MonkeyPatch) -> None:
        path, read = files.directory / "model.safetensors", os.preadv

        def cut_first(*arguments: Any) -> int:
            os.truncate(path, 8)
            return read(*arguments)

        monkeypatch.setattr(os, "preadv", cut_first)
        self.refused(files, "has changed.*has 8")


class TestReplacedFiles:
    """A file of another layout under the old name: the old offsets would give other tensors' bytes."""

    @staticmethod
    def replace(directory: Path) -> None:
        write(directory / "new", a=9, longer__name=8)
        os.replace(directory / "new", directory / "model.safetensors")

    def test_before_its_first_tensor_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", a=1)
        files = TensorFiles(tmp_path)
        self.replace(tmp_path)
        with pytest.raises(CheckpointError, match="has changed") as caught:
            files.tensor("a")
        assert (caught.value.file, caught.value.tensor) == (tmp_path / "model.safetensors", "a")

    def test_of_one_size_and_time_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        write(path, a=1)
        files, status = TensorFiles(tmp_path), path.stat()
        write(tmp_path / "new", a=2)
        os.replace(tmp_path / "new", path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(CheckpointError, match="another file has taken its place"):
            files.tensor("a")

    def test_while_it_is_held_open_the_old_one_is_read(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", a=1, b=2)
        files = TensorFiles(tmp_path)
        assert value(files, "b") == 2
        self.replace(tmp_path)
        assert value(files, "a") == 1

    def test_after_it_was_let_go_is_refused(self, tmp_path: Path) -> None:
        for i in range(FILES_KEPT + 1):
            write(tmp_path / f"part-{i:03}.safetensors", **{f"t{i}": i})
        files = TensorFiles(tmp_path)
        assert [value(files, f"t{i}") for i in range(FILES_KEPT + 1)] == list(range(FILES_KEPT + 1))
        write(tmp_path / "part-000.safetensors", t0=77)
        with pytest.raises(CheckpointError, match="has changed"):
            files.tensor("t0")

    @pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
    def test_by_a_pipe_or_a_directory_does_not_hang(
        self, tmp_path: Path, make: Callable[[Path], None]
    ) -> None:
        path = tmp_path / "model.safetensors"
        write(path, a=1)
        files = TensorFiles(tmp_path)
        path.unlink()
        make(path)
        with pytest.raises(CheckpointError, match="no regular file") as caught:
            files.tensor("a")
        assert (caught.value.file, caught.value.tensor) == (path, "a")

    def test_by_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        write(path, a=1)
        files = TensorFiles(tmp_path)
        path.unlink()
        with pytest.raises(CheckpointError, match="cannot be read: No such file") as caught:
            files.tensor("a")
        assert (caught.value.file, caught.value.tensor) == (path, "a")


class TestClosing:
    def test_arrays_outlive_it(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", a=1)
        with TensorFiles(tmp_path) as files:
            assert descriptors(tmp_path) == 0
            a = files.tensor("a")
            assert descriptors(tmp_path) == 1
        assert descriptors(tmp_path) == 0
        assert a[0] == 1

    def test_no_tensor_after_it(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", a=1)
        files = TensorFiles(tmp_path)
        files.close()
        files.close()
        with pytest.raises(ValueError, match="closed"):
            files.tensor("a")
        assert "a" in files

    def test_only_a_few_files_are_kept_open(self, tmp_path: Path) -> None:
        count = 3 * FILES_KEPT
        for i in range(count):
            write(tmp_path / f"part-{i:03}.safetensors", **{f"t{i}": i})
        files = TensorFiles(tmp_path)
        for _ in range(2):
            assert [value(files, f"t{i}") for i in range(count)] == list(range(count))
        assert descriptors(tmp_path) == FILES_KEPT

    def test_beside_reads_of_other_threads(self, tmp_path: Path) -> None:
        """A read gives the tensor or says that the files are closed, and every descriptor is given back."""
        count = 2 * FILES_KEPT
        for i in range(count):
            write(tmp_path / f"part-{i:03}.safetensors", **{f"t{i}": i})

        def read(files: TensorFiles, start: Barrier) -> str:
            start.wait()
            try:
                for turn in range(200):
                    assert value(files, f"t{turn % count}") == turn % count
            except ValueError as error:
                return str(error)
            return "read all"

        for _ in range(20):
            files, start = TensorFiles(tmp_path), Barrier(4)
            with ThreadPoolExecutor(3) as pool:
                ends = [pool.submit(read, files, start) for _ in range(3)]
                start.wait()
                files.close()
            assert all("closed" in end.result() or end.result() == "read all" for end in ends)
        assert descriptors(tmp_path) == 0


class TestWhichFiles:
    """The order of preference, each step against what would be taken without it."""

    def test_single_file_before_index(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", a=1)
        write(tmp_path / "model-00001-of-00001.safetensors", a=2)
        write_index(tmp_path, {"a": "model-00001-of-00001.safetensors"})
        files = TensorFiles(tmp_path)
        assert value(files, "a") == 1
        assert files.files == (tmp_path / "model.safetensors",)
        assert [(p.code, p.severity) for p in files.problems] == [
            ("index_ignored", "warning"),
            ("unread_files", "note"),
        ]

    def test_single_file_before_others(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", a=1)
        write(tmp_path / "adapter.safetensors", a=2, b=2)
        files = TensorFiles(tmp_path)
        assert value(files, "a") == 1
        assert list(files) == ["a"]
        (note,) = files.problems
        assert note.code == "unread_files"
        assert "adapter.safetensors" in note.message

    def test_index_before_what_it_does_not_name(self, tmp_path: Path) -> None:
        write(tmp_path / "model-00001-of-00002.safetensors", a=1)
        write(tmp_path / "model-00002-of-00002.safetensors", b=2)
        write(tmp_path / "model-00001-of-00009.safetensors", a=9)
        write_index(
            tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        )
        files = TensorFiles(tmp_path)
        assert (value(files, "a"), value(files, "b")) == (1, 2)
        assert files.index == tmp_path / INDEX
        (note,) = files.problems
        assert note.code == "unread_files"
        assert "model-00001-of-00009.safetensors" in note.message

    def test_tensors_of_a_file_beside_the_index_are_not_lost_in_silence(self, tmp_path: Path) -> None:
        write(tmp_path / "model-00001-of-00001.safetensors", a=1)
        write(tmp_path / "mtp.safetensors", a=2, b=2, c=2)
        write_index(tmp_path, {"a": "model-00001-of-00001.safetensors"})
        problems = by_code(TensorFiles(tmp_path).problems)
        assert sorted(problems) == ["unread_files", "unread_tensors"]
        (lost,) = problems["unread_tensors"]
        assert lost.severity == "warning"
        assert "mtp.safetensors has b and 1 more" in lost.message

    def test_model_index_before_another(self, tmp_path: Path) -> None:
        write(tmp_path / "one.safetensors", a=1)
        write(tmp_path / "two.safetensors", a=2)
        write_index(tmp_path, {"a": "one.safetensors"}, "aaa.safetensors.index.json")
        write_index(tmp_path, {"a": "two.safetensors"})
        assert value(TensorFiles(tmp_path), "a") == 2

    def test_the_only_index_whatever_its_name(self, tmp_path: Path) -> None:
        write(tmp_path / "diffusion-1.safetensors", a=1)
        write(tmp_path / "diffusion-2.safetensors", a=2)
        write_index(tmp_path, {"a": "diffusion-2.safetensors"}, "diffusion.safetensors.index.json")
        assert value(TensorFiles(tmp_path), "a") == 2

    def test_every_file_without_an_index(self, tmp_path: Path) -> None:
        write(tmp_path / "x.safetensors", a=1)
        write(tmp_path / "y.safetensors", b=2)
        (tmp_path / "y.bin").write_bytes(b"no")
        files = TensorFiles(tmp_path)
        assert (value(files, "a"), value(files, "b"), len(files)) == (1, 2, 2)

    def test_consolidated_files_are_the_same_once_more(self, tmp_path: Path) -> None:
        write(tmp_path / "consolidated.safetensors", a=9, z=9)
        assert value(TensorFiles(tmp_path), "z") == 9
        write(tmp_path / "model-00001-of-00001.safetensors", a=1)
        files = TensorFiles(tmp_path)
        assert value(files, "a") == 1
        assert list(files) == ["a"]
        assert list(by_code(files.problems)) == ["unread_files"]

    def test_json_only(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        files = TensorFiles(tmp_path)
        assert not files.has_weights
        assert (dict(files.tensors), files.files) == ({}, ())
        assert list(by_code(files.problems)) == ["no_weights"]

    def test_json_only_with_an_index_knows_the_names(self, tmp_path: Path) -> None:
        write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
        files = TensorFiles(tmp_path)
        assert not files.has_weights
        assert list(files.named) == ["a", "b"]
        assert [(p.code, p.severity) for p in files.problems] == [("missing_shard", "error")] * 2
        with pytest.raises(CheckpointError, match="missing") as caught:
            files.tensor("b")
        assert caught.value.file == tmp_path / "model-2.safetensors"

    def test_links_and_subdirectories_are_followed(self, tmp_path: Path) -> None:
        blobs, here = tmp_path / "blobs", tmp_path / "snapshot"
        for directory in (blobs, here, here / "deep"):
            directory.mkdir()
        write(blobs / "0123abc", a=1)
        (here / "linked.safetensors").symlink_to(Path("..") / "blobs" / "0123abc")
        write(here / "deep" / "b.safetensors", b=2)
        write_index(here, {"a": "linked.safetensors", "b": "deep/b.safetensors"})
        files = TensorFiles(here)
        assert (value(files, "a"), value(files, "b")) == (1, 2)

    @pytest.mark.parametrize("name", ["absent", "file", "nul\0"])
    def test_no_directory(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(CheckpointError, match="not a directory") as caught:
            TensorFiles(tmp_path / name)
        assert caught.value.file == tmp_path / name


class TestShards:
    def test_missing_shards_are_collected(self, tmp_path: Path) -> None:
        write(tmp_path / "s1.safetensors", a=1)
        weight_map = {
            "a": "s1.safetensors",
            "b": "s2.safetensors",
            "c": "s2.safetensors",
            "d": "s3.safetensors",
        }
        write_index(tmp_path, weight_map)
        files = TensorFiles(tmp_path)
        assert list(files) == ["a"]
        problems = by_code(files.problems)
        assert list(problems) == ["missing_shard"]
        assert [p.severity for p in problems["missing_shard"]] == ["error", "error"]
        assert "s2.safetensors is missing" in problems["missing_shard"][0].message
        assert "by the index: 2" in problems["missing_shard"][0].message
        assert "s3.safetensors is missing" in problems["missing_shard"][1].message
        with pytest.raises(CheckpointError, match="which is missing") as caught:
            files.tensor("c")
        assert (caught.value.file, caught.value.tensor) == (tmp_path / "s2.safetensors", "c")

    def test_a_tensor_that_is_not_in_its_shard(self, tmp_path: Path) -> None:
        write(tmp_path / "s1.safetensors", a=1)
        write_index(tmp_path, {"a": "s1.safetensors", "b": "s1.safetensors"})
        files = TensorFiles(tmp_path)
        (problem,) = files.problems
        assert (problem.code, problem.severity, problem.tensor) == ("missing_tensor", "error", "b")
        with pytest.raises(CheckpointError, match="it is not") as caught:
            files.tensor("b")
        assert (caught.value.file, caught.value.tensor) == (tmp_path / "s1.safetensors", "b")

    def test_a_tensor_that_is_in_another_shard_is_not_taken_from_there(self, tmp_path: Path) -> None:
        write(tmp_path / "s1.safetensors", a=1)
        write(tmp_path / "s2.safetensors", b=2)
        write_index(tmp_path, {"a": "s2.safetensors", "b": "s2.safetensors", "x": "s1.safetensors"})
        files = TensorFiles(tmp_path)
        problems = by_code(files.problems)
        assert [p.tensor for p in problems["missing_tensor"]] == ["a", "x"]
        assert [p.tensor for p in problems["duplicate_tensor"]] == ["a"]
        assert "a" not in files

    def test_what_the_index_does_not_name_is_read_and_noted(self, tmp_path: Path) -> None:
        write(tmp_path / "s1.safetensors", a=1, extra=7)
        write_index(tmp_path, {"a": "s1.safetensors"})
        files = TensorFiles(tmp_path)
        (note,) = files.problems
        assert (note.code, note.severity, note.tensor) == ("unindexed_tensor", "note", "extra")
        assert value(files, "extra") == 7

    def test_the_index_decides_between_duplicates(self, tmp_path: Path) -> None:
        write(tmp_path / "s1.safetensors", a=1, b=1)
        write(tmp_path / "s2.safetensors", a=2, c=2)
        write_index(tmp_path, {"a": "s2.safetensors", "b": "s1.safetensors", "c": "s2.safetensors"})
        files = TensorFiles(tmp_path)
        assert value(files, "a") == 2
        (note,) = files.problems
        assert (note.code, note.severity, note.tensor) == ("duplicate_tensor", "note", "a")

    @pytest.mark.parametrize("indexed", [True, False])
    def test_duplicates_nobody_decides_between_are_refused(self, tmp_path: Path, indexed: bool) -> None:
        write(tmp_path / "s1.safetensors", a=1, b=1)
        write(tmp_path / "s2.safetensors", a=2, c=2)
        if indexed:
            write_index(tmp_path, {"b": "s1.safetensors", "c": "s2.safetensors"})
        with pytest.raises(CheckpointError, match=r"also in s1\.safetensors") as caught:
            TensorFiles(tmp_path)
        assert (caught.value.file, caught.value.tensor) == (tmp_path / "s2.safetensors", "a")

    def test_holes_are_noted(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        write(path, a=1)
        path.write_bytes(path.read_bytes() + b"tail")
        files = TensorFiles(tmp_path)
        (note,) = files.problems
        assert (note.code, note.severity) == ("hole", "note")
        assert "model.safetensors" in note.message
        assert value(files, "a") == 1

    @pytest.mark.parametrize("content", [b"<html>not found</html>", b"", None])
    def test_a_shard_that_cannot_be_read_is_a_problem(self, tmp_path: Path, content: bytes | None) -> None:
        write(tmp_path / "s1.safetensors", a=1)
        if content is None:
            (tmp_path / "s2.safetensors").symlink_to("nowhere")
        else:
            (tmp_path / "s2.safetensors").write_bytes(content)
        write_index(tmp_path, {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s2.safetensors"})
        files = TensorFiles(tmp_path)
        assert value(files, "a") == 1
        (problem,) = files.problems
        assert (problem.code, problem.severity) == ("unreadable_shard", "error")
        assert problem.message.startswith("s2.safetensors: ")
        assert problem.message.endswith("by the index: 2")
        with pytest.raises(CheckpointError) as caught:
            files.tensor("b")
        assert (caught.value.file, caught.value.tensor) == (tmp_path / "s2.safetensors", "b")

    def test_a_download_that_stopped_in_the_last_shard(self, tmp_path: Path) -> None:
        for i in (1, 2):
            write(tmp_path / f"s{i}.safetensors", **{f"t{i}": i})
        os.truncate(tmp_path / "s2.safetensors", (tmp_path / "s2.safetensors").stat().st_size - 1)
        write_index(tmp_path, {"t1": "s1.safetensors", "t2": "s2.safetensors"})
        assert [p.code for p in TensorFiles(tmp_path).problems] == ["unreadable_shard"]

    def test_the_only_file_that_cannot_be_read_is_refused_without_an_index(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"<html>not found</html>")
        with pytest.raises(CheckpointError) as caught:
            TensorFiles(tmp_path)
        assert caught.value.file == tmp_path / "model.safetensors"

    def test_renamed_shards_are_missing(self, tmp_path: Path) -> None:
        write(tmp_path / "renamed.safetensors", a=1)
        write_index(tmp_path, {"a": "model-00001-of-00001.safetensors"})
        problems = by_code(TensorFiles(tmp_path).problems)
        assert {code: found[0].severity for code, found in problems.items()} == {
            "unread_files": "note",
            "missing_shard": "error",
        }

    def test_an_index_that_points_to_the_wrong_file_says_where_it_is(self, tmp_path: Path) -> None:
        write(tmp_path / "s1.safetensors", a=1)
        write(tmp_path / "s2.safetensors", b=2)
        write_index(tmp_path, {"a": "s1.safetensors", "b": "s1.safetensors", "c": "s2.safetensors"})
        messages = [p.message for p in TensorFiles(tmp_path).problems if p.code == "missing_tensor"]
        assert messages[0] == "the index says it is in s1.safetensors, it is in s2.safetensors"

    @pytest.mark.parametrize(
        ("names", "missing"),
        [
            (["model-00001-of-00002", "model-00002-of-00002"], None),
            (["model-00000-of-00002", "model-00001-of-00002"], None),
            (["model-00001-of-00003", "model-00003-of-00003"], "1 of 3 .*number 2"),
            (["model-00002-of-00003"], "2 of 3 .*number 1"),
            (["a-00001-of-00001", "b-00001-of-00002"], "1 of 2 files b-"),
        ],
    )
    def test_numbers_tell_what_is_missing_without_an_index(
        self, tmp_path: Path, names: list[str], missing: str | None
    ) -> None:
        for i, name in enumerate(names):
            write(tmp_path / f"{name}.safetensors", **{f"t{i}": i})
        problems = TensorFiles(tmp_path).problems
        assert [p.code for p in problems] == ["missing_shard"] * (missing is not None)
        if missing is not None:
            assert re.search(missing, problems[0].message)

    @pytest.mark.unsanitized  # measures time
    def test_hundreds_of_shards_open_in_time_in_proportion(self, tmp_path: Path) -> None:
        layers = 60

        def make(shards: int) -> Callable[[], TensorFiles]:
            directory = tmp_path / str(shards)
            directory.mkdir()
            weight_map: dict[str, str] = {}
            for i in range(shards):
                shard = f"model-{i + 1:05}-of-{shards:05}.safetensors"
                names = [f"model.layers.{i}.mlp.experts.{j}.down_proj.weight" for j in range(layers)]
                header = {
                    name: {"dtype": "U8", "shape": [2, 2], "data_offsets": [4 * j, 4 * j + 4]}
                    for j, name in enumerate(names)
                }
                text = json.dumps(header).encode()
                (directory / shard).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4 * layers))
                weight_map |= dict.fromkeys(names, shard)
            write_index(directory, weight_map)
            return lambda: TensorFiles(directory)

        assert_linear(make, 16)
        files = TensorFiles(tmp_path / "256")
        assert (len(files), len(files.files), files.problems) == (256 * layers, 256, ())
        assert descriptors(tmp_path / "256") == 0


class TestChanged:
    """Genuine files with bytes changed: the outcome is success or CheckpointError, nothing else."""

    CHANGE = st.tuples(
        st.sampled_from(["flip", "insert", "remove", "cut"]),
        st.integers(0, 4000) | st.integers(0, 2**20),
        st.integers(1, 255),
    )

    @staticmethod
    def changed(content: bytes, changes: list[tuple[str, int, int]]) -> bytes:
        for kind, place, bits in changes:
            at = place % (len(content) + 1)
            head, tail = content[:at], content[at:]
            content = {
                "flip": head + bytes(byte ^ bits for byte in tail[:1]) + tail[1:],
                "insert": head + bytes([bits]) + tail,
                "remove": head + tail[bits % 8 + 1 :],
                "cut": head,
            }[kind]
        return content

    @staticmethod
    def open_and_read(directory: Path) -> None:
        """Opens the directory and reads every tensor; each may be refused by an error that says where."""
        names: set[str] = set()
        try:
            files = TensorFiles(directory)
        except CheckpointError as refusal:
            named = refusal.file
        else:
            named = directory
            names = {*files.tensors, *files.named}
        assert named is not None
        for name in names:
            try:
                array = files.tensor(name)
            except CheckpointError as refusal:
                named = refusal.tensor
            else:
                named = name
                assert len(array.tobytes()) == files.tensors[name].nbytes
                assert array.shape == files.tensors[name].shape
            assert named == name

    @settings(max_examples=150)
    @given(source=st.sampled_from(GENUINE), changes=st.lists(CHANGE, min_size=1, max_size=3))
    def test_tensors(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        source: Path,
        changes: list[tuple[str, int, int]],
    ) -> None:
        directory = tmp_path_factory.mktemp("changed")
        content = (source / "model.safetensors").read_bytes()
        (directory / "model.safetensors").write_bytes(self.changed(content, changes))
        self.open_and_read(directory)

    @settings(max_examples=150)
    @given(changes=st.lists(CHANGE, min_size=1, max_size=3))
    def test_index(
        self, tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, int, int]]
    ) -> None:
        directory = tmp_path_factory.mktemp("changed")
        write(directory / "s1.safetensors", a=1, b=2)
        write(directory / "s2.safetensors", c=3)
        index = write_index(directory, {"a": "s1.safetensors", "b": "s1.safetensors", "c": "s2.safetensors"})
        index.write_bytes(self.changed(index.read_bytes(), changes))
        self.open_and_read(directory)


class TestIndex:
    @pytest.mark.parametrize(
        ("text", "message", "tensor"),
        [
            (b"", "not JSON", None),
            (b"[]", "expected an object, found an array", None),
            (b"null", "expected an object, found null", None),
            (b"\xff{}", "not UTF-8", None),
            (b"[" * 200_000, "nested too deeply", None),
            (b"{}", "weight_map must be an object, found null", None),
            (b'{"weight_map": ["a"]}', "weight_map must be an object, found an array", None),
            (b'{"weight_map": {}, "weight_map": {}}', "key 'weight_map' twice", None),
            (b'{"weight_map": {"a": "s", "a": "t"}}', "weight_map names it twice", "a"),
            (b'{"weight_map": {"a": 1}}', "its file must be a string, found a number", "a"),
            (b'{"weight_map": {"a": null}}', "its file must be a string, found null", "a"),
            (b'{"weight_map": {"a": "/etc/passwd"}}', "leaves the directory", "a"),
            (b'{"weight_map": {"a": "../s.safetensors"}}', "leaves the directory", "a"),
            (b'{"weight_map": {"a": "x/../../s.safetensors"}}', "leaves the directory", "a"),
            (b'{"weight_map": {"a": ".."}}', "leaves the directory", "a"),
            (b'{"weight_map": {"a": ""}}', "leaves the directory", "a"),
            (b'{"weight_map": {"a": "."}}', "leaves the directory", "a"),
            (b'{"weight_map": {"a": "s\\u0000"}}', "not a file name", "a"),
            (b'{"weight_map": {"a": "\\udfff"}}', "not a file name", "a"),
            (b'{"weight_map": {"\\udfff": "s"}}', "not valid Unicode", "\udfff"),
        ],
    )
    def test_malformed(self, tmp_path: Path, text: bytes, message: str, tensor: str | None) -> None:
        (tmp_path / INDEX).write_bytes(text)
        with pytest.raises(CheckpointError) as caught:
            TensorFiles(tmp_path)
        assert message in str(caught.value)
        assert caught.value.file == tmp_path / INDEX
        assert caught.value.tensor == tensor
        str(caught.value).encode()

    @pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
    def test_no_regular_file(self, tmp_path: Path, make: Callable[[Path], None]) -> None:
        make(tmp_path / INDEX)
        with pytest.raises(CheckpointError) as caught:
            TensorFiles(tmp_path)
        assert caught.value.file == tmp_path / INDEX

    def test_a_name_too_long_for_a_file_is_a_missing_one(self, tmp_path: Path) -> None:
        write(tmp_path / "s.safetensors", a=1)
        write_index(tmp_path, {"a": "s.safetensors", "b": "x" * 5000})
        files = TensorFiles(tmp_path)
        assert [p.code for p in files.problems] == ["missing_shard"]
