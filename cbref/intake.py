"""What comes in is checked here, before it can do harm: prompts become token ids, misfits a ``ValueError``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral

from cbref.executors import Executor
from cbref.kv_cache import BlockPool
from cbref.request import Request, SamplingParams

Prompt = str | Sequence[int] | Sequence[dict]


def encode(prompt: Prompt, executor: Executor) -> Sequence[int]:
    """Token ids of a prompt: text, chat messages, or ids already."""
    if not hasattr(prompt, "__len__") or isinstance(prompt, dict):
        raise ValueError(f"prompt is {prompt!r}; it must be text, a list of chat messages, or a list of token ids")
    tokenizer = executor.tokenizer
    is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
    if (is_chat or isinstance(prompt, str)) and tokenizer is None:
        raise ValueError(f"prompt is {prompt!r}, but this engine has no tokenizer; pass token ids")
    if is_chat:
        prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    elif isinstance(prompt, str):
        prompt = tokenizer(prompt)["input_ids"]
    if len(prompt) == 0:
        raise ValueError("prompt is empty; it must have at least one token, for the model to predict from")
    limit = "" if executor.vocab_size is None else f" below the vocabulary's size, {executor.vocab_size}"
    # a range, the made-up prompt of a simulation, stays one: no time and no memory to spend on its middle
    for token in (prompt[0], prompt[-1]) if isinstance(prompt, range) else prompt:
        whole = isinstance(token, Integral) and not isinstance(token, bool)
        if not whole or token < 0 or (executor.vocab_size is not None and token >= executor.vocab_size):
            raise ValueError(f"prompt holds {token!r}; token ids are integers of at least 0{limit}")
    return prompt if isinstance(prompt, range) else [int(token) for token in prompt]


def check_room(prompt_len: int, params: SamplingParams, executor: Executor, pool: BlockPool) -> None:
    """Refuse what could never be served: longer than the model's context, or than the whole KV pool."""
    total = prompt_len + params.max_tokens
    asked = f"prompt of {prompt_len} tokens + max_tokens {params.max_tokens} = {total}"
    if total > executor.max_model_len:
        raise ValueError(
            f"{asked}, over the model's context of {executor.max_model_len}; shorten the prompt or lower max_tokens"
        )
    need = pool.blocks_for(total - 1)  # the last token is returned, not stored
    if need > pool.num_blocks:
        raise ValueError(
            f"{asked}, {need} KV blocks of {pool.block_size} tokens; the whole pool has {pool.num_blocks}: "
            "shorten the prompt, lower max_tokens or raise num_blocks"
        )


def add_all(engine, prompts: Iterable[Prompt], params) -> list[Request]:
    """Queue every prompt, or none: the ``ValueError`` names the one that is refused."""
    requests = []
    for i, (prompt, each) in enumerate(pair(prompts, params)):
        try:
            requests.append(engine.add_request(prompt, each))
        except Exception as error:
            for request in requests:
                engine.abort(request.id)
            if isinstance(error, ValueError):
                raise ValueError(f"prompt {i}: {error}") from None
            raise
    return requests


def pair(
    prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Prompts with their parameters: one for all, or one each."""
    if isinstance(prompts, str):
        raise ValueError(f"prompts is one string, {prompts!r}; pass a list of prompts")
    prompts = list(prompts)
    each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise ValueError(f"{len(each)} params for {len(prompts)} prompts; pass one for all, or one each")
    return list(zip(prompts, each, strict=True))
