"""The engine on Triton's kernels (interpreted), and as CUDA graphs (with a stand-in that re-runs what it recorded)."""

import pytest
import torch
from engine_support import assert_at_rest, greedy, prompts_of, reference, serve, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from cbref import Engine, SamplingParams
from cbref.attention import pack_step, torch_attention
from cbref.executors.graphs import DecodeGraphs
from cbref.executors.model import ModelExecutor
from cbref.kv_cache import BlockPool
from cbref.request import Chunk, Request
from cbref.schedulers import POLICIES
from cbref.triton_attention import BACKENDS
from cbref.triton_modules import replace_modules
from cbref_kernels.rmsnorm import rmsnorm_torch

LENGTHS = [1, 5, 8, 13, 2, 30]


LIMIT = {"sarathi_2023": "chunk_size"} | dict.fromkeys(("sarathi", "vllm_v1", "sglang"), "max_num_batched_tokens")


def served(executor, prompts, params, policy, slots, limit=6):
    """Outputs under a policy; one that can is made to cut prompts, by a limit of so many tokens a step."""
    engine = Engine(executor, policy, max_num_seqs=slots, **({LIMIT[policy]: limit} if policy in LIMIT else {}))
    done = engine.generate(prompts, params, progress=False)
    assert_at_rest(engine)
    assert policy not in LIMIT or engine.num_steps > max(len(c.token_ids) for c in done)
    return [c.token_ids for c in done]


def executor_of(model, **options):
    return ModelExecutor(model, **{"block_size": 8, "num_blocks": 40, "max_model_len": 128, **options})


@pytest.fixture(scope="module")
def llama():
    """Three query heads on each KV head, of a dimension that the kernels take."""
    return tiny_model(hidden_size=48, num_attention_heads=3, num_key_value_heads=1, head_dim=64)


# ---- Triton in place of torch


@pytest.mark.parametrize("attention", ["triton", "triton_mixed"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_answers_as_transformers_does(llama, policy, attention):
    prompts = prompts_of(LENGTHS)
    tokens = [3 + n % 3 for n in range(len(prompts))]
    done = served(executor_of(llama, attention=attention), prompts, [greedy(n) for n in tokens], policy, slots=4)
    assert done == [reference(llama, *pair)[0] for pair in zip(prompts, tokens, strict=True)]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_real_model_answers_the_same_on_both_backends(smollm, policy):
    prompts = ["Water boils at", "The"]
    answers = {}
    for attention in ("torch", "triton"):
        executor = ModelExecutor(*smollm, num_blocks=64, max_model_len=256, attention=attention)
        answers[attention] = served(executor, prompts, greedy(2), policy, slots=2, limit=2)
    assert answers["triton"] == answers["torch"]


@pytest.mark.parametrize("attention", ["triton", "triton_mixed"])
def test_memory_that_is_not_the_requests_own_is_never_read(llama, attention):
    """All of the cache but what a step may read is NaN, the null block included."""
    prompts = prompts_of(LENGTHS)

    def poisoned(q, k, v, key_cache, value_cache, meta, *rest):
        foreign = torch.ones(key_cache.shape[:2], dtype=torch.bool)
        for i, context in enumerate(meta.context_len):
            before = torch.arange(int(context - (meta.query_start[i + 1] - meta.query_start[i])))
            foreign[meta.block_table[i, before // key_cache.shape[1]], before % key_cache.shape[1]] = False
        key_cache[foreign] = value_cache[foreign] = torch.nan
        return BACKENDS[attention](q, k, v, key_cache, value_cache, meta, *rest)

    done = serve(executor_of(llama, attention=poisoned), prompts, greedy(4), "sarathi")
    assert [c.token_ids for c in done] == [reference(llama, p, 4)[0] for p in prompts]


def test_a_sliding_window_is_left_to_torch():
    mistral = tiny_model("mistral", num_attention_heads=2, num_key_value_heads=2, head_dim=64, sliding_window=8)
    prompts = prompts_of(LENGTHS)
    done = serve(executor_of(mistral, attention="triton"), prompts, greedy(4))
    assert [c.token_ids for c in done] == [reference(mistral, p, 4)[0] for p in prompts]


def test_before_ampere_prefill_is_left_to_torch(llama, monkeypatch):
    monkeypatch.setattr("cbref_kernels.common.CPU_STANDS_FOR", (7, 5))
    monkeypatch.setattr("cbref_kernels.prefill_attention.prefill_attention", None)  # would not go unnoticed
    prompts = prompts_of(LENGTHS)
    done = serve(executor_of(llama, attention="triton"), prompts, greedy(4), "sarathi")
    assert [c.token_ids for c in done] == [reference(llama, p, 4)[0] for p in prompts]


# ---- the choice, and its reasons


def test_without_a_gpu_torch_is_chosen_and_says_why(llama):
    assert executor_of(llama).attention is torch_attention
    assert executor_of(llama).attention_choice.startswith("torch: Triton would be interpreted")


def test_what_the_user_asks_for_is_said_too(llama):
    assert executor_of(llama, attention="torch").attention_choice == "torch: asked for"
    assert executor_of(llama, attention="triton").attention_choice == "triton: asked for, in Triton's interpreter"
    assert executor_of(llama, attention=torch_attention).attention_choice.startswith("torch_attention: given")


@pytest.mark.parametrize(
    ("config", "dtype", "why"),
    [
        ({"head_dim": 8}, None, r"head dimension is 8.*64, 80, 96.*attention='torch'"),
        ({"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 64}, None, r"16 query heads on 1 KV heads"),
        ({"head_dim": 64}, torch.bfloat16, r"bfloat16.*attention='torch'"),
    ],
)
def test_a_model_that_the_kernels_cannot_serve_is_refused_only_where_they_were_asked_for(config, dtype, why):
    model = tiny_model(**config).to(dtype or torch.float32)
    assert executor_of(model).attention is torch_attention
    with pytest.raises(ValueError, match=why):
        executor_of(model, attention="triton")


def test_without_an_interpreter_and_a_gpu_triton_is_refused(llama, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "needs a GPU" in executor_of(llama).attention_choice
    with pytest.raises(ValueError, match=r"needs a GPU.*cpu.*TRITON_INTERPRET=1"):
        executor_of(llama, attention="triton")


def test_an_unknown_attention_is_refused_with_the_names_there_are(llama):
    with pytest.raises(ValueError, match=r"'flash'.*torch, triton, triton_mixed"):
        executor_of(llama, attention="flash")


# ---- kernels in place of the model's own modules


def test_norms_and_rotary_embeddings_are_replaced_in_this_model_alone():
    kernels, plain = tiny_model(head_dim=64), tiny_model(head_dim=64)
    prompts = prompts_of(LENGTHS)
    executor = executor_of(kernels, use_kernels=True)
    layers = kernels.config.num_hidden_layers
    assert executor.replaced == {"rmsnorm": 2 * layers + 1, "rope": layers}
    calls = []
    for name, module in kernels.named_modules():
        if "forward" in vars(module):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    done = serve(executor, prompts, greedy(4))
    assert len(set(calls)) == 3 * layers + 1
    assert [c.token_ids for c in done] == [reference(plain, p, 4)[0] for p in prompts]
    assert not any("forward" in vars(m) for m in plain.modules())


def test_a_kernel_that_computes_something_else_than_the_module_is_not_put_in_its_place():
    gemma = tiny_model("gemma", head_dim=64)
    norm = gemma.model.layers[0].input_layernorm
    torch.nn.init.normal_(norm.weight)
    assert replace_modules(gemma)["rmsnorm"] == 0
    assert "forward" not in vars(norm)


def test_a_learners_kernel_takes_the_place_of_ours():
    """Also after a wrong one: what is replaced is the model's own module, not what took its place before."""
    model, prompts = tiny_model(head_dim=64), prompts_of(LENGTHS)
    expected = [reference(model, p, 4)[0] for p in prompts]
    wrong = executor_of(model, use_kernels={"rmsnorm": lambda x, weight, eps: torch.zeros_like(x)})
    assert [c.token_ids for c in serve(wrong, prompts, greedy(4))] != expected
    calls = []

    def mine(x, weight, eps):
        calls.append(x.shape)
        return rmsnorm_torch(x, weight, eps)

    executor = executor_of(model, use_kernels={"rmsnorm": mine})
    assert executor.replaced == {"rmsnorm": 2 * model.config.num_hidden_layers + 1}
    calls.clear()
    assert [c.token_ids for c in serve(executor, prompts, greedy(4))] == expected
    assert calls


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        ("rope", "use_kernels is 'rope'; it must be True, False, or functions by name"),
        ({"norm": rmsnorm_torch}, "use_kernels has 'norm'.*rmsnorm and rope"),
        ({"rope": 3}, "use_kernels has 'rope': 3"),
    ],
)
def test_kernels_that_cannot_be_used_are_named(llama, kernels, words):
    with pytest.raises(ValueError, match=words):
        executor_of(llama, use_kernels=kernels)


# ---- CUDA graphs


def rerun(function):
    """What a graph does: the same work on the same memory, its result where it was before."""
    output = function()
    return lambda: output.copy_(function()), output


@pytest.fixture
def graphed(llama):
    def make(**options):
        executor = executor_of(llama, **options)
        executor._graphs = DecodeGraphs(executor._forward, executor.device, capture=rerun)
        return executor

    return make


@pytest.mark.parametrize(
    ("policy", "attention"), [*((p, "torch") for p in sorted(POLICIES)), ("sarathi", "triton"), ("static", "triton")]
)
def test_graphs_change_no_output(llama, graphed, policy, attention):
    prompts = prompts_of(LENGTHS)
    tokens = [3 + 2 * n for n in range(len(prompts))]
    executor = graphed(attention=attention)
    done = served(executor, prompts, [greedy(n) for n in tokens], policy, slots=5)
    assert done == [reference(llama, *pair)[0] for pair in zip(prompts, tokens, strict=True)]
    assert executor._graphs._captured


def test_a_graph_serves_all_steps_of_its_bucket(graphed):
    executor = graphed()
    captured = executor._graphs._captured
    serve(executor, prompts_of([3] * 8), greedy(10), slots=8)
    assert set(captured) == {(8, 1), (8, 2)}  # 4 to 12 tokens of context: one block of 8, then two
    serve(executor, prompts_of([3] * 7), greedy(10), slots=8)
    assert set(captured) == {(8, 1), (8, 2)}  # seven requests fill up a graph for eight


def test_requests_that_fill_up_a_bucket_touch_no_block_of_the_pool(graphed):
    executor = graphed(num_blocks=8)
    pool = BlockPool(8, 8)
    requests = [Request(str(n), list(range(3, 12)), SamplingParams()) for n in range(3)]
    for request in requests:
        pool.grow(request.id, 9)
        executor.execute([Chunk(request, 0, 9)], pool)
    for request in requests:
        request.output.append(1)
        pool.grow(request.id, 10)
    before = executor._cache.clone()
    executor.execute([Chunk(r, 9, 10) for r in requests], pool)
    changed = (executor._cache != before).any(-1).any(-1).any(0).any(0)  # [blocks, block_size]
    own = torch.zeros_like(changed)
    for request in requests:
        own[pool.table(request.id)[1], 1] = True
    assert torch.equal(changed[:-1], own[:-1])
    assert executor._cache.isfinite().all()


def test_the_sizes_of_buckets():
    request = Request("r", [1], SamplingParams())
    sizes = [DecodeGraphs.bucket([Chunk(request, 0, 1)] * n, 16)[0] for n in (1, 2, 3, 5, 8, 9, 16, 17, 100)]
    assert sizes == [1, 2, 4, 8, 8, 16, 16, 24, 104]
    widths = [DecodeGraphs.bucket([Chunk(request, n - 1, n)], 16)[1] for n in (1, 16, 17, 33, 65, 1000)]
    assert widths == [1, 1, 2, 4, 8, 64]


def test_a_model_that_cannot_be_captured_is_served_without_graphs(llama):
    def broken(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    executor = executor_of(llama)
    executor._graphs = DecodeGraphs(executor._forward, executor.device, capture=broken)
    with pytest.warns(UserWarning, match="1 decodes run without a CUDA graph: operation not permitted"):
        done = serve(executor, prompts_of([5]), greedy(4))
    assert done[0].token_ids == reference(llama, prompts_of([5])[0], 4)[0]
    executor._graphs = DecodeGraphs(executor._forward, executor.device, strict=True, capture=broken)
    with pytest.raises(ValueError, match="stream is capturing"):
        executor._try_one_token()


def test_graphs_without_a_gpu_are_refused(llama):
    with pytest.raises(ValueError, match=r"cuda_graphs is True, but the model is on cpu"):
        executor_of(llama, cuda_graphs=True)


# ---- the host does not wait


class NoReadBack(TorchDispatchMode):
    """Raises at operations that need a number on the host, for which the host would wait for a GPU."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if by_mask or name in self.FORBIDDEN:
            raise AssertionError(f"{name} waits for the device")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("use_kernels", [False, True])
def test_a_step_reads_nothing_back_before_its_tokens(monkeypatch, attention, use_kernels):
    executor = executor_of(tiny_model(head_dim=64), attention=attention, use_kernels=use_kernels)
    forward, calls = executor._forward, []

    def watched(*args):
        calls.append(1)
        with NoReadBack():
            return forward(*args)

    monkeypatch.setattr(executor, "_forward", watched)
    serve(executor, prompts_of(LENGTHS), greedy(3), "sarathi")
    assert calls


def test_the_watch_for_reading_back_notices():
    for read in (lambda x: x.max().item(), lambda x: x[x > 0], lambda x: bool(x.any()), lambda x: torch.nonzero(x)):
        with pytest.raises(AssertionError, match="waits"), NoReadBack():
            read(torch.ones(3))


def test_one_copy_brings_a_step_to_the_device(llama, monkeypatch):
    copies = []
    monkeypatch.setattr(
        "cbref.executors.model.to_device", lambda row, device: copies.append(1) or torch.from_numpy(row)
    )
    executor = executor_of(llama)
    copies.clear()
    engine = Engine(executor, "sarathi")
    engine.generate(prompts_of(LENGTHS), greedy(3), progress=False)
    assert len(copies) == engine.num_steps


def test_a_step_of_nothing_but_fillers_is_like_the_prompt_zero():
    pool = BlockPool(4, 8)
    request = Request("r", [5, 6], SamplingParams())
    pool.grow("r", 2)
    row, shape = pack_step([Chunk(request, 1, 2)], pool, pad=(4, 2))
    ids, positions, places, ends = row[:16].reshape(4, 4)
    assert (shape.tokens, shape.chunks, shape.decodes, shape.width) == (4, 4, 4, 2)
    assert ids.tolist() == [6, 0, 0, 0] and positions.tolist() == [1, 0, 0, 0] and ends.tolist() == [0, 1, 2, 3]
    assert places.tolist() == [pool.table("r")[0] * 8 + 1, 32, 32, 32]
