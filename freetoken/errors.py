"""The exception tree: every error the library raises on purpose derives from `FreeTokenError`.

Each class is also a builtin, so callers may catch either. Facts are attributes; the message names what was
found, what was expected and the next step, in one printable line.
"""

from __future__ import annotations

from typing import Any

_MAX_MESSAGE = 2000


def _one_line(message: str) -> str:
    """Printable, and of bounded length: a message quotes names from files, which may hold anything."""
    if not message.isprintable():
        message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
    if len(message) > _MAX_MESSAGE:
        message = f"{message[: _MAX_MESSAGE - 500]} ... {message[-490:]}"
    return message


def _rebuild(cls: type[FreeTokenError], message: str, facts: dict[str, Any]) -> FreeTokenError:
    return cls(message, **facts)


class FreeTokenError(Exception):
    """Base class. Keyword facts become attributes and survive pickling across processes."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(_one_line(message))
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), str(self), self.facts)


class ConfigError(FreeTokenError, ValueError):
    """A setting or an argument is not one of the accepted values."""

    def __init__(self, message: str, *, name: str, value: object, expected: str) -> None:
        super().__init__(message, name=name, value=value, expected=expected)


class FormatError(FreeTokenError, ValueError):
    """Weights cannot be held in a format: width, codes or scales do not fit it."""

    def __init__(self, message: str, *, format: str, shape: tuple[int, ...] | None = None) -> None:
        super().__init__(message, format=format, shape=shape)


class CheckpointError(FreeTokenError, ValueError):
    """A checkpoint is damaged, incomplete, contradicts itself, or holds something this library cannot read."""

    def __init__(
        self, message: str, *, file: str | None = None, tensor: str | None = None, row: int | None = None
    ) -> None:
        super().__init__(message, file=file, tensor=tensor, row=row)


class RowError(FreeTokenError, IndexError):
    """A row that a table does not have was asked for."""

    def __init__(self, message: str, *, row: int, rows: int) -> None:
        super().__init__(message, row=row, rows=rows)


class ClosedError(FreeTokenError, ValueError):
    """Something was used after it was closed, or closed while it was used."""

    def __init__(self, message: str, *, what: str) -> None:
        super().__init__(message, what=what)


class CapacityError(FreeTokenError, MemoryError):
    """More bytes are needed than this process may allocate."""

    def __init__(self, message: str, *, needed: int, available: int, where: str) -> None:
        super().__init__(message, needed=needed, available=available, where=where)


class UnsupportedError(FreeTokenError, NotImplementedError):
    """A model, instruction set or operation that this library does not handle."""

    def __init__(self, message: str, *, feature: str, available: str = "") -> None:
        super().__init__(message, feature=feature, available=available)


class DeviceError(FreeTokenError, RuntimeError):
    """A device refused or failed an operation; lost: nothing can be done on it any more by this process."""

    def __init__(self, message: str, *, operation: str, lost: bool = False) -> None:
        super().__init__(message, operation=operation, lost=lost)


class StepError(FreeTokenError, RuntimeError):
    """A step failed, was cancelled, or something in it is late.

    step: its number. side: "host" or "device", whose part failed; "" when it was cancelled. layer and duty: where, if
    known. waited: seconds. usable: whether the model can go on after this step.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        side: str = "",
        layer: int | None = None,
        duty: str = "",
        waited: float = 0.0,
        usable: bool = True,
    ) -> None:
        super().__init__(message, step=step, side=side, layer=layer, duty=duty, waited=waited, usable=usable)
