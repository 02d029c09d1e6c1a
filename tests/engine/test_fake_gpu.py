"""A step on a device that is not here: tensors without memory say where they are, so mixtures of host and device show.

torch's ``FakeTensorMode`` computes shapes, strides and devices, and no numbers. It refuses what needs a number on the
host. A build of torch for CPUs cannot index tensors of "cuda"; a made-up device, whose guard is written in Python, can.
"""

import pytest
import torch
from engine_support import tiny_model
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from cbref.attention import pack_step, torch_attention
from cbref.executors.graphs import DecodeGraphs, to_device
from cbref.executors.model import ModelExecutor
from cbref.kv_cache import BlockPool
from cbref.request import Chunk, Request, SamplingParams
from cbref.sampling import Sampler
from cbref.triton_attention import BACKENDS
from cbref.triton_modules import replace_modules
from cbref_kernels import decode_attention, kv_write, mixed_attention, prefill_attention, rmsnorm, rope

KERNELS = {"attend", "join", "kv_write", "mixed", "prefill", "rmsnorm", "rope"}
LAUNCHES = {"torch": set(), "triton": {"kv_write", "attend", "prefill"}, "triton_mixed": {"kv_write", "mixed"}}
LAYOUTS = ["llama", "phi3"]  # queries come with the tokens outside the heads, and the other way round


@pytest.fixture(scope="module")
def device():
    if not hasattr(torch, "fakegpu"):
        _setup_privateuseone_for_python_backend("fakegpu")
    return torch.device("fakegpu", 0)


class Stays(TorchDispatchMode):
    """Raises where data crosses between host and device: the host would wait, and no graph can record it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        copies = "copy" in function.overloadpacket.__name__
        large = {x.device.type for x in tensors if x.dim() or copies}  # single numbers travel with a launch
        if len(large) > 1:
            raise AssertionError(f"{function.overloadpacket.__name__} takes data from host to device or back")
        return out


@pytest.fixture
def launched(monkeypatch, device):
    """Names of the kernels launched; all their tensors have to be on the device."""
    names = set()

    class Launch:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return self

        def __call__(self, *args, **options):
            assert {x.device for x in args if isinstance(x, torch.Tensor)} == {device}, self.name
            names.add(self.name)

    for module in (decode_attention, kv_write, mixed_attention, prefill_attention, rmsnorm, rope):
        for name in KERNELS:
            if hasattr(module, f"_{name}_kernel"):
                monkeypatch.setattr(module, f"_{name}_kernel", Launch(name))
    return names


@pytest.fixture
def make(monkeypatch, device):
    monkeypatch.setattr("cbref.executors.model.Sampler", lambda *_: None)  # wants a generator of the device
    monkeypatch.setattr(ModelExecutor, "_try_one_token", lambda _: None)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode():

        def make(attention, kind="llama", use_kernels=False):
            sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}
            with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.inference_mode(False):
                model = tiny_model(kind, **sizes, dtype="bfloat16")
                replaced = replace_modules(model) if use_kernels else {}
            assert bool(replaced) == use_kernels
            for module in model.modules():
                for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                    if tensor is not None:
                        fake = FakeTensor(mode, tensor.detach().to("meta"), device)
                        parameter = name in module._parameters
                        setattr(module, name, torch.nn.Parameter(fake, requires_grad=False) if parameter else fake)
            return ModelExecutor(model, block_size=8, num_blocks=40, attention=attention)

        yield make


def step(executor, chunks):
    """Chunks ``start:stop`` of requests, and the pool that holds their blocks."""
    pool = BlockPool(executor.num_blocks, executor.block_size)
    for i, (_, stop) in enumerate(chunks):
        pool.grow(str(i), stop)
    return [Chunk(Request(str(i), [1] * b, SamplingParams()), a, b) for i, (a, b) in enumerate(chunks)], pool


def logits_of(executor, chunks):
    row, shape = pack_step(*step(executor, chunks))
    numbers = to_device(row, executor.device)
    with Stays():
        return executor._forward(numbers, shape)


MIXED = [(4, 5), (0, 9), (3, 12)]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("attention", sorted(BACKENDS))
def test_a_step_stays_on_the_device(make, launched, device, attention, kind):
    logits = logits_of(make(BACKENDS[attention], kind), MIXED)
    assert (logits.shape, logits.dtype, logits.device) == ((3, 96), torch.float32, device)
    assert launched == LAUNCHES[attention]


def test_kernels_in_place_of_modules_stay_there_too(make, launched):
    logits_of(make(BACKENDS["triton"], use_kernels=True), MIXED)
    assert launched == LAUNCHES["triton"] | {"rmsnorm", "rope"}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("attention", sorted(BACKENDS))
def test_what_a_graph_records_stays_on_the_device(make, launched, device, attention, kind):
    executor, recorded = make(BACKENDS[attention], kind), []

    def record(function):
        with Stays():
            recorded.append(function())
        return lambda: None, recorded[-1]

    graphs = DecodeGraphs(executor._forward, executor.device, strict=True, capture=record)
    chunks, pool = step(executor, [(4, 5), (8, 9), (20, 21)])
    logits = graphs(*pack_step(chunks, pool, pad=graphs.bucket(chunks, executor.block_size)))
    assert logits is recorded[0] and (logits.shape, logits.device) == ((4, 96), device)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 0, "repetition_penalty": 1.2},
        {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    ],
)
def test_a_token_is_chosen_on_the_device(device, params):
    sampler, request = Sampler(frozenset({3}), "cpu"), Request("r", [1, 2, 3], SamplingParams(**params, seed=1))
    sampler._device = device  # the generator stays: the host has the only kind there is
    request.seed = 1
    with FakeTensorMode(), torch.inference_mode():
        logits = torch.empty(1, 96, device=device)
        assert sampler._choose(request, logits).device == device
        with pytest.raises(DataDependentOutputException):  # the host asks for the tokens, and for nothing before them
            sampler([request], logits)


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        (lambda meta: torch.arange(meta.shape.tokens) + meta.positions, "two devices"),
        (lambda meta: torch.arange(3).to(meta.ids.device), "from host to device"),
        (lambda meta: meta.context_len.cpu(), "from host to device"),
        (lambda meta: meta.context_len.tolist(), "_local_scalar_dense"),
        (lambda meta: meta.ids[meta.positions > 3], "nonzero"),
    ],
)
def test_mistakes_that_no_cpu_notices_are_noticed(make, mistake, why):
    def attention(q, k, v, key_cache, value_cache, meta, *rest):
        mistake(meta)
        return torch_attention(q, k, v, key_cache, value_cache, meta, *rest)

    with pytest.raises((RuntimeError, AssertionError), match=why):
        logits_of(make(attention), MIXED)
