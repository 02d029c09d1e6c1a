"""From logits to tokens, each request by its own rules.

Randomness depends on nothing but a request's seed and the position of the token in its output. So neighbours, batch
sizes, policies and preemption cannot change what a seed yields.
"""

from __future__ import annotations

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cbref.request import Request, Sampled, SamplingParams, TokenLogprob


class OccurrencePenalty(LogitsProcessor):
    """Presence and frequency penalties over the output (OpenAI's definition); transformers has no such processor."""

    def __init__(self, prompt_length: int, presence: float, frequency: float):
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids, scores):
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids[:, self.prompt_length :], torch.ones_like(scores))
        return scores - self.presence * (counts > 0) - self.frequency * counts


class Sampler:
    """Turns a step's logits into tokens. Keeps each request's processors until ``release``."""

    def __init__(self, eos_token_ids: frozenset[int], device):
        self._eos = eos_token_ids
        self._device = torch.device(device)
        self._processors: dict[str, LogitsProcessorList] = {}
        self._generator = torch.Generator(device)

    def __call__(self, requests: list[Request], logits: torch.Tensor) -> list[Sampled]:
        """``logits`` [requests, vocabulary], float32, in the order of ``requests``."""
        sound = torch.isfinite(logits).all(-1)
        logits = logits.masked_fill(~sound[:, None], 0.0)  # a broken row must not break the draw of the others
        tokens = logits.argmax(-1)
        raw = {}
        for i, request in enumerate(requests):
            if request.params.logprobs is not None:
                raw[i] = logits[i].log_softmax(-1)
            if not _is_plain_greedy(request.params):
                tokens[i] = self._choose(request, logits[i : i + 1])
        # Here the host waits for the device, and again only for requests that want log probabilities.
        tokens, sound = torch.stack([tokens, sound.to(tokens.dtype)]).tolist()
        return [
            Sampled(
                token,
                _logprobs(raw[i], token, r.params.logprobs) if i in raw and ok else None,
                None if ok else "the model's logits are not finite",
            )
            for i, (r, token, ok) in enumerate(zip(requests, tokens, sound, strict=True))
        ]

    def release(self, request: Request) -> None:
        self._processors.pop(request.id, None)

    def _choose(self, request: Request, scores: torch.Tensor) -> torch.Tensor:
        if request.id not in self._processors:
            self._processors[request.id] = self._make_processors(request)
        ids = torch.tensor([[*request.prompt, *request.output]], pin_memory=self._device.type == "cuda")
        ids = ids.to(self._device, non_blocking=True)  # from pinned memory, so that the host does not wait
        scores = self._processors[request.id](ids, scores).nan_to_num(-torch.inf, posinf=torch.finfo(scores.dtype).max)
        if _is_greedy(request.params):
            return scores.argmax()
        # Each token has its own generator, seeded from (seed, position); the odd constant spreads close positions.
        self._generator.manual_seed((request.seed + len(request.output) * 0x9E3779B97F4A7C15) % 2**63)
        return torch.multinomial(scores[0].softmax(-1), 1, generator=self._generator)[0]

    def _make_processors(self, request: Request) -> LogitsProcessorList:
        p, prompt_length = request.params, len(request.prompt)
        chain = LogitsProcessorList()
        if p.repetition_penalty != 1:
            chain.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
        if p.presence_penalty or p.frequency_penalty:
            chain.append(OccurrencePenalty(prompt_length, p.presence_penalty, p.frequency_penalty))
        ends = sorted({*p.stop_token_ids, *(() if p.ignore_eos else self._eos)})
        if p.min_tokens and ends:
            chain.append(MinNewTokensLengthLogitsProcessor(prompt_length, p.min_tokens, ends, device=self._device))
        if p.temperature != 1 and not _is_greedy(p):
            chain.append(TemperatureLogitsWarper(float(p.temperature)))
        if p.top_k:
            chain.append(TopKLogitsWarper(p.top_k))
        if p.top_p < 1:
            chain.append(TopPLogitsWarper(float(p.top_p)))
        if p.min_p:
            chain.append(MinPLogitsWarper(float(p.min_p)))
        return chain


def _is_greedy(p: SamplingParams) -> bool:
    return p.temperature < 1e-5  # dividing by less overflows, and the likeliest token has all the mass anyway


def _is_plain_greedy(p: SamplingParams) -> bool:
    return _is_greedy(p) and not p.reshapes


def _logprobs(row: torch.Tensor, token: int, top: int) -> TokenLogprob:
    best = row.topk(min(top, len(row)))
    return TokenLogprob(token, row[token].item(), dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
