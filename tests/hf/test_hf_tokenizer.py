"""The tokenizer: round trips, chat templates, errors, several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from looseleaf.errors import ModelError, RequestError
from looseleaf.hf.tokenizer import HFTokenizer

STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer trained on nothing: every byte is a token, plus special ones."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["hello world"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@pytest.fixture
def tokenizer(byte_tokenizer: PreTrainedTokenizerFast) -> HFTokenizer:
    byte_tokenizer.chat_template = None
    return HFTokenizer(byte_tokenizer)


@pytest.mark.parametrize("text", ["", "hello world", " two  spaces ", "naïve 東京 🦊", "a .  b , 'c' don't"])
def test_round_trip(tokenizer: HFTokenizer, text: str) -> None:
    """Text comes back exactly: no spaces cleaned up, no characters lost."""
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_half_a_character_is_the_replacement_character(tokenizer: HFTokenizer) -> None:
    """The first bytes of a character decode to U+FFFD, so that the engine can hold them back."""
    ids = tokenizer.encode("🦊", add_special_tokens=False)
    assert len(ids) == 4
    assert tokenizer.decode(ids[:2]) == "�"


def test_special_tokens_are_skipped_or_shown(tokenizer: HFTokenizer) -> None:
    """Special tokens are left out of the text unless asked for."""
    ids = tokenizer.encode("hi<|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hi<|im_end|>"


def test_end_tokens(tokenizer: HFTokenizer) -> None:
    """A sequence ends at the tokenizer's end token and at the end-of-turn tokens it has."""
    texts = {tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.eos_token_ids}
    assert texts == {"</s>", "<|im_end|>"}


def test_plain_template_where_there_is_none(tokenizer: HFTokenizer) -> None:
    """Without a template of its own a tokenizer gets a plain one: a line per turn, and an open turn for the
    answer.
    """
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = tokenizer.render_chat(messages)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>System: Be brief.\nUser: Hi\nAssistant:"
    closed = tokenizer.render_chat(messages, add_generation_prompt=False)
    assert closed == ids[: len(closed)]
    assert tokenizer.chat_stops == ("\nUser:", "\nSystem:", "\nTool:")


def test_the_plain_template_shows_tools_and_gives_answers_back(tokenizer: HFTokenizer) -> None:
    """The plain template has a line of tools, calls as JSON, and an answer that begins with a space as it was generated
    behind the open turn."""
    messages: list[dict[str, object]] = [{"role": "user", "content": "Hi"}]
    asked = tokenizer.render_chat(messages)
    generated = tokenizer.encode(" yes", add_special_tokens=False)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"day": 1}}}
    messages += [{"role": "assistant", "content": " yes"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "content": "rain"}]
    ids = tokenizer.render_chat(messages, add_generation_prompt=False)
    assert ids[: len(asked) + len(generated)] == asked + generated
    calls = 'Assistant: {"tool_call": {"name": "look", "arguments": {"day": 1}}}\nTool: rain\n'
    assert tokenizer.decode(ids).endswith("Assistant: yes\n" + calls)
    tool = {"type": "function", "function": {"name": "look"}}
    text = tokenizer.decode(tokenizer.render_chat([{"role": "user", "content": "Hi"}], tools=[tool]))
    assert text == 'Tools: [{"type": "function", "function": {"name": "look"}}]\nUser: Hi\nAssistant:'


def test_the_models_own_template(tokenizer: HFTokenizer) -> None:
    """The tokenizer's template is used where there is one; special tokens are written once, by it."""
    tokenizer._tokenizer.chat_template = STRICT_TEMPLATE
    assert tokenizer.chat_stops == ()
    ids = tokenizer.render_chat(
        [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    )
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(tokenizer.encode("<|im_start|>", add_special_tokens=False)[0]) == 2


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "at least one"),
        ([{"content": "x"}], "message 0 has no role"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": 3}], "message 1 is int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ([{"role": "system", "content": "x"}], "only user and assistant"),
    ],
)
def test_what_a_template_refuses(tokenizer: HFTokenizer, messages: list[dict[str, object]], word: str) -> None:
    """A conversation that cannot be rendered is the request's fault, with the reason."""
    tokenizer._tokenizer.chat_template = STRICT_TEMPLATE
    with pytest.raises(RequestError, match=word):
        tokenizer.render_chat(messages)


def test_several_threads(tokenizer: HFTokenizer) -> None:
    """Encoding, decoding and rendering from eight threads at once give what one thread gives."""

    def work(i: int) -> tuple[list[int], str, list[int]]:
        ids = tokenizer.encode(f"text {i}", add_special_tokens=i % 2 == 0)
        return ids, tokenizer.decode(ids), tokenizer.render_chat([{"role": "user", "content": f"{i}"}])

    expected = [work(i) for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(200))) == expected


def test_load_and_nothing_there(byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """A saved tokenizer loads from its folder; an empty folder is a ModelError that names it."""
    byte_tokenizer.save_pretrained(tmp_path / "there")
    loaded = HFTokenizer.load(tmp_path / "there")
    assert loaded.encode("hello") == byte_tokenizer.encode("hello")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="empty"):
        HFTokenizer.load(tmp_path / "empty")
