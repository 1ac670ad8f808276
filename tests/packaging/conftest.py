"""What the tests of packages share: the wheels of this checkout, each built once."""

from __future__ import annotations

import pytest

from tests.packaging.environment import Wheels


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """Wheels of this checkout by distribution."""
    return Wheels(tmp_path_factory.mktemp("wheels"))
