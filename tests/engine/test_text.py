"""Streamed text: the pieces add up to the whole, no piece is ever taken back, and stop strings stop."""

import random

import pytest
from engine_support import Scripted, assert_at_rest, greedy
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from cbref import Engine, SamplingParams
from cbref.detokenize import TextStream

TEXTS = [
    "The capital of France is Paris.",
    "안녕하세요, 연속 배치 처리를 배워 봅시다.",
    "🙂👩‍👩‍👧‍👦🇰🇷 flags, families é ñ ß 漢字 कि",
    "  leading, \n\n trailing  \t ",
    "def f(x):\n    return x**2  # ½",
]


@pytest.fixture(scope="session")
def tokenizer(smollm):
    return smollm[1]


def stream_of(tokenizer, ids, stop=(), min_tokens=0):
    """The pieces as an engine would send them: to the end, or to the first complete stop string."""
    stream, pieces = TextStream(tokenizer, stop), []
    for n, token in enumerate(ids, 1):
        pieces.append(stream.feed(token, check_stop=n >= min_tokens))
        if stream.stopped:
            break
    return [*pieces, stream.finish()]


def pieces_tokenizer(*pieces):
    """A tokenizer whose token n is the n-th piece; what a model's tokenizer may cut a text into."""
    backend = Tokenizer(models.WordLevel({"[unk]": 0} | {p: n for n, p in enumerate(pieces, 1)}, unk_token="[unk]"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


# ---- characters


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_add_up(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    pieces = stream_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert all("\ufffd" not in p for p in pieces), "half a character was sent"


def test_a_character_is_sent_when_its_last_byte_has_come(tokenizer):
    ids = tokenizer("🧿")["input_ids"]
    assert len(ids) > 1, "this character was to be split over tokens"
    assert stream_of(tokenizer, ids) == [*[""] * (len(ids) - 1), "🧿", ""]


def test_an_output_that_ends_within_a_character_shows_it(tokenizer):
    ids = tokenizer("ok 🧿")["input_ids"][:-1]
    pieces = stream_of(tokenizer, ids)
    assert "".join(pieces[:-1]).strip() == "ok"
    assert "".join(pieces) == tokenizer.decode(ids)
    assert pieces[-1].endswith("\ufffd")


def test_special_tokens_are_no_text(tokenizer):
    ids = [*tokenizer("yes")["input_ids"], tokenizer.eos_token_id]
    assert "".join(stream_of(tokenizer, ids)) == "yes"


@given(seed=st.integers(0, 2**32), fragments=st.floats(0, 1))
def test_any_ids_add_up(tokenizer, seed, fragments):
    """Also bytes in an order that is no UTF-8, which random sampling makes."""
    broken = [i for i in range(17, 1200) if "\ufffd" in tokenizer.decode([i])]
    dice = random.Random(seed)
    whole = range(len(tokenizer))
    ids = [dice.choice(broken if dice.random() < fragments else whole) for _ in range(dice.randrange(1, 15))]
    assert "".join(stream_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="session")
def byte_fallback():
    """As in Llama 2, Mistral and Gemma: a character without a token of its own becomes tokens of single bytes."""
    vocab = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁the", "▁cat", "a", "b", "▁", "▁안녕"]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(vocab)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_fallback(byte_fallback, text):
    ids = [byte + 1 for byte in text.encode()]
    assert "".join(stream_of(byte_fallback, ids)) == text


@given(ids=st.lists(st.integers(1, 262), min_size=1, max_size=12))
@example(ids=[36, 238, 262])
def test_bytes_that_are_no_text_harm_nobody(byte_fallback, ids):
    """vllm#17448: where a run of bytes turns out to be no UTF-8, byte fallback takes back text that was out already,
    and the decode stream raises. What was sent stays sent; valid text around it still comes."""
    good = [byte + 1 for byte in "안녕 🙂".encode()]
    assert "".join(stream_of(byte_fallback, [*ids, 259, *good])).endswith("안녕 🙂")


# ---- stop strings


def test_a_stop_string_over_several_tokens():
    """vllm#3574, TGI#1254: the prefix of a stop string leaked; llama.cpp#9867: what was held back got lost."""
    tokenizer = pieces_tokenizer("DEF", "G", "HI", "J", "K")
    assert stream_of(tokenizer, [1, 2, 3, 4], stop=["DEFGHIJ"]) == ["", "", "", "", ""]
    assert stream_of(tokenizer, [1, 2, 3, 5], stop=["DEFGHIJ"]) == ["", "", "", "DEFGHIK", ""]
    assert stream_of(tokenizer, [1, 2, 3], stop=["DEFGHIJ"]) == ["", "", "", "DEFGHI"]


@pytest.mark.parametrize(
    ("ids", "stop", "text"),
    [
        ([1, 2, 3], ["bc"], "a"),
        ([1, 2, 3], ["c", "b"], "a"),  # the one that is complete first
        ([1, 6, 3], ["cd", "bc"], "a"),  # both complete in one token: the one that begins first
        ([1, 6, 3], ["bc", "cd"], "a"),
        ([4, 4, 5], ["aab"], "aa"),  # aa aa b: the end of what was held back begins anew
        ([4, 1, 5], ["aab"], "a"),
        ([6, 1], ["bcd"], ""),
        ([1, 2], ["xyz"], "ab"),
        ([1, 2, 3], ["a"], ""),
    ],
)
def test_which_stop_string_and_where(ids, stop, text):
    tokenizer = pieces_tokenizer("a", "b", "c", "aa", "b!", "bcd")
    assert "".join(stream_of(tokenizer, ids, stop)) == text


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, "a"), (3, "a"), (4, "abca"), (6, "abca"), (7, "abcabca"), (9, "abcabca"), (10, "abcabcabc")],
)
def test_stop_strings_below_min_tokens_do_not_count(min_tokens, text):
    """One that begins below the minimum and is complete above it does: "bc" ends with tokens 3, 6 and 9."""
    tokenizer = pieces_tokenizer("a", "b", "c")
    assert "".join(stream_of(tokenizer, [1, 2, 3] * 3, ["bc"], min_tokens)) == text


def simple_stop(pieces, stop, min_tokens):
    """The rule without any holding back: after each token look at all of the text."""
    text = ""
    for n, piece in enumerate(pieces, 1):
        old, text = len(text), text + piece
        if n >= min_tokens:
            ends = [(at, s) for s in stop for at in range(len(text)) if text.startswith(s, at) and at + len(s) > old]
            if ends:
                return text[: min(ends)[0]], True
    return text, False


ALPHABET = st.text("ab", min_size=1, max_size=4)


@given(
    pieces=st.lists(ALPHABET, min_size=1, max_size=12),
    stop=st.lists(ALPHABET, max_size=3),
    min_tokens=st.integers(0, 6),
)
def test_any_stop_strings_in_any_text(pieces, stop, min_tokens):
    vocabulary = sorted(set(pieces))
    tokenizer = pieces_tokenizer(*vocabulary)
    stream, sent, stopped = TextStream(tokenizer, tuple(stop)), "", False
    for n, piece in enumerate(pieces, 1):
        sent += stream.feed(vocabulary.index(piece) + 1, check_stop=n >= min_tokens)
        held = "".join(pieces[:n])[len(sent) :]
        if stopped := stream.stopped:
            break
        assert held == "" or any(s.startswith(held) and s != held for s in stop), "text is held back without need"
    sent += stream.finish()
    assert (sent, stopped) == simple_stop(pieces, stop, min_tokens)


# ---- in the engine


def serve_pieces(ids, stop, pieces=("DEF", "G", "HI", "J", "K", "é"), **params):
    executor = Scripted({"x": ids})
    executor.tokenizer = pieces_tokenizer(*pieces)
    engine = Engine(executor)
    params = SamplingParams(max_tokens=len(ids), stop=stop, **params)
    request = engine.add_request([1], params, request_id="x")
    events = []
    while engine.has_work:
        events += engine.step()
    assert_at_rest(engine)
    done = engine.completion(request)
    assert done.text == "".join(e.text for e in events)
    assert [e.token_id for e in events] == done.token_ids
    assert [e.index for e in events] == list(range(len(events)))
    assert [e.finish_reason for e in events] == [None] * (len(events) - 1) + [done.finish_reason]
    return done


def test_an_engines_request_stops_at_a_stop_string():
    done = serve_pieces([5, 1, 2, 3, 4, 5, 5], "DEFGHIJ")
    assert (done.text, done.finish_reason, done.token_ids) == ("K", "stop", [5, 1, 2, 3, 4])
    done = serve_pieces([5, 1, 2, 3], "DEFGHIJ")
    assert (done.text, done.finish_reason) == ("KDEFGHI", "length")
    done = serve_pieces([5, 1, 2, 3, 4, 5], ["nothing", "J"], min_tokens=5)
    assert (done.text, done.finish_reason) == ("KDEFGHI", "stop")
    done = serve_pieces([5, 4, 5, 5], ["J"], min_tokens=3)
    assert (done.text, done.finish_reason) == ("KJKK", "length")


def test_what_was_held_back_is_not_lost_when_a_request_is_aborted():
    executor = Scripted({"x": [1, 2, 3, 4]})
    executor.tokenizer = pieces_tokenizer("DEF", "G", "HI", "J")
    engine = Engine(executor)
    request = engine.add_request([1], SamplingParams(max_tokens=4, stop="DEFGHIJ"), request_id="x")
    assert [e.text for e in engine.step() + engine.step()] == ["", ""]
    engine.abort("x")
    assert engine.completion(request).text == "DEFG"


def test_the_real_model_streams_what_it_completes(smollm, smollm_executor):
    tokenizer = smollm[1]
    prompts = ["Write the word 'hello' in Korean and add an emoji:", "Once upon a time"]
    params = [greedy(24), SamplingParams(max_tokens=24, temperature=1.2, seed=1)]
    events = list(Engine(smollm_executor).stream(prompts, params))
    done = Engine(smollm_executor).generate(prompts, params, progress=False)
    for n, completion in enumerate(done):
        mine = [e for e in events if e.request_id == str(n)]
        assert [e.token_id for e in mine] == completion.token_ids
        assert "".join(e.text for e in mine) == completion.text
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
