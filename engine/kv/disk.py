"""KV blocks in files: found by key, bounded, least recently used first.

    <folder>/<group>/<name>          a block: checksum of its format, its key and its bytes; then its bytes
    <folder>/<group>/<name>.*.tmp    a block that is being written

The time of a file is that of its last use. Several processes may share a folder: a file appears under its
name when it is complete, any process may delete any file, and a missing file is a miss. Each process scans
the folder before it exceeds the budget, and after each sixteenth of the budget that it has written.
"""

import logging
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

logger = logging.getLogger(__name__)

FORMAT = 1  # raise it when the content of files changes
HEADER = struct.Struct("<I")  # checksum
SCANS = 16  # scans per budget of written bytes
MEASURED, MEASURED_BYTES = 8, 1 << 22  # to measure the disk: files, bytes per file
ABANDONED_S = 60.0  # age of temporary files that no process writes any more.


class Key(NamedTuple):
    """The identity of a block."""

    group: bytes  # 16 bytes: the model and the form of its KV
    name: bytes  # 16 bytes: the tokens

    def below(self, folder: Path) -> Path:
        return folder / self.group.hex() / self.name.hex()


class DiskCounters(NamedTuple):
    """Counters since the start."""

    read_bytes: int = 0
    written_bytes: int = 0
    dropped_bytes: int = 0  # deleted, or evicted from the caches before they were written
    num_hit_tokens: int = 0  # tokens whose KV came back


class _File(NamedTuple):
    used_ns: int
    size: int
    key: Key


class BlockStore:
    """Bytes by key, on disk. One thread reads and writes; any thread may call `has`.

    Args:
        folder: Created, private to this user.
        budget_bytes: Limit on the total size.

    Raises:
        OSError: The folder cannot be used.
    """

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self._folder = folder
        self._budget = budget_bytes
        self.is_writable = True
        self.read_bytes = self.written_bytes = self.dropped_bytes = 0
        self._known: set[Key] = set()
        self._num_bytes = 0  # in the folder, as far as known
        self._unscanned_bytes = 0  # written since the last scan
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._make_room(0)

    def has(self, key: Key) -> bool:
        """Return True if a file has been seen under this key; another process may have deleted it since."""
        return key in self._known

    def give_up(self) -> None:
        """Read and write nothing any more."""
        self.is_writable = False
        self._known = set()

    def bytes_per_s(self) -> float | None:
        """Measure the rate of reads from the disk, with some files; None: the folder is empty."""
        num_bytes, begun_s = 0, time.perf_counter()
        for key in list(islice(self._known, MEASURED)):
            with suppress(OSError), open(key.below(self._folder), "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                num_bytes += len(file.read(MEASURED_BYTES))
        return num_bytes / (time.perf_counter() - begun_s) or None

    def touch(self, key: Key, used_ns: int) -> None:
        with suppress(OSError):
            os.utime(key.below(self._folder), ns=(used_ns, used_ns))

    def write(self, key: Key, content: memoryview, used_ns: int) -> bool:
        """Save a block; return False if it is not saved. After an error, nothing is saved any more."""
        size = HEADER.size + content.nbytes
        if not self.is_writable or size > self._budget:
            return False
        path = key.below(self._folder)
        if path.exists():  # another process was faster
            self._known.add(key)
            self.touch(key, used_ns)
            return True
        if self._num_bytes + size > self._budget or self._unscanned_bytes > self._budget // SCANS:
            self._make_room(size)
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{id(self)}.tmp")
        header = HEADER.pack(_checksum(key, content))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(temporary, "wb", opener=partial(os.open, mode=0o600), buffering=0) as file:
                for part in (header, content):
                    _write_all(file.fileno(), part)
            os.utime(temporary, ns=(used_ns, used_ns))
            temporary.replace(path)
        except OSError as error:
            self.is_writable = False
            logger.warning("KV is not saved to disk any more: %s", error)
            with suppress(OSError):
                temporary.unlink()
            return False
        self._known.add(key)
        self._num_bytes += size
        self._unscanned_bytes += size
        self.written_bytes += size
        return True

    def read(self, key: Key, out: memoryview) -> bool:
        """Read a block into `out`, which has its size; return False if it is missing or unusable.

        An unusable file is deleted.
        """
        path = key.below(self._folder)
        try:
            with open(path, "rb", buffering=0) as file:
                header, done = file.read(HEADER.size), 0
                while done < out.nbytes and (count := file.readinto(out[done:])):
                    done += count
                is_whole = done == out.nbytes and not file.read(1)
        except OSError:
            self._known.discard(key)
            return False
        if not is_whole or header != HEADER.pack(_checksum(key, out)):
            logger.warning("dropped a file of saved KV, which is damaged or of another format: %s", path)
            self._delete(path)
            self._known.discard(key)
            return False
        self.read_bytes += HEADER.size + out.nbytes
        return True

    def _make_room(self, size: int) -> None:
        """Scan the folder, and delete the least recently used files if `size` bytes do not fit."""
        files = sorted(self._files())
        self._num_bytes = sum(file.size for file in files)
        self._unscanned_bytes = 0
        goal = self._budget - size
        if self._num_bytes > goal:
            goal = max(goal - self._budget // SCANS, 0)  # so that not every write scans
        files.reverse()
        while files and self._num_bytes > goal:
            file = files.pop()
            self._delete(file.key.below(self._folder))
            self._num_bytes -= file.size
        self._known = {file.key for file in files}

    def _files(self) -> Iterator[_File]:
        """Yield every block; delete abandoned temporary files."""
        for group in _entries(self._folder):
            for entry in _entries(group.path):
                try:
                    key = Key(bytes.fromhex(group.name), bytes.fromhex(entry.name.partition(".")[0]))
                    status = entry.stat(follow_symlinks=False)
                except (ValueError, OSError):  # not of this program, or deleted meanwhile
                    continue
                if not entry.name.endswith(".tmp"):
                    yield _File(status.st_mtime_ns, status.st_size, key)
                elif time.time() - status.st_ctime > ABANDONED_S:
                    self._delete(Path(entry.path))

    def _delete(self, path: Path) -> None:
        with suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self.dropped_bytes += size


def _entries(folder: str | Path) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _checksum(key: Key, content: memoryview) -> int:
    return crc32(content, crc32(b"%d" % FORMAT + key.group + key.name))


def _write_all(descriptor: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view.nbytes:
        view = view[os.write(descriptor, view) :]
