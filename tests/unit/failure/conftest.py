"""Tests of processes that are stuck, silent or killed have to wait for them."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leaves these tests out of `make test`, in which test_installation.py kills a rank."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.extended)
