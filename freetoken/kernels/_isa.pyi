from typing import final

from typing_extensions import disjoint_base

LEVELS: tuple[str, ...]
ACTIVATIONS: tuple[str, ...]

def available_levels() -> tuple[str, ...]: ...

@final
class TileKernel:
    @property
    def level(self) -> str: ...
    @property
    def act(self) -> str: ...
