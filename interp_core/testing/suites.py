"""The behaviour half: pytest suites that an author subclasses with a few lines.

::

    from interp_core.testing import ArchitectureConformance, Check, difference, write_checkpoint


    class TestMyDecoder(ArchitectureConformance):
        architecture = "my-decoder"
        backends = ("eager",)

        def checkpoint(self, folder):
            return write_checkpoint(MyConfig(hidden_size=96), folder / "tiny")

        def identities(self, cache):
            for layer in range(2):
                gate, linear, act = (cache[f"{p}.{layer}"][0] for p in ("my_gate", "mlp_pre_linear", "mlp_act"))
                yield Check(identity="my_gate times mlp_pre_linear is mlp_act", layer=layer, proves=("my_gate",),
                            error=difference(gate * linear, act), control=difference(gate, act), tolerance=2e-5)

Each test asks one rule of one model, and fails with everything that breaks it. Weights are made by the author's
``checkpoint``, or by the kit; what is declared is tested, and what is not declared has to refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Final

from interp_core.backend import support_of
from interp_core.checks import Check
from interp_core.host import default_host
from interp_core.testing.conformance import Conformance, none_of
from interp_core.testing.reference import reference_identities
from interp_core.testing.served import Subject
from interp_core.testing.tiny import FAMILIES, write_family

__all__ = ["ArchitectureConformance", "BackendConformance"]

_EXPERTS: Final = ("router_logits", "expert_weights", "expert_indices")


class BackendConformance(Conformance):
    """Subclass this to prove a backend, with ``backend = "my-backend"``.

    The kit makes tiny models of ``families`` with transformers, and compares what is read with bare hooks on
    transformers' own modules. A backend that reads other checkpoints overrides ``checkpoint``, and is held to the
    identities alone.

    Attributes:
        backend: the backend's name.
        families: the kit's own models, keys of :data:`interp_core.testing.tiny.FAMILIES`. That of experts
            (``moe``) is left out where the backend serves none of their points.
    """

    backend: ClassVar[str]
    families: ClassVar[Sequence[str]] = tuple(FAMILIES)

    def cases(self) -> Sequence[tuple[str, str]]:
        """Each family, or the author's own checkpoint."""
        if self._own_checkpoint():
            return [(self.backend, "checkpoint")]
        return [(self.backend, name) for name in self.families if name != "moe" or self._serves_experts()]

    def folder_of(self, name: str, folder: Path) -> Path:
        """The author's checkpoint, or the kit's of that family."""
        return Path(self.checkpoint(folder)) if self._own_checkpoint() else write_family(name, folder)

    def references(self, subject: Subject) -> Iterable[Check]:
        """Bare hooks on transformers' modules, for the kit's own checkpoints."""
        return () if self._own_checkpoint() else reference_identities(subject, self.close_enough)

    def path_of(self, subject: Subject) -> str | None:
        """The first block, of the kit's own checkpoints."""
        own = self._own_checkpoint() or self.module_path is not None
        return self.module_path if own else f"{FAMILIES[subject.name].blocks}.0"

    def _serves_experts(self) -> bool:
        spec = (self.host or default_host()).backends.get(self.backend)
        return spec is not None and any(support_of(spec, name).readable for name in _EXPERTS)

    def _own_checkpoint(self) -> bool:
        return type(self).checkpoint is not Conformance.checkpoint


class ArchitectureConformance(Conformance):
    """Subclass this to prove an architecture, with ``architecture``, ``backends`` and ``checkpoint``.

    Attributes:
        architecture: the architecture's name.
        backends: names of the backends that it is proven on.
    """

    architecture: ClassVar[str]
    backends: ClassVar[Sequence[str]]

    def cases(self) -> Sequence[tuple[str, str]]:
        """The author's checkpoint on each backend."""
        return [(backend, self.architecture) for backend in self.backends]

    def test_the_architecture_claims_the_checkpoint(self, subject: Subject) -> None:
        """The configuration is claimed by this architecture, on every registered backend alike."""
        none_of(self._claims(subject))

    def _claims(self, subject: Subject) -> Iterator[str]:
        from interp_core.loading import inspect_model

        for name in (self.host or default_host()).backends:
            profile = inspect_model(subject.bare, backend=name, host=self.host)
            if profile.architecture is None or profile.architecture.name != self.architecture:
                yield f"on {name!r} the checkpoint is claimed by {profile.architecture_name!r}"
            if not profile.facts.structure_known:
                yield f"on {name!r} the facts do not say that the structure is known"
