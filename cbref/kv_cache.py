"""Who holds which block of the KV cache.

The cache is one array of ``num_blocks`` blocks of ``block_size`` tokens. A request owns a table of blocks; token ``i``
of the request lives in ``table[i // block_size]`` at offset ``i % block_size``, so a request needs no contiguous memory
(PagedAttention, Kwon et al., SOSP 2023). This module does the bookkeeping only: no tensors here.

    request   tokens   table                     pool   0   1   2   3   4   5   6   7
    "a"       37       [5, 0, 2]                        a   b   a   .   ab  a   ~   .
    "b"       20       [4, 1]

A block is in one of three states: held by one request or more ("ab" above: two requests share a prefix), *idle* ("~":
nobody holds it, but its content may be wanted again), or free. Full blocks can be published under their content, that
is their own tokens and everything before them, and be found again. Tokens are compared, not only hashes.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Sequence

from cbref.request import Request

ROOT = 0  # the node before the first block


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
        self._idle: OrderedDict[int, None] = OrderedDict()  # the one given up longest ago comes first, and goes first
        self._holders = [0] * num_blocks
        self._tables: dict[str, list[int]] = {}
        # A published block is a node of a tree; its key is (parent node, its tokens). Node numbers are never used
        # again, so that no child is found under a parent whose content has changed.
        self._nodes = itertools.count(ROOT + 1)
        self._published: dict[tuple[int, tuple[int, ...]], int] = {}  # key -> block
        self._labels: dict[int, tuple[tuple[int, tuple[int, ...]], int]] = {}  # block -> (key, node)
        self._tips: dict[str, tuple[int, int]] = {}  # request -> (node, blocks published) of its chain

    # ------------------------------------------------------------------ room

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out; idle ones lose their content then."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def idle(self) -> list[int]:
        """Blocks that nobody holds and whose content can be found again; the first is the next to be given up."""
        return list(self._idle)

    @property
    def published(self) -> dict[int, int]:
        """Blocks that can be found by content, with their nodes: same node, same content from the beginning on."""
        return {block: node for block, (_, node) in self._labels.items()}

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> list[int]:
        """The request's blocks in token order; empty for a request that holds none."""
        return self._tables.get(request_id, [])

    def room(self, request_id: str) -> int:
        """Tokens for which the request has blocks."""
        return len(self._tables.get(request_id, ())) * self.block_size

    def fits(self, request_id: str, num_tokens: int, prefix: Sequence[int] = ()) -> bool:
        """Whether the request's table can grow to ``num_tokens`` tokens, if it begins with the blocks ``prefix``."""
        missing = self.blocks_for(num_tokens) - len(self.table(request_id)) - len(prefix)
        return missing <= self.num_free - sum(block in self._idle for block in prefix)

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Extend the request's table until it holds ``num_tokens`` tokens."""
        missing = self.blocks_for(num_tokens) - len(self.table(request_id))
        if missing > self.num_free:
            raise MemoryError(
                f"request {request_id!r} needs {missing} more blocks, {self.num_free} of {self.num_blocks} are free"
            )
        if missing > 0:
            self._tables.setdefault(request_id, []).extend(self._take() for _ in range(missing))

    def release(self, request_id: str) -> None:
        """The request gives up all its blocks; nothing happens if it holds none."""
        self._tips.pop(request_id, None)
        for block in reversed(self._tables.pop(request_id, [])):  # the end of a prefix is worth less than its beginning
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._labels:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._unpublish(block)
        self._holders[block] = 1
        return block

    # ------------------------------------------------------------------ prefixes

    def find_prefix(self, tokens: Sequence[int]) -> list[int]:
        """The longest chain of published blocks that ``tokens`` begins with, short of its last token.

        At least one token is left to compute: the last one's logits are what the request has come for.
        """
        blocks, node, size = [], ROOT, self.block_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            block = self._published.get((node, tuple(tokens[start : start + size])))
            if block is None:
                break
            blocks.append(block)
            node = self._labels[block][1]
        return blocks

    def share(self, request_id: str, prefix: list[int]) -> None:
        """Begin the table of a request that holds nothing with published blocks."""
        if not prefix:
            return
        if self.table(request_id):
            raise ValueError(f"request {request_id!r} has a table already")
        for block in prefix:
            self._idle.pop(block, None)
            self._holders[block] += 1
        self._tables[request_id] = list(prefix)
        self._tips[request_id] = (self._labels[prefix[-1]][1], len(prefix))

    def publish(self, request: Request) -> None:
        """Make the request's full, computed blocks known by their content. What is known already is not kept twice."""
        size, table = self.block_size, self._tables[request.id]
        node, count = self._tips.get(request.id, (ROOT, 0))
        while (count + 1) * size <= request.num_computed:
            key = (node, tuple(request.tokens(count * size, (count + 1) * size)))
            block = self._published.get(key)
            if block is None:
                block = self._published[key] = table[count]
                self._labels[block] = (key, next(self._nodes))
            node, count = self._labels[block][1], count + 1
        self._tips[request.id] = (node, count)

    def forget(self, *request_ids: str) -> list[int]:
        """The requests' blocks are spoilt: nobody shall find them again. Returns those that nobody else holds."""
        held = Counter(block for request_id in request_ids for block in self.table(request_id))
        for block in held:
            self._unpublish(block)
        return [block for block, holders in held.items() if self._holders[block] == holders]

    def _unpublish(self, block: int) -> None:
        if block in self._labels:
            del self._published[self._labels.pop(block)[0]]

    # ------------------------------------------------------------------ audit

    def holders(self, block: int | None = None) -> list[str]:
        """Requests that hold this block, or any."""
        return [r for r, table in self._tables.items() if block is None or block in table]

    def num_holders(self, block: int) -> int:
        return self._holders[block]

    def audit(self) -> None:
        """Raise ``AssertionError`` unless every block is free, idle, or in as many tables as it has holders."""
        held = Counter(block for table in self._tables.values() for block in table)
        everything = sorted([*self._free, *self._idle, *held])
        assert everything == list(range(self.num_blocks)), f"blocks lost or in two states: {everything}"
        assert all(self._holders[b] == held[b] for b in range(self.num_blocks)), "holders and tables disagree"
        assert all(len(set(table)) == len(table) for table in self._tables.values()), "a block is twice in one table"
        assert set(self._idle) <= set(self._labels) and not set(self._free) & set(self._labels), "idle is not published"
        assert {key: b for b, (key, _) in self._labels.items()} == self._published, "keys and blocks disagree"
