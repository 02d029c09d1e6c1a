"""From sampled tokens to answers: a token is recorded, turned into text, and may be the last."""

from __future__ import annotations

from cbref.metrics import RequestMetrics
from cbref.request import Chunk, Completion, Request, Sampled, Status, TokenEvent


def advance(
    chunk: Chunk, sampled: Sampled | None, stream, eos_token_ids: frozenset[int], now: float
) -> list[TokenEvent]:
    """A chunk is computed: note how far, and take its token and those that came with guesses, until one is the last."""
    request, events = chunk.request, []
    request.num_computed = chunk.stop
    for token in (sampled, *sampled.following) if sampled and not request.done else ():
        event = take(request, token, stream, eos_token_ids, now)
        events += [event] if event else []
        if request.done:
            break
        request.num_computed = request.num_tokens - 1  # a guess that was kept is computed already
    return events


def take(request: Request, sampled: Sampled, stream, eos_token_ids: frozenset[int], now: float) -> TokenEvent | None:
    """Append the token and decide whether the output ends with it. None if there is no token but an error.

    ``stream`` is the request's ``TextStream``, or None for an engine without a tokenizer.
    """
    if sampled.error:
        request.finish_reason, request.error = "error", sampled.error
        return None
    if request.status is Status.PREFILL:
        request.move(Status.DECODE, now)
    request.output.append(sampled.token_id)
    request.token_times.append(now)
    if sampled.logprob:
        request.logprobs.append(sampled.logprob)

    params = request.params
    made = len(request.output)
    enough = made >= params.min_tokens
    text = stream.feed(sampled.token_id, check_stop=enough) if stream else ""
    ends = sampled.token_id in params.stop_token_ids
    ends = ends or (sampled.token_id in eos_token_ids and not params.ignore_eos)
    if enough and (ends or (stream and stream.stopped)):
        request.finish_reason = "stop"
    elif made >= params.max_tokens:
        request.finish_reason = "length"
    if stream and request.done:
        text += stream.finish()
    request.text += text
    return TokenEvent(request.id, made - 1, sampled.token_id, text, request.finish_reason)


def complete(request: Request) -> Completion:
    """The answer to a finished request."""
    if request.status is not Status.FINISHED:
        raise ValueError(f"{request!r} is not finished; call step() until it is, or abort() it")
    return Completion(
        request_id=request.id,
        prompt_ids=list(request.prompt),
        token_ids=list(request.output),
        text=request.text,
        finish_reason=request.finish_reason,
        metrics=RequestMetrics.of(request),
        logprobs=request.logprobs,
        error=request.error,
    )
