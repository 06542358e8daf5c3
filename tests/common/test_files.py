"""Files that are whole or absent, and the lock between processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.files import atomic_write, hash_json, locked
from tests.faults import files_below


def test_a_crash_before_the_rename_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "new" / "file.json"
    atomic_write(file, "old")

    def power_cut(*_: object) -> None:
        raise SystemError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", power_cut)
        with pytest.raises(SystemError):
            atomic_write(file, "new content")
    assert file.read_text() == "old"
    atomic_write(file, b"new")
    assert file.read_bytes() == b"new"


def test_content_is_durable_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b))[1])
    atomic_write(tmp_path / "file", "content")
    assert calls == ["fsync", "replace", "fsync"]  # the content, its name, the folder that holds the name
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_finds_no_room_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    atomic_write(tmp_path / "file", "old")
    with files_below(1 << 20), pytest.raises(OSError, match="File too large") as error:
        atomic_write(tmp_path / "file", bytes(1 << 21))
    assert error.value.filename == str(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_lock_keeps_a_second_process_out_and_ends_with_its_process(tmp_path: Path) -> None:
    lock = tmp_path / "folder" / "lock"
    held = "import fcntl,sys\nfcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with locked(lock):
        second = subprocess.run([sys.executable, "-c", held, str(lock)], capture_output=True, text=True)
        assert "BlockingIOError" in second.stderr
    killed = "import os,sys\nfrom pathlib import Path\nfrom common.files import locked\n"
    killed += "with locked(Path(sys.argv[1])):\n    os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", killed, str(lock)]).returncode == -9
    with locked(lock):  # would wait for ever
        pass


def test_hash_of_json_does_not_depend_on_the_order_of_keys() -> None:
    assert hash_json({"a": 1, "b": [1, 2]}) == hash_json({"b": [1, 2], "a": 1})
    assert hash_json({"a": 1}) != hash_json({"a": 2})
    assert hash_json([1, 2]) != hash_json([2, 1])
