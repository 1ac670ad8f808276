"""Bad input of every kind is one typed error before any work; good input means what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast, ViTConfig

from interp_core import (
    Ablate,
    Add,
    Address,
    AddressError,
    BackendUnavailable,
    Cache,
    Cap,
    CapabilityUnsupported,
    InterpModel,
    ModelUnavailable,
    NormScaledAdd,
    Replace,
    RequestError,
    Scale,
    Swap,
    load_model,
    parse_address,
    steer,
)
from interp_core.arithmetic import apply_operation
from interp_core.expressions import Read, Slice, Sum, read_value, write_value
from interp_core.expressions import Scale as ScaleBy
from interp_core.text import TextStream
from interp_core.tokens import read_tokens, select_positions

D = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> InterpModel:
    """A configuration without weights: whatever is checked is checked before any are looked for."""
    folder = tmp_path_factory.mktemp("config-only")
    sizes = {"vocab_size": 50, "hidden_size": D, "intermediate_size": 20, "num_hidden_layers": 3}
    LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=12).save_pretrained(
        folder
    )
    return load_model(str(folder), "eager")


# Addresses.

NAMES = st.sampled_from(["resid_post", "z", "mlp_act", "value"])
COORDINATES = st.dictionaries(st.sampled_from(["head", "kv_head", "neuron", "stream"]), st.integers(0, 99))


@given(NAMES, st.none() | st.integers(0, 999), COORDINATES)
def test_addresses_round_trip(name: str, layer: int | None, coordinates: dict[str, int]) -> None:
    address = Address(name, layer, coordinates.items())
    assert parse_address(str(address)) == address


def test_tuples_and_ranges(model: InterpModel) -> None:
    assert model.address(("resid_post", np.int64(2))) == Address("resid_post", 2)
    assert [str(a) for a in model.profile.addresses(["resid_post.1-2", "z.*.head-3"])] == [
        "resid_post.1",
        "resid_post.2",
        "z.0.head-3",
        "z.1.head-3",
        "z.2.head-3",
    ]
    assert len(model.profile.addresses(["resid_post.1", ("resid_post", 1)])) == 1


BAD_ADDRESSES: list[Any] = [
    "",
    "resid_post",
    "resid_post.3",
    "resid_post.-1",
    "resid_post.x",
    "resid_pots.1",
    "z.1.head-4",
    7,
    None,
]
BAD_ADDRESSES += [
    "z.1.head--1",
    "z.1.head-1.head-2",
    "z.1.haed-1",
    "embeddings.0",
    "resid_post.1.head-0",
    ("resid_post", True),
]
BAD_ADDRESSES += [
    ("resid_post", 1.0),
    ("resid_post", -1),
    "resid_post.0-9",
    "resid_post.2-1",
    "Resid_post.1",
    "path.",
    "z..1",
]


@pytest.mark.parametrize("bad", BAD_ADDRESSES, ids=str)
def test_bad_addresses(model: InterpModel, bad: Any) -> None:
    with pytest.raises(AddressError) as caught:
        model.profile.addresses([bad])
    assert len(str(caught.value)) > 15


# Tokens.

GOOD_TOKENS: list[Any] = [
    [1, 2],
    (1, 2),
    range(3),
    [np.int64(4)],
    torch.tensor([1, 2]),
    np.array([[1, 2]]),
    [[1], [2, 3]],
]
BAD_TOKENS: list[Any] = [
    [],
    [[]],
    [[1], []],
    [True],
    [1.0],
    [50],
    [-1],
    "text",
    ["text"],
    5,
    None,
    [1, [2]],
    list(range(13)),
]
BAD_TOKENS += [
    torch.tensor([1.0]),
    torch.tensor([True]),
    torch.zeros(0, dtype=torch.long),
    torch.zeros(1, 1, 1, dtype=torch.long),
]


@pytest.mark.parametrize("tokens", GOOD_TOKENS, ids=str)
def test_good_tokens(model: InterpModel, tokens: Any) -> None:
    assert all(isinstance(i, int) for row in read_tokens(tokens, model.facts).rows for i in row)


@pytest.mark.parametrize("tokens", BAD_TOKENS, ids=str)
def test_bad_tokens_are_refused_before_weights_are_looked_for(model: InterpModel, tokens: Any) -> None:
    with pytest.raises(RequestError):
        model.run_with_cache(tokens, ["resid_post.1"])
    with pytest.raises(RequestError):
        model.generate(tokens, max_tokens=1)
    assert not model.session.warm


def test_masks(model: InterpModel) -> None:
    batch = read_tokens(torch.tensor([[0, 1, 2], [3, 4, 0]]), model.facts, torch.tensor([[0, 1, 1], [1, 1, 0]]))
    assert batch.rows == ((1, 2), (3, 4))
    assert batch.offsets == (1, 0)
    for mask in ([[1, 0, 1]], [[0, 0, 0]], [[1, 1]], [[1, 2, 1]]):
        with pytest.raises(RequestError):
            read_tokens(torch.tensor([[1, 2, 3]]), model.facts, torch.tensor(mask))


def test_positions() -> None:
    assert select_positions(None, 4) is None
    assert select_positions("last", 4) == (3,)
    assert select_positions(slice(-2, None), 4) == (2, 3)
    assert select_positions(torch.tensor([3, 0]), 4) == (3, 0)
    for bad in ("first", 4, [-1], [True], [0.5]):
        with pytest.raises(RequestError):
            select_positions(bad, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": 12},
        {"max_tokens": True},
        {"max_tokens": 1, "temperature": -1},
        {"max_tokens": 1, "top_p": 0},
    ]
    + [
        {"max_tokens": 1, "stop": ""},
        {"max_tokens": 1, "n_logprobs": -1},
        {"max_tokens": 1, "seed": -1},
        {"max_tokens": 1, "top_k": 0},
    ],
    ids=str,
)
def test_bad_sampling(model: InterpModel, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        model.generate([1, 2], **options)
    with pytest.raises(RequestError):
        model.generate_stream([1, 2], **options)
    with pytest.raises(TypeError, match="max_tokns"):
        model.generate([1, 2], max_tokns=1)


# Operations.

BAD_OPERATIONS: list[Any] = [
    Add("resid_post.1", torch.ones(3)),
    Add("resid_post.1", torch.full((D,), float("nan"))),
    Add("resid_post.1", torch.ones(D), scale=float("inf")),
    Add("resid_post.1", "text"),
    Add("resid_post.1", torch.ones(D, dtype=torch.bool)),
    Scale("resid_post.1", torch.zeros(D), 2.0),
    Cap("resid_post.1", torch.ones(D)),
    Cap("resid_post.1", torch.ones(D), low=2.0, high=1.0),
    Swap("resid_post.1", torch.ones(D), 2 * torch.ones(D)),
    Replace("resid_post.1", torch.ones(2, 3)),
    "resid_post.1",
]


@pytest.mark.parametrize("operation", BAD_OPERATIONS, ids=repr)
def test_bad_operations(model: InterpModel, operation: Any) -> None:
    with pytest.raises(RequestError), steer(model, operation):
        raise AssertionError("not refused")


def test_operations_on_what_cannot_be_written_or_does_not_exist(model: InterpModel) -> None:
    with pytest.raises(CapabilityUnsupported), steer(model, Add("lm_head", torch.ones(50))):
        raise AssertionError
    with pytest.raises(AddressError), steer(model, Add("resid_post.9", torch.ones(D))):
        raise AssertionError
    with pytest.raises(RequestError, match="rows for"):
        model.run_with_cache([1, 2, 3], ["resid_post.1"], steering=Replace("resid_post.1", torch.ones(2, D)))


def by_hand() -> dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]]:
    v, w = torch.linspace(-1, 2, D), torch.linspace(3, -1, D)
    unit = v / v.norm()

    def along(x: torch.Tensor) -> torch.Tensor:
        return x @ unit

    def swapped(x: torch.Tensor) -> torch.Tensor:
        basis = torch.stack([unit, w / w.norm()], 1)
        parts = torch.linalg.lstsq(basis, x.T).solution
        return x + (basis @ (parts.flip(0) - parts)).T

    return {
        "add": (Add("resid_post.0", v, 2.0), lambda x: x + 2 * v),
        "scale": (Scale("resid_post.0", v, 3.0), lambda x: x + 2 * along(x)[:, None] * unit),
        "cap": (
            Cap("resid_post.0", v, -0.1, 0.1),
            lambda x: x + (along(x).clamp(-0.1, 0.1) - along(x))[:, None] * unit,
        ),
        "norm": (NormScaledAdd("resid_post.0", v, 0.5), lambda x: x + 0.5 * x.norm(dim=1, keepdim=True) * unit),
        "ablate": (Ablate("resid_post.0", v), lambda x: x - along(x)[:, None] * unit),
        "zero": (Ablate("resid_post.0"), torch.zeros_like),
        "swap": (Swap("resid_post.0", v, w), swapped),
        "replace": (Replace("resid_post.0", v), v.expand_as),
    }


@pytest.mark.parametrize("name", list(by_hand()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arithmetic(name: str, dtype: torch.dtype) -> None:
    operation, want = by_hand()[name]
    x = torch.randn(5, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = x.clone()
    got = apply_operation(operation, x)
    assert got.dtype == dtype
    assert torch.equal(x, before)
    assert torch.allclose(got.float(), want(x.float()), atol=1e-5 if dtype is torch.float32 else 0.1)
    assert not torch.allclose(got.float(), x.float(), atol=1e-3)


def test_expressions_read_and_write_and_a_zero_write_is_nothing() -> None:
    a, b = torch.randn(2, 3, 12), torch.randn(2, 3, 12)
    fused = Slice(Read("qkv"), (2, 3, 2), (slice(None), 1))
    assert torch.equal(read_value(fused, lambda _: a), a.reshape(2, 3, 2, 3, 2)[..., 1, :].flatten(2))
    written = write_value(fused, lambda _: a, read_value(fused, lambda _: a), torch.zeros(2, 3, 4))
    assert not written.reshape(2, 3, 2, 3, 2)[..., 1, :].any()
    assert torch.equal(written.reshape(2, 3, 2, 3, 2)[..., 0, :], a.reshape(2, 3, 2, 3, 2)[..., 0, :])
    total = Sum(Read("first"), ScaleBy(Read("second"), 0.22))

    def leaf(read: Read) -> torch.Tensor:
        return a if read.role == "first" else b

    old = read_value(total, leaf)
    assert torch.equal(write_value(total, leaf, old, old.clone()), b)
    assert torch.allclose(a + 0.22 * write_value(total, leaf, old, old + 1), old + 1, atol=1e-5)


# Text.


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(["the capital " * 4], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=made)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), prompt=st.text(max_size=8))
def test_pieces_join_to_the_text(tokenizer: Any, text: str, prompt: str) -> None:
    ids, before = tokenizer.encode(f"é漢字🙂{text}"), tokenizer.encode(prompt)
    stream = TextStream(tokenizer, before)
    pieces = [stream.push(i) for i in ids]
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
    assert "".join([*pieces, stream.finish()]) == f"é漢字🙂{text}"
    naive = "".join(tokenizer.decode([i]) for i in ids)
    assert naive != f"é漢字🙂{text}"


def test_stop_strings_split_over_tokens(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, [], ("🙂!", "zz"))
    pieces = []
    for i in tokenizer.encode("one 🙂? two 🙂! three zz"):
        pieces.append(stream.push(i))
        if stream.stopped:
            break
    assert stream.stopped
    assert "".join(pieces) == "one 🙂? two " == stream.text


# Loading.


def test_bad_models_options_and_backends(model: InterpModel, tmp_path: Path) -> None:
    empty, corrupt, nameless, vision = (tmp_path / name for name in ("empty", "corrupt", "nameless", "vision"))
    for folder in (empty, corrupt, nameless):
        folder.mkdir()
    (corrupt / "config.json").write_text("{")
    (nameless / "config.json").write_text('{"hidden_size": 3}')
    ViTConfig().save_pretrained(vision)
    for bad in (empty, corrupt, nameless, vision, tmp_path / "nowhere"):
        with pytest.raises(ModelUnavailable):
            load_model(bad, "eager")
    with pytest.raises(BackendUnavailable, match="eager"):
        load_model(model.model_id, "eagre")
    with pytest.raises(RequestError, match="requires_grad"):
        load_model(model.model_id, "eager", require_grad=True)
    with pytest.raises(RequestError, match="dtype"):
        load_model(model.model_id, "eager", dtype="float31")
    with pytest.raises(RequestError, match="declare nothing"):
        load_model(model.model_id, "vllm-static", static_points=[])


def test_no_weights_is_one_error_and_shutdown_is_final(model: InterpModel) -> None:
    with pytest.raises(ModelUnavailable, match="no weights"):
        model.warmup()
    other = load_model(model.model_id, "eager")
    other.shutdown()
    other.shutdown()
    with pytest.raises(BackendUnavailable, match="shut down"):
        other.warmup()


def test_a_folder_without_weights_is_one_error_on_every_backend(model: InterpModel) -> None:
    with pytest.raises(ModelUnavailable, match="no weights"):
        load_model(model.model_id, "vllm").warmup()
    auto = load_model(model.model_id)
    assert auto.backend == "eager"
    assert set(auto.profile.passed_over) == {"vllm", "vllm-static", "vllm-generate"}
    assert all(auto.profile.passed_over.values())


def test_caches_save_and_load(tmp_path: Path) -> None:
    tensor = torch.randn(1, 2, D)
    cache = Cache({Address("resid_post", 1): tensor}, ((3, 4),), (2,), (0,))
    again = Cache.load(cache.save(tmp_path / "c.safetensors"))
    assert torch.equal(again["resid_post.1"], tensor)
    assert (again.tokens, again.lengths, ("resid_post", 1) in again) == (((3, 4),), (2,), True)
    assert cache.stack("resid_post").shape == (1, 1, 2, D)
    with pytest.raises(AddressError, match=r"resid_post\.1"):
        cache["resid_post.2"]
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense")
    for name in ("bad.safetensors", "missing.safetensors"):
        with pytest.raises(ModelUnavailable):
            Cache.load(tmp_path / name)
