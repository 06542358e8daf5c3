"""`gramian generate`: texts of a trained model. Imports no torch before its input is checked."""

from __future__ import annotations

import math
from pathlib import Path

from common.errors import UserError
from launch.reports import check_writable, write_json
from trainer.rundir import find_checkpoint


def run_generate(
    checkpoint: Path,
    prompts: list[str],
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stop: list[str],
    json_file: str | None,
) -> None:
    """Print each prompt with its continuation. Several are told apart by a line before each, `=== 1 of 2: length ===`
    with the reason why it ends."""
    for option, texts in (("--prompt", prompts), ("--stop", stop)):
        if any("\ud800" <= c <= "\udfff" for text in texts for c in text):
            raise UserError(f"{option} is not UTF-8 text; encode it as UTF-8")
    if "" in stop:
        raise UserError("--stop is empty, and so in every text; give the text to end before, or leave --stop out")
    # The bounds of typer's options are closed and let "nan" through.
    if not 0.0 < top_p <= 1.0:
        raise UserError(f"--top-p must be above 0 and at most 1, got {top_p}; 1 leaves every token in")
    if not math.isfinite(temperature):
        raise UserError(f"--temperature must be a finite number, got {temperature}; 1 leaves the model's own")
    check_writable("--json", json_file)
    folder = find_checkpoint(checkpoint)

    from trainer.generate import Settings, generate

    settings = Settings(max_tokens, temperature, top_k or None, seed, top_p, tuple(stop))
    found = generate(folder, prompts, settings)
    write_json(json_file, {"checkpoint": str(folder), "continuations": [one._asdict() for one in found]})
    if json_file != "-":
        for number, one in enumerate(found, start=1):
            if len(found) > 1:
                print(f"=== {number} of {len(found)}: {one.finish} ===")
            print(one.prompt + one.text)
