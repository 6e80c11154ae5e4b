"""A model's folder to the Hugging Face hub, or to the server that ``HF_ENDPOINT`` names."""

from __future__ import annotations

from pathlib import Path

from engine.config import ConfigError


class PushFailed(RuntimeError):
    """A folder was not uploaded."""


def check(key: str) -> None:
    """Raises ConfigError where there is nothing to log in with; asks no server.

    Args:
        key: the setting that asks for an upload, for messages.
    """
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise ConfigError(f"{key}: there is no token of the Hugging Face hub: run hf auth login, or set HF_TOKEN")


def push(folder: Path, hub_id: str, private: bool) -> str:
    """Uploads a folder as one commit to a repository, which is made if it is not there.

    Args:
        private: of a repository that is made.

    Returns:
        where it is.

    Raises:
        PushFailed: in one line, with how to upload it by hand.
    """
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        api = huggingface_hub.HfApi()
        found = api.create_repo(hub_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=found.repo_id, folder_path=folder, commit_message=f"{folder.name} by Tandem")
    except Exception as problem:  # whatever the package, a server or a network makes of it
        said = " ".join(str(problem).split())[:300] or type(problem).__name__
        by_hand = f"hf upload {hub_id} {folder}{' --private' if private else ''}"
        raise PushFailed(f"{folder} is not on the hub ({said}): upload it by {by_hand}") from problem
    return str(found)
