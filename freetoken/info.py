"""What this machine and process look like to the library: the first line of any bug report."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from freetoken import formats, settings, topology
from freetoken.kernels._isa import available_levels
from freetoken.memory import budget, placement
from freetoken.units import format_bytes

_PACKAGES = ("torch", "numpy", "transformers", "safetensors", "tokenizers", "huggingface_hub")
_RUNTIME = re.compile(r"/(lib(?:gomp|iomp5|omp)[^/]*\.so[^/]*)$")


@dataclass(frozen=True)
class Info:
    """Facts about machine and process; see `collect`."""

    version: str
    python: str
    system: str
    packages: dict[str, str]
    tiers: tuple[str, ...]
    tier: str
    activations: str
    formats: tuple[str, ...]
    openmp: tuple[str, ...]
    cores: tuple[int, ...]
    cores_why: str
    nodes: dict[int, int | None]
    gpu_nodes: dict[str, int | None]
    memory_bytes: int
    memory_where: str
    placement: str

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        return "\n".join(
            [
                f"freetoken  {self.version}, Python {self.python}, {self.system}",
                f"packages   {packages}",
                f"CPU tiers  {', '.join(self.tiers)}; in use {self.tier}, activations {self.activations}",
                f"formats    {', '.join(self.formats)}",
                f"OpenMP     {', '.join(self.openmp) or 'none loaded'}",
                f"cores      {', '.join(map(str, self.cores))} ({self.cores_why})",
                f"nodes      {self._draw_nodes()}",
                f"memory     {format_bytes(self.memory_bytes)} may be allocated ({self.memory_where})",
                f"placement  {self.placement}",
            ]
        )

    def _draw_nodes(self) -> str:
        parts = [
            f"{node} ({'memory not known' if size is None else format_bytes(size)})"
            for node, size in self.nodes.items()
        ]
        parts += [
            f"GPU {address} at {'an unknown node' if node is None else f'node {node}'}"
            for address, node in self.gpu_nodes.items()
        ]
        return ", ".join(parts) or "not known"


def collect() -> Info:
    """Read everything now. Raises `ConfigError` for a FREETOKEN_* variable with a bad value."""
    machine, memory, levels = topology.read(), budget.available(), available_levels()
    tier, workers = settings.CPU_ISA.read(), machine.workers()
    return Info(
        version=_version("freetoken"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        packages={name: _version(name) for name in _PACKAGES},
        tiers=levels,
        tier=levels[-1] if tier == "auto" else tier,
        activations=settings.CPU_ACT.read(),
        formats=formats.names(),
        openmp=_openmp_runtimes(),
        cores=workers,
        cores_why=machine.why(),
        nodes={node.id: node.memory_bytes for node in machine.nodes},
        gpu_nodes={gpu.address: machine.gpu_numa_node(gpu.address) for gpu in machine.gpus},
        memory_bytes=memory.available_bytes,
        memory_where=memory.where,
        placement=str(placement.choose(machine, workers)),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _openmp_runtimes() -> tuple[str, ...]:
    """File names of the OpenMP runtimes mapped into this process; more than one costs speed."""
    import freetoken.kernels._experts  # noqa: F401  what a loaded model would have mapped

    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ()
    found = {match.group(0) for line in maps.splitlines() if (match := _RUNTIME.search(line.rstrip()))}
    return tuple(sorted(path.rsplit("/", 1)[1] for path in found))
