"""A reward model served: what reward.url gets of it is what reward.model gives, and what is no request is told so."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.serve_reward
from engine.config import Config, ConfigError
from engine.data import training_rows
from engine.data.prompts import load_tokenizer
from engine.evaluation import serving
from engine.evaluation.reward_server import Asked, BadRequest, RewardServer, Unscorable
from engine.machine.world import joined
from engine.rewards import RewardError, classifier
from engine.rewards.model import ModelReward
from engine.rewards.server import ServerReward
from engine.sample import Sample
from tests import users
from tests.system.helpers import ROOT, unranked
from tests.system.test_relabel import reward_model

TEMPLATE = (
    "{% for m in messages %}<turn> {{ m['role'][0] }} {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<turn> a {% endif %}"
)
"""Of a chat's roles it has the first letters."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = reward_model(tmp_path_factory.mktemp("served") / "gold")
    tokenizer = users.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """The command in a process of its own; gives its URL, and has it end by SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.serve_reward", str(folder), "--port", "0", "--launch.device", "cpu"],
        cwd=ROOT,
        env=unranked() | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "Serving" in line, process.communicate()
    yield next(word for word in line.split() if word.startswith("http://"))
    process.send_signal(signal.SIGTERM)
    said, complained = process.communicate(timeout=20)
    assert (process.returncode, said, complained) == (0, "stopped\n", "")


def sampled(messages: bool = False, count: int = 40) -> list[Sample]:
    """Responses as a sampler gives them, to prompts that are strings or messages; some are empty."""
    tokenizer, generator, found = users.tokenizer(), torch.Generator().manual_seed(0), []
    for i in range(count):
        words = [users.WORDS[int(j)] for j in torch.randint(0, 8, (1 + i % 5,), generator=generator)]
        answer = [users.WORDS[int(j)] for j in torch.randint(0, 8, (i % 7,), generator=generator)]
        row: Any = [{"role": "user", "content": " ".join(words)}] if messages else " ".join(words)
        text = f"<turn> u {' '.join(words)} </s> <turn> a" if messages else row
        prompt_ids = tokenizer(text, add_special_tokens=not messages)["input_ids"]
        ids = [*tokenizer(" ".join(answer), add_special_tokens=False)["input_ids"], 2]
        found.append(
            Sample(i, i, prompt_ids, {"prompt": row}, ids, "stop", prompt_text=text, response_text=" ".join(answer))
        )
    return found


def by_model(folder: Path, samples: list[Sample]) -> list[float | None]:
    """What a run with reward.model gets, in passes of as many tokens as the server's."""
    lengths = {"max_prompt_tokens": 20, "max_response_tokens": 20}
    tree = {"reward": {"model": str(folder)}, "model": {"path": str(folder)}, "rollout": lengths}
    config = Config.model_validate(tree)
    about = classifier.read(config, load_tokenizer(str(folder)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with joined("cpu", 1) as world:
        scores = ModelReward(config, world, about)(samples)
    torch.set_num_threads(threads)
    return scores


@pytest.mark.parametrize("messages", [False, True])
def test_scores_are_those_of_reward_model(folder: Path, server: str, messages: bool) -> None:
    """To the bit in one request; from many clients at once to rounding, since others share the passes."""
    samples = sampled(messages)
    expected = by_model(folder, samples)
    assert len(set(expected)) > 30
    assert ServerReward(Config.model_validate({"reward": {"url": server}}))(samples) == expected
    several = ServerReward(Config.model_validate({"reward": {"url": server, "batch_size": 3}}))
    found: list[list[float | None]] = []
    clients = [threading.Thread(target=lambda: found.append(several(samples))) for _ in range(4)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert len(found) == 4
    for scores in found:
        assert scores == pytest.approx(expected, abs=1e-6)


def test_tools_of_a_row_are_in_its_prompt(folder: Path) -> None:
    """As those of a run whose rows have them: in the template, and nowhere else."""
    tree = {"model": {"path": str(folder)}, "data": {"templated": True, "tools_column": "functions"}}
    config, tokenizer = Config.model_validate(tree), load_tokenizer(str(folder))
    tokenizer.chat_template = "{% for t in tools or [] %}<turn> {{ t['name'] }} {% endfor %}" + TEMPLATE
    read = serving.Reader(config, training_rows.answers(config, tokenizer)).samples
    messages = [{"role": "user", "content": "b"}]
    content = {"prompts": ["b", "b", "b"], "completions": ["c", "c", "c"], "raw_prompts": [messages, messages, "b"]}
    samples = read(content | {"functions": [[{"name": "h"}], None, None]})
    assert tokenizer.decode(samples[0].prompt_ids) == "<turn> h <turn> <unk> b </s> <turn> a"
    assert tokenizer.decode(samples[1].prompt_ids) == "<turn> <unk> b </s> <turn> a"
    with pytest.raises(BadRequest, match="item 0: the tools in the column 'functions' must be a list"):
        read(content | {"functions": [7, None, None]})


def ask(url: str, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, Any]]:
    host = url.removeprefix("http://").removesuffix("/score")
    connection = http.client.HTTPConnection(host, timeout=10)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content


BAD = {
    "no JSON": (b"{", "the body is no JSON"),
    "no object": (b"[]", "the body must be an object with prompts and completions, not []"),
    "no prompts": (b'{"completions": []}', "the body has no 'prompts'"),
    "no list": (b'{"prompts": "a", "completions": []}', "'prompts' must be a list of strings, not 'a'"),
    "no text": (b'{"prompts": ["a"], "completions": [1]}',
                "'completions' must be a list of strings, and its item 0 is 1"),
    "lengths": (b'{"prompts": ["a"], "completions": []}', "there are 1 prompts, 0 completions"),
    "raw": (b'{"prompts": ["a"], "completions": ["b"], "raw_prompts": 7}', "'raw_prompts' must be a list, not 7"),
    "message": (b'{"prompts": ["a"], "completions": ["b"], "raw_prompts": [[{"content": "x"}]]}',
                "item 0: message 0 has no role"),
    "half a character": (b'{"prompts": ["a"], "completions": ["\\ud800"]}', "half of a surrogate pair"),
}  # fmt: skip


@pytest.mark.parametrize("body,line", BAD.values(), ids=BAD)
def test_what_is_no_request_is_told_so(server: str, body: bytes, line: str) -> None:
    status, content = ask(server, "POST", "/score", body)
    assert status == 400 and line in content["error"]


def test_other_answers(server: str) -> None:
    assert ask(server, "GET", "/health") == (200, {"status": "ok"})
    assert ask(server, "GET", "/score")[0] == 404 and ask(server, "POST", "/other", b"{}")[0] == 404
    assert ask(server, "POST", "/score", b"", **{"Content-Length": str(2**40)})[0] == 413
    assert ask(server, "POST", "/score", b'{"prompts": [], "completions": []}') == (200, {"scores": []})
    long = json.dumps({"prompts": ["a", "a"], "completions": ["b " * 100, "b"]}).encode()
    status, content = ask(server, "POST", "/", long)
    assert status == 200 and content["scores"][0] is None and isinstance(content["scores"][1], float)


def test_requests_are_scored_together_up_to_a_number_of_tokens() -> None:
    """And one that the model has no number for fails alone."""
    server = RewardServer("127.0.0.1", 0)
    asked = [Asked([Sample(0, 0, [1] * tokens)]) for tokens in (4, 4, 5, 9, 1)]
    for one in asked:
        server._queue.put(one)
    batches = server.batches(10)
    assert [next(batches) for _ in range(3)] == [asked[:2], asked[2:3], asked[3:]]

    def score(samples: list[Sample]) -> None:
        if any(sample.length == 9 for sample in samples):
            raise RewardError("nan")
        for sample in samples:
            sample.reward_parts = {"model": float(sample.length)}

    serving.answer(asked[2:], score)
    assert asked[2].scores.result() == [5.0] and asked[4].scores.result() == [1.0]
    with pytest.raises(Unscorable, match="nan"):
        asked[3].scores.result()
    server.stop()


def test_loading_and_stopping_are_answered() -> None:
    server = RewardServer("127.0.0.1", 0)
    assert ask(server.url, "GET", "/health") == (503, {"status": "loading"})
    assert ask(server.url, "POST", "/score", b"{}") == (503, {"error": "the server is loading"})
    server.start(lambda _: [Sample(0, 0, [1])])
    answers: list[tuple[int, dict[str, Any]]] = []
    client = threading.Thread(target=lambda: answers.append(ask(server.url, "POST", "/score", b"{}")))
    client.start()
    while server._queue.empty():
        time.sleep(0.01)
    server.stop()
    client.join()
    assert answers == [(503, {"error": "the server stops"})]
    with pytest.raises(OSError):
        ask(server.url, "GET", "/health")


def test_what_cannot_be_served_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = users.model_folder(tmp_path / "policy")
    capsys.readouterr()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, line in {
            (): "nothing to work on, it must be one",
            (str(tmp_path),): "is no model folder",
            (str(folder), "--port", port): f"port: 127.0.0.1:{port} cannot be listened on: Address already in use",
            (str(policy), "--port", "0"): "has no scoring head",
        }.items():
            assert engine.serve_reward.main([*words]) == 2
            said = capsys.readouterr().err
            assert line in said and said.count("\n") == 1
    with pytest.raises(ConfigError, match="cannot be listened on"):
        RewardServer("256.0.0.1", 0)
