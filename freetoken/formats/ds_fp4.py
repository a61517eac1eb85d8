"""ds_fp4: the numbers of mxfp4 as DeepSeek-V4 spells them, so that a checkpoint's own format has its own name.

Codes are `weight`, I8 (out, in / 2), scales are `scale`, F8_E8M0 (out, in / 32).
"""

from __future__ import annotations

from freetoken.formats.base import Spelling
from freetoken.formats.mxfp4 import MXFP4


class DSFP4(MXFP4):
    """Value = e2m1 * 2**(scale - 127); the layout and the tiles are mxfp4's."""

    name = "ds_fp4"
    spellings = (Spelling("deepseek", {"codes": ("weight", ("I8",)), "scales": ("scale", ("F8_E8M0",))}),)


FORMAT = DSFP4()
