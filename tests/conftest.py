"""What several folders of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Runs short programs in processes of their own, with torch and transformers imported already."""
    with Zygote() as running:
        yield running
