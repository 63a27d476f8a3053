"""Fixtures of the driver's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver_kit import Box


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)
