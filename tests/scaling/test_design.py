"""From a sweep's file to its runs: sizes, lengths, identities, shared prefixes, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import Config
from common.errors import UserError
from models.flops import parameter_counts, training_flops_per_token
from scaling.design import Cell, design, trunks, write_config_for
from scaling.sweepfile import SweepConfig, load_sweep
from tests.runs import TINY
from tests.scaling.data import ROOT
from trainer.config import load_config

SWEEP: dict[str, Any] = {
    "name": "test",
    "base": TINY,
    "overrides": {"data.tokenizer": {"kind": "bytes"}, "schedule.name": "wsd", "schedule.warmup_steps": 2},
    "sizes": {"widths": [16, 32, 64], "layers": 2, "head_dim": 16, "d_ff": 2.0},
    "budgets": {"flops": [1e10, 4e10]},
}


def sweep(folder: Path, **changes: Any) -> SweepConfig:
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({**SWEEP, **changes}), encoding="utf-8")
    return load_sweep(file)


def by_place(cells: list[Cell]) -> dict[tuple[int, str], Cell]:
    return {(cell.width, cell.budget): cell for cell in cells}


def test_flops_budgets_are_met_by_the_models_own_count(tmp_path: Path) -> None:
    cells = design(sweep(tmp_path))
    assert len(cells) == 6
    for cell in cells:
        model = cell.config.model.with_vocab_size(257)
        per_step = training_flops_per_token(model, 64, causal=True) * 64 * 32
        assert cell.flops["causal"] == per_step * cell.config.train.steps
        assert abs(cell.flops["causal"] - float(cell.budget)) <= per_step / 2
        assert cell.tokens == cell.config.train.steps * 64 * 32
        counts = parameter_counts(model)
        assert cell.params["active"] == counts["total"]
        assert cell.params["active_non_embedding"] == counts["total"] - 257 * cell.width
        assert load_config(cell.base, cell.words) == cell.config


def test_the_family_follows_its_rule(tmp_path: Path) -> None:
    sizes = {"widths": [32, 64, 160], "aspect": 32, "head_dim": 16, "d_ff": 2.7, "heads_per_kv": 2}
    shapes = {
        cell.width: [getattr(cell.config.model, k) for k in ("n_layers", "n_heads", "kv_heads", "d_ff")]
        for cell in design(sweep(tmp_path, sizes=sizes, budgets={"tokens": [1e5]}))
    }
    assert shapes == {32: [1, 2, 1, 88], 64: [2, 4, 2, 176], 160: [5, 10, 5, 432]}
    of_heads = sweep(tmp_path, sizes={"widths": [20, 36], "layers": 1, "heads": 2}, budgets={"tokens": [1e5]})
    models = [cell.config.model for cell in design(of_heads)]
    assert [(model.n_heads, model.kv_heads, model.d_head) for model in models] == [(2, 2, 10), (2, 2, 18)]


@pytest.mark.parametrize("parameters", ["active", "active_non_embedding"])
@pytest.mark.parametrize("flops", ["causal", "full_attention", "6nd"])
def test_counting_is_switchable(tmp_path: Path, parameters: str, flops: str) -> None:
    counting = {"parameters": parameters, "flops": flops}
    for cell in design(sweep(tmp_path, counting=counting, budgets={"flops": [1e11]})):
        n, c = cell.counted(sweep(tmp_path, counting=counting).counting)
        assert n == cell.params[parameters]
        per_step = c / cell.config.train.steps
        assert abs(c - 1e11) <= 0.51 * per_step
        if flops == "6nd":
            assert c == 6 * n * cell.tokens
    ratio = {"tokens_per_parameter": [20.0]}
    for cell in design(sweep(tmp_path, counting=counting, budgets=ratio)):
        assert cell.tokens == pytest.approx(20 * cell.params[parameters], abs=64 * 32)


def test_experts_are_counted_active_and_total(tmp_path: Path) -> None:
    moe = {"model.moe": {"n_experts": 8, "top_k": 2}}
    (cell, *_) = design(sweep(tmp_path, overrides={**SWEEP["overrides"], **moe}))
    # Of 8 experts of 3 matrices a token uses 2; router and all else count in both.
    assert cell.params["total"] - cell.params["active"] == 2 * 6 * 3 * 16 * 32


def test_an_identity_is_that_of_the_result(tmp_path: Path) -> None:
    """It does not change with what changes no number, with the order of axes or with other cells beside it."""
    before = by_place(design(sweep(tmp_path)))
    same = {**SWEEP["overrides"], "train.micro_batch_size": 4, "log.every": 5, "checkpoint.async": False}
    again = by_place(design(sweep(tmp_path, overrides=same, dir="elsewhere")))
    assert {k: c.id for k, c in again.items()} == {k: c.id for k, c in before.items()}
    more = by_place(design(sweep(tmp_path, budgets={"flops": [1e10, 2e10, 4e10]})))
    assert {k: more[k].id for k in before} == {k: c.id for k, c in before.items()}
    for key, value in (("optim.lr", 2e-3), ("run.seed", 1), ("eval.batches", 1), ("model.norm", "layernorm")):
        other = by_place(design(sweep(tmp_path, overrides={**SWEEP["overrides"], key: value})))
        assert not {c.id for c in other.values()} & {c.id for c in before.values()}, key


def test_variants_axes_and_learning_rates(tmp_path: Path) -> None:
    cells = design(
        sweep(
            tmp_path,
            variants={"adamw": {}, "muon": {"optim.name": "muon", "optim.lr": 0.02, "optim.weight_decay": 0.1}},
            axes={"run.seed": [0, 1], "model.qk_norm": [False, True]},
            lr={"factors": [0.5, 1.0]},
            budgets={"flops": [1e10]},
        )
    )
    assert len(cells) == 3 * 2 * 2 * 2 * 2
    assert {cell.variant for cell in cells} == {
        f"{name} model.qk_norm={value}" for name in ("adamw", "muon") for value in ("false", "true")
    }
    of_muon = [cell.config.optim for cell in cells if cell.variant.startswith("muon")]
    assert {(optim.lr, optim.adamw.lr) for optim in of_muon} == {(0.01, 1.5e-3), (0.02, 3e-3)}
    assert len({cell.name for cell in cells}) == len({cell.id for cell in cells}) == len(cells)


def test_sizes_outside_the_ratio_are_left_out(tmp_path: Path) -> None:
    all_of_them, inside = (
        design(sweep(tmp_path, budgets={"flops": [1e10, 4e10], **more})) for more in ({}, {"within": [1.0, 30.0]})
    )
    ratios = {cell.id: cell.tokens / cell.params["active"] for cell in all_of_them}
    assert {cell.id for cell in inside} == {name for name, ratio in ratios.items() if 1 <= ratio <= 30}
    assert 0 < len(inside) < len(all_of_them)


def test_trunks_end_where_the_last_decay_begins(tmp_path: Path) -> None:
    cells = design(sweep(tmp_path))
    found = trunks(cells)
    assert [trunk.cells[0].width for trunk in found] == [16, 32, 64]
    for trunk in found:
        short, long = trunk.cells
        assert (short.decay_start or 0) < (long.decay_start or 0)
        assert short.decay_start == short.config.train.steps - max(1, short.config.train.steps // 5)
        config = load_config(trunk.base, [*trunk.words, "train.steps=3"])
        assert (config.schedule.name, config.schedule.warmup_steps, config.eval.batches) == ("constant", 2, 0)
        assert config.model == short.config.model
    cosine = {**SWEEP["overrides"], "schedule.name": "cosine"}
    assert trunks(design(sweep(tmp_path, overrides=cosine))) == []
    assert trunks(design(sweep(tmp_path, budgets={"flops": [1e10]}))) == []


def test_a_trunk_keeps_its_name_when_a_budget_comes_before_its_own(tmp_path: Path) -> None:
    """Twelve seeds, so that hashes of all kinds are among the names of cells."""
    seeds = {"run.seed": list(range(12))}
    two, three = ({"flops": [*more, 1e10, 4e10]} for more in ([], [5e9]))
    names = [{trunk.name for trunk in trunks(design(sweep(tmp_path, budgets=b, axes=seeds)))} for b in (two, three)]
    assert len(names[0]) == 36
    assert names[0] == names[1]


def test_the_largest_budget_is_held_out(tmp_path: Path) -> None:
    cells = design(sweep(tmp_path, hold_out_largest=True))
    assert {cell.budget for cell in cells if cell.held_out} == {repr(4e10)}
    assert sum(cell.held_out for cell in cells) == 3


def test_a_config_for_a_budget(tmp_path: Path) -> None:
    of = sweep(tmp_path, variants={"muon": {"optim.name": "muon", "optim.lr": 0.02}})
    told = write_config_for(of, "muon", 1e12, 2e5, tmp_path / "big.yaml")
    config = load_config(tmp_path / "big.yaml")
    model = config.model.with_vocab_size(257)
    n = parameter_counts(model)["active"]
    assert (told["params"], config.optim.name, config.model.n_layers) == (n, "muon", 2)
    for width in (model.d_model - 16, model.d_model + 16):  # no other size of the family is nearer
        shape = {k.removeprefix("model."): v for k, v in of.sizes.model(width).items()}
        assert abs(parameter_counts(model.model_copy(update=shape))["active"] - 2e5) > abs(n - 2e5)
    flops = training_flops_per_token(model, 64, causal=True) * 64 * 32 * config.train.steps
    assert flops == pytest.approx(1e12, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sizes": {"widths": [16, 20], "head_dim": 16}}, "'widths' has 20, which is no multiple of head_dim=16"),
        ({"sizes": {"widths": [16], "layers": 2, "aspect": 8, "head_dim": 16}}, "both say how deep models are"),
        ({"sizes": {"widths": [16], "heads": 2, "head_dim": 8}}, "'heads' and 'head_dim' both say"),
        (
            {"sizes": {"widths": [16, 18], "heads": 2}},
            "'widths' has 18, which is no multiple of 4, for 2 heads of even",
        ),
        ({"sizes": {"widths": [16, 16], "head_dim": 16}}, "'widths' must be different numbers"),
        ({"budgets": {"flops": [1e9], "tokens": [1e5]}}, "give one of flops, tokens_per_parameter and tokens"),
        ({"budgets": {}}, "got none"),
        ({"budgets": {"flops": [-1.0]}}, "'flops' must be numbers above 0"),
        ({"budgets": {"tokens": [1e5], "within": [1, 2]}}, "belongs to flops"),
        ({"budgets": {"flops": [1e10], "within": [500, 900]}}, "has no runs: budgets.within leaves no size"),
        ({"lr": {"factors": []}}, "'factors' must be numbers above 0"),
        ({"lr": {"base_width": 16}}, "'base_width' does nothing under transfer: none"),
        ({"lr": {"transfer": "mup"}, "overrides": {"model.tie_embeddings": True}}, "set model.tie_embeddings to false"),
        ({"lr": {"transfer": "mup"}, "variants": {"a": {"optim.name": "sgd"}}}, "has no rule for optim.name sgd"),
        ({"axes": {"seed": [0]}}, "axes: 'seed' must be a dotted key"),
        ({"axes": {"run.sed": [0]}}, "did you mean 'run.seed'?"),
        ({"overrides": {"eval.batches": 0}}, "the held-out loss is what is fitted"),
        ({"hold_out_largest": True, "budgets": {"tokens": [1e5]}}, "needs a budget beside the largest"),
        ({"sizs": {}}, "did you mean 'sizes'?"),
        ({"base": "none.yaml"}, "there is no"),
        ({"name": "a/b"}, "must be a plain folder name"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as refused:
        design(sweep(tmp_path, **changes))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_base_with_stages_is_refused(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("stages: [{tokens: 100000}]\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"base\.yaml has stages, whose length a sweep cannot choose"):
        design(sweep(tmp_path, base="base.yaml"))


def test_every_key_of_a_sweep_is_in_the_page() -> None:
    """Found another way than docs/configuration.py finds them, which writes them there."""
    text = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")

    def keys(section: type[Config], prefix: str = "") -> list[str]:
        found = []
        for name, field in section.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Config):
                found += keys(kind, f"{prefix}{name}.")
            else:
                found.append(prefix + name)
        return found

    assert [key for key in keys(SweepConfig) if f"| `{key}` |" not in text] == []


def test_sweeps_of_the_project_have_designs() -> None:
    for file in sorted((ROOT / "configs" / "sweeps").glob("*.yaml")):
        assert len(design(load_sweep(file))) >= 6, file
