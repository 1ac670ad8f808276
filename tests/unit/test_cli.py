"""The command line, in processes of its own, on a configuration without weights and on a tiny model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, ViTConfig
from zygote import Zygote

from interp_core import Cache, load_harvest

Interp = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def interp(zygote: Zygote) -> Interp:
    """The command, in a process of its own. (That the script is installed is seen in the tests of the README.)"""
    return lambda *arguments: zygote.run("from interp_core.cli import main\nmain()", arguments)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny [llama]"
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["the capital of france"], trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return str(folder)


def test_describe_points_and_capabilities_answer_as_json(tiny: str, interp: Interp) -> None:
    described = json.loads(interp("describe", tiny, "--json").stdout)
    assert described["facts"]["n_layers"] == 2
    assert described["backend"] == "eager"
    points = json.loads(interp("points", tiny, "--backend", "vllm", "--json").stdout)
    assert {p["name"]: p["support"]["vllm"]["mode"] for p in points}["resid_post"] == "hook"
    verdicts = json.loads(interp("capabilities", tiny, "--json").stdout)["capabilities"]
    assert verdicts["capture"]["supported"] is True
    assert verdicts["gradients"]["supported"] is False
    assert verdicts["gradients"]["instead"]


def test_tables_are_for_people(tiny: str, interp: Interp) -> None:
    for command in (["describe", tiny], ["points", tiny], ["capabilities", tiny], ["capabilities"], ["plugins"]):
        done = interp(*command)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) > 4


def test_lens_writes_a_page_and_a_document(tiny: str, tmp_path: Path, interp: Interp) -> None:
    page = tmp_path / "lens.html"
    done = interp("lens", tiny, "the <capital>", "--html", str(page), "--json", "--top-k", "3")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert len(record["top"]) == 2
    assert len(record["top"][0][0]) == 3
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "the &lt;capital&gt;" in text
    assert "http" not in text


def test_capture_writes_what_the_library_reads(tiny: str, tmp_path: Path, interp: Interp) -> None:
    file = tmp_path / "c.safetensors"
    done = interp("capture", tiny, "the capital", "resid_post.*", "z.1.head-1", "--out", str(file), "--max-tokens", "3")
    assert done.returncode == 0, done.stderr
    cache = Cache.load(file)
    assert [str(a) for a in cache] == ["resid_post.0", "resid_post.1", "z.1.head-1"]
    assert cache["resid_post.1"].shape == (1, len(cache.tokens[0]), 32)


def test_harvest_writes_what_the_library_reads_and_goes_on(tiny: str, tmp_path: Path, interp: Interp) -> None:
    texts, folder = tmp_path / "texts.txt", tmp_path / "h"
    texts.write_text("the capital\nof\nfrance\n", encoding="utf-8")
    points = ["--points", "resid_post.*,z.1.head-1", "--points", "mlp_out.0"]
    command = ["harvest", tiny, "--texts", str(texts), *points, "--out", str(folder), "--shard-size", "2"]
    done = interp(*command, "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["texts"], record["complete"]) == (3, True)
    assert record["files"] == ["shard-000000.safetensors", "shard-000001.safetensors"]
    assert list(record["points"]) == ["resid_post.0", "resid_post.1", "z.1.head-1", "mlp_out.0"]
    found = load_harvest(folder)
    assert found[2]["z.1.head-1"].shape == (1, len(found.tokens(2)), 16)
    again = interp(*command)
    assert again.returncode == 0, again.stderr
    assert "3 texts, 2 files" in again.stdout
    other = interp(*command, "--positions", "last")
    assert other.returncode == 1
    assert "positions null" in other.stderr
    assert len(load_harvest(folder)) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["points", "{tiny}", "--backend", "eagre"], "eager"),
        (["describe", "/no/such/folder"], "is not there: a model is a folder"),
        (["describe", "{tiny}", "-o", "attn_implementatoin=sdpa"], "attn_implementation"),
        (["describe", "{tiny}", "-o", "nonsense"], "NAME=VALUE"),
        (["capture", "{tiny}", "the", "resid_pots.1", "--out", "{out}"], "resid_post"),
        (["capture", "{tiny}", "the", "resid_post.7", "--out", "{out}"], "0 to 1"),
        (["capture", "{tiny}", "the", "resid_post.1", "--out", "/no/such/folder/x"], "folder does not exist"),
        (["capture", "{tiny}", "the", "q_norm_in.1", "--out", "{out}"], "Instead"),
        (["harvest", "{tiny}", "--texts", "/no/such/file", "--points", "resid_post.1", "--out", "{out}"], "not a file"),
        (["harvest", "{tiny}", "--texts", "{tiny}", "--points", "resid_pots.1", "--out", "{out}"], "not a file"),
        (["lens", "{tiny}", "the", "--positions", "9"], "positions 0 to"),
        (["lens", "{tiny}", ""], "empty"),
        (["describe", "{vit}"], "vit"),
    ],
)
def test_bad_input_is_one_readable_line(
    tiny: str, tmp_path: Path, arguments: list[str], words: str, interp: Interp
) -> None:
    vit = tmp_path / "vit"
    ViTConfig().save_pretrained(vit)
    names = {"tiny": tiny, "out": str(tmp_path / "out.safetensors"), "vit": str(vit)}
    done = interp(*(argument.format(**names) for argument in arguments))
    assert done.returncode == 1, done.stdout + done.stderr
    line = " ".join(done.stderr.split("error:")[-1].split())
    assert words in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


def test_verbose_shows_the_traceback(interp: Interp) -> None:
    assert "Traceback" in interp("-v", "describe", "/no/such/folder").stderr


def test_demo_of_another_model_runs_all_four_parts(tiny: str, interp: Interp) -> None:
    done = interp("demo", "--model", tiny)
    assert done.returncode == 0, done.stderr
    for part in ("1. What", "2. The logit lens", "3. Steering", "4. A refusal", "CapabilityUnsupported"):
        assert part in done.stdout


@pytest.mark.real_model
def test_demo_says_paris(interp: Interp) -> None:
    record = json.loads(interp("demo", "--json").stdout)
    assert record["lens"]["best"][-1] == " Paris"
    assert record["lens"]["probability"][-1] > 0.7
    assert record["steering"]["plain"] != record["steering"]["steered"]
    assert record["refusal"]["why"]


def test_verify_says_what_is_proven_and_exits_by_it(tiny: str, interp: Interp) -> None:
    ran = interp("verify", tiny, "--prompt", "the capital of france", "--json")
    assert ran.returncode == 0, ran.stderr
    record = json.loads(ran.stdout)
    assert (record["ok"], record["complete"], record["backend"]) == (True, True, "eager")
    assert record["points"]["resid_mid"] == "proven"
    assert record["layers"]["attn_gate"]["1"]["reason"] == "this family does not gate its attention output"
    table = interp("verify", tiny, "--dtype", "float32")
    assert table.returncode == 0, table.stderr
    assert "27 points: 19 proven, 8 absent, 0 failed, 0 unchecked" in table.stdout
    assert "absent: router_logits: the MLP of this layer is dense" in table.stdout
    refused = interp("verify", tiny, "--backend", "vllm-generate")
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr


def test_verify_exits_1_and_names_what_failed_or_stayed_unchecked(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from interp_core import InterpModel
    from interp_core.checks import Check
    from interp_core.cli.main import app
    from interp_core.verdicts import Verdict, Verification

    made = {"layer": 0, "proves": ("z",), "control": 0.5, "tolerance": 2e-5}
    right = Check(identity="one is the other", error=1e-7, **made)
    wrong = Check(identity="this is that", error=0.3, **made)
    unsure = {
        0: Verdict(state="unchecked", reason="no identity speaks of it"),
        1: Verdict(state="proven", checks=[right]),
    }
    failed = {0: Verdict(state="failed", reason="numbers", checks=[wrong]), 1: Verdict(state="proven", checks=[right])}
    for layers, checks, said in (
        ({"z": unsure}, [right], "unchecked: z (layer 0): no identity speaks of it"),
        ({"z": failed}, [right, wrong], "failed: z (layer 0): this is that"),
    ):
        found = Verification(checks=checks, layers=layers, hints=["look here"])
        monkeypatch.setattr(InterpModel, "verify", lambda self, tokens, progress, found=found: found)
        ran = CliRunner().invoke(app, ["verify", tiny])
        assert ran.exit_code == 1, ran.output
        assert said in ran.output
        assert "hint: look here" in ran.output
