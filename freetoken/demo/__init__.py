"""The demo model that the package ships: a Qwen3-MoE of 5 M parameters, trained on public-domain novels.

Made from the bf16 original by tools/make_demo.py: experts in nvfp4 as ModelOpt spells it, the rest as it was.
"""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """The folder of the demo model."""
    return Path(__file__).parent
