"""What a config would do, without doing it."""

from __future__ import annotations

import yaml
from rich.console import Console
from rich.table import Table

from models.flops import parameter_counts, training_flops_per_token
from trainer.config import TrainingConfig
from trainer.layout import Layout


def print_plan(config: TrainingConfig, layout: Layout) -> None:
    """Print the resolved config, the mesh, the batch arithmetic, parameter counts and FLOPs."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(yaml.safe_dump(config.tree(), sort_keys=False, allow_unicode=True), markup=False)
    console.print(layout.describe(), markup=False)
    model = config.model.with_vocab_size(config.data.tokenizer.vocab_size)
    counts = parameter_counts(model)
    table = Table("parameters", "count", "share")
    for part, count in counts.items():
        if part != "total":
            table.add_row(part, f"{count:,}", f"{count / counts['total']:.1%}")
    table.add_section()
    table.add_row("total", f"{counts['total']:,}", "100.0%")
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)
    flops = training_flops_per_token(model, layout.seq_len, causal=True)
    tokens = config.train.steps * layout.global_batch_size * layout.seq_len
    console.print(
        f"work   {tokens:,} tokens in {config.train.steps:,} steps x {flops:,} FLOPs per token "
        f"(forward and backward, causal attention) = {tokens * flops:.3g} FLOPs",
        markup=False,
    )
