"""A reward model scores as transformers does, one unpacked sequence at a time; what cannot be one is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from engine import rewards
from engine.config import Config, ConfigError
from engine.machine.world import World, joined
from engine.sample import Sample
from engine.tasks import addition

EOS = 2


def save(folder: Path, tokenizer: Any = None, **settings: Any) -> str:
    """A random sequence classifier of the embedded task's shape, by default with its tokenizer."""
    config = addition.model_config()
    config.num_labels = 1
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    model.save_pretrained(folder)
    (tokenizer or addition.tokenizer()).save_pretrained(folder)
    return str(folder)


def other_tokenizer() -> PreTrainedTokenizerFast:
    """Pairs of digits are one token; nothing is put in front; ``<end>`` pads and ends; has a chat template."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    texts = [*"0123456789+=", *(f"{i:02d}" for i in range(100)), "<user>", "<assistant>", "<end>"]
    core = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\w+>|\d\d|."), "isolated")
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<end>", eos_token="<end>", chat_template=template)


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model with the policy's vocabulary whose padding is the end of sequence."""
    return save(tmp_path_factory.mktemp("same"), pad_token_id=EOS)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model with another tokenizer."""
    return save(tmp_path_factory.mktemp("other"), other_tokenizer(), vocab_size=115)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with joined("cpu", 5) as alone:
        yield alone


def settings(policy: str, model: str, **sections: Any) -> Config:
    rollout = {"max_prompt_tokens": 8, "max_response_tokens": 8}
    return Config.model_validate(
        {
            "model": {"path": policy},
            "reward": {"model": model},
            "rollout": rollout | sections.pop("rollout", {}),
            "train": {"tokens_per_microbatch": 24} | sections.pop("train", {}),
        }
        | sections
    )


def sample(prompt: str, response: str, finish_reason: str = "stop") -> Sample:
    """As the sampler leaves it, with the embedded task's tokenizer."""
    tokenizer = addition.tokenizer()
    ids = tokenizer.encode(response, add_special_tokens=False)
    return Sample(
        index=0,
        group_id=0,
        prompt_ids=tokenizer.encode(prompt),
        response_ids=[*ids, EOS] if finish_reason == "stop" else ids,
        finish_reason=finish_reason,  # type: ignore[arg-type]
        prompt_text=prompt,
        response_text=response,
        columns={"prompt": prompt},
    )


SAMPLES = [
    sample("12+34=", "46"),
    sample("1+1=", ""),  # nothing but the end of sequence
    sample("99+99=", "198198", "length"),
    sample("07+7=", "0"),
    sample("5+5=", "1", "length"),
]


def expected(path: str, sequences: list[list[int]]) -> list[float]:
    """What transformers gives to each sequence alone, at its last token whatever that is."""
    model = AutoModelForSequenceClassification.from_pretrained(path)
    model.config.pad_token_id = None
    with torch.no_grad():
        return [float(model(torch.tensor([ids])).logits[0, 0]) for ids in sequences]


def scores(config: Config, world: World, batch: list[Sample]) -> list[float | None]:
    rewards.load(config, world).score(batch)
    return [one.reward for one in batch]


@pytest.mark.parametrize("stage", [0, 3])
def test_scores_equal_one_sequence_at_a_time(tiny_model: str, same: str, world: World, stage: int) -> None:
    """Several packed passes, the padding token inside a prompt and at the end, sharded by ZeRO-3 or not."""
    with_eos = sample("12+34=", "46")
    with_eos.prompt_ids = [1, 5, EOS, EOS, 6]
    batch = [*SAMPLES, with_eos]
    got = scores(settings(tiny_model, same, train={"zero_stage": stage}), world, batch)
    want = expected(same, [one.prompt_ids + one.response_ids for one in batch])
    assert got == pytest.approx(want, abs=1e-5, rel=0)
    assert min(abs(a - b) for i, a in enumerate(want) for b in want[:i]) > 1e-3, "the scores tell sequences apart"


def test_weights_and_a_rank_without_samples(tiny_model: str, same: str, world: World) -> None:
    config = settings(tiny_model, same)
    config.reward.weights = {"model": -0.5}
    scorer = rewards.load(config, world)
    scorer.score([])
    batch = SAMPLES[:2]
    scorer.score(batch)
    assert all(one.reward == -0.5 * one.reward_parts["model"] for one in batch)


def test_another_tokenizer_reads_the_text(tiny_model: str, other: str, world: World, tmp_path: Path) -> None:
    """End of sequence included where the response has one; chat messages by the reward model's own template, with what
    the policy's template prefilled (``1+``) at the beginning of the assistant's message."""
    tokenizer = other_tokenizer()
    texts = [one.prompt_text + one.response_text + "<end>" * (one.finish_reason == "stop") for one in SAMPLES]
    want = expected(other, [tokenizer(text)["input_ids"] for text in texts])
    assert scores(settings(tiny_model, other), world, SAMPLES) == pytest.approx(want, abs=1e-5, rel=0)

    (want_chat,) = expected(other, [tokenizer("<user>12+34=<end><assistant>1+46<end>")["input_ids"]])
    chats = str(shutil.copytree(tiny_model, tmp_path / "policy"))
    policy = addition.tokenizer()
    policy.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}1+{% endif %}"
    )
    policy.save_pretrained(chats)
    messages = sample("12+34=", "46")
    messages.columns["prompt"] = [{"role": "user", "content": "12+34="}]
    assert scores(settings(chats, other), world, [messages]) == [pytest.approx(want_chat, abs=1e-5)]
    wrapped = settings(chats, other, data={"chat_template": True})
    assert scores(wrapped, world, [sample("12+34=", "46")]) == [pytest.approx(want_chat, abs=1e-5)]
    assert abs(want_chat - want[0]) > 1e-3


def test_the_embedded_task_s_own_policy(same: str, world: World) -> None:
    """Its tokenizer is known before there is a starting checkpoint."""
    config = settings(None, same, data={"task": "addition"})  # type: ignore[arg-type]
    want = expected(same, [SAMPLES[0].prompt_ids + SAMPLES[0].response_ids])
    assert scores(config, world, SAMPLES[:1]) == pytest.approx(want, abs=1e-5, rel=0)


@pytest.mark.parametrize(
    "change,needle",
    [
        ("no head", "has no scoring head: .*score.weight"),
        ("labels", "a classifier with 3 labels"),
        ("encoder", "BertForSequenceClassification.* no decoder"),
        ("nowhere", "'tests' has no tokenizer"),
        ("positions", "takes 12 tokens at most"),
        ("chat template", "no chat template"),
    ],
)
def test_what_is_no_reward_model_is_refused(
    tiny_model: str, tmp_path: Path, world: World, change: str, needle: str
) -> None:
    sections: dict[str, Any] = {}
    if change == "no head":
        path = tiny_model
    elif change == "labels":
        path = save(tmp_path, num_labels=3)
    elif change == "encoder":
        from transformers import BertConfig, BertForSequenceClassification

        shape = BertConfig(
            vocab_size=15, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
        )
        shape.num_labels = 1
        BertForSequenceClassification(shape).save_pretrained(tmp_path)
        addition.tokenizer().save_pretrained(tmp_path)
        path = str(tmp_path)
    elif change == "nowhere":
        path = "tests"
    elif change == "positions":
        path = save(tmp_path, max_position_embeddings=12)
    else:
        tokenizer = other_tokenizer()
        tokenizer.chat_template = None
        path = save(tmp_path, tokenizer, vocab_size=115)
        sections = {"data": {"chat_template": True}}
    with pytest.raises(ConfigError, match=needle):
        rewards.load(settings(tiny_model, path, **sections), world)


def test_sequences_that_the_model_cannot_take(tiny_model: str, same: str, other: str, world: World) -> None:
    """They are dropped: no score, and a metric counts them; what lies beside them is scored as ever."""
    fine, unknown = sample("1+3=", "4"), sample("1+1=", "2")
    unknown.response_ids = [15]  # beyond its 15 tokens
    positions = sample("1+3=", "1+" * 31, "length")
    for config, refused in (
        (settings(tiny_model, other, train={"tokens_per_microbatch": 100}), positions),
        (settings(tiny_model, other), sample("1+3=", "1+" * 12)),  # more than tokens_per_microbatch
        (settings(tiny_model, same), unknown),
        (settings(tiny_model, other), sample("", "", "length")),  # no token at all
    ):
        scorer = rewards.load(config, world)
        batch = [refused, fine]
        scorer.score(batch)
        alone = [sample("1+3=", "4")]
        scorer.score(alone)
        assert refused.reward is None and fine.reward == pytest.approx(alone[0].reward, abs=1e-5)
        assert rewards.means(batch, config, world.sum)["reward/model_refused_fraction"] == 0.5
        scorer.score([refused])  # nothing left
        assert refused.reward is None
