"""The whole engine on a model of random weights: with and without Triton and CUDA graphs, and against transformers."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from cbref import Engine, SamplingParams
from cbref.attention import NAME
from gpu.machine import NO_GPU, Machine
from gpu.model import load_of, make_executor, model_of
from gpu.parts import Row, attempt, check, figure, goal, not_run

PAGE_SIZE = 256  # transformers' default
TARGET = 3.0  # times generate_batch

# ---- ways to serve: called with prompts and a number of tokens, they return the outputs; ``close`` ends them


class Cbref:
    def __init__(self, machine: Machine, **options):
        self.executor = make_executor(machine, **options)

    def __call__(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        engine = Engine(self.executor, "orca", max_num_seqs=len(prompts), record=False)
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        return [done.token_ids for done in engine.generate(prompts, params, progress=False)]

    def close(self) -> None:
        del self.executor


class Generate:
    """transformers' ``generate``: one left-padded batch. All want the same number of tokens: only padding is wasted."""

    def __init__(self, machine: Machine):
        self.machine, self.model = machine, model_of(machine)

    def __call__(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.machine.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.machine.device)
        with _transformers_attention(self.model, "sdpa"):
            out = self.model.generate(ids, attention_mask=mask, generation_config=_greedy(tokens))
        return out[:, longest:].tolist()

    def close(self) -> None:
        pass


class GenerateBatch:
    """transformers' continuous batching: what ``generate_batch`` does between its set-up and its tear-down.

    Those take half a second in each call of it and are not measured. The choices are transformers' own, but for the
    cache, which has room for all requests and does not keep prompts: a second run would find the first one's computed.
    """

    def __init__(self, machine: Machine):
        self.machine, self.model, self.sizes = machine, model_of(machine), None
        self.stack = contextlib.ExitStack()

    def _open(self, prompts, tokens: int) -> None:
        self.stack.enter_context(_transformers_attention(self.model, peer_attention(self.machine)))
        config = ContinuousBatchingConfig(
            num_blocks=sum(-(-(len(p) + tokens) // PAGE_SIZE) + 1 for p in prompts), page_size=PAGE_SIZE,
            allow_block_sharing=False, auto_switch_to_flash=False, seed=0,
            max_batch_tokens=None if self.machine.cuda else 64,
        )  # fmt: skip
        manager = self.model.continuous_batching_context_manager(
            _greedy(tokens), timeout=5, continuous_batching_config=config,
            workload_hints=WorkloadHints(max(map(len, prompts)), tokens, len(prompts)),
        )  # fmt: skip
        self.manager, self.sizes = self.stack.enter_context(manager), (len(prompts), tokens)

    def __call__(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        if self.sizes != (len(prompts), tokens):
            self.close()
            self._open(prompts, tokens)
        ids, answers = self.manager.add_requests(prompts, max_new_tokens=tokens), {}
        while len(answers) < len(ids):
            answer = self.manager.get_result(timeout=1)
            if answer is None and not self.manager.is_running():
                raise RuntimeError("transformers' continuous batching has ended; what it says is above")
            if answer is not None and answer.error:
                raise RuntimeError(f"transformers' continuous batching: {answer.error}")
            if answer is not None and answer.is_finished():
                answers[answer.request_id] = answer.generated_tokens
        return [answers[i] for i in ids]

    def close(self) -> None:
        self.stack.close()
        self.sizes = self.manager = None


def peer_attention(machine: Machine) -> str:
    """Flash attention if the package is here; transformers' own switch would also look for it on the hub."""
    if machine.tensor_cores and is_flash_attn_3_available():
        return "flash_attention_3"
    return "flash_attention_2" if machine.tensor_cores and is_flash_attn_2_available() else "sdpa"


@contextlib.contextmanager
def _transformers_attention(model, name: str):
    """The model with transformers' own attention, and without its hints."""
    logging.disable(logging.WARNING)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(NAME)
        logging.disable(logging.NOTSET)


def _greedy(tokens: int) -> GenerationConfig:
    # eos_token_id -1: like `ignore_eos`, no token ends a request
    return GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)


BEST, PEER, PLAIN = "cbref, triton + kernels + graphs", "transformers generate_batch", "cbref, torch"
WAYS: dict[str, Callable[[Machine], Callable]] = {  # the most telling first, should time run out
    BEST: lambda m: Cbref(m, attention="triton", kernels=True, graphs=True),
    PEER: GenerateBatch,
    "transformers generate": Generate,
    PLAIN: lambda m: Cbref(m, attention="torch"),
    "cbref, triton": lambda m: Cbref(m, attention="triton"),
    "cbref, torch + graphs": lambda m: Cbref(m, attention="torch", graphs=True),
    "cbref, triton + graphs": lambda m: Cbref(m, attention="triton", graphs=True),
    "cbref, triton_mixed + graphs": lambda m: Cbref(m, attention="triton_mixed", graphs=True),
    "cbref, triton_mixed": lambda m: Cbref(m, attention="triton_mixed"),
    "cbref, triton + kernels": lambda m: Cbref(m, attention="triton", kernels=True),
}

# ---- the part


def speed(machine: Machine) -> Iterator[Row]:
    """Output tokens per second, every way on the same requests. The first run of each is a warm-up and not timed.

    On a CPU the ways with Triton are interpreted: their outputs are compared, and no time is taken.
    """
    rates, outputs = {}, {}
    for way in WAYS:
        if "graphs" in way and not machine.cuda:
            yield not_run(way, NO_GPU)
        else:
            yield from attempt(way, _measure(machine, way, rates, outputs))
            machine.release()
    yield from _compare(machine, rates, outputs)


def _measure(machine: Machine, way: str, rates: dict, outputs: dict) -> Iterator[Row]:
    work, vocabulary, took = load_of(machine), model_of(machine).config.vocab_size, 0.0
    serve = WAYS[way](machine)
    with contextlib.closing(serve):
        for count in work.counts:
            what = f"{way}, {_requests(count)}"
            if machine.time_left < 2 * took:
                yield not_run(what, f"{max(0, machine.time_left):.0f} s are left")
                continue
            begin = time.perf_counter()
            prompts = work.prompts(count, vocabulary)
            outputs[way, count] = serve(prompts, work.output)
            if "triton" in way and not machine.cuda:
                yield not_run(what, f"{NO_GPU}; interpreted to compare outputs")
                continue
            seconds = []
            while len(seconds) < 3 and sum(seconds) < 2:
                start = time.perf_counter()
                serve(prompts, work.output)  # ends with ids on the host, so the GPU is done too
                seconds.append(time.perf_counter() - start)
            rates[way, count] = count * work.output / statistics.median(seconds)
            raw = {"attention": peer_attention(machine)} if way == PEER else {}
            yield figure(what, rates[way, count], "tokens/s", seconds=seconds, **raw)
            took = time.perf_counter() - begin


def _compare(machine: Machine, rates: dict, outputs: dict) -> Iterator[Row]:
    counts = load_of(machine).counts
    for count in counts:
        what = f"cbref's best against generate_batch, {_requests(count)}"
        if not machine.cuda:
            yield not_run(what, NO_GPU)
        elif (BEST, count) in rates and (PEER, count) in rates:
            yield goal(what, rates[BEST, count] / rates[PEER, count], "×", TARGET)
        else:
            yield not_run(what, "one of them was not timed")
    for way in WAYS:
        both = [n for n in counts if (way, n) in outputs and (PLAIN, n) in outputs]
        if way == PLAIN or not both:
            continue
        pairs = [pair for n in both for pair in zip(outputs[way, n], outputs[PLAIN, n], strict=True)]
        same, raw = sum(a == b for a, b in pairs), {"counts": both, "requests": len(pairs)}
        what = f"outputs that differ: {way} and {PLAIN}"
        if machine.cuda:  # in 16 bits the two likeliest of 128,256 random logits are often equal: then nobody is wrong
            yield figure(what, len(pairs) - same, f"of {len(pairs)}", **raw)
        else:
            yield check(what, len(pairs) - same, 0, **raw)


def _requests(count: int) -> str:
    return f"{count} request" + "s" * (count > 1)
