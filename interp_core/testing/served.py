"""A model under test and what it serves: addresses by what may be done with them, and captured rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field

from interp_core.address import COORDINATE_AXES, Address
from interp_core.captures import Capture, layers_of, prompt_like
from interp_core.checks import Get
from interp_core.landings import exactness
from interp_core.loading import inspect_model, load_model
from interp_core.testing.tiny import PROMPT

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.cache import Cache
    from interp_core.host import PluginHost
    from interp_core.model import InterpModel
    from interp_core.profile import ModelProfile

__all__ = ["Subject", "prompts", "without_weights"]

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.npz", "*.npy", "*.msgpack", "*.h5")


def without_weights(checkpoint: Path, folder: Path) -> Path:
    """A copy of a checkpoint with everything in it but its weights."""
    import shutil

    bare = folder / f"{checkpoint.name}-no-weights"
    if not bare.is_dir():
        shutil.copytree(checkpoint, bare, ignore=shutil.ignore_patterns(*_WEIGHTS, "*.index.json"))
    return bare


def prompts(vocab_size: int) -> list[list[int]]:
    """Three prompts of unequal lengths whose ids the vocabulary has; the first two differ at every position."""
    first = [token % vocab_size for token in PROMPT]
    second = prompt_like(first, vocab_size)
    return [first, second[:5], second[2:9]]


@define(eq=False)
class Subject:
    """One checkpoint on one backend, and a model of it that is loaded when first asked for.

    Attributes:
        name: of the checkpoint, for messages.
        path: its folder.
        bare: a copy of it without weights.
        backend: the backend's name.
        host: the plugins; ``None`` for the installed ones.
        options: load options.
    """

    name: str
    path: Path
    bare: Path
    backend: str
    host: PluginHost | None = None
    options: Mapping[str, Any] = field(factory=dict)
    _model: InterpModel | None = field(default=None, init=False)
    _captures: dict[tuple[int, ...], Capture] = field(factory=dict, init=False)

    @property
    def model(self) -> InterpModel:
        """The model, warm. Loaded again if a test has shut it down."""
        if self._model is None:
            self._model = load_model(self.path, backend=self.backend, host=self.host, **self.options).warmup()
        return self._model

    def forget(self) -> InterpModel | None:
        """Let go of the model, which is the caller's to shut down, and of what was captured of it."""
        model, self._model = self._model, None
        self._captures.clear()
        return model

    def close(self) -> None:
        """Shut the model down, if there is one."""
        model = self.forget()
        if model is not None:
            model.shutdown()

    def lazy(self) -> InterpModel:
        """A model of the copy without weights: whatever touches a weight fails on it."""
        return load_model(self.bare, backend=self.backend, host=self.host, **self.options)

    def inspected(self, path: Path | None = None) -> ModelProfile:
        """The profile, of the copy without weights unless another folder is named."""
        return inspect_model(path or self.bare, backend=self.backend, host=self.host, **self.options)

    @property
    def profile(self) -> ModelProfile:
        """The profile of the model under test."""
        return self.model.profile if self._model is not None else self.inspected(self.path)

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids to run: see :func:`prompts`."""
        return prompts(self.profile.facts.vocab_size)

    @property
    def other_prompt(self) -> list[int]:
        """A prompt as long as the first, with another id at every position."""
        return prompt_like(self.prompts[0], self.profile.facts.vocab_size)

    @property
    def exact(self) -> float:
        """How far apart two runs of one request may be; see :func:`~interp_core.landings.exactness`."""
        return exactness(self.profile)

    def addresses(self, profile: ModelProfile | None = None) -> list[Address]:
        """Every address without coordinates, and every single stream of a point that is refused as a stack."""
        profile = profile or self.profile
        found: list[Address] = []
        for spec in profile.points():
            for layer in layers_of(spec, profile):
                found.append(Address(spec.name, layer))
                if spec.name.startswith("resid_") and spec.axes[0] == "streams" and profile.facts.n_streams > 1:
                    streams = range(profile.facts.n_streams)
                    found += [Address(spec.name, layer, (("stream", k),)) for k in streams]
        return found

    def readable(self) -> list[Address]:
        """Addresses that the profile promises to read."""
        return [a for a in self.addresses() if self.profile.read_refusal(a) is None]

    def writable(self) -> list[Address]:
        """Addresses that the profile promises to write."""
        return [a for a in self.addresses() if self.profile.write_refusal(a) is None]

    def coordinates(self, address: Address) -> list[Address]:
        """The last element of every axis of ``address`` that a coordinate may name."""
        spec = self.profile.specs[address.name]
        taken = {name for name, _ in address.coordinates}
        found = []
        for name, axis in COORDINATE_AXES.items():
            if axis in spec.axes and name not in taken:
                size = self.profile.facts.axis_size(axis, address.layer)
                found.append(Address(address.name, address.layer, (*address.coordinates, (name, size - 1))))
        return found

    def rows(self, prompt: list[int] | None = None) -> Mapping[Address, Tensor]:
        """Every readable address over one prompt, ``[pos, *axes]`` or ``[heads, query, key]``; captured once."""
        cache = self.cache(prompt)
        return {address: cache[address][0] for address in cache}

    def cache(self, prompt: list[int] | None = None) -> Cache:
        """The same as :func:`~interp_core.functions.run_with_cache` gives it."""
        return self.captured(prompt).cache

    def get(self) -> Get:
        """Rows of the first prompt by point and layer; see :func:`~interp_core.captures.getter`."""
        return self.captured().get

    def captured(self, prompt: list[int] | None = None) -> Capture:
        """Every readable address over one prompt, the first unless another is given."""
        ids = prompt or self.prompts[0]
        if tuple(ids) not in self._captures:
            self._captures[tuple(ids)] = Capture(self.model, ids, self.readable())
        return self._captures[tuple(ids)]

    def ends(self) -> list[Address]:
        """Where the last layers' outcome can be seen: the logits, or what comes nearest to them."""
        last = self.profile.facts.n_layers - 1
        wanted = [
            Address("lm_head"),
            Address("final_norm"),
            Address("resid_streams", last),
            Address("resid_post", last),
        ]
        served = self.readable()
        return [a for a in wanted if a in served][:2]
