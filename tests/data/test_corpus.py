from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import UserError
from data.config import DataConfig
from data.corpus import Corpus
from data.inputs import stdlib_files


def read(*paths: Path, text_field: str = "text") -> list[str]:
    return list(Corpus(DataConfig(corpus=[str(path) for path in paths], text_field=text_field)).documents())


def test_text_files_are_kept_to_the_byte_and_empty_ones_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\r\ntwo\tü\u2028\n".encode())
    (tmp_path / "b.txt").write_bytes(b" \n")
    assert read(tmp_path / "a.txt", tmp_path / "b.txt") == ["one\r\ntwo\tü\u2028\n"]


def test_jsonl_is_a_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [{"text": "x\u2028y"}, {"text": ""}, {"text": "z", "more": 1}]
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    assert read(path) == ["x\u2028y", "z"]


def test_folders_are_read_by_relative_path_and_lists_in_their_order(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name in ("b.txt", "a/z.txt", "a.txt", "c.md", ".hidden.txt", ".git/x.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (tmp_path / "0.txt").write_text("0")
    assert read(folder, tmp_path / "0.txt") == ["a.txt", "a/z.txt", "b.txt", "0"]


def test_fingerprint_follows_content_and_order_not_place(tmp_path: Path) -> None:
    def fingerprint(*paths: Path) -> str:
        return Corpus(DataConfig(corpus=[str(path) for path in paths])).fingerprint()

    one, two, moved = (tmp_path / name for name in ("one.txt", "two.txt", "moved.txt"))
    for path, text in ((one, "1"), (two, "2"), (moved, "1")):
        path.write_text(text)
    assert fingerprint(one, two) == fingerprint(moved, two)
    assert len({fingerprint(one, two), fingerprint(two, one), fingerprint(one)}) == 3


def test_standard_library_has_a_fixed_order_and_no_tests() -> None:
    files = stdlib_files()
    assert files == stdlib_files()
    assert len(files) > 300
    folders = {part for path in files for part in path.parts}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    root = next(path.parent for path in files if path.name == "this.py")
    relative = [path.relative_to(root).as_posix() for path in files]
    assert relative == sorted(relative)
    assert {"os.py", "json/decoder.py"} <= set(relative)
    assert not any(name.startswith("_sysconfigdata") for name in relative)


def test_standard_library_files_that_are_not_utf8_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_bytes(b"# caf\xe9")
    (tmp_path / "b.py").write_bytes(b"b = 1")
    monkeypatch.setattr("data.inputs.sysconfig.get_path", lambda _: str(tmp_path))
    assert list(Corpus(DataConfig()).documents()) == ["b = 1"]
    (tmp_path / "a.py").unlink()
    (tmp_path / "b.py").unlink()
    with pytest.raises(UserError, match="no library sources"):
        Corpus(DataConfig())


def test_errors_in_paths(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_text("x")
    (tmp_path / "empty.txt").touch()
    for path, message in (
        ("missing", r"data.corpus: .*missing does not exist; give .*'python-stdlib'"),
        ("a.pdf", r"data.corpus: .*a.pdf has no supported extension; give .txt, .jsonl, .*or .arrow"),
        ("empty.txt", r"data.corpus: no document with any text in .*empty.txt"),
    ):
        with pytest.raises(UserError, match=message):
            read(tmp_path / path)
    (tmp_path / "empty.txt").unlink()
    with pytest.raises(UserError, match=r"data.corpus: folder .* holds no .txt, .jsonl, .* file"):
        read(tmp_path)


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")

    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(UserError, match=r"cannot read .*a.txt: Permission denied"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', r"a\.jsonl:2: not valid JSON"),
        (b'["text"]', r"a\.jsonl:2: not a JSON object"),
        (b'{"body": "x", "id": 1}', r"a\.jsonl:2: no field 'text'; set data\.text_field to .*: 'body', 'id'"),
        (b'{"text": 5}', r"a\.jsonl:2: field 'text' is not a string"),
        (b'{"text": "\\ud800"}', r"a\.jsonl:2: field 'text' has half a surrogate pair"),
        (b'{"text": "\xff"}', r"a\.jsonl:2: not UTF-8 at byte 10"),
    ],
)
def test_errors_in_lines_name_the_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(UserError, match=message):
        read(path)


def test_a_text_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(UserError, match=r"a\.txt: not UTF-8 at byte 2"):
        read(tmp_path / "a.txt")


def test_text_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}')
    assert read(tmp_path / "a.jsonl", text_field="body") == ["x"]
