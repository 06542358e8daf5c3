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
    n_tokens = (config.data.tokenizer.known_size if config.data.reads_corpus else None) or _read_size(config)
    model = config.model.with_vocab_size(n_tokens)
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
    for stage in config.plan:
        of_stage = layout.at(stage.number)
        flops = training_flops_per_token(model, of_stage.seq_len, causal=True)
        tokens = stage.steps * of_stage.global_batch_size * of_stage.seq_len
        console.print(
            f"work   {tokens:,} tokens in {stage.steps:,} steps x {flops:,} FLOPs per token "
            f"(forward and backward, causal attention) = {tokens * flops:.3g} FLOPs",
            markup=False,
        )


def _read_size(config: TrainingConfig) -> int:
    """Number of token ids of dataset folders, or of a tokenizer that is given as a file."""
    if not config.data.reads_corpus:
        from data.sources import open_sources

        return open_sources(config.data).vocab_size
    from data.tokenizer import given_tokenizer

    tokenizer = given_tokenizer(config.data.tokenizer)
    assert tokenizer is not None  # one that is to be trained has its size in the config
    return tokenizer.vocab_size
