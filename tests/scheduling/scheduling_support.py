"""A model in miniature that reads what it has written, and helpers that the scheduling tests share."""

from cbref.executors.simulated import SimulatedExecutor
from cbref.request import Sampled, SamplingParams

END, KINDS = 9, 8  # the end-of-sequence id, and how many answers there are to a context


def keys_of(tokens):
    """The key of each token, which stands for the token and everything before it."""
    keys, key = [], 0
    for token in tokens:
        key = hash((key, token))
        keys.append(key)
    return keys


def said(key, breaks=False):
    """The token after a context, or None: the model breaks there."""
    if breaks and key % 29 == 0:
        return None
    return END if key % KINDS == 0 else key % KINDS


def answer(prompt, params: SamplingParams, breaks=False):
    """Output and finish reason of one request that is alone in the world."""
    output, tokens = [], list(prompt)
    while len(output) < params.max_tokens:
        token = said(keys_of(tokens)[-1], breaks)
        if token is None:
            return output, "error"
        output.append(token)
        tokens.append(token)
        if token == END and not params.ignore_eos and len(output) >= params.min_tokens:
            return output, "stop"
    return output, "length"


class Reading(SimulatedExecutor):
    """Stores a key for each token in the token's place in the pool, and checks every key that it would have to read.

    So a place that was never written, or was written by somebody else, is found out at once; and an output depends on
    the whole context, as a real model's does. With ``breaks`` some contexts end in an error, which is cleaned up as
    ``ModelExecutor`` does it.
    """

    eos_token_ids = frozenset({END})

    def __init__(self, breaks=False, **options):
        super().__init__(**options)
        self.breaks = breaks
        self.places = {}  # (block, offset) -> key
        self.before = self.after = None  # called with a step's chunks before and after they are computed
        self.released = []

    def execute(self, chunks, pool):
        if self.before:
            self.before(chunks)
        assert len({c.request.id for c in chunks}) == len(chunks) > 0, "two chunks of one request, or no chunk"
        sampled = [self._compute(c, pool) for c in chunks]
        if self.after:
            self.after(chunks)
        broken = [c.request.id for c, token in zip(chunks, sampled, strict=True) if token and token.error]
        for block in pool.forget(*broken):
            for offset in range(pool.block_size):
                self.places.pop((block, offset), None)
        super().execute(chunks, pool)
        return sampled

    def _compute(self, chunk, pool):
        request, size, table = chunk.request, pool.block_size, pool.table(chunk.request.id)
        tokens = [*request.prompt, *request.output]
        assert chunk.start == request.num_computed < chunk.stop <= len(tokens), f"{chunk} starts or ends elsewhere"
        assert chunk.stop <= len(table) * size, "no place for the chunk's last token"
        for i, key in enumerate(keys_of(tokens[: chunk.stop])):
            place = (table[i // size], i % size)
            if i < chunk.start:
                assert self.places.get(place) == key, f"token {i} of {request!r} reads a foreign key"
            else:
                assert pool.num_holders(table[i // size]) == 1, f"token {i} of {request!r} goes into a shared block"
                self.places[place] = key
        if chunk.stop < len(tokens):
            return None
        token = said(key, self.breaks)
        return Sampled(0, error="broken") if token is None else Sampled(token)

    def release(self, request):
        self.released.append(request.id)


def finish(engine, most=10_000):
    """Run to the end; every step is audited."""
    for _ in range(most):
        if not engine.has_work:
            return
        engine.step()
        engine.audit()
    raise AssertionError(f"not done after {most} steps: {engine.scheduler.running} {engine.scheduler.waiting}")


def plans(engine):
    """What each step computed: ``[{request id: (start, stop)}]``."""
    return [{s.request_id: (s.start, s.stop) for s in step.shares} for step in engine.steps]


def lengths(engine):
    """The same as numbers of tokens: ``[{request id: tokens}]``."""
    return [{name: stop - start for name, (start, stop) in plan.items()} for plan in plans(engine)]
