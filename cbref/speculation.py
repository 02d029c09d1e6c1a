"""Speculative decoding without a second model: guess the next tokens from what the request has written already.

A pass reads all weights to make one token, and could check several in hardly more time. So the scheduler lets guesses
ride along with a decode: the chunk becomes the last token and k guesses, the pass yields the model's own choice after
each of them, and guesses are kept up to the first that the model would not have made. The output is the model's own,
token for token; only the number of passes changes (Leviathan et al., 2023; guesses from the prompt: Saxena, 2023,
"prompt lookup decoding").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cbref.request import Request, Sampled


class NgramDrafter:
    """Looks for the request's last tokens earlier in its own text, and guesses that it goes on as it did there.

    length  most tokens of a guess
    ngram   so many last tokens have to be found again; if they are not, one fewer, down to ``shortest``
    """

    def __init__(self, length: int = 4, ngram: int = 3, shortest: int = 1):
        for name, value, low in (("length", length, 1), ("shortest", shortest, 1), ("ngram", ngram, shortest)):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least {low}")
        self.length, self.ngram, self.shortest = length, ngram, shortest

    def propose(self, request: Request, limit: int) -> tuple[int, ...]:
        """At most ``limit`` tokens that may follow; none where the text gives no hint."""
        tokens, limit = request.tokens(), min(limit, self.length)
        for n in range(min(self.ngram, len(tokens) - 1), self.shortest - 1, -1) if limit > 0 else ():
            tail = tokens[-n:]
            for start in range(len(tokens) - n - 1, -1, -1):  # the latest occurrence is the likeliest to repeat
                if tokens[start : start + n] == tail:
                    return tuple(tokens[start + n : start + n + limit])
        return ()


def verify(draft: Sequence[int], answers: Sequence[Sampled]) -> Sampled:
    """The first answer, followed by those that stand on a guess which was right. ``answers``: one more than guesses."""
    kept = 0
    while kept < len(draft) and answers[kept].token_id == draft[kept] and not answers[kept].error:
        kept += 1
    return replace(answers[0], following=tuple(answers[1 : kept + 1])) if kept else answers[0]


def can_speculate(request: Request) -> bool:
    """Guesses are checked against the likeliest token, so only a request that takes it as it is can have them."""
    p = request.params
    return p.temperature == 0 and p.logprobs is None and not p.reshapes
