"""Patterns of module names: those that tools write match, those that would match for ever are refused by name."""

from __future__ import annotations

import pytest

from freetoken.checkpoint.patterns import match_any
from freetoken.errors import CheckpointError

EXPERT = "model.language_model.layers.10.mlp.experts.127.gate_proj"

FOR_EVER = [
    "(a+)+$",
    "(.*)*$",
    "((.*)*)*!",
    "(m|mo|o)*$",
    "(?=(.*)*$)x",
    "(?>(.*)*)!",
    r"(\w+\.?)+!",
    "(?:(?:.{1,30}){1,30}){1,30}!",
    "(?:){4294967294}",
    ".*.*.*.*.*.*!",
    "(.|..)" * 30 + "!",
    "[a-z.]?" * 40 + "!",
    "(a)?(?(1)x|.*.*.*.*.*!)",
    "(" * 5000,
    "(?i)[\x01-\U0010ffff]",
    "(?i)(?:[\x01-\uffff]{0}|b)",
]


@pytest.mark.parametrize("expression", FOR_EVER)
def test_an_expression_that_could_match_for_ever_is_refused(expression: str) -> None:
    with pytest.raises(CheckpointError, match="could take for ever") as caught:
        match_any(["lm_head", f"re:{expression}"], EXPERT)
    assert repr(f"re:{expression}")[:8] in str(caught.value)


@pytest.mark.parametrize(
    ("expression", "matches"),
    [
        (".*", True),
        (".*experts.*", True),
        (".*self_attn.*", False),
        ("^(?!.*self_attn).*", True),
        (r".*layers\.\d+\.mlp\.experts\.\d+\.(gate|up|gate_up|down)_proj$", True),
        (r"model\.layers\.(" + "|".join(map(str, range(61))) + r")\..*", True),
        (".*mlp.*experts.*gate.*", True),
        ("(?i).*MLP.*", True),
        (".*[0-9]{3}.gate_proj", True),
        (r"(\w+)\.language_model\.\w+\..*", True),
        ("(", False),
        ("[z-a]", False),
        ("[[e]", False),
        ("a{99999999999}", False),
        ("a{" + "9" * 5000 + "}", False),
        ("(?a)(?u)x", False),
    ],
)
def test_expressions_that_tools_write(expression: str, matches: bool) -> None:
    assert match_any([f"re:{expression}"], EXPERT) is matches


def test_many_expressions_count_together() -> None:
    assert not match_any(["re:.*x.*y"] * 100, EXPERT)
    with pytest.raises(CheckpointError, match="could take for ever"):
        match_any(["re:.*x.*y"] * 1000, EXPERT)
    assert match_any(["re:.*experts", *["re:.*x.*y"] * 1000], EXPERT)
