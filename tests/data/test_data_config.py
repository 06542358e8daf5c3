from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import data
from common.config import validate
from common.errors import UserError
from data.config import DataConfig, TokenizerConfig


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(4096, "uint16"), (65_499, "uint16"), (65_500, "int32"), (65_537, "int32")]
)
def test_auto_dtype_is_megatrons(vocab_size: int, dtype: str) -> None:
    assert DataConfig(tokenizer=TokenizerConfig(vocab_size=vocab_size)).token_dtype == dtype


def test_explicit_uint16_holds_65536_ids_and_no_more() -> None:
    assert DataConfig(dtype="uint16", tokenizer=TokenizerConfig(vocab_size=65_536)).token_dtype == "uint16"
    with pytest.raises(
        UserError, match=r"data\.dtype: uint16 holds 65,536 .* 65,537; set data\.dtype to int32 or auto"
    ):
        DataConfig(dtype="uint16", tokenizer=TokenizerConfig(vocab_size=65_537))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"tokenizer": {"vocab_size": 299}}, "'tokenizer.vocab_size': 299 is too small: byte fallback needs 256"),
        ({"tokenizer": {"vocabsize": 1000}}, "unknown key 'tokenizer.vocabsize'; did you mean 'tokenizer.vocab_size'?"),
        ({"eval_fraction": 0.5}, "'eval_fraction': must be less than 0.5, got 0.5"),
        ({"eval_fraction": 0}, "'eval_fraction': must be greater than 0, got 0"),
        ({"seq_len": 0}, "'seq_len': must be greater than or equal to 1"),
        ({"packing": "best_fit"}, "'packing': must be 'concat' or 'pad', got 'best_fit'"),
        ({"corpus": 5}, "'corpus': 5 is neither 'python-stdlib' nor a path nor a list of paths"),
        ({"corpus": []}, "'corpus': [] is neither 'python-stdlib' nor a path nor a list of paths"),
    ],
)
def test_errors_name_the_key_in_one_line(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        validate(DataConfig, tree, "train.yaml")
    assert str(error.value).startswith(f"train.yaml: {message}")


def test_every_key_is_documented() -> None:
    for section in (DataConfig, TokenizerConfig):
        assert all(field.description for field in section.model_fields.values())


def test_the_package_needs_no_torch() -> None:
    program = "import data.config, data.loader, data.prepare, sys; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], cwd=Path(data.__file__).parents[1], check=False).returncode == 0
    )
