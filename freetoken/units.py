"""Numbers for people: bytes in binary units."""

from __future__ import annotations


def format_bytes(n: float) -> str:
    """ "1.50 MiB"; below 1 MiB the exact number."""
    if abs(n) < 1 << 20:
        return f"{n:.0f} bytes" if abs(n) < 10_000 else f"{n / 1024:.1f} KiB"
    for unit in ("MiB", "GiB"):
        n /= 1024
        if abs(n) < 1024 * 1024:
            return f"{n / 1024:.2f} {unit}"
    return f"{n / 1024 / 1024:.2f} TiB"
