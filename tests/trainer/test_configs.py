"""The recipes in configs/ are valid, and those that are to be compared differ in what is compared alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config import differences, load_config

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"


RECIPES = sorted([*CONFIGS.glob("*.yaml"), *(CONFIGS / "optim").glob("*.yaml")])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_a_recipe_is_valid_and_has_its_file_s_name(path: Path) -> None:
    assert load_config(path).run.name == path.stem


def test_optimizers_are_compared_on_the_quickstart() -> None:
    quickstart = load_config(CONFIGS / "quickstart.yaml").tree()
    names = {path.stem: load_config(path) for path in (CONFIGS / "optim").iterdir()}
    assert set(names) == {"adamw", "muon", "shampoo", "soap"}
    for name, config in names.items():
        changed = {key for key in differences(config.tree(), quickstart) if not key.startswith("optim.")}
        assert changed == {"run.name"}
        assert config.optim.name == name
        if config.optim.is_rule:  # all else as AdamW alone has it
            assert config.optim.adamw.lr == names["adamw"].optim.lr
            assert config.optim.adamw.weight_decay == names["adamw"].optim.weight_decay
    assert names["muon"].optim == load_config(CONFIGS / "quickstart.yaml").optim
