"""The engine's answers are those of ``transformers``, whatever the policy, the batch, the order or the blocks."""

import random
from pathlib import Path

import pytest
import torch
import transformers
from engine_support import (
    POLICIES,
    Chunked,
    assert_at_rest,
    executor_of,
    greedy,
    next_logits,
    plain,
    prompts_of,
    reference,
    serve,
    tiny_model,
)
from transformers import AttentionInterface, AttentionMaskInterface, GenerationConfig

from cbref import Engine, SamplingParams, load_model
from cbref.attention import torch_attention

# ---- the real model


# (prompt tokens, output tokens): from one to 700, around the edges of blocks of 16 tokens, one answer of one token
SHAPES = [(1, 14), (2, 5), (15, 9), (16, 1), (17, 22), (33, 3), (64, 12), (129, 7), (300, 17), (700, 6)]


@pytest.fixture(scope="module")
def asked(smollm):
    """Prompts cut from a text that the repository has, with transformers' answers, computed once."""
    model, tokenizer = smollm
    text = tokenizer((Path(__file__).parents[2] / "LICENSE").read_text())["input_ids"]
    prompts = [text[40 * i + 200 :][:length] for i, (length, _) in enumerate(SHAPES)]
    answers = [reference(model, p, n, pad_token_id=0) for p, (_, n) in zip(prompts, SHAPES, strict=True)]
    for _, logits in answers:  # rounding must not decide: two likeliest tokens too close would make the test a lottery
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3
    return prompts, answers


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_ids_and_logprobs_are_those_of_transformers(smollm_executor, asked, policy, slots):
    prompts, answers = asked
    order = random.Random(f"{policy}{slots}").sample(range(len(prompts)), len(prompts))
    params = [SamplingParams(max_tokens=SHAPES[i][1], logprobs=(None, 5)[i % 2]) for i in order]
    done = serve(smollm_executor, [prompts[i] for i in order], params, policy, slots)
    for i, completion in zip(order, done, strict=True):
        ids, logits = answers[i]
        assert completion.token_ids == ids, f"prompt of {SHAPES[i][0]} tokens"
        assert completion.prompt_ids == prompts[i]
        assert completion.finish_reason == "length"
        check_logprobs(completion, logits, 5 if i % 2 else None)


def check_logprobs(completion, logits, top, tolerance=1e-4):
    if top is None:
        assert completion.logprobs == []
        return
    expected = logits.log_softmax(-1)
    assert len(completion.logprobs) == len(completion.token_ids)
    for token, got, row in zip(completion.token_ids, completion.logprobs, expected, strict=True):
        assert got.token_id == token
        assert got.logprob == pytest.approx(row[token].item(), abs=tolerance)
        assert len(got.top) == top
        for alternative, logprob in got.top.items():
            assert logprob == pytest.approx(row[alternative].item(), abs=tolerance)
        likeliest = row.topk(top).values.tolist()
        assert list(got.top.values()) == pytest.approx(likeliest, abs=tolerance)


def test_chat_prompts_and_text_are_encoded_by_the_models_own_tokenizer(smollm, smollm_executor):
    _, tokenizer = smollm
    chat = [{"role": "user", "content": "Say hello."}]
    text, talk = serve(smollm_executor, ["The capital of France is", chat], SamplingParams(max_tokens=4))
    assert text.prompt_ids == tokenizer("The capital of France is")["input_ids"]
    as_text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert talk.prompt_ids == tokenizer(as_text)["input_ids"]
    assert "Paris" in text.text


# ---- small models: shapes


GROUPS = {"one head each": (4, 4), "three to one": (6, 2), "five to one": (5, 1)}  # query heads, KV heads
KINDS = {
    "llama": {},
    "qwen3": {},  # normalises queries and keys
    "mistral": {"sliding_window": 7},  # shorter than the prompts
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},  # layers differ
}
LENGTHS = [1, 2, 3, 9, 16, 31, 64]


@pytest.mark.parametrize("heads", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_small_models_of_every_shape(kind, heads):
    shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 8 * heads[0]}
    model = tiny_model(kind, **KINDS[kind], **shape)
    prompts = prompts_of(LENGTHS)
    outputs = [reference(model, p, n + 3) for n, p in enumerate(prompts)]
    params = [greedy(n + 3, logprobs=3) for n in range(len(prompts))]
    for policy in POLICIES:
        for completion, (ids, logits) in zip(serve(executor_of(model), prompts, params, policy), outputs, strict=True):
            assert completion.token_ids == ids
            check_logprobs(completion, logits, 3)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_blocks_and_chunks_do_not_change_the_answer(kind, block_size, chunk):
    """nano-vllm PR#213: a chunk that took the prompt's end for its own saw keys that were not there yet."""
    model = tiny_model(kind, **KINDS[kind])
    prompts = prompts_of([1, 4, 5, 10, 33])
    outputs = [reference(model, p, 6)[0] for p in prompts]
    executor = executor_of(model, block_size=block_size, num_blocks=-(-200 // block_size))
    engine = Engine(executor, Chunked(chunk))
    done = engine.generate(prompts, greedy(6), progress=False)
    assert_at_rest(engine)
    assert [c.token_ids for c in done] == outputs
    assert max(s.stop - s.start for step in engine.steps for s in step.shares) <= chunk


@pytest.mark.skipif(
    "page_size" not in getattr(getattr(transformers, "ContinuousBatchingConfig", None), "__annotations__", ()),
    reason="this transformers names the settings of generate_batch differently",
)
def test_generate_batch_agrees():
    """transformers' own continuous batching, on its own paged cache of 12 pages."""
    model = tiny_model("qwen3")
    prompts = prompts_of([1, 5, 9, 12, 3])
    with plain(model):
        answers = model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                page_size=4, num_blocks=12, max_batch_tokens=16
            ),
        )
    expected = {tuple(a.prompt_ids): a.generated_tokens for a in answers.values()}
    for policy in POLICIES:
        done = serve(executor_of(model, num_blocks=12), prompts, greedy(8), policy, slots=3)
        assert {tuple(c.prompt_ids): c.token_ids for c in done} == expected


def test_bfloat16():
    model = tiny_model()
    prompts = prompts_of(LENGTHS)
    exact = [next_logits(model, p) for p in prompts]
    rounded = tiny_model().to(torch.bfloat16)
    for completion, logits in zip(serve(executor_of(rounded), prompts, greedy(5, logprobs=0)), exact, strict=True):
        assert len(completion.token_ids) == 5
        first = torch.from_numpy(logits).log_softmax(-1)[completion.token_ids[0]].item()
        assert completion.logprobs[0].logprob == pytest.approx(first, abs=0.3)  # 8 bits of mantissa, logits up to 10


# ---- memory: nothing but the request's own tokens is read


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("policy", [*POLICIES, "chunked"])
def test_memory_that_is_not_the_requests_own_is_never_read(kind, policy):
    """All of the cache but the tokens that the step may read is NaN; one NaN read would end a request with an error."""
    model = tiny_model(kind, **KINDS[kind])
    prompts = prompts_of([1, 5, 8, 13, 2, 30])

    def poisoned(q, k, v, key_cache, value_cache, meta, *rest):
        foreign = torch.ones(key_cache.shape[:2], dtype=torch.bool)
        foreign[-1] = False  # the null block, which padding reads
        for i, context in enumerate(meta.context_len):
            before = torch.arange(int(context - (meta.query_start[i + 1] - meta.query_start[i])))
            foreign[meta.block_table[i, before // key_cache.shape[1]], before % key_cache.shape[1]] = False
        key_cache[foreign] = value_cache[foreign] = torch.nan
        return torch_attention(q, k, v, key_cache, value_cache, meta, *rest)

    outputs = [reference(model, p, 3 + n % 4)[0] for n, p in enumerate(prompts)]
    engine = Engine(executor_of(model, attention=poisoned), Chunked(4) if policy == "chunked" else policy)
    done = engine.generate(prompts, [greedy(3 + n % 4) for n in range(len(prompts))], progress=False)
    assert [c.token_ids for c in done] == outputs


# ---- attention of one's own


def dense_attention(q, k, v, key_cache, value_cache, meta, scale, window=None):
    """From ``StepMeta``'s description: request by request, softmax by hand, whole blocks as kernels read them."""
    size, heads, dim = key_cache.shape[1:]
    out = torch.zeros_like(q)
    for i, context in enumerate(meta.context_len):
        rows = slice(int(meta.query_start[i]), int(meta.query_start[i + 1]))
        positions = torch.arange(int(context) - (rows.stop - rows.start), int(context))
        blocks = meta.block_table[i]
        key_cache[blocks[positions // size], positions % size] = k[rows]
        value_cache[blocks[positions // size], positions % size] = v[rows]
        keys = key_cache[blocks].reshape(-1, heads, dim).repeat_interleave(q.shape[1] // heads, 1)
        values = value_cache[blocks].reshape(-1, heads, dim).repeat_interleave(q.shape[1] // heads, 1)
        seen = torch.arange(len(keys)) <= positions[:, None]
        if window is not None:
            seen &= torch.arange(len(keys)) > positions[:, None] - window
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * scale
        out[rows] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
    return out


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("policy", [*POLICIES, "chunked"])
def test_attention_written_from_the_description_of_the_metadata(kind, policy):
    model = tiny_model(kind, **KINDS[kind])
    prompts = prompts_of([1, 5, 8, 13, 2, 30])
    calls = []

    def counted(*args):
        calls.append(len(args[0]))
        return dense_attention(*args)

    engine = Engine(executor_of(model, attention=counted), Chunked(5) if policy == "chunked" else policy)
    calls.clear()  # a new executor tries one token
    done = engine.generate(prompts, greedy(6), progress=False)
    assert [c.token_ids for c in done] == [reference(model, p, 6)[0] for p in prompts]
    assert calls == [step.num_tokens for step in engine.steps for _ in range(model.config.num_hidden_layers)]


def test_the_outputs_of_a_given_attention_are_what_the_model_goes_on_with(tiny):
    """An attention that answers zero, here and in transformers: the same answers, and others than with a real one."""
    AttentionInterface.register("test_zero", lambda module, q, *_, **__: (torch.zeros_like(q).transpose(1, 2), None))
    AttentionMaskInterface.register("test_zero", lambda *_, **__: None)
    prompt = prompts_of([7])[0]
    ours = tiny.config._attn_implementation
    tiny.set_attn_implementation("test_zero")
    expected = tiny.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, 7:].tolist()
    tiny.set_attn_implementation(ours)
    executor = executor_of(tiny, attention=lambda q, *_: torch.zeros_like(q))
    [done] = serve(executor, [prompt], greedy(6))
    assert done.token_ids == expected != reference(tiny, prompt, 6)[0]


# ---- models that cannot be served


def test_a_model_without_the_attention_interface_is_refused(tmp_path):
    bloom = tiny_model("bloom", n_head=4, n_layer=2)
    with pytest.raises(ValueError, match=r"BloomForCausalLM.*Llama"):
        executor_of(bloom)
    bloom.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"BloomForCausalLM.*Llama"):
        load_model(str(tmp_path))


def test_a_model_that_fails_with_our_attention_is_refused_when_the_engine_is_made():
    gemma = tiny_model("gemma2")
    with pytest.raises(ValueError, match=r"cannot serve a Gemma2ForCausalLM: .*soft-capped"):
        executor_of(gemma)


def test_a_model_with_layers_that_are_not_attention_over_all_tokens_is_refused():
    """Packed into one row, a convolution or a recurrence would run on from one request into the next."""
    lfm2 = tiny_model("lfm2", layer_types=["conv", "full_attention"])
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM.*conv"):
        executor_of(lfm2)


def test_a_local_folder_is_served_with_and_without_a_tokenizer(tmp_path, smollm):
    model = tiny_model("qwen3", vocab_size=50_000)
    model.save_pretrained(tmp_path / "bare")
    engine = Engine.from_pretrained(str(tmp_path / "bare"), "static", 2, block_size=4, num_blocks=32)
    [done] = engine.generate([[5, 6, 7]], greedy(5), progress=False)
    assert done.token_ids == reference(model, [5, 6, 7], 5)[0]
    assert done.text == ""
    with pytest.raises(ValueError, match=r"'hello'.*no tokenizer"):
        engine.add_request("hello")

    model.save_pretrained(tmp_path / "whole")
    smollm[1].save_pretrained(tmp_path / "whole")
    engine = Engine.from_pretrained(str(tmp_path / "whole"), num_blocks=32)
    [done] = engine.generate(["hello"], greedy(5), progress=False)
    assert done.text == smollm[1].decode(done.token_ids, skip_special_tokens=True)
