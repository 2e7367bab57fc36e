"""The blocks of one tier: which are free, which are used by how many, which can be reused by content."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from neo_desktop.engine.kv.layout import BLOCKS_PER_RUN

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

    Every block is in exactly one of four states:

        used      reference count >= 1: in the block tables of that many requests
        cached    reference count 0, but its content is known by hash: reusable until somebody needs the room
        free      reference count 0, content worthless
        withheld  reference count 0, at the limit or above it: there is no memory behind it

    Cached blocks count as free. Those unused for longest are given up first, run by run.

    Memory is read fastest in order, so the blocks of a request should follow each other. Therefore aligned
    runs of BLOCKS_PER_RUN blocks are left to the request with their first block, while there are idle ones:

        | a a a . | b b b b | b . . . | . . . . | c c . . |    a, b and c grow by the block after their last,
                                       an idle run             another request gets the first of an idle run

    Nothing is reserved: once no run is idle, any request may get any free block.

    Args:
        stays_low: whether the lowest blocks are given away first, cached or not: what is used lies together
            at the front, and is copied in one piece.
    """

    def __init__(self, num_blocks: int, *, stays_low: bool = False) -> None:
        self.num_blocks = num_blocks
        self.limit = num_blocks  # blocks from here on are not given away
        self.num_touched = 0  # all from here on are as they were when the memory was taken, or opened again
        self._withheld: set[int] = set()
        self._stays_low = stays_low
        self._free = set(range(num_blocks))
        self._num_references = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        # Runs without a used block: free ones, then least recently used first.
        self._idle_runs = OrderedDict.fromkeys(range(-(-num_blocks // BLOCKS_PER_RUN)))
        self._block_of_hash: dict[BlockHash, int] = {}
        self._hash_of_block: dict[int, BlockHash] = {}
        # Content that is still to be computed: into which block it is computed first.
        self._block_to_come: dict[BlockHash, int] = {}
        self._hash_to_come: dict[int, BlockHash] = {}
        self._arriving: set[int] = set()  # those of them that are copied, not computed

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests refer to."""
        return self.num_blocks - self.num_free_blocks - len(self._withheld)

    @property
    def num_cached_blocks(self) -> int:
        """Unused blocks whose content can still be reused."""
        return len(self._cached)

    def allocate(self, after: int | None = None) -> int:
        """Take a block whose content is worthless.

        Args:
            after: the block that the new one should follow in memory, if it can.

        Raises:
            MemoryError: no block is free; callers check `num_free_blocks` first.
        """
        block = self._choose(after)
        self._free.discard(block)
        self._idle_runs.pop(block // BLOCKS_PER_RUN, None)
        self._num_references[block] = 1
        self.num_touched = max(self.num_touched, block + 1)
        return block

    def set_limit(self, limit: int) -> bool:
        """Give away no block from this one on; used ones stay with their owners.

        Args:
            limit: at most `num_blocks`; a multiple of BLOCKS_PER_RUN, or `num_blocks`.

        Returns:
            Whether no block from there on is used.
        """
        assert limit == self.num_blocks or (0 <= limit < self.num_blocks and not limit % BLOCKS_PER_RUN)
        before, self.limit = self.limit, limit
        for block in range(limit, before):
            self._forget_announced(block)
            if block in self._cached:
                self._give_up(block)
            elif (block_hash := self._hash_of_block.pop(block, None)) is not None:
                del self._block_of_hash[block_hash]
            if block in self._free:
                self._free.discard(block)
                self._withheld.add(block)
        opened = {block for block in range(before, limit) if block in self._withheld}
        self._withheld -= opened
        self._free |= opened
        for run in range(min(before, limit) // BLOCKS_PER_RUN, -(-max(before, limit) // BLOCKS_PER_RUN)):
            self._idle_runs.pop(run, None)
            if run * BLOCKS_PER_RUN < limit and not any(self.is_used(block) for block in self._blocks(run)):
                self._idle_runs[run] = None
        return not self.is_used_from(limit)

    def is_used_from(self, begin: int) -> bool:
        """Whether a block from this one on is used."""
        return any(self._num_references[begin:])

    def _choose(self, after: int | None) -> int:
        """Return a free block; give up cached content for it if need be."""
        if after is not None and (after + 1) % BLOCKS_PER_RUN and after + 1 in self._free:
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
        """Make a cached block free."""
        del self._cached[block]
        del self._block_of_hash[self._hash_of_block.pop(block)]
        self._free.add(block)

    def _blocks(self, run: int) -> range:
        """The blocks of a run; the last run may be shorter."""
        return range(run * BLOCKS_PER_RUN, min((run + 1) * BLOCKS_PER_RUN, self.num_blocks))

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the block that holds this content, if any does."""
        return self._block_of_hash.get(block_hash)

    def announce(self, block: int, block_hash: BlockHash) -> None:
        """Say what a used block will hold once that is computed."""
        is_known = block_hash in self._block_to_come or block_hash in self._block_of_hash
        if block < self.limit and not is_known:
            self._block_to_come[block_hash] = block
            self._hash_to_come[block] = block_hash

    def expect(self, block: int, block_hash: BlockHash) -> None:
        """Say what a used block will hold before the next iteration computes anything."""
        self.announce(block, block_hash)
        if block in self._hash_to_come:
            self._arriving.add(block)

    def find_arriving(self, block_hash: BlockHash) -> int | None:
        """Return the block that will hold this content before the next iteration computes anything."""
        block = self._block_to_come.get(block_hash)
        return block if block in self._arriving else None

    def is_coming(self, block_hash: BlockHash) -> bool:
        """Whether somebody is about to compute this content."""
        return block_hash in self._block_to_come

    def _forget_announced(self, block: int) -> None:
        if (block_hash := self._hash_to_come.pop(block, None)) is not None:
            del self._block_to_come[block_hash]
            self._arriving.discard(block)

    def is_used(self, block: int) -> bool:
        """Whether a request refers to the block, so that sharing it takes no free block away."""
        return self._num_references[block] > 0

    def share(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        self._cached.pop(block, None)
        self._idle_runs.pop(block // BLOCKS_PER_RUN, None)
        self._num_references[block] += 1

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Make the content of a used, full block findable; the first block with a content keeps the name."""
        self._forget_announced(block)
        if block < self.limit and block_hash not in self._block_of_hash and block not in self._hash_of_block:
            self._block_of_hash[block_hash] = block
            self._hash_of_block[block] = block_hash

    def release(self, block: int) -> None:
        """Drop one reference; the last one makes the block cached or free."""
        if self._num_references[block] == 0:
            raise ValueError(f"block {block} is released more often than it was taken")
        self._num_references[block] -= 1
        if self._num_references[block] > 0:
            return
        self._forget_announced(block)
        if block >= self.limit:
            self._withheld.add(block)
            return
        if block in self._hash_of_block:
            self._cached[block] = None
        else:
            self._free.add(block)
        run = block // BLOCKS_PER_RUN
        begin = run * BLOCKS_PER_RUN
        if not any(self._num_references[begin : begin + BLOCKS_PER_RUN]):
            self._idle_runs[run] = None
            self._idle_runs.move_to_end(run, last=not self._free.issuperset(self._blocks(run)))

    def check(self, num_owners: Sequence[int]) -> None:
        """Check that no block is lost and none is owned twice.

        Args:
            num_owners: `block -> how many block tables hold it`, counted independently.

        Raises:
            AssertionError: an invariant is broken.
        """
        assert list(num_owners) == self._num_references, "reference counts differ from block tables"
        free, cached = self._free, set(self._cached)
        used = {block for block, count in enumerate(self._num_references) if count}
        states = free, cached, used, self._withheld
        assert sum(map(len, states)) == self.num_blocks, "a block is lost or in two states"
        assert set().union(*states) == set(range(self.num_blocks)), "a block is lost or in two states"
        assert min(self._withheld, default=self.limit) >= self.limit, "a block is withheld that may be used"
        assert max(free | cached, default=-1) < self.limit, "a block would be given away that is withheld"
        assert max(self._hash_of_block, default=-1) < self.limit, "a withheld block can be found"
        assert {h: b for b, h in self._hash_of_block.items()} == self._block_of_hash, "hash maps differ"
        assert cached <= self._hash_of_block.keys(), "a cached block has no hash"
        assert not free & self._hash_of_block.keys(), "a free block has a hash"
        assert {h: b for b, h in self._hash_to_come.items()} == self._block_to_come, "announcements differ"
        assert self._hash_to_come.keys() >= self._arriving, "nobody knows what arrives"
        assert used >= self._hash_to_come.keys(), "nobody computes what was announced"
        runs = range(-(-self.limit // BLOCKS_PER_RUN))
        idle = {run for run in runs if used.isdisjoint(self._blocks(run))}
        assert idle == self._idle_runs.keys(), "runs without a used block differ from the idle ones"
