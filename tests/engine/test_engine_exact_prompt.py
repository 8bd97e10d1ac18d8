"""Prompts that go on from an earlier sequence: its own tokens as far as the text is the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.engine.exact_prompt import ExactPrompt, Seam, texts_agree
from looseleaf.errors import InvalidTokens
from looseleaf.testing.fake_tokenizer import FakeTokenizer
from looseleaf.testing.pair_tokenizer import PairTokenizer

PAIRS = PairTokenizer()


def encoded(text: str) -> np.ndarray:
    return np.array(PAIRS.encode(text), np.int32)


def spelt(text: str) -> np.ndarray:
    """As a model might generate it: a token for each byte."""
    return np.array(list(text.encode()), np.int32)


def go_on(prompt: str, answer: str, now: str) -> ExactPrompt:
    return ExactPrompt.of(encoded(prompt)).go_on(PAIRS, spelt(answer), encoded(now))


def test_the_generated_tokens_stand_for_their_text():
    """An answer that comes back as text keeps the tokens that were generated; what follows is as rendered."""
    prompt = go_on("user: hi. assistant: ", "hello there", "user: hi. assistant: hello there. user: more. ")
    assert prompt.tokens.tolist() == [
        *encoded("user: hi. assistant: "),
        *b"hello there",
        *encoded(". user: more. ")[1:],
    ]
    assert PAIRS.decode(prompt.tokens) == PAIRS.decode(prompt.rendered)
    assert prompt.num_kept_tokens == len(encoded("user: hi. assistant: ")) + len("hello there")


def test_a_last_token_that_goes_on_is_left_to_the_template():
    """Where the rendered text has no token border at the answer's end, the answer is used up to the last common one."""
    prompt = go_on("say: ", "abc", "say: abcd. ")
    assert prompt.tokens.tolist() == [*encoded("say: "), *b"ab", *encoded("cd. ")[1:]]
    assert prompt.seams[-1].exact_end == prompt.num_kept_tokens == len(encoded("say: ")) + 2


def test_a_prompts_own_last_token_may_be_split():
    """A prompt that ends inside what is one token in the longer text goes on with its own tokens all the same."""
    prompt = go_on("say: a", "bcd", "say: abcd. ")
    assert prompt.tokens.tolist() == [*encoded("say: a"), *b"bcd", *encoded(". ")[1:]]


def test_where_the_text_differs_the_rendered_tokens_begin():
    """An answer of which the template drops the beginning is not used at all; what is before it is."""
    prompt = go_on("user: hi. assistant: ", "<think>hm</think>yes", "user: hi. assistant: yes. user: more. ")
    assert prompt.tokens.tolist() == encoded("user: hi. assistant: yes. user: more. ").tolist()
    assert prompt.num_kept_tokens == len(encoded("user: hi. assistant: "))
    assert prompt.seams == ()


def test_no_character_is_cut():
    """Bytes of a character that differ are not taken for the same text because neither is a character by itself."""
    tokenizer = FakeTokenizer()
    before = tokenizer.encode("x")
    first, second = (np.array([*before, *letter.encode()], np.int32) for letter in "éè")
    prompt = ExactPrompt.of(before).go_on(tokenizer, first[2:], second)
    assert prompt.tokens.tolist() == second.tolist()
    assert prompt.seams == ()


def test_lengths_carry_over():
    """A number of rendered tokens becomes that of the tokens with the same text; inside a seam, of those before it."""
    prompt = go_on("a: ", "bcde", "a: bcde. ")
    assert prompt.seams == (Seam(4, 4, 6, 5), Seam(6, 5, 8, 6))
    assert [prompt.num_exact_tokens(n) for n in range(4, len(prompt.rendered) + 1)] == [4, 6, 8, 9, 10]


def test_an_empty_prompt_is_none():
    """A prompt has tokens."""
    with pytest.raises(InvalidTokens):
        ExactPrompt.of([])


TEXTS = st.text(alphabet="abc. é🙂\n", max_size=12)


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5), TEXTS, st.booleans())
def test_turn_after_turn_the_text_is_that_of_the_template(turns, end, is_edited):
    """Whatever was generated, however often, edited or not: the prompt has the text of the rendering, begins with the
    earlier tokens as far as it says, and its seams are where both differ."""
    text = "s"
    asked = ExactPrompt.of(encoded(text))
    for user, answer in turns:
        generated = spelt(answer)
        rest = answer[:-1] + "x" if is_edited and answer else answer
        text += rest + "|" + user
        earlier = [*asked.tokens, *generated]
        asked = asked.go_on(PAIRS, generated, encoded(text))
        assert PAIRS.decode(asked.tokens) == PAIRS.decode(asked.rendered) == text
        assert asked.tokens[: asked.num_kept_tokens].tolist() == earlier[: asked.num_kept_tokens]
        if not is_edited:
            assert asked.num_kept_tokens == len(earlier)
        for number in range(len(asked.rendered) + 1):
            place = asked.num_exact_tokens(number)
            whole = PAIRS.decode(asked.tokens[:place])
            assert PAIRS.decode(asked.rendered[:number]).startswith(whole.rstrip("\ufffd"))


@pytest.mark.parametrize(
    ("ours", "theirs", "agree"), [("abc", "abc", True), ("ab", "abc", True), ("ab", "cb", False), ("", "ab", False)]
)
def test_texts_agree(ours, theirs, agree):
    """The same text in other tokens agrees, another text does not; nothing agrees with nothing."""
    tokens = np.concatenate((spelt("x"), spelt(ours)))
    others = np.concatenate((spelt("x"), encoded(theirs)[1:]))
    assert texts_agree(PAIRS, tokens, others, 1) is agree
