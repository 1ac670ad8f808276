"""Every row of the table of capabilities is raised by some call, and every refusal names its way forward."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config, LlamaConfig

from interp_core import (
    Add,
    Apply,
    BackendSpec,
    CapabilityUnsupported,
    InterpModel,
    PluginHost,
    decode_residuals,
    hookimpl,
    load_model,
    run_with_cache,
    steer,
)
from interp_core.capabilities import CORE_CAPABILITIES
from interp_core.points import GENERAL_POINTS, hook

ALL = frozenset(CORE_CAPABILITIES)
NOTHING = "nothing_that_exists:Backend"


class Plugin:
    """One backend that serves nothing, and one that reads and writes but has none of the extras."""

    @hookimpl
    def interp_backends(self) -> Sequence[BackendSpec]:
        points = {name: hook(writable=name != "z") for name in GENERAL_POINTS}
        bare = BackendSpec(name="bare", summary="serves nothing", factory=NOTHING, hooks=False, rank=None)
        some = BackendSpec(
            name="some",
            summary="reads and writes",
            factory=NOTHING,
            points=points,
            capabilities=frozenset({"capture", "steer", "logit_lens"}),
        )
        return [bare, some]


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return PluginHost(discover=False, plugins=[("fake", Plugin())])


@pytest.fixture(scope="module")
def models(host: PluginHost, tmp_path_factory: pytest.TempPathFactory) -> dict[str, InterpModel]:
    llama, streams = tmp_path_factory.mktemp("llama"), tmp_path_factory.mktemp("streams")
    LlamaConfig().save_pretrained(llama)
    DeepseekV4Config().save_pretrained(streams)
    return {
        "bare": load_model(str(llama), "bare", host=host),
        "some": load_model(str(llama), "some", host=host),
        "streams": load_model(str(streams), "some", host=host),
    }


def steered(model: InterpModel, operation: Any) -> None:
    with steer(model, operation):
        raise AssertionError("not refused")


Models = dict[str, InterpModel]
CALLS: dict[str, Callable[[Models], Any]] = {
    "capture": lambda m: run_with_cache(m["bare"], [1], ["resid_post.0"]),
    "steer": lambda m: steered(m["bare"], Add("resid_post.0", torch.ones(4096))),
    "read_point": lambda m: run_with_cache(m["some"], [1], ["q_norm_in.0"]),
    "write_point": lambda m: steered(m["some"], Add("z.0", torch.ones(4096))),
    "residual_stream": lambda m: run_with_cache(m["streams"], [1], ["resid_post.5"]),
    "logit_lens": lambda m: m["streams"].logit_lens([1], [0]),
    "raw_logits": lambda m: decode_residuals(m["some"], torch.ones(1, 4096)),
    "step_logits": lambda m: m["some"].profile.require("step_logits"),
    "attention": lambda m: m["some"].capture_attention([1], [0]),
    "apply": lambda m: steered(m["some"], Apply("resid_post.0", lambda x: x)),
    "gradients": lambda m: run_with_cache(m["some"], [1], ["resid_post.0"], detach=False),
    "module_path": lambda m: run_with_cache(m["some"], [1], ["path.model.layers.0"]),
}


@pytest.mark.parametrize("name", sorted(CORE_CAPABILITIES))
def test_every_row_is_raised_before_any_work(models: Models, name: str) -> None:
    with pytest.raises(CapabilityUnsupported) as caught:
        CALLS[name](models)
    refused = caught.value
    assert refused.capability == name
    assert refused.why
    assert refused.instead
    assert refused.owner
    assert not any(model.session.warm for model in models.values())
    again = pickle.loads(pickle.dumps(refused))
    assert (str(again), again.capability) == (str(refused), name)


def test_supports_and_refusal_agree(models: Models) -> None:
    for model in models.values():
        for name in ALL:
            assert model.supports(name) is (model.refusal(name) is None)
    assert models["some"].supports("capture")
    assert not models["bare"].supports("capture")
    assert models["some"].supports("resid_post.3")
    assert not models["some"].supports("resid_post.99")


def test_a_trunk_that_nobody_describes_names_the_package_by_convention(models: Models) -> None:
    refused = models["streams"].refusal("resid_post.5")
    assert "pip install interp-" in str(refused)
    assert models["streams"].facts.n_streams > 1
    assert models["streams"].n_layers > 0


def test_a_plugins_own_function_that_fails_names_its_owner(host: PluginHost, tmp_path: Path) -> None:
    from interp_core import PluginUnavailable

    def grad(*_: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    class Broken:
        @hookimpl
        def interp_backends(self) -> Sequence[BackendSpec]:
            return [BackendSpec(name="broken", summary="a broken one", factory=NOTHING, grad=grad)]

    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(PluginUnavailable, match=r"gradients failed: ZeroDivisionError: on purpose") as caught:
        load_model(str(tmp_path), "broken", host=PluginHost(discover=False, plugins=[("b", Broken())]))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
