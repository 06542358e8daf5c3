"""What a config would do, without doing it."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from launch.reports import align_right
from models.config import ModelConfig
from models.flops import forward_flops_per_token, parameter_parts, training_flops_per_token
from trainer.config import TrainingConfig
from trainer.layout import Layout


def print_plan(config: TrainingConfig, layout: Layout) -> None:
    """Print the resolved config, the mesh, the batch arithmetic, parameter counts and FLOPs."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(config.yaml(), markup=False)
    console.print(layout.describe(), markup=False)
    n_tokens = config.data.known_vocab_size or _read_size(config)
    model = config.model.with_vocab_size(n_tokens)
    console.print(parameter_table(model))
    if config.optim.is_rule:
        from optim.table import routing_table
        from trainer.build import planned_routing

        routing = planned_routing(config, model, layout)
        console.print(routing_table(routing, config.optim.name, config.optim.lr) + "\n", markup=False)
    for stage in config.plan:
        of_stage = layout.at(stage.number)
        forward = forward_flops_per_token(model, of_stage.seq_len, causal=True)
        training = training_flops_per_token(model, of_stage.seq_len, causal=True)
        positions = stage.steps * of_stage.global_batch_size * of_stage.seq_len
        console.print(
            f"FLOPs  {forward:,} per token forward, {training:,} with backward (causal attention, rows of "
            f"{of_stage.seq_len})\nwork   {positions:,} positions in {stage.steps:,} steps = "
            f"{positions * training:.3g} FLOPs, forward and backward",
            markup=False,
        )


def parameter_table(model: ModelConfig) -> Table:
    """Parameters by part: of one block, in how many blocks, in all; of a sparse model also those that a token uses."""
    parts, sparse = parameter_parts(model), model.moe is not None
    # No lines between columns: the largest models' numbers still fit into a terminal of 80.
    table = Table("parameters", "in one block", "blocks", "in all", "share", box=box.SIMPLE_HEAD, collapse_padding=True)
    if sparse:
        table.add_column("of a token")
    align_right(table, *range(1, len(table.columns)))
    total = sum(part.total for part in parts)
    for part in parts:
        name = "embedding, head" if part.name == "embedding" and model.tie_embeddings else part.name
        block = (f"{part.in_block:,}", f"{part.blocks:,}") if part.blocks else ("", "")
        row = (name, *block, f"{part.total:,}", f"{part.total / total:.1%}", f"{part.active:,}")
        table.add_row(*row[: len(table.columns)])
    table.add_section()
    row = ("total", "", "", f"{total:,}", "100.0%", f"{sum(part.active for part in parts):,}")
    table.add_row(*row[: len(table.columns)])
    return table


def _read_size(config: TrainingConfig) -> int:
    """Number of token ids of dataset folders, or of a tokenizer that is given as a file."""
    if not config.data.reads_corpus:
        from data.sources import open_sources

        return open_sources(config.data).vocab_size
    from data.tokenizer import given_tokenizer

    tokenizer = given_tokenizer(config.data.tokenizer)
    assert tokenizer is not None  # one that is to be trained has its size in the config
    return tokenizer.vocab_size
