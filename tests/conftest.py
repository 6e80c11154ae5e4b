"""Shared by all tests: one thread a process is enough for small shapes, and GPU tests need a GPU."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cuda" if os.path.exists("/dev/nvidia0") else "cpu")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs fast tests first, and skips GPU tests where there is no GPU."""
    items.sort(key=lambda item: ("/system/" in str(item.path)) + 2 * ("slow" in item.keywords))
    if not os.path.exists("/dev/nvidia0"):
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
