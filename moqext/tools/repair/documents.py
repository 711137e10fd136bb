"""The JSON files of a checkpoint that say how it is quantized, read whole and perhaps written again."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moqext.reader.files.config_files import documents
from moqext.reader.files.untrusted import open_file, parse_object
from moqext.tools.convert.files import QUANTIZATION_FILES

CONFIG_FILES = ("config.json", *QUANTIZATION_FILES)


class Documents:
    """The files by name, read when they are asked for.

    Attributes:
        changed: files that `mark` named.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, dict[str, Any]] = {}
        self.changed: set[str] = set()

    def quantization(self) -> Iterator[tuple[str, dict[str, Any], bool]]:
        """File, the object with the fields of a quantization, and whether it is the inner one of two."""
        for file, path, _ in documents(self._directory):
            found: Any = self._whole(file)
            for key in path.split(".")[1:]:
                found = found[key]
            inner = found.get("quantization")
            yield (file, inner, True) if isinstance(inner, dict) else (file, found, False)

    @property
    def has_layer_list(self) -> bool:
        """Whether the layer list of exports before 0.27 is there."""
        return (self._directory / QUANTIZATION_FILES[1]).exists()

    def create(self, inline: dict[str, Any], own: dict[str, Any]) -> None:
        """Adds hf_quant_config.json, and the quantization_config of config.json where there is that file."""
        self._files[QUANTIZATION_FILES[0]] = own
        self.changed.add(QUANTIZATION_FILES[0])
        if (self._directory / CONFIG_FILES[0]).exists():
            self._whole(CONFIG_FILES[0])["quantization_config"] = inline
            self.changed.add(CONFIG_FILES[0])

    def mark(self, file: str) -> None:
        """Has a file written again."""
        self.changed.add(file)

    def written(self) -> Mapping[str, dict[str, Any]]:
        """The files that are written again."""
        return {name: self._files[name] for name in sorted(self.changed)}

    def copied(self) -> dict[str, Path]:
        """The files that stay as they are."""
        paths = {name: self._directory / name for name in CONFIG_FILES if name not in self.changed}
        return {name: path for name, path in paths.items() if path.is_file()}

    def _whole(self, file: str) -> dict[str, Any]:
        if file not in self._files:
            path = self._directory / file
            with open_file(path) as (stream, _):
                self._files[file] = parse_object(stream.read(), path, "the configuration")
        return self._files[file]
