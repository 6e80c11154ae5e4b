"""The sampler's life cycle: a call in the wrong state raises, naming the call and the state."""

import pytest

from engine import rollout
from engine.config import ConfigError
from engine.generation.base import Generator, Request, Response, Sampling, WrongStateError
from engine.tasks import addition


class Recorder(Generator):
    """Records which hooks ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def _generate(self, requests, sampling):
        self.ran.append("generate")
        return [Response([2], [0.0], "stop") for _ in requests]

    def _load_weights(self, weights) -> None:
        self.ran.append("load")

    def _sleep(self) -> None:
        self.ran.append("sleep")

    def _wake(self) -> None:
        self.ran.append("wake")

    def _start(self) -> None:
        self.ran.append("start")


CALLS = {
    "generate": lambda g: g.generate([Request([1], 0)], Sampling(1, 1.0, ())),
    "sleep": lambda g: g.sleep(),
    "wake": lambda g: g.wake(),
    "load_weights": lambda g: g.load_weights([], 1),
    "start": lambda g: g.start(),
}
ALLOWED = {"ready": {"generate", "sleep"}, "asleep": {"wake"}, "weights": {"load_weights"}}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state", ALLOWED)
def test_wrong_state_raises_and_does_nothing(state: str, call: str) -> None:
    generator = Recorder()
    for step in {"ready": [], "asleep": ["sleep"], "weights": ["sleep", "wake"]}[state]:
        CALLS[step](generator)
    before = list(generator.ran)
    if call in ALLOWED[state]:
        CALLS[call](generator)
        assert generator.ran[len(before) :] == [call.removesuffix("_weights")]
    else:
        with pytest.raises(WrongStateError, match=call):
            CALLS[call](generator)
        assert generator.ran == before


def test_cannot_start_without_weights() -> None:
    generator = Recorder()
    generator.sleep()
    generator.wake()
    with pytest.raises(WrongStateError, match="without its weights"):
        generator.start()
    generator.load_weights([], 7)
    generator.start()
    assert (generator.state, generator.version) == ("ready", 7)


@pytest.mark.parametrize("asleep", [False, True])
def test_renewal_is_the_whole_cycle(asleep: bool) -> None:
    generator = Recorder()
    if asleep:
        generator.sleep()
    generator.renew([], 3)
    assert generator.ran == ["sleep", "wake", "load", "start"]
    assert (generator.state, generator.version) == ("ready", 3)


def test_a_failed_load_cannot_be_started() -> None:
    generator = Recorder()
    generator.sleep()
    generator.wake()
    generator.load_weights([], 1)
    generator._load_weights = lambda weights: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        generator.load_weights([], 2)
    with pytest.raises(WrongStateError):
        generator.start()


def test_sample_seeds_differ_by_run_step_and_sample() -> None:
    seeds = {rollout.sample_seed(seed, step, i) for seed in range(3) for step in range(4) for i in range(50)}
    assert len(seeds) == 600 and all(0 <= seed < 2**63 for seed in seeds)
    assert rollout.sample_seed(1, 2, 3) == rollout.sample_seed(1, 2, 3)


def test_stop_tokens() -> None:
    tokenizer = addition.tokenizer()
    assert rollout.stop_token_ids(tokenizer, ["="]) == (tokenizer.eos_token_id, 14)
    with pytest.raises(ConfigError, match="'1='"):
        rollout.stop_token_ids(tokenizer, ["1="])
