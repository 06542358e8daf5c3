"""Reading parts of tensors from safetensors files, and writing files tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import UserError
from trainer.exchange import tensors
from trainer.exchange.tensors import Item, StoredTensors, plan_files, write_file


def sharded(folder: Path, shards: list[dict[str, tuple[list[int], Tensor]]]) -> list[Path]:
    """Files as ranks write them: of each tensor its offsets and the part."""
    files = []
    for number, shard in enumerate(shards):
        places = {name: {"saved_offsets": offsets} for name, (offsets, _) in shard.items()}
        parts = {name: part.contiguous() for name, (_, part) in shard.items()}
        files.append(folder / f"shard-{number}.safetensors")
        save_file(parts, files[-1], {"DCP_SHARDING_INFO": json.dumps(places)})
    return files


def identity(name: str) -> str:
    return name


@pytest.fixture(params=[1, 3, 1 << 20])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(tensors, "_BLOCK", request.param)
    return int(request.param)


def test_parts_of_any_layout_are_put_together(tmp_path: Path, block: int) -> None:
    rows, columns, experts = torch.randn(7, 4), torch.randn(5, 6), torch.randn(3, 4, 5)
    whole = torch.randn(9)
    shards = [
        {"rows": ([0, 0], rows[:3]), "columns": ([0, 0], columns[:, :1]), "experts": ([0, 0, 0], experts[:2, :3])},
        {"rows": ([3, 0], rows[3:]), "columns": ([0, 1], columns[:, 1:]), "experts": ([2, 0, 0], experts[2:, :3])},
        {"whole": ([0], whole), "experts": ([0, 3, 0], experts[:, 3:])},
    ]
    stored = StoredTensors(sharded(tmp_path, shards), identity)
    expected = {"rows": rows, "columns": columns, "experts": experts, "whole": whole}
    assert stored.shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    for name, tensor in expected.items():
        assert torch.equal(stored.read(name), tensor)
        for start in range(len(tensor)):
            for stop in range(start, len(tensor) + 1):
                assert torch.equal(stored.read(name, start, stop), tensor[start:stop]), (name, start, stop)


def test_only_the_rows_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = torch.randn(8, 5, 6)
    files = sharded(tmp_path, [{"e": ([0, 0, 0], experts[:3])}, {"e": ([3, 0, 0], experts[3:])}])
    stored, read = StoredTensors(files, identity), []
    fill = tensors._fill

    def counted(block: Tensor, *rest: object) -> None:
        read.append(block.numel())
        fill(block, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tensors, "_fill", counted)
    assert torch.equal(stored.read("e", 4, 5)[0], experts[4])
    assert sum(read) == 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_become_fp32(tmp_path: Path, block: int, dtype: torch.dtype) -> None:
    values = torch.randn(5, 7).to(dtype)
    save_file({"t": values}, tmp_path / "a")
    read = StoredTensors([tmp_path / "a"], identity).read("t")
    assert read.dtype == torch.float32
    assert torch.equal(read, values.float())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "cut short"),
        (lambda file: file.write_bytes(b""), "no safetensors file"),
        (lambda file: file.write_bytes(b"PK\x03\x04" * 100), "cut short, or no safetensors file"),
        (lambda file: file.write_bytes((8).to_bytes(8, "little") + b"[1, 2]  "), "no safetensors file"),
        (lambda file: file.write_bytes(file.read_bytes().replace(b"[2,3]", b"[2,4]")), "no safetensors file"),
        (lambda file: file.write_bytes(file.read_bytes().replace(b"[2,3]", b'["x"]')), "no safetensors file"),
        (lambda file: file.unlink(), "cannot be read: No such file"),
    ],
)
def test_damaged_files(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"t": torch.zeros(2, 3)}, file)
    assert b"[2,3]" in file.read_bytes()
    damage(file)
    with pytest.raises(UserError, match=message) as error:
        StoredTensors([file], identity)
    assert str(file) in str(error.value)


def test_a_part_that_no_file_has(tmp_path: Path) -> None:
    files = sharded(tmp_path, [{"t": ([0, 0], torch.zeros(2, 3))}, {"t": ([4, 0], torch.zeros(2, 3))}])
    with pytest.raises(UserError, match="a part of 't' is in none of the files"):
        StoredTensors(files, identity)


def test_a_tensor_that_two_files_have(tmp_path: Path) -> None:
    whole = torch.zeros(4, 3)
    both = [{"t": ([0, 0], whole)}, {"t": ([0, 0], whole)}]
    overlapping = [{"t": ([0, 0], whole[:3])}, {"t": ([2, 0], whole[2:])}]
    for shards in (both, overlapping):
        with pytest.raises(UserError, match=r"shard-0\.safetensors: has 't', as shard-1\.safetensors has once more"):
            StoredTensors(sharded(tmp_path, shards), identity)


def test_same_numbers_of_whatever_type(tmp_path: Path, block: int) -> None:
    values = torch.randn(5, 7).bfloat16()
    last = values.float()
    last[-1, -1] += 1e-6
    save_file({"a": values, "b": values.float(), "last": last, "shorter": values[:4].clone()}, tmp_path / "a")
    stored = StoredTensors([tmp_path / "a"], identity)
    assert stored.same("a", "b")
    assert not stored.same("a", "last")
    assert not stored.same("a", "shorter")


def test_a_file_cut_short_after_it_was_opened(tmp_path: Path) -> None:
    save_file({"t": torch.zeros(2, 3)}, tmp_path / "a")
    stored = StoredTensors([tmp_path / "a"], identity)
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-4])
    with pytest.raises(UserError, match="cut short"):
        stored.read("t")


def named(number: int, of: int) -> str:
    return f"{number}-of-{of}"


@pytest.mark.parametrize(("code", "dtype"), [("F32", torch.float32), ("BF16", torch.bfloat16), ("F16", torch.float16)])
def test_written_files_are_read_by_safetensors(tmp_path: Path, block: int, code: str, dtype: torch.dtype) -> None:
    made = {
        "a": torch.randn(5, 3),
        "transposed": torch.randn(4, 6).t(),
        "b": torch.randn(2, 3, 4)[:, 1:],
        "c": torch.randn(1),
    }
    items = [Item(name, tuple(tensor.shape), code) for name, tensor in made.items()]
    (file,) = plan_files(items, 10**6, named)
    write_file(tmp_path, file, made.__getitem__)
    assert [path.name for path in tmp_path.iterdir()] == ["1-of-1"]
    assert (tmp_path / "1-of-1").stat().st_size == file.bytes
    assert len(file.header) % 8 == 0
    read = load_file(tmp_path / "1-of-1")
    assert list(read) == list(made)
    for name, tensor in made.items():
        assert torch.equal(read[name], tensor.to(dtype))


def test_tensors_are_spread_over_files_in_order() -> None:
    sizes = [3, 4, 9, 1, 1, 5, 7]
    items = [Item(str(i), (size,), "F32") for i, size in enumerate(sizes)]
    files = plan_files(items, 4 * 7, named)
    assert [[int(item.name) for item in file.items] for file in files] == [[0, 1], [2], [3, 4, 5], [6]]
    assert [file.name for file in files] == ["1-of-4", "2-of-4", "3-of-4", "4-of-4"]


def test_what_fp16_cannot_hold_is_refused(tmp_path: Path) -> None:
    (file,) = plan_files([Item("t", (3,), "F16")], 100, named)
    write_file(tmp_path, file, lambda name: torch.tensor([1.0, float("nan"), 65504.0]))
    with pytest.raises(UserError, match="'t' has numbers that fp16 cannot hold"):
        write_file(tmp_path, file, lambda name: torch.tensor([1.0, 2.0, 65520.0]))
