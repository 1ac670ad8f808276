"""``model.verify()`` on trunks whose streams no captured rows alone account for: it writes, and then they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import define
from torch import Tensor
from trunks import save

from interp_core import InterpModel, load_model
from interp_core.captures import Capture, prompt_like
from interp_core.checks import Get
from interp_core.transfers import transfer_identities, write_transfers

PROMPT = [5, 9, 11, 5, 77, 42, 8, 31]


@define(eq=False)
class Spoiled(Capture):
    """A capture whose weights of writing belong to other streams."""

    @property
    def get(self) -> Get:
        right = super().get

        def get(name: str, layer: int | None) -> Tensor | None:
            found = right(name, layer)
            return found.roll(1, -1) if "write" in name and found is not None else found

        return get


@pytest.fixture(scope="module", params=["gemma3n_text", "qwen4_exp_text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> InterpModel:
    folder: Path = tmp_path_factory.mktemp("trunks")
    return load_model(save(request.param, folder), backend="eager", dtype="float32")


def test_every_point_is_proven_or_absent_with_its_reason(model: InterpModel) -> None:
    found = model.verify(PROMPT)
    assert found.complete, str(found)
    absent = [v for verdicts in found.layers.values() for v in verdicts.values() if v.state == "absent"]
    assert all(verdict.reason for verdict in absent)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gemma3n_text", "qwen4_exp_text"])
def test_nothing_fails_for_being_rounded(name: str, dtype: str, tmp_path: Path) -> None:
    with load_model(save(name, tmp_path), backend="eager", dtype=dtype) as model:
        found = model.verify(PROMPT)
    assert found.ok, [check.describe() for check in found.failed()]
    assert found.points["attn_stream_collapse"] == "proven"


def test_outputs_of_sublayers_are_proven_by_what_they_alone_bring_about(model: InterpModel) -> None:
    here, there = Capture(model, PROMPT), Capture(model, prompt_like(PROMPT, model.vocab_size))
    needed = {("attn_out", 1), ("mlp_out", 1)}
    found = list(transfer_identities(here, there, needed, 2e-5))
    assert {name for check in found for name in check.proves} == {"attn_out", "mlp_out"}
    assert all(check.proof for check in found), found


def test_weights_of_another_stream_do_not_account_for_a_write(model: InterpModel) -> None:
    here, there = Capture(model, PROMPT), Capture(model, prompt_like(PROMPT, model.vocab_size))
    needed = {("attn_stream_write", layer) for layer in range(model.n_layers)}
    right = list(write_transfers(here, there, needed, 2e-5))
    wrong = list(write_transfers(Spoiled(model, PROMPT), there, needed, 2e-5))
    assert all(check.proof for check in right)
    assert all(check.fails for check in wrong)
    # Gemma 3n writes once per block, behind the MLP.
    assert len(right) == (0 if model.facts.model_type == "gemma3n_text" else model.n_layers)
