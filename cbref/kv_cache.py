"""Who holds which block of the KV cache.

The cache is one array of ``num_blocks`` blocks of ``block_size`` tokens. A request owns a table of blocks; token ``i``
of the request lives in ``table[i // block_size]`` at offset ``i % block_size``, so a request needs no contiguous memory
(PagedAttention, Kwon et al., SOSP 2023). This module does the bookkeeping only: no tensors here.

    request   tokens   table                     pool   0   1   2   3   4   5   6   7
    "a"       37       [5, 0, 2]                        a   b   a   .   b   a   .   .      free: 3 6 7
    "b"       20       [1, 4]
"""

from __future__ import annotations


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens, handed out and taken back.

    Errors: asking for more than is free raises ``MemoryError`` and changes nothing. Ask ``fits`` first.
    """

    def __init__(self, num_blocks: int, block_size: int):
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm, take it first
        self._tables: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> list[int]:
        """The request's blocks in token order; empty for a request that holds none."""
        return self._tables.get(request_id, [])

    def fits(self, request_id: str, num_tokens: int) -> bool:
        """Whether the request's table can grow to hold ``num_tokens`` tokens."""
        return self.blocks_for(num_tokens) - len(self.table(request_id)) <= self.num_free

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Extend the request's table until it holds ``num_tokens`` tokens."""
        missing = self.blocks_for(num_tokens) - len(self.table(request_id))
        if missing > self.num_free:
            raise MemoryError(
                f"request {request_id!r} needs {missing} more blocks, {self.num_free} of {self.num_blocks} are free"
            )
        if missing > 0:
            table = self._tables.setdefault(request_id, [])
            table.extend(self._free.pop() for _ in range(missing))

    def release(self, request_id: str) -> None:
        """Take back all blocks of the request; nothing happens if it holds none."""
        self._free.extend(reversed(self._tables.pop(request_id, [])))

    def holders(self) -> list[str]:
        return list(self._tables)

    def audit(self) -> None:
        """Raise ``AssertionError`` unless every block is either free or in exactly one table."""
        held = [block for table in self._tables.values() for block in table]
        everything = sorted(self._free + held)
        if everything != list(range(self.num_blocks)):
            lost = set(range(self.num_blocks)) - set(everything)
            twice = {b for b in everything if everything.count(b) > 1}
            raise AssertionError(f"blocks are not conserved: lost {sorted(lost)}, held twice {sorted(twice)}")
