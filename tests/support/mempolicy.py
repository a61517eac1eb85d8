"""Stands for the system's calls on memory policies."""

from __future__ import annotations

import os
from typing import Any

import pytest

from freetoken.memory import _mempolicy


class FakeKernel:
    """Stands for the system's calls: notes each, and refuses with an errno if told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses: dict[str, int] = {}
        self.thread: tuple[int, tuple[int, ...]] = (_mempolicy.BIND, (1,))
        for name in ("mbind", "set_mempolicy", "get_mempolicy", "locate_pages"):
            monkeypatch.setattr(_mempolicy, name, lambda *args, name=name: self.take(name, *args))
        monkeypatch.setattr(_mempolicy, "SUPPORTED", True)

    def take(self, name: str, *args: Any) -> Any:
        self.calls.append((name, *args))
        if name in self.refuses:
            raise OSError(self.refuses[name], os.strerror(self.refuses[name]))
        if name == "set_mempolicy":
            self.thread = (args[0], tuple(args[1]))
        return self.thread if name == "get_mempolicy" else None
