"""Shared by all tests: one thread a process is enough for small shapes, and GPU tests need a GPU."""

import os

import pytest

HAS_GPU = os.path.exists("/dev/nvidia0")
os.environ.setdefault("DS_ACCELERATOR", "cuda" if HAS_GPU else "cpu")
if not HAS_GPU:  # Triton decides at its first import whether it compiles or interprets
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Has Triton interpreted in the kernels' tests, but not in the processes that other tests start."""
    if not HAS_GPU:
        if "/kernels/" in str(item.path):
            os.environ["TRITON_INTERPRET"] = "1"
        else:
            os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of this process write no curves.png, which takes half of a short run's time; test_runs has them drawn."""
    from engine.report import figures

    monkeypatch.setattr(figures, "write_figures", lambda *_: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs fast tests first, and skips GPU tests where there is no GPU."""
    items.sort(key=lambda item: ("/system/" in str(item.path)) + 2 * ("slow" in item.keywords))
    if not HAS_GPU:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
