"""`gramian generate` on a trained run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.commands import command
from tests.launch.conftest import Trained


class Generate:
    """Calls the command in this process, which has torch already; returns what it prints."""

    def __init__(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._run, self._capsys = run, capsys

    def __call__(self, *words: str, at: Path | None = None) -> str:
        from launch.cli import app

        app(["generate", str(at or self._run), *words], standalone_mode=False)
        return self._capsys.readouterr().out


@pytest.fixture
def generate(trained: Trained, capsys: pytest.CaptureFixture[str]) -> Generate:
    return Generate(trained.run.path, capsys)


def test_seeds(trained: Trained, generate: Generate) -> None:
    words = ["--prompt", "def ", "--max-tokens", "20"]
    first = generate(*words, "--seed", "0")
    assert first.startswith("def ")
    assert first == generate(*words) == generate(*words, at=trained.run.checkpoint(6))
    assert first != generate(*words, "--seed", "1")
    # Another process gives the same text, and nothing but it.
    result = command("generate", trained.run.path, *words, "--seed", "0")
    assert (result.returncode, result.stdout, result.stderr) == (0, first, "")


def test_temperature_top_k_and_top_p(generate: Generate) -> None:
    """At temperature 0 or among one token there is no chance; each gives the likeliest text."""
    words = ["--prompt", "import ", "--max-tokens", "20"]
    greedy = generate(*words, "--temperature", "0")
    assert greedy == generate(*words, "--temperature", "0", "--seed", "7")
    assert greedy == generate(*words, "--top-k", "1", "--seed", "3")
    assert greedy == generate(*words, "--top-p", "1e-9", "--seed", "3")
    hot = [*words, "--temperature", "2", "--top-k", "0"]
    assert greedy != generate(*hot)
    assert generate(*hot) == generate(*hot, "--top-p", "1") != generate(*hot, "--top-p", "0.5")


def test_number_of_tokens(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many draws as tokens asked for, up to the model's length, unless the document ends."""
    import trainer.generate as module

    draws: list[int] = []
    sample = module.sample

    def counted(*arguments: Any) -> int:
        draws.append(sample(*arguments))
        return draws[-1]

    monkeypatch.setattr(module, "sample", counted)
    words, texts, numbers = ["--prompt", "class", "--temperature", "0"], [], []
    for asked in ("1", "5", "1000"):
        draws.clear()
        texts.append(generate(*words, "--max-tokens", asked).removesuffix("\n"))
        numbers.append(len(draws))
    assert numbers[:2] == [1, 5]
    assert 5 < numbers[2] < 64
    assert texts[1].startswith(texts[0])
    assert texts[2].startswith(texts[1])
    assert generate("--max-tokens", "5")  # no prompt is an empty one


def test_several_prompts(generate: Generate, tmp_path: Path) -> None:
    """Each as alone with its seed, after a line that no prompt alone has; all of it in a JSON file too."""
    options = ["--max-tokens", "8", "--json"]
    texts = ["def ", "", "import os"]
    words = [word for text in texts for word in ("--prompt", text)]
    printed = generate(*words, *options, str(tmp_path / "out.json"), "--seed", "3")
    record = json.loads((tmp_path / "out.json").read_text())
    assert printed == "".join(
        f"=== {i} of 3: {one['finish']} ===\n{one['prompt']}{one['text']}\n"
        for i, one in enumerate(record["continuations"], start=1)
    )
    for i, (text, one) in enumerate(zip(texts, record["continuations"], strict=True)):
        assert list(one) == ["prompt", "text", "tokens", "finish"]
        assert (one["prompt"], one["finish"], len(one["tokens"])) == (text, "length", 8)
        alone = generate("--prompt", text, "--max-tokens", "8", "--seed", str(3 + i))
        assert alone == f"{one['prompt']}{one['text']}\n"
    assert json.loads(generate(*words, *options, "-", "--seed", "3")) == record


def test_stop_texts(generate: Generate) -> None:
    words = ["--prompt", "class", "--temperature", "0", "--max-tokens", "20"]
    whole = generate(*words).removesuffix("\n")
    text = whole.removeprefix("class")
    assert generate(*words, "--stop", text[3:6]) == f"class{text[: text.index(text[3:6])]}\n"
    assert generate(*words, "--stop", "no such text", "--stop", text[3:6]) == generate(*words, "--stop", text[3:6])
    assert generate(*words, "--stop", "class") == whole + "\n"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--prompt", "word " * 100], ["--prompt is", "64 (model.max_seq_len)", "shorten"]),
        (["--prompt", "a", "--prompt", "word " * 100], ["--prompt 2 of 2 ('word word word word '...) is", "shorten"]),
        (["--prompt", "a\udcff"], ["--prompt is not UTF-8"]),
        (["--prompt", "a", "--stop", "a\udcff"], ["--stop is not UTF-8"]),
        (["--prompt", "a", "--stop", "b", "--stop", ""], ["--stop is empty", "leave --stop out"]),
        (["--prompt", "a", "--json", "/no/such/folder/file"], ["--json /no/such/folder/file: cannot be written"]),
    ],
)
def test_refused_words(
    generate: Generate, capsys: pytest.CaptureFixture[str], words: list[str], parts: list[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        generate(*words)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert all(part in error for part in parts)


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--top-p", "0", "above 0 and at most 1"),
        ("--top-p", "1.01", "above 0 and at most 1"),
        ("--top-p", "nan", "above 0 and at most 1"),
        ("--temperature", "inf", "finite"),
    ],
)
def test_refused_numbers(
    generate: Generate, capsys: pytest.CaptureFixture[str], option: str, value: str, rule: str
) -> None:
    with pytest.raises(SystemExit) as end:
        generate(option, value)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert option in error
    assert rule in error
