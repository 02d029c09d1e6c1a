"""From token ids to text, one token at a time, and never a character that may still change.

Two things can hold text back: a character whose bytes are split over tokens (``tokenizers``' decode stream waits for
the rest), and the beginning of what may become a stop string.
"""

from __future__ import annotations

from tokenizers.decoders import DecodeStream


class TextStream:
    """Feed ids, get text. ``stopped`` is True once a stop string is complete; the text ends before it."""

    def __init__(self, tokenizer, stop: tuple[str, ...] = ()):
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._ids: list[int] = []
        self._decoded = ""  # everything that the decode stream let go
        self._sent = 0  # characters of it that the caller has
        self.stopped = False

    def feed(self, token_id: int, check_stop: bool = True) -> str:
        """The text that became final. ``check_stop`` False (below min_tokens): stop strings ending here are text."""
        self._ids.append(token_id)
        old = len(self._decoded)
        self._decoded += self._step(token_id)
        hits = [self._decoded.find(s, max(0, old - len(s) + 1)) for s in self._stop if check_stop]  # ends after old
        hits = [at for at in hits if at >= 0]
        if hits:
            self.stopped = True
            self._decoded = self._decoded[: min(hits)]
        return self._send(len(self._decoded) - (0 if self.stopped else self._open_stop()))

    def finish(self) -> str:
        """The output has ended: let go of what was held back, incomplete characters too."""
        if not self.stopped:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
            if whole.startswith(self._decoded):
                self._decoded = whole
        return self._send(len(self._decoded))

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._backend, token_id) or ""
        except Exception:  # bytes that are no UTF-8 can take back text that was out already (vllm#17448): start afresh
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._backend, token_id) or ""

    def _send(self, upto: int) -> str:
        text = self._decoded[self._sent : upto]
        self._sent = max(self._sent, upto)
        return text

    def _open_stop(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(self._decoded) - self._sent), longest, -1):
                if self._decoded.endswith(stop[:n]):
                    longest = n
                    break
        return longest
