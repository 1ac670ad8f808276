"""Known traps: the silent ones, each beside the naive way; and the list of the tests that hold every trap.

Numbers are those of the project's list of traps.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from checks import hf_logits, served
from tiny_families import PROMPT, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import interp_core
from interp_core import Ablate, InterpModel, RequestError, load_model, run_with_cache
from interp_core.errors import InterpError

_HERE = "plugins/interp_eager/tests"
_MINE = f"{_HERE}/test_traps_eager.py::"
_TENSORS = f"{_HERE}/test_traps_tensors.py::"
HELD: dict[int, tuple[str, ...]] = {
    1: (f"{_HERE}/test_verify.py::test_a_wrong_binding_is_named", f"{_HERE}/test_identities.py::test_identities_1_to_5")
    + (f"{_HERE}/test_hybrids.py::test_two_mixers_each_with_a_factor_of_its_own",),
    2: (f"{_HERE}/test_verify.py::test_a_wrong_binding_is_named", f"{_HERE}/test_hybrids.py::test_every_block_adds_up"),
    3: (f"{_TENSORS}test_modules_that_return_the_residual_too", f"{_HERE}/test_identities.py::test_identity_3_modules"),
    4: (f"{_TENSORS}test_a_capture_is_a_copy", f"{_HERE}/test_concurrency.py::test_results_are_copies"),
    5: (f"{_TENSORS}test_a_residual_between_sublayers_only_where_they_are_in_sequence",),
    6: (f"{_TENSORS}test_heads_are_as_wide_as_they_are", "tests/unit/test_facts.py::test_widths_per_layer"),
    7: (f"{_TENSORS}test_neurons_and_routers_layer_by_layer",),
    8: (f"{_HERE}/test_experts.py::test_weights_are_the_models_own_and_not_renormalised",)
    + (f"{_HERE}/test_experts.py::test_identity_7_the_experts_combined_by_hand_are_the_block",),
    9: (f"{_HERE}/test_experts.py::test_writing_router_logits_changes_the_choice_or_is_refused",),
    10: (f"{_TENSORS}test_sinks_take_their_share_of_the_probabilities",)
    + (f"{_HERE}/test_gates.py::test_sinks_that_come_as_a_factor_are_in_the_probabilities",),
    11: (f"{_TENSORS}test_a_window_counts_the_current_token",)
    + ("tests/unit/test_facts_modules.py::test_a_window_leaves_exactly_as_many_keys",),
    12: (f"{_TENSORS}test_a_softcap_comes_before_the_mask", f"{_TENSORS}test_the_logits_are_finished_once"),
    13: (f"{_TENSORS}test_an_embedding_scale_inside_or_outside_its_module",)
    + ("tests/unit/test_identities.py::test_embeddings_scaled_outside_their_module",),
    14: (f"{_TENSORS}test_the_last_hidden_state_is_behind_the_final_norm",),
    15: (f"{_TENSORS}test_blocks_that_return_tuples", f"{_HERE}/test_identities.py::test_identity_10_bare_hooks"),
    16: (f"{_TENSORS}test_attention_under_a_fused_kernel",)
    + (f"{_HERE}/test_identities.py::test_attention_is_the_same_on_every_kernel",),
    17: (f"{_TENSORS}test_what_the_mlp_reads_is_behind_the_gain",),
    18: (f"{_TENSORS}test_grouped_heads_are_repeated_and_not_tiled",),
    19: (f"{_HERE}/test_hybrids.py::test_mixers_without_softmax_refuse_its_points_per_layer",)
    + (f"{_TENSORS}test_a_linear_mixer_refuses_attention_points",),
    20: (f"{_TENSORS}test_neurons_without_an_mlp_module",),
    21: (f"{_TENSORS}test_a_nested_text_trunk", "tests/unit/test_facts_forms.py::test_the_text_model_of_a_wrapper"),
    22: (f"{_TENSORS}test_positions_follow_the_mask", f"{_HERE}/test_identities.py::test_batches_equal_one_by_one"),
    23: (f"{_MINE}test_unknown_keywords_are_refused", "tests/unit/test_loading.py::test_what_cannot_be_asked_for"),
    25: (f"{_MINE}test_compiled_parts_are_refused_before_a_forward", f"{_MINE}test_compiled_later_is_no_silence"),
    26: (f"{_MINE}test_no_points_read_nothing",),
    27: (f"{_HERE}/test_numbers.py::test_hooks_are_gone_after_a_failure_and_a_users_own_stay",),
    28: ("tests/unit/test_inputs.py::test_bad_tokens_are_refused_before_weights_are_looked_for",)
    + ("tests/unit/test_inputs.py::test_good_tokens", "tests/unit/test_inputs.py::test_bad_addresses")
    + ("tests/unit/test_address.py::test_ranges_expand_in_order_and_duplicates_go",)
    + (f"{_HERE}/test_faults.py::test_a_path_and_a_point_on_one_module_do_not_disturb_each_other",)
    + (f"{_HERE}/test_batch_requests.py::test_too_long_is_refused_before_any_forward_in_every_call",),
    29: (f"{_MINE}test_text_is_not_the_tokens_decoded_one_by_one",)
    + ("tests/unit/test_text.py::test_characters_of_many_tokens_come_whole",)
    + (f"{_HERE}/test_numbers.py::TestRealModel::test_it_says_paris_and_streams_bytes_whole",),
    30: (f"{_MINE}test_a_chat_has_one_beginning_of_text",)
    + ("tests/unit/test_chat.py::test_trusted_code_writes_the_conversation",),
}
"""Trap to the tests that fail on its naive implementation; trap 24 is of another backend's entry points alone."""


def inside(model: InterpModel) -> Any:
    """The transformers model."""
    backend: Any = model.session.backend()
    return backend.model


def test_every_trap_is_held_by_tests_that_exist() -> None:
    root = Path(__file__).parents[3]
    assert set(HELD) == set(range(1, 31)) - {24}
    defined: dict[str, set[str]] = {}
    for name in {name for names in HELD.values() for name in names}:
        path, _, test = name.partition("::")
        if path not in defined:
            tree = ast.parse((root / path).read_text("utf-8"))
            groups = [("", tree.body), *((f"{c.name}::", c.body) for c in tree.body if isinstance(c, ast.ClassDef))]
            defined[path] = {a + f.name for a, body in groups for f in body if isinstance(f, ast.FunctionDef)}
        assert test in defined[path], name
    assert "test_that_nobody_wrote" not in defined[_MINE.removesuffix("::")]


def test_unknown_keywords_are_refused(llama: InterpModel, folders: Path) -> None:
    """23: a misspelt keyword is an error in every call; transformers' forward takes any, and ignores it."""
    model: Any = llama
    with torch.no_grad():
        naive = inside(model)(input_ids=torch.tensor([PROMPT]), temprature=3.0).logits[0]
    assert torch.equal(naive, hf_logits(model, PROMPT))
    calls: list[Callable[..., Any]] = [
        lambda **more: model.run_with_cache(PROMPT, ["lm_head"], **more),
        lambda **more: model.capture_generation(PROMPT, [], max_tokens=1, **more),
        lambda **more: model.generate(PROMPT, max_tokens=1, **more),
        lambda **more: model.generate_stream(PROMPT, max_tokens=1, **more),
        lambda **more: model.capture_attention(PROMPT, [0], **more),
        lambda **more: model.logit_lens(PROMPT, **more),
        lambda **more: model.decode_residuals(torch.zeros(1, 48), **more),
        lambda **more: model.verify(PROMPT, **more),
        lambda **more: model.harvest([PROMPT], ["lm_head"], folders / "harvest", **more),
        lambda **more: model.steer(Ablate("resid_post.1"), **more),
        lambda **more: Ablate("resid_post.1", **more),
        lambda **more: load_model(save("llama", folders), **more),
    ]
    for call in calls:
        with pytest.raises((TypeError, RequestError), match="temprature"):
            call(temprature=3.0)
    assert not (folders / "harvest").exists()


COMPILED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda model: model.compile(backend="eager"),
    "its forward": lambda model: setattr(model, "forward", torch.compile(model.forward, backend="eager")),
    "its trunk": lambda model: setattr(model, "model", torch.compile(model.model, backend="eager")),
    "a block": lambda model: model.model.layers[1].compile(backend="eager"),
}


def fresh(folders: Path) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(save("llama", folders), dtype=torch.float32).eval()


@pytest.mark.parametrize("part", COMPILED)
def test_compiled_parts_are_refused_before_a_forward(part: str, folders: Path) -> None:
    """25: whichever part is compiled, and in whichever of the ways that there are, hooks in it never fire."""
    model = fresh(folders)
    load_model(model)
    COMPILED[part](model)
    with pytest.raises(RequestError, match="never fire"):
        load_model(model)


@pytest.mark.parametrize("part", COMPILED)
def test_compiled_later_is_no_silence(part: str, folders: Path) -> None:
    """25: compiled once it is loaded, a hook of one's own sees nothing and says nothing; a request is an error."""
    model = fresh(folders)
    loaded = load_model(model).warmup()
    block, seen = model.model.layers[1], []
    COMPILED[part](model)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        model(input_ids=ids)
        block.self_attn.register_forward_hook(lambda *_: seen.append(1))
        model(input_ids=ids)
    assert seen == []
    for call in (
        lambda: run_with_cache(loaded, PROMPT, ["attn_out.1"]),
        lambda: loaded.generate(PROMPT, max_tokens=2, steering=[Ablate("resid_post.1")]),
    ):
        with pytest.raises(InterpError, match="never fire"):
            call()


def test_no_points_read_nothing(llama: InterpModel) -> None:
    """26: an empty list is not "everything", and costs no forward."""
    model = llama
    ran: list[int] = []
    handle = inside(model).register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        assert list(run_with_cache(model, PROMPT, [])) == []
        assert ran == []
        completion, cache = model.capture_generation(PROMPT, [], max_tokens=2, ignore_eos=True)
    finally:
        handle.remove()
    assert list(cache) == []
    assert len(completion.token_ids) == 2
    naive = [] or served(model)
    assert len(naive) > 40


@pytest.fixture
def speaking(tmp_path: Path) -> InterpModel:
    """A tokenizer of bytes that begins every text with ``<s>``, and a chat template that writes one itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    fast.save_pretrained(tmp_path)
    config = hf.LlamaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=1)
    config.save_pretrained(tmp_path)
    return load_model(tmp_path, backend="eager")


def test_text_is_not_the_tokens_decoded_one_by_one(speaking: InterpModel) -> None:
    """29: joined, decodes of 12 tokens of four characters are 12 replacement characters; a stream gives them whole."""
    ids = speaking.to_tokens("é漢字🙂", add_special_tokens=False)[0].tolist()
    naive = "".join(speaking.tokenizer.decode([token]) for token in ids)
    assert naive == "\ufffd" * len(ids) == "\ufffd" * 12
    assert speaking.to_string(ids) == "é漢字🙂"
    stream = speaking.text_stream([])
    assert stream is not None
    assert [piece for piece in map(stream.push, ids) if piece] == ["é", "漢", "字", "🙂"]


def test_a_chat_has_one_beginning_of_text(speaking: InterpModel, llama: InterpModel) -> None:
    """30: a template's text holds its ``<s>`` already; read as any text, it gets a second one."""
    ids = speaking.chat_tokens([{"role": "user", "content": "hello"}])
    text = speaking.to_string(ids[0])
    assert text == "<s>[user]hello"
    bos = speaking.tokenizer.bos_token_id
    assert ids[0].tolist().count(bos) == 1
    assert speaking.to_tokens(text)[0].tolist().count(bos) == 2
    assert speaking.to_tokens("hello")[0].tolist().count(bos) == 1
    assert bos not in speaking.to_tokens("hello", add_special_tokens=False)[0].tolist()
    assert list(llama.generate(PROMPT, max_tokens=1).prompt_token_ids) == PROMPT  # what was used is there to see


def test_no_public_call_takes_any_keyword_unchecked() -> None:
    """23: those that pass keywords on are known by name; above, they refuse them; a chat's go to its template."""
    public = {name: getattr(interp_core, name) for name in interp_core.__all__} | dict(inspect.getmembers(InterpModel))
    calls = {name: call for name, call in public.items() if inspect.isfunction(call) and not name.startswith("_")}
    assert len(calls) > 20
    keywords = inspect.Parameter.VAR_KEYWORD
    taking = {
        n for n, call in calls.items() if keywords in {p.kind for p in inspect.signature(call).parameters.values()}
    }
    assert taking == {"chat_spans", "chat_tokens", "harvest", "inspect_model", "load_model", "logit_lens"}
