"""A backend that is not there: not installed, misspelt, broken, in conflict or switched off, each in its words."""

from __future__ import annotations

import pytest

from interp_core.errors import BackendUnavailable, PluginConflict, PluginUnavailable
from tests.plugins.fakes import (
    CONFLICTS,
    GOOD,
    backend,
    boom,
    loaded,
    plugin,
)


def test_a_backend_that_nobody_has_names_the_distribution_to_install() -> None:
    for name, distribution in (("eager", "interp-eager"), ("vllm-static", "interp-vllm"), ("Jax", "interp-jax")):
        error = loaded().explain_missing_backend(name)
        assert type(error) is BackendUnavailable
        assert repr(name) in str(error)
        assert f"pip install {distribution})" in str(error)
        assert error.__cause__ is None


def test_a_misspelt_backend_gets_the_likely_name_and_the_valid_ones() -> None:
    host = loaded(("e", plugin(backends=[backend("eager"), backend("numpy")])))
    error = host.explain_missing_backend("eagr")
    assert type(error) is BackendUnavailable
    assert "Did you mean 'eager'?" in str(error)
    assert "eager, numpy" in str(error)
    # To install whatever was typed would be bad advice here.
    assert "pip install" not in str(error)
    assert "Did you mean" not in str(host.explain_missing_backend("vllm"))


@pytest.mark.parametrize("name", ["", "a b", "../x", "x;rm", "é"])
def test_a_name_that_no_distribution_can_have_is_not_offered_for_install(name: str) -> None:
    error = loaded(GOOD).explain_missing_backend(name)
    assert type(error) is BackendUnavailable
    assert "pip install" not in str(error)
    assert "Valid: good" in str(error)


def test_what_a_failed_plugin_is_known_to_own_is_refused_from_the_cause() -> None:
    host = loaded(("odd_name", plugin(backends=[backend("turbo")], interp_capabilities=boom)), GOOD)
    error = host.explain_missing_backend("turbo")
    assert type(error) is PluginUnavailable
    assert isinstance(error.__cause__, OSError)
    assert "'turbo' belongs to the plugin 'odd_name'" in str(error)
    assert "failed to load. Its hook interp_capabilities raised OSError" in str(error)
    near = host.explain_missing_backend("trubo")
    assert type(near) is BackendUnavailable
    assert "Did you mean 'turbo'? The backend 'turbo' belongs to the plugin 'odd_name'" in str(near)


@pytest.mark.parametrize("asked", ["turbo", "turbo-static"])
@pytest.mark.parametrize("name", ["turbo", "interp-turbo", "interp_turbo"])
def test_what_a_failed_plugin_most_likely_owns_is_refused_from_the_cause(name: str, asked: str) -> None:
    host = loaded((name, plugin(interp_backends=boom)), GOOD)
    error = host.explain_missing_backend(asked)
    assert type(error) is PluginUnavailable
    assert isinstance(error.__cause__, OSError)
    assert "most likely belongs" in str(error)


def test_a_conflict_and_a_switched_off_plugin_are_refused_each_in_its_words() -> None:
    first, second, _ = CONFLICTS["backend"]
    error = loaded(("a", first), ("b", second)).explain_missing_backend("y")
    assert type(error) is PluginUnavailable
    assert isinstance(error.__cause__, PluginConflict)
    assert "cannot be used" in str(error)
    error = loaded(GOOD, INTERP_PLUGINS="").explain_missing_backend("good")
    assert type(error) is PluginUnavailable
    assert error.__cause__ is None
    assert "is switched off. Not in the allow list INTERP_PLUGINS." in str(error)


def test_a_silent_failed_plugin_is_mentioned_but_not_accused() -> None:
    host = loaded(("acme", plugin(interp_backends=boom)), GOOD)
    error = host.explain_missing_backend("warp")
    assert type(error) is BackendUnavailable
    assert "acme (acme, failed)" in str(error)
