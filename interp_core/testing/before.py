"""What has to be answered, and refused, before a weight is loaded: asked of a checkpoint that has none."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from interp_core.address import Address
from interp_core.discovery import one_line
from interp_core.errors import CapabilityUnsupported, InterpError
from interp_core.operations import Add, Apply
from interp_core.testing.reasons import of_basis, of_gradients
from interp_core.testing.served import Subject

if TYPE_CHECKING:
    from interp_core.model import InterpModel
    from interp_core.profile import ModelProfile

__all__ = ["pickle_faults", "profile_faults", "reason_faults", "refusal_faults"]


def profile_faults(subject: Subject) -> Iterator[str]:
    """The profile is the same without weights, is JSON-able, and leaves the model cold."""
    whole = subject.inspected(subject.path).describe()
    try:
        bare = subject.inspected().describe()
    except InterpError as error:
        yield f"of a copy of the checkpoint without weights there is no profile: {error}"
        return
    for name in ("model_id", "passed_over"):
        whole.pop(name), bare.pop(name)
    for key, value in whole.items():
        if bare[key] != value:
            yield f"describe()[{key!r}] differs between the checkpoint and a copy of it without weights"
    try:
        json.dumps(whole)
    except (TypeError, ValueError) as error:
        yield f"describe() cannot be written as JSON: {error}"
    model = subject.lazy()
    asked: list[Any] = [model.points(), model.describe(), model.grad_support, model.residual_basis, model.static_points]
    asked += [model.refusal(name) for name in model.profile.capabilities]
    if model.session.warm:
        yield f"asking {len(asked)} questions loaded the weights"
    model.shutdown()


def pickle_faults(subject: Subject) -> Iterator[str]:
    """The profile, and the errors that it refuses with, come back from pickling as they were."""
    profile = subject.profile
    try:
        back = pickle.loads(pickle.dumps(profile))
    except Exception as error:  # noqa: BLE001 - whatever pickling of a stranger's object raises
        yield f"the profile cannot be pickled: {one_line(error)}"
        return
    if back.describe() != profile.describe():
        yield "the profile comes back from pickling as something else"
    for name in profile.capabilities:
        refused = profile.refusal(name)
        if refused is not None and str(pickle.loads(pickle.dumps(refused))) != str(refused):
            yield f"the refusal of {name!r} comes back from pickling as something else"


def reason_faults(subject: Subject) -> Iterator[str]:
    """On this model, every point that is not served or not writable says why, and so do the basis and gradients."""
    profile = subject.profile
    for spec in profile.points():
        support = profile.support(spec.name)
        if None in spec.absent or support.why.strip():
            continue
        if not support.readable:
            yield f"the point {spec.name!r} is not served on this model, and 'why' is empty"
        elif spec.writable and not support.writable:
            yield f"the point {spec.name!r} cannot be written on this model, and 'why' is empty"
    yield from of_basis(profile.residual_basis)
    yield from of_gradients(profile.grad_support)


def refusal_faults(subject: Subject) -> Iterator[str]:
    """Everything undeclared is refused by the typed error, with reason and way forward, before anything is loaded."""
    model = subject.lazy()
    prompt = subject.prompts[0]
    for address in subject.addresses(model.profile):
        if model.profile.read_refusal(address) is not None:
            yield from _refused(f"reading {address}", partial(model.run_with_cache, prompt, [address]))
        if model.profile.write_refusal(address) is not None:
            yield from _refused(f"writing {address}", partial(_written, model, prompt, address))
    for name, call in CALLS.items():
        if model.profile.refusal(name) is not None:
            yield from _refused(f"the capability {name!r}", partial(call, model, prompt))
    if model.session.warm:
        yield "a refusal loaded the weights first"
    model.shutdown()


def _refused(what: str, call: Callable[[], Any]) -> Iterator[str]:
    try:
        call()
    except CapabilityUnsupported as error:
        if not error.why.strip() or not error.instead.strip():
            yield f"{what} is refused without {'a reason' if not error.why.strip() else 'a way forward'}: {error}"
    except InterpError as error:
        yield f"{what} is not refused before work, but fails with {one_line(error)}"
    except Exception as error:  # noqa: BLE001 - the finding is that it is not of the family
        yield f"{what} raises {one_line(error)}, not CapabilityUnsupported"
    else:
        yield f"{what} is not declared, and not refused"


def _written(model: InterpModel, prompt: list[int], address: Address) -> None:
    import torch

    width = max(1, int(torch.Size(model.profile.shape(address)).numel()))
    with model.steer(Add(address, torch.zeros(width))):
        pass


def _residual(profile: ModelProfile) -> str:
    return "resid_post.0" if profile.facts.n_streams == 1 else "resid_post.0.stream-0"


def _rows(model: InterpModel) -> Any:
    import torch

    return torch.zeros(2, model.d_model)


def _softmax_layer(model: InterpModel) -> list[int]:
    return [next((layer.index for layer in model.facts.layers if layer.softmax), 0)]


CALLS: Final[dict[str, Callable[[Any, list[int]], Any]]] = {
    "capture": lambda model, prompt: model.run_with_cache(prompt, [_residual(model.profile)]),
    "steer": lambda model, prompt: _written(model, prompt, model.address(_residual(model.profile))),
    "logit_lens": lambda model, prompt: model.logit_lens(prompt),
    "raw_logits": lambda model, prompt: _raw(model),
    "attention": lambda model, prompt: model.capture_attention(prompt, _softmax_layer(model)),
    "apply": lambda model, prompt: model.run_with_cache(
        prompt, [_residual(model.profile)], steering=Apply(_residual(model.profile), lambda x: x)
    ),
    "gradients": lambda model, prompt: model.run_with_cache(prompt, [_residual(model.profile)], detach=False),
    "module_path": lambda model, prompt: model.run_with_cache(prompt, ["path.some.module"]),
}
"""How each capability is used, as far as it takes to be refused."""


def _raw(model: InterpModel) -> Any:
    from interp_core.functions import decode_residuals

    return decode_residuals(model, _rows(model))
