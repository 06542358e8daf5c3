"""Options of rules as the config has them."""

from __future__ import annotations

import inspect

import pytest

from optim.build import make_rule
from optim.config import OPTIONS, RULES, OptimConfig


@pytest.mark.parametrize("name", RULES)
def test_options_are_the_arguments_of_the_rule_with_its_defaults(name: str) -> None:
    arguments = inspect.signature(type(make_rule(OptimConfig(name=name)))).parameters
    assert {key: argument.default for key, argument in arguments.items()} == OPTIONS[name]
