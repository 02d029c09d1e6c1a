"""The event loop. One step is four moves: admit, forward, update, retire.

    workload -> Engine.step():  Scheduler.schedule -> Executor.execute -> update -> Scheduler.retire -> metrics

The loop does not know whether a model or a simulator computes, nor whether its clock is real.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from tqdm import tqdm

from cbref.audit import audit, check_plan
from cbref.executors import Executor
from cbref.executors.roofline import make_simulator
from cbref.hardware import Hardware, ModelShape
from cbref.intake import Prompt, add_all, check_room, encode
from cbref.kv_cache import BlockPool
from cbref.metrics import SLO, RequestMetrics, StepRecord, Totals, summarize
from cbref.output import advance, complete
from cbref.request import Chunk, Completion, Request, Sampled, SamplingParams, Status, TokenEvent
from cbref.schedulers import Scheduler, make_scheduler


class Engine:
    """Serves requests with one scheduler on one executor.

    ``steps`` records every step for tables and pictures; ``record=False`` keeps none, for long simulations.
    ``seed`` is for requests that bring no seed of their own: same engine seed, same outputs. None: fresh ones.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler | str = "orca",
        *,
        record: bool = True,
        seed: int | None = None,
        **policy_options,
    ):
        self.executor = executor
        self.pool = BlockPool(executor.num_blocks, executor.block_size)
        self.scheduler = make_scheduler(scheduler, **policy_options)
        self.scheduler.bind(self.pool)
        self.steps: list[StepRecord] = []
        self.totals = Totals()
        self._record = record
        self._random = random.Random(seed)
        self._ids, self._turns = itertools.count(), itertools.count()
        self._live: dict[str, Request] = {}  # not finished yet
        self._pending: list[tuple[float, int, Request]] = []  # a heap by time of arrival, still in the future
        self._texts: dict[str, object] = {}  # open TextStreams
        self._inboxes: dict[str, deque[TokenEvent]] = {}  # where a stream finds the events of its requests

    @classmethod
    def from_pretrained(
        cls,
        model: str = "smollm2-135m",
        policy: str | Scheduler = "orca",
        max_batch_size: int | None = None,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        dtype=None,
        device: str | None = None,
        attention=None,
        use_kernels=False,
        seed: int | None = None,
        **policy_options,
    ) -> Engine:
        """An engine around a real model: a name that ``load_model`` knows, a local folder, or a hub name.

        max_batch_size  most requests in the batch at once; None: the policy's own default, 8
        num_blocks      size of the KV pool in blocks of ``block_size`` tokens; None: room for ``max_batch_size``
                        requests of full length, within 1 GiB on a CPU and 80 % of free memory on a GPU
        dtype, device   None: float32 on the CPU; on a GPU bfloat16, or float16 where the GPU has no bfloat16
        attention       None: what suits the device (``executor.attention_choice`` says what and why); "torch",
                        "triton", or a function with the signature of ``cbref.attention.torch_attention``
        use_kernels     Triton kernels for RMSNorm and rotary embedding too: True, or {"rmsnorm": f, "rope": g} of yours
        """
        scheduler = make_scheduler(policy, max_num_seqs=max_batch_size, **policy_options)
        from cbref.executors.model import ModelExecutor  # torch starts here, and only for those who want a real model
        from cbref.models import load_model

        network, tokenizer = load_model(model, dtype=dtype, device=device)
        sizes = {"block_size": block_size, "num_blocks": num_blocks, "max_model_len": max_model_len}
        options = {"max_num_seqs": scheduler.max_num_seqs, "attention": attention, "use_kernels": use_kernels}
        return cls(ModelExecutor(network, tokenizer, **sizes, **options), scheduler, seed=seed)

    @classmethod
    def simulated(
        cls,
        policy: str | Scheduler = "orca",
        max_batch_size: int | None = None,
        *,
        model: str | ModelShape | None = None,
        hardware: str | Hardware | None = None,
        tp: int | None = None,
        step_time: float | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_model_len: int = 1 << 20,
        record: bool = True,
        **policy_options,
    ) -> Engine:
        """The same loop on a virtual clock, without a model: needs no torch.

        model, hardware  names in ``cbref.hardware`` or shapes of your own: a step takes as long as what it computes and
                         reads; ``tp`` GPUs share each layer. Given one, the other is "llama-3-8b" or "h100"
        step_time        without model and hardware: seconds of every step; None: 1, so that times are step counts
        num_blocks       None: what the GPU's memory holds beside the weights; without a GPU, as good as no limit
        """
        scheduler = make_scheduler(policy, max_num_seqs=max_batch_size, **policy_options)
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "max_model_len": max_model_len}
        return cls(make_simulator(model, hardware, tp, step_time, **sizes), scheduler, record=record)

    # ------------------------------------------------------------------ requests in and out

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        arrival: float | None = None,
    ) -> Request:
        """Queue a request: text, chat messages or token ids. ``arrival`` is a time of the engine's clock; None: now.

        A request that can never be served is refused here with a ``ValueError``; nothing is queued then.
        """
        params = params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params is {params!r}; it must be a SamplingParams")
        if request_id is None:
            request_id = next(i for i in map(str, self._ids) if i not in self._live)
        if request_id in self._live:
            raise ValueError(f"request id {request_id!r} is being served already; choose another or leave it out")
        if arrival is not None and not math.isfinite(arrival):
            raise ValueError(f"arrival is {arrival!r}; it must be a finite time of the engine's clock, in seconds")
        ids = encode(prompt, self.executor)
        check_room(len(ids), params, self.executor, self.pool)
        self.scheduler.check(len(ids), params.max_tokens)
        now = self.executor.now()
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        request = Request(request_id, ids, params, now if arrival is None else arrival, priority, seed)
        if self.executor.tokenizer is not None:
            from cbref.detokenize import TextStream

            self._texts[request_id] = TextStream(self.executor.tokenizer, params.stop)
        self._live[request_id] = request
        # all through one heap: who arrived during the last step is not queued yet, and comes before who arrives now
        heapq.heappush(self._pending, (request.arrival, next(self._turns), request))
        self._receive()
        return request

    def abort(self, request_id: str) -> bool:
        """End a request now, wherever it stands, and free what it holds. False if there is no such request."""
        request = self._live.get(request_id)
        if request is None:
            return False
        request.finish_reason = request.finish_reason or "abort"
        now = self.executor.now()
        if any(r is request for _, _, r in self._pending):
            self._pending = [entry for entry in self._pending if entry[2] is not request]
            heapq.heapify(self._pending)
            request.move(Status.FINISHED, now)
        else:
            self.scheduler.remove(request, now)
        self._close(request)
        for other in self.scheduler.retire(now):  # a static batch may have waited for this request alone
            self._close(other)
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Serve prompts to the end; completions in the order of the prompts. ``params``: one for all, or one each.

        A progress bar appears when it takes more than two seconds; ``progress=False`` keeps it away.
        If any prompt is refused, the ``ValueError`` names it, and none is served.
        """
        requests = add_all(self, prompts, params)
        limits = {r.id: r.params.max_tokens for r in requests}
        quiet = {} if progress else {"disable": True}  # not `disable=False`: TQDM_DISABLE in the environment counts too
        with tqdm(total=sum(limits.values()), unit="tok", desc="generate", delay=2, **quiet) as bar:
            for event in self._serve(requests):
                bar.update(1)
                if event.finish_reason:  # an early end leaves out what was promised to the bar
                    bar.total -= limits[event.request_id] - event.index - 1
        return [self.completion(r) for r in requests]

    def stream(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[TokenEvent]:
        """Serve prompts and yield each token as it is made. Leaving the loop early aborts what is not finished.

        Several streams may be read in turns. A request that ends by an abort or an error makes no further event.
        """
        yield from self._serve(add_all(self, prompts, params))

    def completion(self, request: Request) -> Completion:
        """The answer to a finished request."""
        return complete(request)

    # ------------------------------------------------------------------ the loop

    def step(self) -> list[TokenEvent]:
        """Run one iteration and return the tokens that it made: none where there is no work."""
        if self._pending and not self.scheduler.has_work:  # nothing to do before the next request comes
            self.executor.wait_until(self._pending[0][0])
        self._receive()
        begin = self.executor.now()
        chunks = self.scheduler.schedule(begin)  # admit
        if not chunks:
            if self.scheduler.has_work:
                name, running, waiting = type(self.scheduler).__name__, self.scheduler.running, self.scheduler.waiting
                raise RuntimeError(f"{name} planned nothing; {len(running)} requests run and {len(waiting)} wait")
            return []
        check_plan(chunks, self.scheduler)
        sampled = self.executor.execute(chunks, self.pool)  # forward
        now = self.executor.now()
        if self._record:
            self.steps.append(StepRecord.of(self.totals.steps, begin, now, chunks, self.scheduler))
        self.totals.add(begin, now, chunks, self.scheduler)
        events = [e for chunk, token in zip(chunks, sampled, strict=True) for e in self._update(chunk, token, now)]
        for event in events:
            if event.request_id in self._inboxes:
                self._inboxes[event.request_id].append(event)
        for request in self.scheduler.retire(now):  # retire
            self._close(request)
        return events

    def audit(self) -> None:
        """Raise ``AssertionError`` unless every block is accounted for and every request is in exactly one place."""
        audit(self.scheduler, self._live, [request for _, _, request in self._pending])

    num_steps = property(lambda self: self.totals.steps)

    def summary(self, requests: Iterable[Request | Completion], slo: SLO | None = None) -> dict:
        """``cbref.metrics.summarize`` of these requests over all steps since the start, or since ``forget_steps``."""
        metrics = [r.metrics if isinstance(r, Completion) else RequestMetrics.of(r) for r in requests]
        summary = summarize(metrics, self.totals, self.scheduler.max_num_seqs, slo)
        return summary | (self.executor.utilisation() if hasattr(self.executor, "utilisation") else {})

    def forget_steps(self) -> None:
        """Begin a new measurement: what was recorded so far, a warm-up for instance, counts no more."""
        self.steps, self.totals = [], Totals()

    def _serve(self, requests: list[Request]) -> Iterator[TokenEvent]:
        """The events of these requests, whoever calls ``step``."""
        inbox = deque()
        self._inboxes |= {r.id: inbox for r in requests}
        try:
            while inbox or any(r.status is not Status.FINISHED for r in requests):
                if inbox:
                    yield inbox.popleft()
                else:
                    self.step()
        finally:
            for r in (r for r in requests if r.status is not Status.FINISHED):
                self.abort(r.id)

    def _receive(self) -> None:
        """Queue the requests whose time has come."""
        while self._pending and self._pending[0][0] <= self.executor.now():
            self.scheduler.add(heapq.heappop(self._pending)[2])

    def _update(self, chunk: Chunk, sampled: Sampled | None, now: float) -> list[TokenEvent]:
        request = chunk.request
        if request.status is Status.FINISHED:  # aborted while it was being computed: the late token is dropped
            return []
        events = advance(chunk, sampled, self._texts.get(request.id), self.executor.eos_token_ids, now)
        self.totals.drafted += len(chunk.draft)
        self.totals.accepted += len(events) - 1 if chunk.draft and events else 0
        if request.finish_reason != "error":
            self.scheduler.computed(request)
        return events

    def _close(self, request: Request) -> None:
        del self._live[request.id]
        self._inboxes.pop(request.id, None)
        stream = self._texts.pop(request.id, None)
        if stream and request.finish_reason in ("abort", "error"):
            request.text += stream.finish()
        self.executor.release(request)
