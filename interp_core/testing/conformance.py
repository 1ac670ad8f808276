"""What both suites of the behaviour half share: where a subject comes from, and one test per rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest

from interp_core.checks import Check, tolerance_of
from interp_core.host import PluginHost, default_host
from interp_core.testing import abilities, before, generations, hygiene, reads, writes
from interp_core.testing.proofs import prove
from interp_core.testing.served import Subject, without_weights

if TYPE_CHECKING:
    from interp_core.cache import Cache

__all__ = ["Conformance", "none_of"]

_KIT: Final = "interp_core.testing."


class Conformance:
    """What both suites share. Subclass one of those.

    Attributes:
        options: load options of the backend, beside ``dtype``.
        dtype: what the weights are loaded as; identities are sharpest in float32.
        tolerance: largest relative error of an identity; ``None`` for that of the dtype.
        unproven: points, or places such as ``attn_out.2``, that no identity can pin down, each with the reason.
        uses: per capability of the plugin's own, a function of the model that raises if it does not work.
        module_path: path of a module with one row per position, where ``module_path`` is served.
        host: the plugins; ``None`` for all that are installed.
        subject: while a test runs, the model under test (:class:`~interp_core.testing.served.Subject`).
    """

    options: ClassVar[Mapping[str, Any]] = {}
    dtype: ClassVar[str] = "float32"
    tolerance: ClassVar[float | None] = None
    unproven: ClassVar[Mapping[str, str]] = {}
    uses: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    module_path: ClassVar[str | None] = None
    host: ClassVar[PluginHost | None] = None
    subject: Subject

    _current: ClassVar[tuple[tuple[str, str], Subject] | None] = None

    def checkpoint(self, folder: Path) -> str | Path:
        """Make a tiny checkpoint with random weights, norm gains and biases below ``folder``, and return its path."""
        raise TypeError("say which model to test: def checkpoint(self, folder) -> path")

    def identities(self, cache: Cache) -> Iterable[Check]:
        """The author's own identities, on every served point of one prompt. Each check names what it proves."""
        return ()

    def cases(self) -> Sequence[tuple[str, str]]:
        """Pairs of backend and checkpoint that every test is run with."""
        raise TypeError("subclass BackendConformance or ArchitectureConformance")

    def folder_of(self, name: str, folder: Path) -> Path:
        """The checkpoint of a case, below ``folder``."""
        return Path(self.checkpoint(folder))

    def references(self, subject: Subject) -> Iterable[Check]:
        """Identities with somebody else's forward of the same checkpoint."""
        return ()

    def path_of(self, subject: Subject) -> str | None:
        """Path of a module with one row per position."""
        return self.module_path

    # How pytest comes to a subject.

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One run of each test per case; all tests of a case follow each other."""
        if "case" in metafunc.fixturenames:
            cases = list(self.cases())
            metafunc.parametrize("case", cases, ids=["-".join(case) for case in cases], scope="class")

    @pytest.fixture(name="subject")
    def _open(self, case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Subject:
        """The model under test; one is open at a time, and closed after the last test of its case."""
        cls = type(self)
        current = cls._current
        if current is None or current[0] != case:
            cls.teardown_class()
            subject = self.subject_for(case, tmp_path_factory.mktemp("conformance"))
            cls._current = current = (case, subject)
        self.subject = current[1]
        return current[1]

    @classmethod
    def teardown_class(cls) -> None:
        """Close the model that is open."""
        current, cls._current = cls._current, None
        if current is not None:
            current[1].close()

    def subject_for(self, case: tuple[str, str], folder: Path) -> Subject:
        """A subject of a case, its checkpoint made below ``folder``; skips the test where the backend cannot run."""
        backend, name = case
        host = self.host or default_host()
        host.load()
        if backend not in host.backends:
            raise host.explain_missing_backend(backend)
        available = host.backends[backend].probe()
        if not available.ok:
            pytest.skip(f"backend {backend!r} cannot run here: {available.reason}")
        path = self.folder_of(name, folder)
        options = {**self.options, "dtype": self.dtype}
        return Subject(name, path, without_weights(path, folder), backend, self.host, options)

    @property
    def close_enough(self) -> float:
        """The tolerance of identities."""
        return tolerance_of(self.dtype) if self.tolerance is None else self.tolerance

    # Before a weight is loaded.

    def test_profile_answers_without_weights(self, subject: Subject) -> None:
        """Everything static is answered from a checkpoint whose weight files are gone."""
        none_of(before.profile_faults(subject))

    def test_every_no_has_a_reason(self, subject: Subject) -> None:
        """What is not served on this model says why."""
        none_of(before.reason_faults(subject))

    def test_undeclared_is_refused_before_work(self, subject: Subject) -> None:
        """Points and capabilities that are not served refuse, without a weight being loaded."""
        none_of(before.refusal_faults(subject))

    def test_profile_and_refusals_pickle(self, subject: Subject) -> None:
        """The profile can be sent to another process."""
        none_of(before.pickle_faults(subject))

    # Reading.

    def test_declared_points_have_the_declared_shape(self, subject: Subject) -> None:
        """Every point that is declared readable is read."""
        self.needs(subject, "capture")
        none_of(reads.shape_faults(subject, self.dtype))

    def test_every_point_is_proven(self, subject: Subject) -> None:
        """Every point that is read is pinned down by an identity whose control fails."""
        self.needs(subject, "capture")
        known = subject.profile.specs
        unknown = [name for name in self.unproven if name.partition(".")[0] not in known]
        silent = [name for name, reason in self.unproven.items() if not reason.strip()]
        assert not unknown + silent, f"unproven names no point of this model, or gives no reason: {unknown + silent}"
        more = [*self.references(subject), *self.identities(subject.cache())]
        proof = prove(subject, more, self.close_enough)
        # What one backend proves another may not; with one case there is no such doubt.
        stale = proof.stale(self.unproven) if len(self.cases()) == 1 else []
        none_of([*proof.faults(self.unproven), *stale])

    def test_parts_equal_the_whole(self, subject: Subject) -> None:
        """Coordinates and positions give slices of what is read without them."""
        self.needs(subject, "capture")
        none_of(reads.selection_faults(subject))

    def test_unequal_prompts_equal_one_by_one(self, subject: Subject) -> None:
        """A batch of prompts of unequal lengths gives what each gives alone."""
        self.needs(subject, "capture")
        none_of(reads.batch_faults(subject, self.close_enough))

    def test_results_are_copies(self, subject: Subject) -> None:
        """Editing a result in place reaches nothing else."""
        self.needs(subject, "capture")
        none_of(reads.copy_faults(subject))

    def test_the_vocabulary_is_as_declared(self, subject: Subject) -> None:
        """Every id that the core lets through runs."""
        self.needs(subject, "capture")
        none_of(reads.vocabulary_faults(subject))

    # Writing.

    def test_a_zero_write_changes_nothing(self, subject: Subject) -> None:
        """Adding zero to any writable point changes no logit."""
        self.needs(subject, "steer")
        none_of(writes.zero_faults(subject))

    def test_a_large_write_lands_where_it_says(self, subject: Subject) -> None:
        """A vector changes the named position and element, the logits from there on, and nothing else."""
        self.needs(subject, "steer")
        none_of(writes.landing_faults(subject, 1e-4 if self.dtype == "float32" else 10 * self.close_enough))

    def test_steering_stays_in_its_request(self, subject: Subject) -> None:
        """A request beside a steered one is not changed."""
        self.needs(subject, "steer")
        none_of(writes.company_faults(subject))

    # Capabilities and generation.

    def test_declared_capabilities_work(self, subject: Subject) -> None:
        """Each capability that is declared is used once."""
        self.needs(subject, "capture")
        none_of(abilities.ability_faults(subject, self.uses, self.path_of(subject)))

    def test_generation(self, subject: Subject) -> None:
        """generate, a batch of it, and generate_stream agree with each other and their log-probabilities."""
        none_of(generations.generation_faults(subject))

    def test_capture_while_generating_equals_one_forward(self, subject: Subject) -> None:
        """Tokens and rows of a generation are those of one forward over the same tokens."""
        self.needs(subject, "capture")
        none_of(generations.captured_generation_faults(subject, self.close_enough))

    # Manners.

    def test_bad_input_is_a_typed_error(self, subject: Subject) -> None:
        """Bad input is refused by an error of this project's family."""
        none_of(hygiene.bad_input_faults(subject))

    def test_nothing_is_left_after_a_failure(self, subject: Subject) -> None:
        """After an exception in an operation the model is as it was."""
        self.needs(subject, "capture")
        none_of(hygiene.leftover_faults(subject))

    def test_several_threads(self, subject: Subject) -> None:
        """Callers on several threads do not meet."""
        self.needs(subject, "capture")
        none_of(hygiene.thread_faults(subject))

    def test_shutdown(self, subject: Subject) -> None:
        """Shutting down twice, and before use, is harmless; work afterwards is refused."""
        none_of(hygiene.shutdown_faults(subject))

    def test_no_test_of_the_kit_is_replaced(self) -> None:
        """A test may be added, or marked ``xfail`` with a reason, but not left out."""
        kits = [cls for cls in type(self).__mro__ if cls.__module__.startswith(_KIT)]
        own = {name: member for cls in reversed(kits) for name, member in vars(cls).items() if name.startswith("test_")}
        replaced = [name for name, member in own.items() if getattr(type(self), name, None) is not member]
        assert not replaced, f"replaced: {replaced}; a point that cannot be proven goes into unproven, with its reason"

    @staticmethod
    def needs(subject: Subject, capability: str) -> None:
        """Skip a test of what the backend refuses as a whole; that it refuses has a test of its own."""
        refused = subject.profile.refusal(capability)
        if refused is not None:
            pytest.skip(str(refused))


def none_of(faults: Iterable[str]) -> None:
    """Fail with every fault, if there is one."""
    listed = list(faults)
    if listed:
        pytest.fail("\n".join(listed), pytrace=False)
