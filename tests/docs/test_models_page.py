"""docs/models.md: its numbers are those of the code, its command prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path

from models.config import ModelConfig, load_preset, preset_names
from models.flops import forward_flops_per_token, parameter_counts
from tests.docs.test_docs import ROOT, blocks, commands, shell

PAGE = ROOT / "docs" / "models.md"


def _table() -> str:
    lines = ["| preset | parameters | of a token | forward FLOPs per token |", "| --- | ---: | ---: | ---: |"]
    sized = []
    for name in preset_names():
        config = ModelConfig(preset=name)
        if config.vocab_size is None:
            config = config.with_vocab_size(50257 if name == "llama-125m" else 4096)
        counts = parameter_counts(config)
        flops = forward_flops_per_token(config, min(2048, config.max_seq_len), causal=True)
        row = f"| `{name}` | {counts['total']:,} | {counts['active']:,} | {flops:,} |"
        sized.append((config.moe is not None, counts["total"], row))
    return "\n".join([*lines, *(row for _, _, row in sorted(sized))])


def test_table_of_presets() -> None:
    (shown,) = re.findall(r"<!-- presets -->\n(.*?)\n?<!-- end -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown == _table(), f"the table is now\n{_table()}"


def test_command_prints_what_is_shown(tmp_path: Path) -> None:
    (command,) = commands(PAGE)
    (shown,) = blocks(PAGE, "text")
    printed = shell(f"export COLUMNS=80; {command}", ROOT)
    assert "\n".join(line.rstrip() for line in shown.splitlines()) in "\n".join(
        line.rstrip() for line in printed.splitlines()
    )


def test_every_preset_is_in_its_familys_row() -> None:
    """With all keys that it sets, but those of its size and those that train it."""
    sizes = {"vocab_size", "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_seq_len"}
    rest = {"norm_eps", "rope_theta", "attention_scale", "init_std", "n_experts", "top_k"}
    training = {"aux_loss_coef", "z_loss_coef"}
    (section,) = re.findall(r"^## Families\n(.*?)^## ", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    listed = []
    for row in re.findall(r"^\| .* \|$", section, re.MULTILINE):
        _, _, said, presets, _ = row.split("|")
        for name in re.findall(r"`([^`]+)`", presets):
            listed.append(name)
            keys = load_preset(name)
            keys |= keys.get("moe") or {}
            assert {key for key in keys if f"`{key}" not in said} <= sizes | rest | training, name
    assert sorted(listed) == preset_names()
