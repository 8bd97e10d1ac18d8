"""The server's parts on their own: durations, conversations under odd templates, texts of tokens, the page."""

from __future__ import annotations

import re

import pytest

from looseleaf import errors
from looseleaf.errors import RequestError
from looseleaf.server.conversations import Mark, Turn, prefix_up_to, render, stable_prefix
from looseleaf.server.errors import answer_for
from looseleaf.server.logprobs import token_texts
from looseleaf.server.schemas import parse_duration
from looseleaf.testing.fake_tokenizer import FakeTokenizer


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("24h", 86_400), ("1h", 3600), ("5m", 300), ("90s", 90), ("90", 90), (90, 90), (0.5, 0.5), ("1.5h", 5400),
     ("2d", 172_800), ("in_memory", 300), ("in-memory", 300), (" 5m ", 300)],
)  # fmt: skip
def test_durations(value, seconds):
    """Durations with and without a unit are seconds."""
    assert parse_duration(value) == seconds


@pytest.mark.parametrize(
    "value", ["", "soon", "-5m", "5 minutes", "0", 0, -1, float("inf"), float("nan"), "1e3", "5y", "٣h0"]
)
def test_what_is_no_duration_is_refused(value):
    """Anything else is refused."""
    with pytest.raises(ValueError, match="no duration"):
        parse_duration(value)


class MergingTokenizer(FakeTokenizer):
    """Puts the system text into the first user turn and wants roles in turn, as Gemma's template does."""

    def render_chat(self, messages, *, add_generation_prompt=True):
        messages = [dict(message) for message in messages]
        head = messages.pop(0)["content"] + "\n\n" if messages[0]["role"] == "system" else ""
        if not messages:
            raise RequestError("a conversation needs a user turn")
        text = ""
        for index, message in enumerate(messages):
            if message["role"] != ("user", "assistant")[index % 2]:
                raise RequestError("roles must alternate")
            text += f"<{message['role']}>{head if index == 0 else ''}{message['content']}</>"
        return self.encode(text + ("<assistant>" if add_generation_prompt else ""))


class ForgetfulTokenizer(FakeTokenizer):
    """Opens a thought in the prompt for an answer and drops it from history, as thinking models' templates do."""

    def render_chat(self, messages, *, add_generation_prompt=True):
        text = "".join(f"<{message['role']}>{message['content']}</>" for message in messages)
        return self.encode(text + ("<answer><think>" if add_generation_prompt else ""))


SYSTEM, USER, ANSWER = Turn("system", ("rules",)), Turn("user", ("question",)), Turn("assistant", ("answer",))


@pytest.mark.parametrize("make", [FakeTokenizer, MergingTokenizer, ForgetfulTokenizer])
@pytest.mark.parametrize("turns", [[SYSTEM], [SYSTEM, USER], [USER], [USER, ANSWER], [SYSTEM, USER, ANSWER]])
def test_stable_prefix_is_a_prefix_of_every_continuation(make, turns):
    """Whatever the template does, the tokens kept for a conversation begin every request that goes on from it, and
    hold its last text."""
    tokenizer = make()
    prefix = stable_prefix(tokenizer, turns)
    answers = turns[-1].role == "user"
    continuations = [[Turn("assistant", ("x",)), USER], [Turn("assistant", ("yz",)), USER]] if answers else [[USER]]
    continuations += [[]] if answers else [[Turn("user", ("other",))]]
    for more in continuations:
        assert render(tokenizer, [*turns, *more])[: len(prefix)] == prefix
    assert turns[-1].parts[0] in tokenizer.decode(prefix)


@pytest.mark.parametrize("make", [FakeTokenizer, MergingTokenizer, ForgetfulTokenizer])
def test_prefix_up_to_a_part_holds_that_part_and_nothing_after(make):
    """A mark inside a message keeps everything up to the end of its part and nothing that depends on what follows."""
    tokenizer = make()
    turns = [SYSTEM, Turn("user", ("document", "question"))]
    prompt = render(tokenizer, turns)
    prefix = prefix_up_to(tokenizer, turns, Mark(1, 0), prompt)
    assert prompt[: len(prefix)] == prefix
    text = tokenizer.decode(prefix)
    assert text.rstrip().endswith("document")
    whole = prefix_up_to(tokenizer, turns, Mark(1, 1), prompt)
    assert "question" in tokenizer.decode(whole)


def test_a_template_that_refuses_everything_says_so():
    """If no rendering is accepted, the template's own error comes out."""
    with pytest.raises(RequestError, match="alternate"):
        stable_prefix(MergingTokenizer(), [ANSWER])


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc", ["a", "b", "c"]),
        ("aßb", ["a", "", "ß", "b"]),
        ("😀", ["", "", "", "😀"]),
        ("a€ß", ["a", "", "", "€", "", "ß"]),
    ],
)
def test_token_texts_join_to_the_text(text, pieces):
    """The token that completes a character has it, those before have the empty text; joined they are the text
    exactly."""
    tokenizer = FakeTokenizer()
    assert token_texts(tokenizer, text, tokenizer.encode(text, add_special_tokens=False)) == pieces
    assert token_texts(tokenizer, "", [257]) == [""]


def test_token_texts_of_a_cut_token():
    """What a stop string cut off is missing from the last piece."""
    tokenizer = FakeTokenizer()
    assert token_texts(tokenizer, "ab", list(b"abc")) == ["a", "b", ""]


def test_token_texts_keep_a_leading_space():
    """A leading space that `decode` drops stays with the first token."""

    class Stripping(FakeTokenizer):
        def decode(self, token_ids, *, skip_special_tokens=True):
            return super().decode(token_ids).removeprefix(" ")

    assert token_texts(Stripping(), " ab c", list(b" ab c")) == [" ", "a", "b", " ", "c"]


@pytest.mark.parametrize(
    ("error", "status", "details"),
    [
        (errors.InvalidTokens("bad"), 400, {}),
        (errors.DuplicateRequest("r"), 409, {"request_id": "r"}),
        (errors.OutOfBlocks(5, 1, 2, 3), 503, {"needed": 5, "free": 1, "evictable": 2, "pinned": 3}),
        (
            errors.PromptTooLong(9, 5, "memory"),
            400,
            {"num_prompt_tokens": 9, "limit_tokens": 5, "limited_by": "memory"},
        ),
        (errors.UnknownPin("'p'"), 404, {"what": "'p'"}),
        (errors.UnknownRequest("r"), 404, {"request_id": "r"}),
        (errors.LeaseClosed("r", "commit"), 503, {"request_id": "r"}),
        (errors.UnsupportedModel("x", "y"), 500, {"architecture": "x"}),
        (errors.IntegrityError("I1", "blocks are lost"), 500, {"invariant": "I1"}),
    ],
)
def test_errors_keep_their_code_and_numbers(error, status, details):
    """Each error of looseleaf has its status, its stable code, its message with the hint, and its numbers as
    fields."""
    answer = answer_for(error)
    assert answer.status == status
    assert answer.error["code"] == error.code
    assert answer.error["message"] == str(error)
    assert answer.error.get("details", {}) == details


@pytest.mark.anyio
async def test_openapi_describes_every_route(server):
    """/openapi.json lists the routes; there is no page that loads scripts from elsewhere."""
    paths = (await server.get("/openapi.json"))["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/pins", "/v1/cache/clear", "/metrics", "/health"):
        assert path in paths
    assert (await server.http.get("/docs")).status_code == 404


@pytest.mark.anyio
async def test_dashboard_is_one_page_without_outside_assets(server):
    """The page loads nothing from elsewhere, says so in its policy, and never puts strings in as markup."""
    response = await server.http.get("/dashboard")
    assert response.status_code == 200
    assert "default-src 'none'" in response.headers["content-security-policy"]
    page = response.text
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", page)
    for field in ("waste", "hit_rate", "active_blocks", "cached_blocks", "free_blocks", "pinned_blocks"):
        assert f"stats.{field}" in page
        assert hasattr(server.cache.stats(), field)
