"""KV in files: what is read was written, the budget holds, and nothing else can be taken for it."""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from held_process import held_process
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.engine.kv import disk
from neo_desktop.engine.kv.disk import HEADER, SCANS, BlockStore, Key

KEYS = [Key(bytes([group] * 16), bytes([name] * 16)) for group in range(2) for name in range(6)]
SIZE = 1000
BUDGET = 5 * (SIZE + HEADER.size)


def content(key: Key, size: int = SIZE) -> bytes:
    return (key.group[:1] + key.name[:1]) * (size // 2)


def write(store: BlockStore, key: Key, used: int = 0) -> bool:
    return store.write(key, memoryview(content(key)), used)


def read(store: BlockStore, key: Key) -> bytes | None:
    out = bytearray(SIZE)
    return bytes(out) if store.read(key, memoryview(out)) else None


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(KEYS)), max_size=40), st.integers(1, 3))
def test_the_budget_holds_and_the_last_used_blocks_stay(
    steps: list[tuple[bool, Key]], processes: int
) -> None:
    """Several stores share the folder; each may exceed the budget by its writes between two scans."""
    with TemporaryDirectory() as name:
        folder = Path(name, "kv")
        stores = [BlockStore(folder, BUDGET) for _ in range(processes)]
        last_used: dict[Key, int] = {}
        for now, (is_write, key) in enumerate(steps, 1):
            store = stores[now % processes]
            if is_write:
                assert write(store, key, now)
                if not (processes > 1 and key in last_used):
                    last_used[key] = now
            elif read(store, key) is not None:
                store.touch(key, now)
                last_used[key] = now
            for found in (read(each, key) for each in stores):
                assert found in (None, content(key))
            sizes = sum(path.stat().st_size for path in files(folder))
            assert sizes <= BUDGET + (processes - 1) * (BUDGET // SCANS + SIZE + HEADER.size)
        if processes == 1:
            there = {key for key in KEYS if read(stores[0], key) is not None}
            order = sorted(last_used, key=lambda key: -last_used[key])
            assert there == set(order[: len(there)])
            assert len(there) >= min(len(order), 4)  # a scan makes a little more room than needed


def test_files_are_the_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o755)
    write(BlockStore(folder, BUDGET), KEYS[0])
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(folder)} == {0o600}


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [
        _flipped,
        lambda data: data[:-1],
        lambda data: data[:9],
        lambda data: b"",
        lambda data: data + b"more",
        lambda data: b"GGUF" + data[4:],
        lambda data: data[: HEADER.size - 1] + b"x" + data[HEADER.size :],
    ],
    ids=["damaged", "truncated", "stump", "empty", "longer", "foreign", "of another block"],
)
def test_an_unusable_file_is_dropped_with_one_sentence(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    store = BlockStore(tmp_path, BUDGET)
    write(store, KEYS[0])
    (path,) = files(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    for again in (store, BlockStore(tmp_path, BUDGET)):
        assert read(again, KEYS[0]) is None
    assert not files(tmp_path)
    assert len(caplog.messages) == 1
    assert str(path) in caplog.text
    assert write(store, KEYS[0])
    assert read(store, KEYS[0]) == content(KEYS[0])


def test_files_of_others_stay(tmp_path: Path) -> None:
    others = tmp_path / "notes.txt", tmp_path / ("ab" * 16) / "notes.txt"
    others[1].parent.mkdir()
    for path in others:
        path.write_text("x" * 3 * BUDGET)
    store = BlockStore(tmp_path, BUDGET)
    for key in KEYS:
        assert write(store, key)
    assert all(path.exists() for path in others)


def test_a_file_of_another_format_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(disk, "FORMAT", disk.FORMAT - 1)
        assert write(BlockStore(tmp_path, BUDGET), KEYS[0])
    assert read(BlockStore(tmp_path, BUDGET), KEYS[0]) is None
    assert not files(tmp_path)


def test_a_full_disk_ends_writing_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = BlockStore(tmp_path, BUDGET)
    write(store, KEYS[0])
    room = [HEADER.size]

    def full(descriptor: int, data: bytes) -> int:
        if not room:
            raise OSError(28, "No space left on device")
        return len(data[: room.pop()])

    monkeypatch.setattr(disk.os, "write", full)
    assert not write(store, KEYS[1])
    assert not store.is_writable
    assert not write(store, KEYS[2])
    assert len(caplog.messages) == 1
    assert "No space left" in caplog.text
    assert len(files(tmp_path)) == 1
    assert read(store, KEYS[0]) == content(KEYS[0])


WRITER = """
import os
from pathlib import Path
from neo_desktop.engine.kv.disk import BlockStore, Key
store = BlockStore(Path({folder!r}), 10**8)
while True:
    for name in range(200):
        if name == 3:
            print("begins", flush=True)  # some files are there
        key = Key(bytes(16), bytes([name]) * 16)
        (Path({folder!r}) / key.group.hex() / key.name.hex()).unlink(missing_ok=True)
        store.write(key, memoryview(bytes([name]) * 300_000), 0)
"""


def test_after_kill_9_no_file_is_half_written(tmp_path: Path) -> None:
    for delay_s in (0.05, 0.1):
        with held_process(WRITER, folder=str(tmp_path)) as writer:
            assert writer.read_line() == "begins"
            time.sleep(delay_s)
            writer.kill()
        store = BlockStore(tmp_path, 10**8)
        keys = [Key(bytes(16), bytes([name]) * 16) for name in range(200)]
        there = [key for key in keys if store.has(key)]
        assert there
        for key in there:
            out = bytearray(300_000)
            assert store.read(key, memoryview(out))
            assert out == key.name[:1] * 300_000
    left = tmp_path / bytes(16).hex() / f"{bytes(16).hex()}.1-1.tmp"
    left.write_bytes(b"half")
    os.utime(left)
    BlockStore(tmp_path, 10**8)
    assert left.exists(), "another process may be writing it"


def test_abandoned_temporary_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / bytes(16).hex() / f"{bytes(16).hex()}.1-1.tmp"
    left.parent.mkdir()
    left.write_bytes(b"half")
    monkeypatch.setattr(disk, "ABANDONED_S", -1.0)
    BlockStore(tmp_path, BUDGET)
    assert not left.exists()
