"""The command `gramian`. Heavy imports happen inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from common.errors import EXIT_BAD_INPUT
from common.ranks import is_worker
from launch.options import ConfigFile, JsonFile, Overrides, Processes
from launch.report_errors import leave, user_errors
from launch.slurm.commands import app as slurm_app
from launch.sweep import app as sweep_app

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train decoder-only language models, with the same numbers on any layout.",
)
tokenizer_app = typer.Typer(no_args_is_help=True, help="Make tokenizers.")
app.add_typer(tokenizer_app, name="tokenizer")
data_app = typer.Typer(no_args_is_help=True, help="Look at dataset folders; token files of others as one.")
app.add_typer(data_app, name="data")
checkpoint_app = typer.Typer(no_args_is_help=True, help="Look at checkpoints; to Hugging Face folders, and back.")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(sweep_app, name="sweep")
app.add_typer(slurm_app, name="slurm")

# Arguments and options that several commands have.
Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        metavar="PATH",
        help="Texts: .txt, .jsonl (.gz, .zst), .parquet or .arrow files, folders or globs of these, "
        "hf:NAME[:CONFIG][:SPLIT], or python-stdlib. May be given several times.",
    ),
]
MoreInputs = Annotated[
    list[str] | None, typer.Argument(metavar="PATH", help="More of --input: what a shell makes of a *.")
]
TextField = Annotated[str, typer.Option(help="Key or column that holds the text.")]
DatasetFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Dataset folder.")]


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    nproc: Processes = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the config and the plan, and stop.")] = False,
    nnodes: Annotated[int, typer.Option(min=1, help="Machines, on each of which this command is given.")] = 1,
    node_rank: Annotated[int | None, typer.Option(min=0, help="Which of the machines this is, from 0.")] = None,
    rdzv: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where machine 0 listens, a free port of it.")
    ] = None,
) -> None:
    """Train a model. Under torchrun (RANK and WORLD_SIZE set) this is one worker, and so it is as a task of srun."""
    with user_errors():
        from common.nodes import Nodes, parse_nodes
        from launch.train import run_train

        nodes = Nodes(nnodes) if dry_run else parse_nodes(nnodes, node_rank, rdzv)
        run_train(config, list(overrides or []), nproc, dry_run, nodes)


@app.command()
def certify(
    config: ConfigFile,
    overrides: Overrides = None,
    nproc: Processes = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare, the first of the config.")] = 5,
    repeat: Annotated[
        bool, typer.Option("--repeat", help="Compare two runs of the layout to the bit instead.")
    ] = False,
    no_shrink: Annotated[
        bool, typer.Option("--no-shrink", help="Refuse a model that one process cannot hold, rather than shrink it.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Prove a config: its layout against one plain process, number by number. Exit code 1: it is not the same."""
    with user_errors():
        from launch.certify import Request, run_certify

        request = Request(config, list(overrides or []), steps, repeat, not no_shrink, json_file)
        run_certify(request, nproc)


@app.command()
def generate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run directory or checkpoint folder.")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text to continue. May be given several times.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="Divides the logits; 0: the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many likeliest tokens; 0: all.")] = 50,
    top_p: Annotated[
        float,
        typer.Option(
            help="Sample among the fewest likeliest tokens whose probability reaches this, after top-k; 1: all."
        ),
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling; the second prompt has the next one.")
    ] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text in a continuation. May be given several times."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Continue texts with a trained model, each as if it were alone."""
    with user_errors():
        from launch.generate import run_generate

        run_generate(checkpoint, prompt or [""], max_tokens, temperature, top_k, top_p, seed, stop or [], json_file)


@tokenizer_app.callback()
def _tokenizer_commands() -> None:
    """Keep `train` a word of its own."""


@tokenizer_app.command("train")
def train_tokenizer(
    inputs: Inputs,
    vocab_size: Annotated[int, typer.Option(help="Number of token ids, 300 or more.")],
    out: Annotated[Path, typer.Option(help="File to write, for example tokenizer.model.")],
    more_inputs: MoreInputs = None,
    kind: Annotated[str, typer.Option(help="bpe or unigram.")] = "bpe",
    text_field: TextField = "text",
    sample_bytes: Annotated[
        int | None, typer.Option(min=1, help="Bytes of text to train on, spread over all of it. Default: 16,000,000.")
    ] = None,
    special: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Token that no text encodes to. May be given several times."),
    ] = None,
) -> None:
    """Train a SentencePiece tokenizer that every text comes back from."""
    with user_errors():
        from launch.tokenizer import run_train

        run_train([*inputs, *(more_inputs or [])], vocab_size, out, kind, text_field, sample_bytes, special or [])


@app.command()
def tokenize(
    inputs: Inputs,
    tokenizer: Annotated[
        Path, typer.Option(metavar="FILE", help="SentencePiece .model, tokenizer.json, or the word bytes.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Dataset folder to make, or to go on with.")],
    more_inputs: MoreInputs = None,
    eos: Annotated[
        str | None, typer.Option(metavar="NAME", help="Token that ends a document, where the file does not tell.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one for each core.")] = None,
    text_field: TextField = "text",
    eval_fraction: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of documents held out, chosen by a hash of their content.")
    ] = 0.02,
    min_chars: Annotated[int, typer.Option(min=1, help="Shorter documents are left out.")] = 1,
    max_chars: Annotated[int | None, typer.Option(min=1, help="Longer documents are left out.")] = None,
    max_bad_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of records that may be unusable; 0: the first one ends it.")
    ] = 0.0,
    shard_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens after which a shard ends, with the document.")
    ] = 100_000_000,
    shard: Annotated[
        str | None, typer.Option(metavar="i/n", help="Do part i (from 0) of n only, as one of n jobs.")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write what was done there; -: to the terminal.")
    ] = None,
) -> None:
    """Turn texts into a dataset folder. A job that was stopped goes on with the same words."""
    with user_errors():
        from launch.tokenize import Request, run_tokenize

        run_tokenize(
            Request(
                [*inputs, *(more_inputs or [])],
                tokenizer,
                eos,
                out,
                workers,
                text_field,
                eval_fraction,
                min_chars,
                max_chars,
                max_bad_share,
                shard_tokens,
                shard,
                json_file,
            )
        )


@data_app.command("inspect")
def inspect_data(
    folder: DatasetFolder,
    samples: Annotated[int, typer.Option(min=0, help="Documents of each split to show.")] = 3,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the lengths of documents there.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Show counts, lengths of documents and samples."""
    with user_errors():
        from launch.data import run_inspect

        run_inspect(folder, samples, plot, json_file)


@data_app.command("verify")
def verify_data(
    folder: DatasetFolder,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads. Default: one for each core.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare every byte with the checksums of the manifest. Exit code 1: something is not as it was written."""
    with user_errors():
        from launch.data import run_verify

        run_verify(folder, workers, json_file)


@data_app.command("adopt")
def adopt_data(
    prefixes: Annotated[
        list[Path], typer.Argument(metavar="PREFIX", help="Token files to train on: PREFIX.bin and PREFIX.idx.")
    ],
    tokenizer: Annotated[
        Path, typer.Option(metavar="FILE", help="The one that made the tokens: SentencePiece .model, tokenizer.json.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Dataset folder to make.")],
    eos: Annotated[
        str | None, typer.Option(metavar="NAME", help="Token that ends a document, where the file does not tell.")
    ] = None,
    held_out: Annotated[
        list[Path] | None,
        typer.Option(metavar="PREFIX", help="Token files to evaluate on. May be given several times."),
    ] = None,
) -> None:
    """Make a dataset folder of token files in Megatron's format that others made."""
    with user_errors():
        from launch.data import run_adopt

        run_adopt(prefixes, held_out or [], tokenizer, eos, out)


@checkpoint_app.command("list")
def list_checkpoints(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")], json_file: JsonFile = None
) -> None:
    """Show what a run has saved: steps, losses, sizes, and whether it is committed."""
    with user_errors():
        from launch.saved import run_list

        run_list(run, json_file)


@checkpoint_app.command("verify")
def verify_checkpoints(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Checkpoint folder, or run directory: all that it has.")
    ],
    workers: Annotated[int | None, typer.Option(min=1, help="Threads. Default: one for each core.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare every byte with the checksums of the manifest. Exit code 1: something is not as it was written."""
    with user_errors():
        from launch.saved import run_verify

        run_verify(checkpoint, workers, json_file)


@checkpoint_app.command("export")
def export_checkpoint(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run directory or checkpoint folder.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to make.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="hf|deepspeed",
            help="What to make: hf, a folder that transformers reads; deepspeed, a universal checkpoint.",
        ),
    ] = "hf",
    dtype: Annotated[str, typer.Option(help="Type of the weights: fp32, bf16 or fp16.")] = "fp32",
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Most bytes of weights in a file.")] = "5GB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List files and sizes, and write nothing.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Write a model as a Hugging Face folder (config, tokenizer, safetensors), or with its optimizer for DeepSpeed."""
    with user_errors():
        from launch.checkpoint import Request, run_export

        run_export(Request(checkpoint, to, out, dtype, max_shard_size, dry_run, json_file))


@checkpoint_app.command("import")
def import_checkpoint(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Hugging Face folder, or a universal checkpoint.")],
    out: Annotated[Path, typer.Option(metavar="CHECKPOINT", help="Checkpoint folder to make.")],
    eos: Annotated[
        str | None, typer.Option(metavar="NAME", help="Token that ends a document, where the folder does not tell.")
    ] = None,
    source: Annotated[
        str,
        typer.Option("--from", metavar="hf|deepspeed", help="What it is: hf, or deepspeed's universal checkpoint."),
    ] = "hf",
    config: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG", help="--from deepspeed: whose `model` it is, where the folder does not tell."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Write a Hugging Face folder as a checkpoint of weights, to generate from, or to train on with model.init_from.

    A universal checkpoint of DeepSpeed that gramian made becomes a whole checkpoint again.
    """
    with user_errors():
        from launch.checkpoint import run_import

        run_import(folder, out, eos, json_file, source, config)


@app.command()
def doctor(
    nodes: Annotated[
        bool,
        typer.Option("--nodes", help="All processes, of an allocation, --nnodes or --nproc."),
    ] = False,
    folder: Annotated[Path, typer.Option("--dir", help="Where runs will be written.")] = Path("runs"),
    nproc: Processes = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Machines, as for train.")] = 1,
    node_rank: Annotated[int | None, typer.Option(min=0, help="Which of them this is.")] = None,
    rdzv: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where machine 0 listens.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Check what could keep a run from training, or slow it down. Exit code 1: something would."""
    with user_errors():
        from common.nodes import parse_nodes
        from launch.doctor import run_doctor

        run_doctor(nodes or nnodes > 1, folder, nproc, parse_nodes(nnodes, node_rank, rdzv), json_file)


def run() -> None:
    """Entry point of the console command."""
    # A worker's log lines and a user's pipe see output as it is made.
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    try:
        code = app(prog_name="gramian", standalone_mode=False)
    except SystemExit as end:
        if is_worker():
            leave(end.code)  # type: ignore[arg-type]  # our own are numbers
        raise
    except Exception as error:
        # Words that are no command or option. typer, which shows them as a box, carries a click of its own since 0.20,
        # so that the class has no public name: it is known by what it can do.
        if not hasattr(error, "format_message"):
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", "gramian")
        message = " ".join(error.format_message().split()).removesuffix(".")
        print(f"gramian: {message}; see {command} --help", file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT) from None
    if is_worker():
        leave(code or 0)
    raise SystemExit(code)
