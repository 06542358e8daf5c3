"""Speed of tokenizing against `datasets.map` and datatrove, and of the loader against what a small model consumes.

    python benchmarks/data.py [--megabytes 100] [--workers 2] [--vocab 16384] [--rounds 7] [--only huggingface]

The standard library's sources, as JSONL and repeated to the size asked for, are turned into files of token ids by

- `gramian tokenize`,
- `datasets`: `load_dataset("json")` and a batched `map` over as many processes, into its Arrow cache, with the same
  tokenizer's fastest call; the stated time of `map` alone leaves out the start of Python and reading the JSONL,
- datatrove's `DocumentTokenizer`, where it is installed: a task for each process, each with its part of the file; it
  takes no SentencePiece models.

Each is a process of its own, timed from start to end, as a user would wait for it. They run in turn, so that a drift of
the machine's speed meets all. That all write the same ids is asserted. Printed are medians, and the median ratio of the
times of a round.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # in place of this folder, where this file would be taken for the package `data`

import numpy as np  # noqa: E402

from data.config import DataConfig  # noqa: E402
from data.dataset import Dataset  # noqa: E402
from data.readers import Source  # noqa: E402

EOS = "<|endoftext|>"
QUIET = {**os.environ, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def write_corpus(folder: Path, size: int, parts: int) -> tuple[int, list[str]]:
    """Write `size` bytes of text to corpus.jsonl, and the same in `parts` runs to parts/; the bytes, and what was taken
    of the library."""
    texts = [document.text for document in Source(["python-stdlib"]).documents()]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    sizes, taken, total = [len(text.encode("utf-8")) for text in texts], [], 0
    while total < size:
        taken.append(len(taken) % len(lines))
        total += sizes[taken[-1]]
    (folder / "corpus.jsonl").write_text("".join(lines[i] for i in taken), encoding="utf-8")
    (folder / "parts").mkdir()
    for part, share in enumerate(np.array_split(taken, parts)):
        (folder / "parts" / f"{part:05d}.jsonl").write_text("".join(lines[i] for i in share), encoding="utf-8")
    return total, [texts[i] for i in sorted(set(taken))]


def train_tokenizers(folder: Path, texts: list[str], vocab: int) -> dict[str, Path]:
    """A SentencePiece model and a byte-level BPE of these texts, by kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from data.tokenizers.training import train_sentencepiece

    (folder / "tokenizer.model").write_bytes(train_sentencepiece(texts, vocab))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=vocab, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return {"sentencepiece": folder / "tokenizer.model", "huggingface": folder / "tokenizer.json"}


def run_gramian(folder: Path, tokenizer: Path, workers: int) -> dict[str, Any]:
    """`gramian tokenize` into folder/gramian."""
    words = ["tokenize", "--input", folder / "corpus.jsonl", "--tokenizer", tokenizer, "--out", folder / "gramian"]
    command = [Path(sys.executable).with_name("gramian"), *words, "--eval-fraction", "0", "--workers", str(workers)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=QUIET)
    return {}


def run_peer(name: str, folder: Path, tokenizer: Path, workers: int) -> dict[str, Any]:
    """A peer, in a process that runs `peer_NAME` of this file; what it printed as JSON in its last line."""
    words = [__file__, "--peer", name, str(folder), str(tokenizer), "--workers", str(workers)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=QUIET)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def peer_datasets(folder: Path, tokenizer: Path, workers: int) -> dict[str, Any]:
    """Tokenize with `datasets` into folder/datasets."""
    import datasets

    if tokenizer.suffix == ".model":
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))

        def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            return {"ids": processor.encode(batch["text"], add_eos=True)}

    else:
        from tokenizers import Tokenizer

        library = Tokenizer.from_file(str(tokenizer))
        eos = library.token_to_id(EOS)

        def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            encoded = library.encode_batch_fast(batch["text"], add_special_tokens=False)
            return {"ids": [[*encoding.ids, eos] for encoding in encoded]}

    corpus = datasets.load_dataset(
        "json", data_files=str(folder / "corpus.jsonl"), split="train", cache_dir=str(folder / "datasets" / "read")
    )
    begin = time.perf_counter()
    ids = datasets.Features({"ids": datasets.Sequence(datasets.Value("int32"))})
    tokens = corpus.map(
        encode,
        batched=True,
        num_proc=workers,
        remove_columns=corpus.column_names,
        features=ids,
        cache_file_name=str(folder / "datasets" / "tokens.arrow"),
    )
    return {"map_seconds": time.perf_counter() - begin, "files": [file["filename"] for file in tokens.cache_files]}


def peer_datatrove(folder: Path, tokenizer: Path, workers: int) -> dict[str, Any]:
    """Tokenize with datatrove into folder/datatrove."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.utils.logging import logger

    logger.remove()
    out = folder / "datatrove"
    LocalPipelineExecutor(
        [
            JsonlReader(str(folder / "parts"), doc_progress=False),
            DocumentTokenizer(str(out), str(tokenizer), eos_token=EOS, batch_size=1000, shuffle_documents=False),
        ],
        tasks=workers,
        workers=workers,
        logging_dir=str(folder / "logs"),
    ).run()
    return {"files": sorted(str(path) for path in out.glob("*.ds"))}


def ids_of(name: str, folder: Path, told: dict[str, Any]) -> np.ndarray:
    """All token ids that one of them wrote, in order."""
    if name == "gramian":
        stream = Dataset.open(folder / "gramian").train
        return stream.slice(0, stream.n_tokens)
    if name == "datatrove":
        return np.concatenate([np.fromfile(file, dtype="<u2") for file in told["files"]])
    import pyarrow.ipc

    parts = []
    for file in told["files"]:
        with pyarrow.memory_map(file) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
            parts += [column.flatten().to_numpy() for column in stream.read_all().column("ids").chunks]
    return np.concatenate(parts)


def compare(kind: str, folder: Path, tokenizer: Path, workers: int, rounds: int, size: int) -> dict[str, Any]:
    """Time all on one tokenizer, and print; the median seconds, and how many times as fast gramian is."""
    names = ["gramian", "datasets"]
    if kind == "huggingface" and importlib.util.find_spec("datatrove"):
        names.append("datatrove")
    seconds: dict[str, list[float]] = {name: [] for name in [*names, "map alone"]}
    n_tokens = 0
    for number in range(rounds):
        written: dict[str, np.ndarray] = {}
        for name in names:
            for leftover in (name, "logs"):
                shutil.rmtree(folder / leftover, ignore_errors=True)
            begin = time.perf_counter()
            told = (
                run_gramian(folder, tokenizer, workers)
                if name == "gramian"
                else run_peer(name, folder, tokenizer, workers)
            )
            seconds[name].append(time.perf_counter() - begin)
            if name == "datasets":
                seconds["map alone"].append(told["map_seconds"])
            if number == 0:
                written[name] = ids_of(name, folder, told)
        for name, ids in written.items():
            assert np.array_equal(ids, written["gramian"]), f"{name} wrote other ids"
            n_tokens = len(ids)
    print(f"\n{kind}: {n_tokens:,} tokens, the same ids from all; {workers} processes")
    figures: dict[str, Any] = {}
    for name, values in seconds.items():
        took = statistics.median(values)
        ratio = statistics.median(theirs / ours for ours, theirs in zip(seconds["gramian"], values, strict=True))
        note = "" if name == "gramian" else f"   gramian is {ratio:.2f}x as fast"
        figures[name] = {"seconds": round(took, 2), "megabytes_per_second": round(size / took / 1e6, 2)}
        figures[name] |= {} if name == "gramian" else {"gramian_is_faster_by": round(ratio, 3)}
        print(f"  {name:<10}{took:>8.1f} s {n_tokens / took:>12,.0f} tokens/s {size / took / 1e6:>7.2f} MB/s{note}")
    print(f"  medians of {rounds} alternating runs")
    return figures


def loader_rate(folder: Path, steps: int, config: DataConfig, rows: int) -> float:
    """Tokens per second of the batches of one rank."""
    from data.loader import Batches

    batches = Batches(Dataset.open(folder), config, seed=0, global_batch_size=rows)
    batches.train(0, 0, 1)  # maps the files
    begin = time.perf_counter()
    for step in range(steps):
        batches.train(step, 0, 1)
    return steps * rows * config.seq_len / (time.perf_counter() - begin)


def compare_loader(folder: Path, rounds: int) -> dict[str, Any]:
    """The loader against the training of the quickstart, batches as there: how many times its rate, by packing."""
    figures = json.loads((ROOT / "docs" / "evidence" / "quickstart.json").read_text())["figures"]
    consumed = figures["median_tokens_per_second"]
    print(f"\nloader, 16 rows of 256 tokens; the quickstart's model takes {consumed:,.0f} tokens/s")
    times: dict[str, Any] = {}
    for packing in ("concat", "pad"):
        config = DataConfig(path=str(folder / "gramian"), packing=packing)  # type: ignore[arg-type]
        rate = statistics.median(loader_rate(folder / "gramian", 500, config, 16) for _ in range(rounds))
        print(f"  {packing:<10}{rate:>14,.0f} tokens/s = {rate / consumed:,.0f} times that")
        times[packing] = round(rate / consumed)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--vocab", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["sentencepiece", "huggingface", "loader"])
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--peer", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        name, folder, tokenizer = arguments.peer
        peer = {"datasets": peer_datasets, "datatrove": peer_datatrove}[name]
        print(json.dumps(peer(Path(folder), Path(tokenizer), arguments.workers)))
        return
    with tempfile.TemporaryDirectory(prefix="gramian-benchmark-") as name:
        folder = Path(name)
        size, texts = write_corpus(folder, round(arguments.megabytes * 1e6), arguments.workers)
        print(f"{size:,} bytes of text in one JSONL file; vocabulary of {arguments.vocab:,}")
        tokenizers = train_tokenizers(folder, texts, arguments.vocab)
        figures: dict[str, Any] = {"bytes": size, "rounds": arguments.rounds, "processes": arguments.workers}
        for kind, tokenizer in tokenizers.items():
            if arguments.only in (None, kind):
                figures[kind] = compare(kind, folder, tokenizer, arguments.workers, arguments.rounds, size)
        if arguments.only in (None, "loader"):
            if not (folder / "gramian").exists():
                run_gramian(folder, tokenizers["sentencepiece"], arguments.workers)
            figures["loader"] = compare_loader(folder, arguments.rounds)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
