"""The tensors of a directory: which files are read, views without a copy, and what is told to be missing."""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import save_file

from moqext import CheckpointError, Problem
from moqext import tensor_files as module
from moqext.tensor_files import MAPS_KEPT, TensorFiles

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


def mappings(path: Path) -> list[tuple[int, int]]:
    """The address ranges [low, high) at which this process has the file mapped."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [line[0].split("-") for line in lines if line[-1] == str(path.resolve())]
    return [(int(low, 16), int(high, 16)) for low, high in ranges]


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


class TestTensor:
    def test_is_a_read_only_view_into_the_map(self, data: Path) -> None:
        path = data / "checkpoints" / "llama_nvfp4_kvfp8" / "model.safetensors"
        files = TensorFiles(path.parent)
        assert mappings(path) == []
        arrays = {name: files.tensor(name) for name in files}
        ((low, high),) = mappings(path)
        for name, array in arrays.items():
            assert array.ctypes.data == low + files.tensors[name].begin
            assert array.ctypes.data + array.nbytes <= high
            assert array.flags.c_contiguous
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
            with pytest.raises(ValueError):
                array.flags.writeable = True

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
        assert not files.tensor("empty").flags.writeable
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
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, np.float32([1.5, -2]))

    def test_absent_name(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", a=1)
        with pytest.raises(CheckpointError, match="no such tensor") as caught:
            TensorFiles(tmp_path).tensor("b")
        assert caught.value.tensor == "b"
        assert caught.value.file == tmp_path

    @pytest.mark.parametrize("size", [0, 20])
    def test_a_file_cut_after_opening(self, tmp_path: Path, size: int) -> None:
        path = tmp_path / "model.safetensors"
        write(path, a=1)
        files = TensorFiles(tmp_path)
        os.truncate(path, size)
        with pytest.raises(CheckpointError) as caught:
            files.tensor("a")
        assert (caught.value.file, caught.value.tensor) == (path, "a")

    def test_a_file_removed_after_opening(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        write(path, a=1)
        files = TensorFiles(tmp_path)
        path.unlink()
        with pytest.raises(CheckpointError, match="cannot be mapped") as caught:
            files.tensor("a")
        assert (caught.value.file, caught.value.tensor) == (path, "a")

    @staticmethod
    def write_raw(directory: Path, dtype: str, shape: list[int], content: bytes, pad: int = 0) -> None:
        header = {"t": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(content)]}}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8 + pad)
        (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)


class TestClosing:
    def test_views_outlive_it_and_the_map_goes_with_the_last(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        write(path, a=1, b=2)
        with TensorFiles(tmp_path) as files:
            assert descriptors(tmp_path) == 0
            a, b = files.tensor("a"), files.tensor("b")
        assert len(mappings(path)) == 1
        assert a[0] == 1
        del a
        gc.collect()
        assert len(mappings(path)) == 1
        assert b[0] == 2
        del b
        gc.collect()
        assert mappings(path) == []
        assert descriptors(tmp_path) == 0

    def test_no_tensor_after_it(self, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", a=1)
        files = TensorFiles(tmp_path)
        files.close()
        files.close()
        with pytest.raises(ValueError, match="closed"):
            files.tensor("a")
        assert "a" in files

    def test_only_a_few_maps_are_kept(self, tmp_path: Path) -> None:
        count = 3 * MAPS_KEPT
        for i in range(count):
            write(tmp_path / f"part-{i:03}.safetensors", **{f"t{i}": i})
        files = TensorFiles(tmp_path)
        for _ in range(2):
            assert [value(files, f"t{i}") for i in range(count)] == list(range(count))
        gc.collect()
        assert descriptors(tmp_path) <= MAPS_KEPT
        held = [files.tensor(f"t{i}") for i in range(count)]
        assert [len(mappings(path)) for path in files.files] == [1] * count
        again = [files.tensor(f"t{i}") for i in range(count)]
        assert [len(mappings(path)) for path in files.files] == [1] * count
        assert [a.ctypes.data for a in held] == [b.ctypes.data for b in again]


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
        assert [(p.code, p.severity) for p in files.problems] == [("no_weights", "note")]
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

    def test_a_malformed_shard_is_refused_by_name(self, tmp_path: Path) -> None:
        write(tmp_path / "s1.safetensors", a=1)
        (tmp_path / "s2.safetensors").write_bytes(b"<html>not found</html>")
        write_index(tmp_path, {"a": "s1.safetensors", "b": "s2.safetensors"})
        with pytest.raises(CheckpointError) as caught:
            TensorFiles(tmp_path)
        assert caught.value.file == tmp_path / "s2.safetensors"

    @pytest.mark.unsanitized
    def test_a_thousand_shards_open_in_seconds(self, tmp_path: Path) -> None:
        shards, layers = 1000, 60
        weight_map: dict[str, str] = {}
        for i in range(shards):
            shard = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            names = [f"model.layers.{i}.mlp.experts.{j}.down_proj.weight" for j in range(layers)]
            header = {
                name: {"dtype": "U8", "shape": [2, 2], "data_offsets": [4 * j, 4 * j + 4]}
                for j, name in enumerate(names)
            }
            text = json.dumps(header).encode()
            (tmp_path / shard).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4 * layers))
            weight_map |= dict.fromkeys(names, shard)
        write_index(tmp_path, weight_map)
        start = time.process_time()
        files = TensorFiles(tmp_path)
        elapsed = time.process_time() - start
        assert (len(files), len(files.files), files.problems) == (shards * layers, shards, ())
        assert descriptors(tmp_path) == 0
        assert not any(mappings(path) for path in files.files[:3])
        assert elapsed < 10, f"{elapsed:.2f} s"  # 1 s on an idle core


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

    @settings(max_examples=150, deadline=None)
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

    @settings(max_examples=150, deadline=None)
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
