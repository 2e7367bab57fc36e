"""The blocks of one tier: free blocks, reference counts, and reuse by content."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from neo_desktop.engine.kv.layout import BLOCKS_PER_RUN
from neo_desktop.models.vision.prompt import ImageRows

BlockHash = bytes


def hash_block(parent: BlockHash, token_ids: Sequence[int], images: bytes = b"") -> BlockHash:
    """Return the hash of a full block: its tokens and, through `parent`, all tokens before them.

    `images` are the digests of images that start in the block.

    KV depends on every earlier token, so equal hashes mean equal KV. The hash is cryptographic, since a
    collision would answer a prompt with the KV of another user's prompt.
    """
    return blake2b(parent + array("I", token_ids).tobytes() + images, digest_size=16).digest()


def extend_hashes(
    hashes: list[BlockHash], token_ids: Sequence[int], block_size: int, images: ImageRows | None = None
) -> None:
    """Append the missing hashes of the full blocks in `token_ids`."""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent, end = hashes[-1] if hashes else b"", start + block_size
        digests = b"" if images is None else images.digests(start, end)
        hashes.append(hash_block(parent, token_ids[start:end], digests))


class BlockPool:
    """Reference-counted blocks `0 .. num_blocks - 1`.

    Every block is in exactly one of four states:

        used      reference count >= 1: in the block tables of that many requests
        cached    reference count 0, but its content is known by hash: reusable until evicted
        free      reference count 0, content worthless
        withheld  reference count 0, at or above the limit: no memory backs it

    Cached blocks count as free. The least recently used ones are evicted first, run by run.

    Sequential reads are fastest, so the blocks of a request should be contiguous. Therefore, while idle runs
    remain, an aligned run of blocks is left to the request that owns its first block:

        | a a a . | b b b b | b . . . | . . . . | c c . . |    a, b and c grow by the block after their last,
                                       an idle run             another request gets the first of an idle run

    Runs are not reserved: once no run is idle, any request may get any free block.

    Args:
        stays_low: Allocate the lowest blocks first, cached or not. Used blocks then stay contiguous at the
            front, and one copy moves them.
        run: Blocks of a run.
    """

    def __init__(self, num_blocks: int, *, stays_low: bool = False, run: int = BLOCKS_PER_RUN) -> None:
        self.num_blocks = num_blocks
        self.limit = num_blocks  # blocks at or above the limit are not allocated
        self.num_touched = 0  # blocks from this one on were not written since their memory was taken
        self._stays_low, self._run = stays_low, run
        self._free = set(range(num_blocks))
        self._num_references = [0] * num_blocks
        self.num_used_blocks = 0
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        # Runs without a used block: free ones first, then the least recently used.
        self._idle_runs = OrderedDict.fromkeys(range(-(-num_blocks // self._run)))
        self._block_of_hash: dict[BlockHash, int] = {}
        self._hash_of_block: dict[int, BlockHash] = {}
        # Announced content: hash -> the first block that will hold it.
        self._block_to_come: dict[BlockHash, int] = {}
        self._hash_to_come: dict[int, BlockHash] = {}
        self._arriving: set[int] = set()  # announced blocks that a copy fills, not a computation

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be allocated now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def allocate(self, after: int | None = None) -> int:
        """Allocate a block, whose content is undefined; `after` is its preferred predecessor in memory.

        Raises:
            MemoryError: No block is free; callers check `num_free_blocks` first.
        """
        block = self._choose(after)
        self._free.discard(block)
        self._idle_runs.pop(block // self._run, None)
        self._num_references[block] = 1
        self.num_used_blocks += 1
        self.num_touched = max(self.num_touched, block + 1)
        return block

    def set_limit(self, limit: int) -> bool:
        """Stop allocating blocks at or above `limit`; used ones stay with their owners.

        `limit` is `num_blocks`, or a smaller multiple of a run.

        Returns:
            True if no block at or above the limit is used.
        """
        assert limit == self.num_blocks or (0 <= limit < self.num_blocks and not limit % self._run)
        before, self.limit = self.limit, limit
        for block in range(limit, before):
            self._forget_announced(block)
            if block in self._cached:
                self._give_up(block)
            elif (block_hash := self._hash_of_block.pop(block, None)) is not None:
                del self._block_of_hash[block_hash]
            self._free.discard(block)
        self._free |= {block for block in range(before, limit) if not self.is_used(block)}
        for run in range(min(before, limit) // self._run, -(-max(before, limit) // self._run)):
            self._idle_runs.pop(run, None)
            if run * self._run < limit and not any(self.is_used(block) for block in self._blocks(run)):
                self._idle_runs[run] = None
        return not self.is_used_from(limit)

    def is_used_from(self, begin: int) -> bool:
        return any(self._num_references[begin:])

    def _choose(self, after: int | None) -> int:
        """Return a free block, and evict cached content if necessary."""
        if after is not None and (after + 1) % self._run and after + 1 in self._free:
            return after + 1
        if self._idle_runs:
            blocks = self._blocks(min(self._idle_runs) if self._stays_low else next(iter(self._idle_runs)))
            for block in blocks:
                if block in self._cached:
                    self._give_up(block)
            return blocks[0]
        if not self._free:
            if not self._cached:
                raise MemoryError("no free KV block")
            self._give_up(next(iter(self._cached)))
        if self._stays_low:
            block = min(self._free)
            self._free.discard(block)
            return block
        return self._free.pop()

    def _give_up(self, block: int) -> None:
        del self._cached[block]
        del self._block_of_hash[self._hash_of_block.pop(block)]
        self._free.add(block)

    def _blocks(self, run: int) -> range:
        """Return the blocks of a run; the last run may be shorter."""
        return range(run * self._run, min((run + 1) * self._run, self.num_blocks))

    def find(self, block_hash: BlockHash) -> int | None:
        return self._block_of_hash.get(block_hash)

    def hash_of(self, block: int) -> BlockHash | None:
        """Return the hash under which a block is found, or None."""
        return self._hash_of_block.get(block)

    def announce(self, block: int, block_hash: BlockHash) -> None:
        """Register the content that a used block will hold after its computation."""
        is_known = block_hash in self._block_to_come or block_hash in self._block_of_hash
        if block < self.limit and not is_known:
            self._block_to_come[block_hash] = block
            self._hash_to_come[block] = block_hash

    def expect(self, block: int, block_hash: BlockHash) -> None:
        """Register the content that a copy will write to a used block before the next iteration computes."""
        self.announce(block, block_hash)
        if block in self._hash_to_come:
            self._arriving.add(block)

    def find_arriving(self, block_hash: BlockHash) -> int | None:
        """Return the block that a copy will fill with this content before the next iteration computes."""
        block = self._block_to_come.get(block_hash)
        return block if block in self._arriving else None

    def is_coming(self, block_hash: BlockHash) -> bool:
        """Return True if a request is about to compute this content."""
        return block_hash in self._block_to_come

    def _forget_announced(self, block: int) -> None:
        if (block_hash := self._hash_to_come.pop(block, None)) is not None:
            del self._block_to_come[block_hash]
            self._arriving.discard(block)

    def is_used(self, block: int) -> bool:
        """Return True if a request refers to the block, so that sharing it consumes no free block."""
        return self._num_references[block] > 0

    def share(self, block: int) -> None:
        self._cached.pop(block, None)
        self._idle_runs.pop(block // self._run, None)
        self.num_used_blocks += not self._num_references[block]
        self._num_references[block] += 1

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Make the content of a used, full block findable; among equal blocks, the first one wins."""
        self._forget_announced(block)
        if block < self.limit and block_hash not in self._block_of_hash and block not in self._hash_of_block:
            self._block_of_hash[block_hash] = block
            self._hash_of_block[block] = block_hash

    def release(self, block: int) -> None:
        """Drop one reference; the last one makes the block cached or free."""
        if self._num_references[block] == 0:
            raise ValueError(f"block {block} was released more often than it was allocated")
        self._num_references[block] -= 1
        if self._num_references[block] > 0:
            return
        self.num_used_blocks -= 1
        self._forget_announced(block)
        if block >= self.limit:
            return
        if block in self._hash_of_block:
            self._cached[block] = None
        else:
            self._free.add(block)
        run = block // self._run
        begin = run * self._run
        if not any(self._num_references[begin : begin + self._run]):
            self._idle_runs[run] = None
            self._idle_runs.move_to_end(run, last=not self._free.issuperset(self._blocks(run)))
