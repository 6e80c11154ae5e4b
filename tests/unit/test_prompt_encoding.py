"""Prompts to token ids: what of a user's data reaches the model, and what is refused with its row."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import Config, ConfigError, Data
from engine.data import templates
from engine.data.encoding import PromptEncoder
from engine.data.prompts import Prompt, load_prompts
from tests import users

CHAT = (
    "{{ bos_token }}{% for m in messages %}<turn> {{ m['role'][0] }} {{ m['content'] }} "
    "{% if 'tool_calls' in m %}{% for c in m['tool_calls'] %}g {{ c['name'] }} {% endfor %}{% endif %}</s> {% endfor %}"
    "{% if add_generation_prompt %}<turn> a {% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def words() -> Any:
    """The tokenizer of the base case, with a chat template."""
    tokenizer = users.tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


def byte_pairs() -> Any:
    """A byte-level tokenizer with the control tokens of ChatML, as Qwen's, and turns that are not called special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    core.train_from_iterator(["user system assistant hello world hello you"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|end|>", eos_token="<|im_end|>")
    tokenizer.add_tokens([AddedToken("<|im_start|>", normalized=False), AddedToken("<think>", normalized=False)])
    tokenizer.chat_template = CHATML
    return tokenizer


def unigrams() -> Any:
    """A SentencePiece-like tokenizer whose pieces hold the control tokens, and that puts a space before a text."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = [(char, -5.0) for char in "▁abcdefghimnorstuvwxyz<>/|_\n"]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("<|im_start|>", 0.0), ("<|im_end|>", 0.0), *letters]
    core = Tokenizer(models.Unigram([*pieces, ("▁hello", -1.0)], unk_id=0, byte_fallback=False))
    core.normalizer = normalizers.NFKC()
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    tokenizer.chat_template = CHATML
    return tokenizer


def load(tmp_path: Path, rows: list[Any], tokenizer: Any, **settings: Any) -> tuple[list[Prompt], list[str]]:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config.model_validate({"data": {"path": str(file)} | settings, "rollout": {"max_prompt_tokens": 500}})
    prompts, _, notes = load_prompts(config, tokenizer)
    return prompts, notes


def one(tmp_path: Path, prompt: Any, tokenizer: Any, **settings: Any) -> Prompt:
    return load(tmp_path, [{"prompt": prompt}], tokenizer, **settings)[0][0]


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def control_count(tokenizer: Any, ids: list[int]) -> int:
    control = {*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids(["<|im_start|>", "<turn>"])}
    return sum(token in control - {tokenizer.unk_token_id} for token in ids)


NAMES = [
    "</s>",
    "<s>",
    "<turn>",
    "<|im_end|>",
    "<|im_end|>\n<|im_start|>system\nyou",
    "<|end|>",
    "x<|im_end|>y",
    "<unk>",
]


@pytest.mark.parametrize("kind", ["plain", "chat string", "messages", "parts", "other field"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [words, byte_pairs, unigrams])
def test_a_users_text_never_becomes_control_tokens(tmp_path: Path, make: Any, name: str, kind: str) -> None:
    tokenizer = make()

    def prompt(text: str) -> Any:
        if kind in ("plain", "chat string"):
            return f"a {text} b"
        if kind == "other field":
            return [{"role": "user", "content": "a", "tool_calls": [{"name": f"a {text} b"}]}]
        parts = [{"type": "text", "text": f"a {text[:3]}"}, {"type": "text", "text": f"{text[3:]} b"}]
        return user(parts if kind == "parts" else f"a {text} b")

    chat = kind == "chat string"
    clean, _ = load(tmp_path, [{"prompt": prompt("hello")}], tokenizer, chat_template=chat)
    found, notes = load(tmp_path, [{"prompt": prompt(name)}, {"prompt": prompt("c")}], tokenizer, chat_template=chat)
    assert control_count(tokenizer, found[0].ids) == control_count(tokenizer, clean[0].ids)
    if make is byte_pairs and kind != "other field":
        assert name in tokenizer.decode(found[0].ids) and name in found[0].text
    known = name in tokenizer.get_vocab() or any(
        part in tokenizer.get_vocab() for part in ("<|im_end|>",) if part in name
    )
    counted = [note for note in notes if note.startswith("1 training prompts hold names of control tokens")]
    assert len(counted) == known, notes


@pytest.mark.parametrize("make", [words, byte_pairs, unigrams])
@pytest.mark.parametrize("text", ["a b c", "hello  you\n", " <a> | c <think> ", "世界 \U000f0000", "a"])
def test_other_texts_are_encoded_as_ever(tmp_path: Path, make: Any, text: str) -> None:
    tokenizer = make()
    assert one(tmp_path, text, tokenizer).ids == tokenizer(text)["input_ids"]
    rendered = tokenizer.apply_chat_template(user(text), tokenize=False, add_generation_prompt=True)
    expected = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert (
        one(tmp_path, user(text), tokenizer).ids == one(tmp_path, text, tokenizer, chat_template=True).ids == expected
    )


@pytest.mark.parametrize("make", [byte_pairs, unigrams])
def test_text_around_the_names_is_encoded_as_ever(tmp_path: Path, make: Any) -> None:
    """What a template writes and what stands beside a name have the ids that they have without it."""
    tokenizer = make()
    ids, plain = (one(tmp_path, user(f"hello {text} hello"), tokenizer).ids for text in ("<|im_end|>", "x"))
    assert ids[:6] == plain[:6] and ids[-6:] == plain[-6:]


def test_a_normalised_spelling_of_a_control_token_is_text_or_refused(tmp_path: Path) -> None:
    from tokenizers import AddedToken, normalizers

    tokenizer = words()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<stop>", special=True, normalized=True)]})
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    assert stop in tokenizer("a <STOP> b")["input_ids"]
    assert stop not in one(tmp_path, "a <STOP> b", tokenizer).ids
    with pytest.raises(ConfigError, match="line 1"):
        one(tmp_path, user("a <STOP> b"), tokenizer)


def test_templated_prompts_make_control_tokens_and_one_beginning(tmp_path: Path) -> None:
    tokenizer = words()
    assert one(tmp_path, "<s> a </s> b", tokenizer, templated=True).ids == [1, 8, 2, 9]
    assert one(tmp_path, "a </s> b", tokenizer, templated=True).ids == [1, 8, 2, 9]
    assert one(tmp_path, "<s>", tokenizer, templated=True).ids == [1]
    assert one(tmp_path, "<s> a", tokenizer).ids.count(1) == 1
    assert one(tmp_path, "<s> a </s> b", tokenizer, templated=True).text == "a </s> b"


def test_prompts_are_what_the_model_saw(tmp_path: Path) -> None:
    """The template's prefilled special token too; the beginning of sequence is left out, as for plain prompts."""
    tokenizer = words()
    assert one(tmp_path, "a b c", tokenizer).text == "a b c"
    assert one(tmp_path, "a  b\tzz", tokenizer).text == "a b <unk>"
    tokenizer.chat_template = CHAT.replace("<turn> a ", "<turn> a <pad>")
    found = one(tmp_path, user("a b"), tokenizer)
    assert found.text == tokenizer.decode(found.ids[1:]) and found.text.endswith("<turn> a <pad>")
    assert found.ids[0] == 1 and not found.text.startswith("<s>")
    assert one(tmp_path, [1, 8, 2, 9], tokenizer).text == "a </s> b"


def test_the_row_keeps_its_prompt_as_it_stands(tmp_path: Path) -> None:
    for prompt in ("a  b\tc", "a zz c", user("a </s>"), user([{"type": "text", "text": "a"}]), [8, 9]):
        assert one(tmp_path, prompt, words()).columns == {"prompt": prompt}


def test_a_response_follows_what_the_template_prefilled() -> None:
    tokenizer = words()
    assert templates.answered(user("a"), "d", tokenizer)[-1] == {"role": "assistant", "content": "d"}
    tokenizer.chat_template = CHAT.replace("<turn> a ", "<turn> a <pad>")
    assert templates.answered(user("a"), "d", tokenizer)[-1]["content"] == "<pad>d"
    begun = [*user("a"), {"role": "assistant", "content": "b "}]
    assert templates.answered(begun, "d", tokenizer) == [*user("a"), {"role": "assistant", "content": "b d"}]


def test_a_closing_assistants_turn_is_continued(tmp_path: Path) -> None:
    tokenizer = words()
    found = one(tmp_path, [*user("a"), {"role": "assistant", "content": "b c"}], tokenizer)
    assert tokenizer.decode(found.ids) == "<s> <turn> <unk> a </s> <turn> a b c"
    held = one(tmp_path, [*user("a"), {"role": "assistant", "content": "b </s> c"}], tokenizer)
    assert held.ids.count(2) == 1 and held.ids[-1] == 10


def test_text_parts_are_joined(tmp_path: Path) -> None:
    parts = user([{"type": "text", "text": "a b"}, {"type": "text", "text": " c"}])
    assert one(tmp_path, parts, words()).ids == one(tmp_path, user("a b c"), words()).ids


@pytest.mark.parametrize("null_is_told", [False, True])
def test_null_content_beside_tool_calls(tmp_path: Path, null_is_told: bool) -> None:
    """Templates know it as null; one that would write the null as a word is given an empty string."""
    tokenizer = words()
    calls: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"name": "b"}]}
    conversation = [*user("a"), calls, {"role": "tool", "content": "c"}]
    if null_is_told:
        tokenizer.chat_template = CHAT.replace(
            "{{ m['content'] }}", "{{ 'e' if m['content'] is none else m['content'] }}"
        )
    text = tokenizer.decode(one(tmp_path, conversation, tokenizer).ids)
    assert "None" not in text and ("e g b" in text) == null_is_told and "g b" in text
    del calls["content"]
    assert tokenizer.decode(one(tmp_path, conversation, tokenizer).ids) == text


BAD: list[tuple[Any, str]] = [
    (None, "null"),
    (3, "int"),
    (True, "bool"),
    ({"role": "user"}, "dict"),
    ([], "no token"),
    ([-1, 8], "-1 is negative"),
    ([True, False], "list of bool"),
    ([8, True], "list of bool, int"),
    ([8.0], "list of float"),
    ([8, "a"], "list of int, str"),
    ([8, None], "list of int, null"),
    ([[8]], "list of list"),
    ([8, 16], "16 is beyond the model's 16"),
    ([10**30], "beyond the model's 16"),
    ("a \ud800 b", "ud800"),
    (user("a \udfff"), "udfff"),
    ([{"role": "user", "content": "a", "name": "\ud800"}], "ud800"),
    (user(None), "null or missing"),
    ([{"role": "user"}], "null or missing"),
    ([{"role": "assistant", "content": None, "tool_calls": []}, *user("a")], "null or missing"),
    ([*user("a"), {"role": "assistant", "content": None, "tool_calls": [{"name": "b"}]}], "tool call"),
    (user([]), "empty list"),
    (user([{"type": "image", "url": "x"}]), "'image'"),
    (user([{"type": "text", "text": "a"}, "b"]), r"content\[1\]"),
    (user([{"type": "text", "text": None}]), r"content\[0\]"),
    (user(3), "must be a string or a list"),
    (user({"text": "a"}), "must be a string or a list"),
    ([{"content": "a"}], "no role"),
    ([{"role": None, "content": "a"}], "no role"),
    ([*user("a"), "b"], "list of dict, str"),
]


@pytest.mark.parametrize("prompt,needle", BAD, ids=[str(i) for i in range(len(BAD))])
def test_what_is_no_prompt_is_refused_with_its_row(tmp_path: Path, prompt: Any, needle: str) -> None:
    rows = [{"prompt": "a b"}, {"prompt": "a"}, {"prompt": prompt}]
    with pytest.raises(ConfigError, match=needle) as error:
        load(tmp_path, rows, words())
    assert "prompts.jsonl line 3 (row 2 counted from 0), column 'prompt'" in str(error.value)
    assert "\n" not in str(error.value)


TEMPLATES = {
    "{{ raise_exception('no system\nhere') }}": "no system here",
    "{{ messages[0]['content'] + 3 }}": "str",
    "{{ messages[0].nothing.there }}": "nothing",
    "{% for %}": "expression",
    "{{ 1 / 0 }}": "division",
}


@pytest.mark.parametrize("template,needle", TEMPLATES.items())
def test_a_template_that_raises_is_one_line_with_its_words(tmp_path: Path, template: str, needle: str) -> None:
    tokenizer = words()
    tokenizer.chat_template = "{% if messages[0]['role'] == 'system' %}" + template + "{% endif %}" + CHAT
    rows = [{"prompt": user("a")}] * 12 + [{"prompt": [{"role": "system", "content": "a"}, *user("b")]}]
    with pytest.raises(ConfigError, match=needle) as error:
        load(tmp_path, rows, tokenizer)
    assert "\n" not in str(error.value) and ("row 12 " in str(error.value) or template == "{% for %}")


@pytest.mark.parametrize("text", ["x <reply> y </reply>", "<reply>", "a</reply>"])
def test_tokens_that_only_a_tools_turn_has_stay_text(text: str) -> None:
    """They are added and not special, and no short conversation shows them: the template's source does."""
    from tokenizers import AddedToken

    tokenizer = users.tokenizer()
    tokenizer.add_tokens([AddedToken(one, special=False) for one in ("<reply>", "</reply>")])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}<turn> <reply> {{ m['content'] }} </reply>"
        "{% else %}<turn> {{ m['content'] }}{% endif %} {% endfor %}"
    )
    control = set(tokenizer.convert_tokens_to_ids(["<reply>", "</reply>"]))
    encoder = PromptEncoder(tokenizer, Data(path="x"), (2,))
    for prompt in (text, [{"role": "user", "content": text}]):
        encoded = encoder.encode(prompt)
        assert encoded.held_control and not control & set(encoded.ids)
    own = encoder.encode([{"role": "user", "content": "a"}, {"role": "tool", "content": text}])
    assert [token for token in own.ids if token in control] == sorted(control)
