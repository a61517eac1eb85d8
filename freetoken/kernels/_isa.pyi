from typing import NoReturn, final

LEVELS: tuple[str, ...]
ACTIVATIONS: tuple[str, ...]

def available_levels() -> tuple[str, ...]: ...

@final
class TileKernel:
    def __init__(self, *args: object, **kwargs: object) -> NoReturn: ...
    @property
    def level(self) -> str: ...
    @property
    def act(self) -> str: ...
