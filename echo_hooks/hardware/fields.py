"""Reading hardware files: TOML whose numbers carry unit and source, checked key by key."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from echo_hooks.errors import UsageError
from echo_hooks.hardware.units import parse_quantity

MAX_FILE_BYTES = 1 << 20


@dataclass
class Provenance:
    """Where each number of a file is from, and its band (low, high), by dotted key."""

    sources: dict[str, str] = field(default_factory=dict)
    bands: dict[str, tuple[float, float]] = field(default_factory=dict)


def read_toml(path: Path | Traversable) -> dict[str, Any]:
    """A TOML file of at most MAX_FILE_BYTES; UsageError says what is wrong with it."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"{path}: larger than {MAX_FILE_BYTES} bytes, so no hardware file")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
        raise UsageError(f"{path}: not valid TOML ({error})") from None


class Fields:
    """One table of a file. Each key is asked for by type; ``done()`` refuses those nobody asked for.

    A number is written ``key = {value = ..., source = "...", band = [low, high]}``; the band may be left out.
    """

    def __init__(self, path: object, data: dict[str, Any], provenance: Provenance, prefix: str = ""):
        self.path, self.provenance = path, provenance
        self._data, self._prefix = data, prefix
        self._asked: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def error(self, key: str, message: str) -> UsageError:
        return UsageError(f"{self.path}: {self._prefix}{key}: {message}")

    def text(self, key: str) -> str:
        value = self._get(key, "a text")
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, f"{value!r} should be a text")
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in choices:
            raise self.error(key, f"{value!r} should be one of {', '.join(choices)}")
        return value

    def expect(self, key: str, right: Any) -> None:
        """The key must be there and have this one value."""
        form = _toml(right)
        value = self._get(key, form)
        if type(value) is not type(right) or value != right:
            raise self.error(key, f"{value!r} should be {form}")

    def table(self, key: str) -> Fields:
        value = self._get(key, "a table")
        if not isinstance(value, dict):
            raise self.error(key, f"{value!r} should be a table")
        return Fields(self.path, value, self.provenance, f"{self._prefix}{key}.")

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers from 0, such as a version."""
        value = self._get(key, "a list of whole numbers")
        if not isinstance(value, list) or not all(type(v) is int and v >= 0 for v in value):
            raise self.error(key, f"{value!r} should be a list of whole numbers")
        return tuple(value)

    def quantity(self, key: str, dimension: str, **extra: str) -> float:
        """A number with a unit, above zero (see ``parse_quantity``). ``extra``: further keys, each of one value."""
        return self._number(key, lambda text: parse_quantity(text, dimension), extra)

    def link(self, key: str) -> float:
        """A bandwidth of a link, which must say ``direction = "one way"`` (datasheets like to give both summed)."""
        return self.quantity(key, "bandwidth", direction="one way")

    def count(self, key: str) -> int:
        """A whole number from 1."""

        def whole(value: Any) -> int:
            if type(value) is not int:
                raise UsageError(f"{value!r} should be a whole number")
            return value

        return int(self._number(key, whole, {}))

    def share(self, key: str) -> float:
        """A number above 0 and at most 1."""

        def fraction(value: Any) -> float:
            if type(value) not in (int, float) or not 0 < value <= 1:
                raise UsageError(f"{value!r} should be a number above 0 and at most 1")
            return float(value)

        return self._number(key, fraction, {})

    def ratio(self, key: str) -> float:
        """A number from 1, such as an oversubscription of 2 (to 1)."""

        def at_least_one(value: Any) -> float:
            if type(value) not in (int, float) or not 1 <= value < float("inf"):
                raise UsageError(f"{value!r} should be a number from 1")
            return float(value)

        return self._number(key, at_least_one, {})

    def flag(self, key: str) -> bool:
        value = self._get(key, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r} should be true or false")
        return value

    def done(self, known: tuple[str, ...] = ()) -> None:
        """Raises UsageError for a key that nobody asked for. ``known``: further keys that may be there."""
        allowed = list(dict.fromkeys((*self._asked, *known)))
        for key in self._data:
            if key not in allowed:
                raise self.error(key, f"unknown key; known here: {', '.join(allowed)}")

    def _get(self, key: str, expected: str) -> Any:
        self._asked.append(key)
        if key not in self._data:
            raise self.error(key, f"missing; {expected} was expected")
        return self._data[key]

    def _number(self, key: str, convert, extra: dict[str, str]) -> Any:
        said = "".join(f", {name} = {_toml(value)}" for name, value in extra.items())
        form = f'{{value = ...{said}, source = "..."}}'
        entry = self._get(key, form)
        if not isinstance(entry, dict):
            raise self.error(key, f"{entry!r} says no source; write {form}")
        fields = Fields(self.path, entry, self.provenance, f"{self._prefix}{key}.")
        value = self._convert(key, fields._get("value", form), convert)
        for name, right in extra.items():
            fields.expect(name, right)
        name = self._prefix + key
        self.provenance.sources[name] = fields.text("source")
        if "band" in fields:
            band = fields._get("band", "[low, high]")
            if not isinstance(band, list) or len(band) != 2:
                raise fields.error("band", f"{band!r} should be [low, high]")
            low, high = (self._convert(key, v, convert) for v in band)
            if not low <= value <= high:
                raise fields.error("band", f"{band!r} does not hold the value {entry['value']!r}")
            self.provenance.bands[name] = (low, high)
        fields.done()
        return value

    def _convert(self, key: str, raw: Any, convert) -> Any:
        try:
            value = convert(raw)
        except UsageError as error:
            raise self.error(key, str(error)) from None
        if value <= 0:
            raise self.error(key, f"{raw!r} should be above zero")
        return value


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
