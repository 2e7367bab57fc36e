"""The blocks of one place: which are free, which are used by how many, which can be reused by content."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

BlockHash = bytes


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the hash of a full block: its tokens and, through `parent`, all tokens before them.

    KV depends on every earlier token, so equal hashes mean equal KV. A cryptographic hash, since a
    collision would give one user's answer to another's prompt.
    """
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()


def extend_hashes(hashes: list[BlockHash], token_ids: Sequence[int], block_size: int) -> None:
    """Append the hashes of those full blocks of `token_ids` that are not there yet."""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else b""
        hashes.append(hash_block(parent, token_ids[start : start + block_size]))


class BlockPool:
    """Reference-counted blocks `0 .. num_blocks - 1`.

    Every block is in exactly one of three states:

        used      reference count >= 1: in the block tables of that many requests
        cached    reference count 0, but its content is known by hash: reusable until somebody needs the room
        free      reference count 0, content worthless

    Cached blocks count as free for whoever asks; the one unused for longest is given up first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_references = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of_hash: dict[BlockHash, int] = {}
        self._hash_of_block: dict[int, BlockHash] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        """Unused blocks whose content can still be reused."""
        return len(self._cached)

    def allocate(self) -> int:
        """Take a block whose content is worthless.

        Raises:
            MemoryError: no block is free; callers check `num_free_blocks` first.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            del self._block_of_hash[self._hash_of_block.pop(block)]
        else:
            raise MemoryError("no free KV block")
        self._num_references[block] = 1
        return block

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the block that holds this content, if any does."""
        return self._block_of_hash.get(block_hash)

    def is_used(self, block: int) -> bool:
        """Whether a request refers to the block, so that sharing it takes no free block away."""
        return self._num_references[block] > 0

    def share(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        self._cached.pop(block, None)
        self._num_references[block] += 1

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Make the content of a used, full block findable; the first block with a content keeps the name."""
        if block_hash not in self._block_of_hash and block not in self._hash_of_block:
            self._block_of_hash[block_hash] = block
            self._hash_of_block[block] = block_hash

    def release(self, block: int) -> None:
        """Drop one reference; the last one makes the block cached or free."""
        if self._num_references[block] == 0:
            raise ValueError(f"block {block} is released more often than it was taken")
        self._num_references[block] -= 1
        if self._num_references[block] == 0:
            if block in self._hash_of_block:
                self._cached[block] = None
            else:
                self._free.append(block)

    def check(self, num_owners: Sequence[int]) -> None:
        """Check that no block is lost and none is owned twice.

        Args:
            num_owners: `block -> how many block tables hold it`, counted independently.

        Raises:
            AssertionError: an invariant is broken.
        """
        assert list(num_owners) == self._num_references, "reference counts differ from block tables"
        free, cached = set(self._free), set(self._cached)
        used = {block for block, count in enumerate(self._num_references) if count}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(cached) + len(used) == self.num_blocks, "a block is lost or in two states"
        assert free | cached | used == set(range(self.num_blocks)), "a block is lost or in two states"
        assert {h: b for b, h in self._hash_of_block.items()} == self._block_of_hash, "hash maps differ"
        assert cached <= self._hash_of_block.keys(), "a cached block has no hash"
        assert not free & self._hash_of_block.keys(), "a free block has a hash"
