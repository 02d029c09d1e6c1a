"""What a user asks for, how far it has come, and what the user gets back.

A request carries one counter, ``num_computed``, that chases ``num_tokens`` (prompt + output). There is no other notion
of phase: a decode is a prefill of length one (the idea is vLLM V1's: no prefill phase, no decode phase).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real


class Status(Enum):
    """Where a request stands. The source document's four names; legal moves are in ``_MOVES``."""

    WAITING = "waiting"  # in the queue, holds no KV blocks
    PREFILL = "prefill"  # admitted, no output token yet
    DECODE = "decode"  # at least one output token
    FINISHED = "finished"  # has left the batch, holds no KV blocks


_MOVES = {
    Status.WAITING: {Status.PREFILL, Status.FINISHED},
    Status.PREFILL: {Status.DECODE, Status.WAITING, Status.FINISHED},
    Status.DECODE: {Status.WAITING, Status.FINISHED},
    Status.FINISHED: set(),
}

# (name, low, what is behind the bound, or what turns it off)
_COUNTS = (
    ("max_tokens", 1, "the first token comes out of the prompt's own pass"),
    ("min_tokens", 0, "0 sets no minimum"),
    ("top_k", 0, "0 keeps every token"),
)

# (name, low, high, low itself allowed, what turns it off or what is usual)
_RANGES = (
    ("temperature", 0.0, math.inf, True, "0 is greedy"),
    ("top_p", 0.0, 1.0, False, "1 keeps every token"),
    ("min_p", 0.0, 1.0, True, "0 keeps every token"),
    ("repetition_penalty", 0.0, math.inf, False, "1 changes nothing"),
    ("presence_penalty", -2.0, 2.0, True, "0 changes nothing"),
    ("frequency_penalty", -2.0, 2.0, True, "0 changes nothing"),
)


def _integer(name: str, value, low: int, remedy: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {low} ({remedy})")
    return int(value)


def _tuple(name: str, value) -> tuple:
    if not isinstance(value, Iterable):
        raise ValueError(f"{name} is {value!r}; it must be a list, empty for none")
    return tuple(value)


@dataclass(frozen=True)
class SamplingParams:
    """How one request turns logits into tokens. Checked when it is made; a bad value is a ``ValueError``.

    max_tokens, min_tokens  bounds of the output, in tokens; the end-of-sequence token counts
    temperature             0 (the default) is greedy; otherwise logits are divided by it
    top_k, top_p, min_p     keep the k likeliest; the smallest set with mass p; those with at least p of the best's
                            probability. 0, 1 and 0 keep all
    repetition_penalty      divides (multiplies, if negative) logits of tokens in prompt or output
    presence_penalty        subtracted from the logits of every token already in the output
    frequency_penalty       the same, times the number of occurrences
    seed                    same seed, same prompt: same output, whatever else is in the batch. None: a fresh seed
    stop                    strings that end the output; the text stops before them
    stop_token_ids          ids that end the output, besides the model's own end-of-sequence ids
    ignore_eos              go on past the model's end-of-sequence ids (benchmarks)
    logprobs                None, or how many likeliest alternatives to report beside the chosen token's log-probability
                            (of the model's own distribution, before any of the above)
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        for name, low, hint in _COUNTS:  # stored as plain int and float: transformers' processors refuse others
            object.__setattr__(self, name, _integer(name, getattr(self, name), low, hint))
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, above max_tokens, {self.max_tokens}; lower it or raise max_tokens"
            )
        for name, low, high, closed, hint in _RANGES:
            value = getattr(self, name)
            inside = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
            if not inside or not (low <= value <= high if closed else low < value <= high):
                bound = f"{'at least' if closed else 'above'} {low:g}" + (
                    f" and at most {high:g}" if high < math.inf else ""
                )
                raise ValueError(f"{name} is {value!r}; it must be a finite number, {bound} ({hint})")
            object.__setattr__(self, name, float(value))
        if self.seed is not None:
            object.__setattr__(self, "seed", _integer("seed", self.seed, 0, "None draws one"))
            if self.seed >= 2**63:
                raise ValueError(f"seed is {self.seed}; it must be below 2**63")
        if self.logprobs is not None:
            object.__setattr__(
                self,
                "logprobs",
                _integer("logprobs", self.logprobs, 0, "None reports none, 0 the chosen token's alone"),
            )
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        if not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop is {self.stop!r}; it must be a non-empty string or a list of them")
        object.__setattr__(self, "stop", stop)
        ids = _tuple("stop_token_ids", self.stop_token_ids)
        ids = tuple(_integer("a stop token id", i, 0, "ids of the model's vocabulary") for i in ids)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def reshapes(self) -> bool:
        """Whether anything but temperature and cuts changes the model's logits before a token is chosen."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(penalties or self.min_tokens)


@dataclass(eq=False)
class Request:
    """One prompt on its way to an output, both as token ids. Times are seconds of the engine's clock."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    arrival: float = 0.0
    priority: int = 0
    seed: int = 0  # params.seed, or the one that the engine drew

    output: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_computed: int = 0  # tokens whose keys and values are in the cache
    status: Status = Status.WAITING
    num_cached: int = 0  # of these, how many the prefix cache had at the last admission
    preemptions: int = 0
    slot: int | None = None  # lane of the batch, for pictures; None while waiting
    finish_reason: str | None = None  # set with the last token; a static batch may keep the request longer
    error: str | None = None

    admitted: float | None = None  # first admission
    finished: float | None = None  # when it left the batch, that is when its answer went back
    token_times: array = field(default_factory=lambda: array("d"))

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def missing(self) -> int:
        """Tokens that are still to be computed before the next one can be sampled."""
        return len(self.prompt) + len(self.output) - self.num_computed

    def tokens(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Token ids ``start:stop`` of prompt and output."""
        cut, stop = len(self.prompt), self.num_tokens if stop is None else stop
        return [*self.prompt[start:stop], *self.output[max(start - cut, 0) : max(stop - cut, 0)]]

    @property
    def max_len(self) -> int:
        """Most tokens whose keys and values are ever stored: the last token is returned, not read again."""
        return len(self.prompt) + self.params.max_tokens - 1

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def move(self, status: Status, now: float) -> None:
        """Change status and stamp the time; an illegal move is a bug in a scheduler and raises ``RuntimeError``."""
        if status not in _MOVES[self.status]:
            raise RuntimeError(f"request {self.id!r} cannot go from {self.status.value} to {status.value}")
        self.status = status
        if status is Status.PREFILL and self.admitted is None:
            self.admitted = now
        if status is Status.FINISHED:
            self.finished = now

    def __repr__(self) -> str:
        progress = f"{self.num_computed}/{self.num_tokens} computed, {len(self.output)} out"
        return f"Request({self.id!r}, {self.status.value}, {progress})"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start:stop`` of one request, to be computed in one step. It yields a token when it reaches the end.

    ``draft``: guessed tokens behind the end, which ride along to be checked (speculative decoding).
    """

    request: Request
    start: int
    stop: int
    draft: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.stop - self.start + len(self.draft)

    @property
    def end(self) -> int:
        """The position behind the last token that is computed, guesses included."""
        return self.stop + len(self.draft)

    @property
    def yields_token(self) -> bool:
        return self.stop == self.request.num_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural) of a chosen token, and of the likeliest ones as ``{token id: logprob}``."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an executor returns for a chunk that yields a token."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None  # the request cannot go on; its neighbours can
    following: tuple[Sampled, ...] = ()  # what the kept guesses of a draft brought besides


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of one request, as ``Engine.step`` and ``Engine.stream`` report it."""

    request_id: str
    index: int  # 0 is the first output token
    token_id: int
    text: str  # text that became final with this token; "" while a character or a stop string may still be open
    finish_reason: str | None


@dataclass(frozen=True)
class Completion:
    """A finished request: ``finish_reason`` is "stop", "length", "abort" or "error" (then ``error`` says why)."""

    request_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    metrics: object  # cbref.metrics.RequestMetrics
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None
