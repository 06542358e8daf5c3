from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import data
from common.config import validate
from common.errors import UserError
from data.config import DataConfig, ShuffleConfig, SourceConfig, TokenizerConfig
from data.order import Shuffle


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
        (
            {"tokenizer": {"vocab_size": None}},
            "'tokenizer': 'vocab_size' must be a whole number for kind sentencepiece",
        ),
        (
            {"tokenizer": {"path": "x.json", "vocab_size": 4096}},
            "'tokenizer': 'vocab_size' is not to choose for kind file; leave it out, or set it to null",
        ),
        (
            {"tokenizer": {"kind": "bytes", "vocab_size": 300}},
            "'tokenizer': 'vocab_size' is not to choose for kind byt",
        ),
        (
            {"tokenizer": {"kind": "bytes", "path": "x.json"}},
            "'tokenizer': 'path' is a tokenizer to use, and kind is b",
        ),
        ({"tokenizer": {"kind": "file"}}, "'tokenizer': kind is file, but there is no 'path'; give it"),
        (
            {"tokenizer": {"eos": "</s>"}},
            "'tokenizer': 'eos' names a token of 'path', which is not given; leave it out",
        ),
        ({"tokenizer": {"kind": "words"}}, "'tokenizer.kind': must be 'sentencepiece', 'bytes' or 'file', got 'words'"),
        ({"tokenizer": {"model": "word"}}, "'tokenizer.model': must be 'bpe' or 'unigram', got 'word'"),
        ({"eval_fraction": 0.5}, "'eval_fraction': must be less than 0.5, got 0.5"),
        ({"eval_fraction": 0}, "'eval_fraction': must be greater than 0, got 0"),
        ({"seq_len": 0}, "'seq_len': must be greater than or equal to 1"),
        ({"packing": "first_fit"}, "'packing': must be 'concat', 'pad' or 'best_fit', got 'first_fit'"),
        ({"path": "a", "corpus": "b"}, "'corpus' does nothing beside 'path', which holds tokens already; remove it"),
        ({"path": "a", "tokenizer": {"kind": "bytes"}}, "'tokenizer' does nothing beside 'path'"),
        ({"path": "a", "mixture": [{"path": "b", "weight": 1}]}, "'path' does nothing beside 'mixture'"),
        ({"mixture": [{"path": "b", "weight": 0}]}, "'mixture.0': the weight of b must be above 0, got 0; or leave"),
        ({"mixture": [{"path": "b", "weight": -1}]}, "'mixture.0': the weight of b must be above 0, got -1"),
        ({"mixture": [{"path": "b"}]}, "'mixture.0.weight' is required"),
        ({"mixture": [{"path": "b", "weigth": 1}]}, "unknown key 'mixture.0.weigth'; did you mean 'mixture.0.weight'?"),
        ({"mixture": [{"path": "b", "weight": i} for i in (1, 2)]}, "b is in 'mixture' twice; give it once"),
        ({"mixture": [{"path": p, "weight": 1} for p in ("b", "a", "a/.././b")]}, "a/.././b is in 'mixture' twice;"),
        ({"shuffle": {"window": 3}}, "'shuffle': 'window' does nothing without 'block'; give both, or remove it"),
        ({"shuffle": {"block": 0}}, "'shuffle.block': must be greater than or equal to 1"),
        ({"corpus": 5}, "'corpus': 5 is neither 'python-stdlib' nor a path nor a list of paths"),
        ({"corpus": []}, "'corpus': [] is neither 'python-stdlib' nor a path nor a list of paths"),
    ],
)
def test_errors_name_the_key_in_one_line(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        validate(DataConfig, tree, "train.yaml")
    assert str(error.value).startswith(f"train.yaml: {message}")


@pytest.mark.parametrize(
    ("tree", "kind", "size"),
    [
        ({}, "sentencepiece", 4096),
        ({"model": "unigram", "vocab_size": 300}, "sentencepiece", 300),
        ({"kind": "bytes"}, "bytes", 257),
        ({"path": "x.model"}, "file", None),
        ({"path": "x.json", "kind": "file", "eos": "<eos>", "vocab_size": None}, "file", None),
        ({"path": None, "eos": None}, "sentencepiece", 4096),
    ],
)
def test_kinds_of_tokenizers(tree: dict[str, Any], kind: str, size: int | None) -> None:
    config = validate(TokenizerConfig, tree, "x")
    assert (config.kind, config.known_size) == (kind, size)
    assert validate(TokenizerConfig, config.model_dump(), "its own dump") == config


def test_uint16_waits_for_a_tokenizer_to_be_read() -> None:
    assert DataConfig(dtype="uint16", tokenizer=TokenizerConfig(path="x.json")).token_dtype == "uint16"
    assert DataConfig(tokenizer=TokenizerConfig(kind="bytes")).token_dtype == "uint16"


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"path": "a", "packing": "best_fit", "document_mask": True},
        {"mixture": [{"path": "a", "weight": 0.3}, {"path": "b", "weight": 2}], "shuffle": {"block": 4, "window": 2}},
        {"corpus": ["a", "b"], "shuffle": {"block": 7}},
    ],
)
def test_a_resolved_config_is_read_again(tree: dict[str, Any]) -> None:
    """Also where keys have nothing to say, and giving them is an error."""
    config = validate(DataConfig, tree, "x")
    assert validate(DataConfig, config.model_dump(mode="json"), "its own dump") == config


def test_documents_are_not_kept_apart_unless_asked_for() -> None:
    """Numbers of runs from before the key was there stay as they are."""
    config = DataConfig()
    assert not config.document_mask
    assert config.shuffle.order() == Shuffle(None)
    assert ShuffleConfig(block=5).order() == Shuffle(5, 512)
    assert ShuffleConfig(block=5, window=7).order() == Shuffle(5, 7)


def test_every_key_is_documented() -> None:
    for section in (DataConfig, TokenizerConfig, SourceConfig, ShuffleConfig):
        assert all(field.description for field in section.model_fields.values())


def test_the_package_needs_no_torch() -> None:
    program = "import data.config, data.loader, data.prepare, sys; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], cwd=Path(data.__file__).parents[1], check=False).returncode == 0
    )
