"""Fields of a configuration, which may hold anything: read, or refused by their JSON path."""

from collections.abc import Mapping
from typing import Any

from moqext._C import ConfigError
from moqext.reader.files.config_files import fail
from moqext.reader.files.untrusted import type_name


class Fields:
    """An object of a configuration.

    Attributes:
        path: its JSON path.
    """

    def __init__(self, file: str, path: str, value: Any) -> None:
        """Takes an object; `value` that is none is refused."""
        self._file, self.path = file, path
        if not isinstance(value, Mapping):
            raise self.wrong("", "an object", value)
        self._value = value

    def __contains__(self, name: str) -> bool:
        return self._value.get(name) is not None

    def wrong(self, name: str, expected: str, found: Any) -> ConfigError:
        """The exception for a field: what was expected, and what is there."""
        shown = repr(found)[:60] if isinstance(found, (str, int, float)) else type_name(found)
        return self.refused(name, f"expected {expected}, found {shown}")

    def refused(self, name: str, message: str) -> ConfigError:
        """The exception for a field."""
        return fail(self._file, f"{self.path}.{name}" if name else self.path, message)

    def text(self, name: str) -> str | None:
        """A text, None where it is absent or null."""
        value = self._value.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "text", value)
        return value

    def number(self, name: str) -> int | None:
        """An integer, None where it is absent or null."""
        value = self._value.get(name)
        if value is not None and type(value) is not int:
            raise self.wrong(name, "an integer", value)
        return value

    def texts(self, name: str) -> list[str]:
        """A list of text, empty where it is absent or null."""
        value = self._value.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of text", value)
        return value

    def numbers(self, name: str) -> list[int] | None:
        """A list of integers, None where it is absent or null."""
        value = self._value.get(name)
        if value is not None and not (isinstance(value, list) and all(type(item) is int for item in value)):
            raise self.wrong(name, "a list of integers", value)
        return value

    def raw(self, name: str) -> Any:
        """A value of any type."""
        return self._value.get(name)

    def inner(self, name: str) -> "Fields | None":
        """An object, None where it is absent or null."""
        value = self._value.get(name)
        return None if value is None else Fields(self._file, f"{self.path}.{name}", value)

    def members(self) -> "list[tuple[str, Fields]]":
        """The members, each of which is to be an object."""
        return [
            (name, Fields(self._file, f"{self.path}.{name}", value)) for name, value in self._value.items()
        ]
