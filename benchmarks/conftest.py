"""What every benchmark records beside its times: the machine, as `ft info` tells it."""

from typing import Any

import pytest

from freetoken.info import collect


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Put the topology and settings into the JSON of a run."""
    machine_info["freetoken"] = collect().to_dict()
