"""A finished model on a hub: what is uploaded, and what a hub that fails costs."""

from __future__ import annotations

from pathlib import Path

import pytest

import engine.export
from engine import run
from tests import hub_server, users
from tests.system.helpers import run_here

SHORT = (
    "--algo sft --data.task addition --data.max_row_tokens 13 --train.rows_per_step 4 --train.steps 1 --eval.prompts 4 "
    "--launch.device cpu --save.best false "
)


@pytest.fixture
def hub_of_me(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.mark.usefixtures("hub_of_me", "without_pictures")
def test_a_runs_model_is_uploaded_at_its_end(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of model/ in one commit; without push.hub_id no request is made."""
    with hub_server.serving("me/adder") as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)  # as HF_ENDPOINT, which is read at import
        options = f"{SHORT} --model.path {tiny_model} --output_dir {tmp_path}"
        run_here(f"{options} --name silent")
        assert not hub.made and not hub.tokens
        said = run_here(f"{options} --name run --push.hub_id me/adder").stdout
        assert f"{tmp_path}/run/model is on the hub: {hub.url}/me/adder" in said
        files = {one.name: one.read_bytes() for one in (tmp_path / "run" / "model").iterdir()}
        assert hub.files == files and "model.safetensors" in files
        assert hub.made == [{"name": "adder", "organization": "me", "visibility": "private"}]
        assert hub.commits == ["model by Tandem"] and hub.tokens == {"Bearer hf_mine"}


@pytest.mark.usefixtures("hub_of_me", "without_pictures")
def test_a_hub_that_fails_costs_nothing_but_a_line(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with hub_server.serving("me/other") as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        said = run_here(f"{SHORT} --model.path {tiny_model} --output_dir {tmp_path} --name run --push.hub_id me/adder")
        place = tmp_path / "run" / "model"
        assert f"{place} is not on the hub (" in said.stdout
        assert f"upload it by hf upload me/adder {place} --private" in said.stdout
        assert (place / "model.safetensors").exists() and (tmp_path / "run" / "summary.json").exists()
        assert hub.files == {}
        folder = tmp_path / "exported"
        words = [f"{tmp_path}/run", "--output", f"{folder}", "--push.hub_id", "me/adder", "--push.private", "false"]
        assert engine.export.main(words) == 1
        assert capsys.readouterr().err.endswith(f"upload it by hf upload me/adder {folder}\n") and folder.is_dir()


def test_what_cannot_be_uploaded_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    model = users.model_folder(tmp_path / "model")
    for hub_id, line in {"me/adder": "there is no token of the Hugging Face hub", "a b": "push.hub_id"}.items():
        capsys.readouterr()
        assert run.main(users.arguments(tmp_path, model, "--push.hub_id", hub_id)) == 2
        said = capsys.readouterr().err
        assert line in said and said.count("\n") == 1 and not (tmp_path / "runs").exists()
