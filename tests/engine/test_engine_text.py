"""Detokenizing and stop strings: what may be given out, and when."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.engine.detokenizer import Detokenizer, TextPiece
from looseleaf.engine.sampling import TokenLogprobs
from looseleaf.engine.sequence import OutputText
from looseleaf.engine.stop import StopMatcher
from looseleaf.testing.fake_tokenizer import FakeTokenizer


class SpaceTokenizer(FakeTokenizer):
    """Sentencepiece-like: token i is " word-i"; the leading space of the whole text is dropped."""

    WORDS = ("the", "quick", "brown", "fox", ".", "<bos>")

    def decode(self, token_ids, *, skip_special_tokens=True):
        text = ""
        for token in token_ids:
            word = self.WORDS[token]
            if word == "<bos>":
                continue
            text += word if word == "." else " " + word
        return text.removeprefix(" ")


def pieces_of(tokenizer, prompt_tail, tokens):
    detokenizer = Detokenizer(tokenizer, prompt_tail)
    pieces = [detokenizer.push(token) for token in tokens]
    return [piece for piece in [*pieces, detokenizer.flush()] if piece is not None]


@given(st.text(max_size=40), st.text(max_size=12))
def test_no_piece_splits_a_character(text, prompt):
    """Every piece is the exact text of its tokens, whole characters only, and the pieces make the text."""
    tokenizer = FakeTokenizer()
    tokens = list(text.encode())
    pieces = pieces_of(tokenizer, list(prompt.encode()), tokens)
    assert "".join(piece.text for piece in pieces) == text
    at = 0
    for piece in pieces:
        assert bytes(tokens[at : at + piece.num_tokens]).decode() == piece.text
        at += piece.num_tokens
    assert at == len(tokens)


@given(st.binary(max_size=60), st.binary(max_size=6))
def test_broken_bytes_lose_no_token(data, prompt):
    """Bytes that are no UTF-8 come out as U+FFFD; no token is lost and none is held for ever."""
    pieces = pieces_of(FakeTokenizer(), list(prompt), list(data))
    assert sum(piece.num_tokens for piece in pieces) == len(data)
    assert "".join(piece.text for piece in pieces) == data.decode("utf-8", errors="replace")


def test_prompt_that_ends_inside_a_character():
    """What follows half a character is decoded by itself: no text is lost for it."""
    pieces = pieces_of(FakeTokenizer(), list("€".encode()[:2]), [0xAC, *b"AB"])
    assert "".join(piece.text for piece in pieces) == "\ufffdAB"


def test_endless_broken_bytes_are_given_out():
    """A model stuck on bytes that never become a character still streams."""
    detokenizer = Detokenizer(FakeTokenizer(), [])
    given_out = [detokenizer.push(0xFF) for _ in range(40)]
    assert sum(piece.num_tokens for piece in given_out if piece) >= 20


@pytest.mark.parametrize("prompt", [[], [0], [5], [0, 1], [0, 5]])
def test_leading_spaces_of_sentencepiece(prompt):
    """Text is what decoding prompt and output together adds to the prompt, whatever the cut into steps."""
    tokenizer = SpaceTokenizer()
    tokens = [1, 2, 4, 5, 3, 0, 5, 5, 2]
    text = "".join(piece.text for piece in pieces_of(tokenizer, prompt, tokens))
    assert text == tokenizer.decode(prompt + tokens)[len(tokenizer.decode(prompt)) :]


@given(st.lists(st.integers(0, 4), max_size=3), st.lists(st.integers(0, 5), max_size=120))
def test_long_runs_keep_their_spaces(prompt, tokens):
    """However long the text gets, with special tokens in between, no space is lost or added."""
    tokenizer = SpaceTokenizer()
    if "555555555555" in "".join(map(str, tokens)):  # a dozen special tokens in a row fill the window
        return
    text = "".join(piece.text for piece in pieces_of(tokenizer, prompt, tokens))
    assert text == tokenizer.decode(prompt + tokens)[len(tokenizer.decode(prompt)) :]


def stream(stops, tokens):
    """Push texts as tokens; the streamed texts, whether it stopped, and the number of tokens given out."""
    matcher = StopMatcher(tuple(stops))
    texts, num_tokens = [], 0
    for token in tokens:
        piece, stopped = matcher.push(TextPiece(1, token))
        texts.append(piece.text)
        num_tokens += piece.num_tokens
        if stopped:
            return texts, True, num_tokens
    piece = matcher.flush()
    return [*texts, piece.text], False, num_tokens + piece.num_tokens


def test_stop_string_over_tokens_is_never_streamed():
    """[S111] Stop "DEFG" over the tokens "DE", "F", "G": nothing of it is given out, and its tokens are not either."""
    assert stream(["DEFG"], ["abc", "DE", "F", "G", "x"]) == (["abc", "", "", ""], True, 1)


def test_held_text_is_released():
    """[S111] "DE" is held for "DEFG"; "X" shows that it is none, and both are given out."""
    assert stream(["DEFG"], ["DE", "X"]) == (["", "DEX", ""], False, 2)


def test_held_tail_is_flushed():
    """[S111] Text held at the end of the sequence is given out."""
    assert stream(["DEFG"], ["ab", "DE"]) == (["ab", "", "DE"], False, 2)


def test_token_in_which_a_stop_begins():
    """[S112] A token with text before the stop string is given out with that text; a whole stop token is not."""
    assert stream(["DE"], ["abD", "Ex"]) == (["", "ab"], True, 1)
    assert stream(["DE"], ["ab", "DE"]) == (["ab", ""], True, 1)
    assert stream(["DE"], ["DEab"]) == ([""], True, 0)


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_cut_into_tokens_does_not_matter(text, stops, rng):
    """[S111] However text is cut into tokens, what is streamed is the text before the stop string that ends first."""
    end = (
        min((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text)
        if any(stop in text for stop in stops)
        else None
    )
    expected = text if end is None else text[: end[1]]
    cuts = sorted(rng.sample(range(len(text) + 1), k=min(len(text), rng.randint(0, 6)))) if text else []
    edges = [0, *cuts, len(text)]
    texts, stopped, _ = stream(stops, [text[a:b] for a, b in itertools.pairwise(edges)])
    assert "".join(texts) == expected
    assert stopped == (end is not None)


def test_logprobs_and_tokens_are_held_with_their_text():
    """[S112] In each piece the tokens' texts make the text, with one log-probability each; the sum is the whole."""
    rng = random.Random(7)
    tokenizer = FakeTokenizer()
    for _ in range(200):
        text = "".join(rng.choice(["D", "E", "F", "é", "€", "😀"]) for _ in range(rng.randint(0, 12)))
        output = OutputText(tokenizer, [65], ("DEFG", "€D€", "EE"))
        whole, is_stopped = "", False
        for token in text.encode():
            given_out = output.push(token, TokenLogprobs(token, -0.5))
            assert tokenizer.decode(given_out.token_ids).startswith(given_out.text)
            if not given_out.is_stopped:
                assert tokenizer.decode(given_out.token_ids) == given_out.text
            assert tuple(entry.token_id for entry in given_out.logprobs) == given_out.token_ids
            whole += given_out.text
            if given_out.is_stopped:
                is_stopped = True
                break
        if not is_stopped:
            whole += output.flush().text
            assert whole == text
