"""Turns of a conversation: generated tokens hit in the next one, and where it drifts the explanation says why."""

from __future__ import annotations

import json

import pytest

from looseleaf.server import ServerSettings
from looseleaf.testing.fake_tokenizer import FakeTokenizer
from looseleaf.testing.pair_tokenizer import PairTokenizer

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
ASK = {"role": "user", "content": "tell me a story about binders, please, and make it long"}
MORE = {"role": "user", "content": "and now go on with it, but shorter this time"}


class ThinkingTokenizer(FakeTokenizer):
    """Opens a thought in the prompt for an answer and leaves it out of old turns: `T` stands for the open thought."""

    def render_chat(self, messages, *, tools=(), add_generation_prompt=True):
        text = "".join(f"<{message['role']}>{message['content']}</>" for message in messages)
        return self.encode(text + ("<assistant>T" if add_generation_prompt else ""))


class TrimmingTokenizer(PairTokenizer):
    """Cuts white space off what it renders, and shows tool calls in an order of its own."""

    def render_chat(self, messages, *, tools=(), add_generation_prompt=True):
        trimmed = []
        for message in messages:
            calls = [json.dumps(call["function"], sort_keys=True) for call in message.get("tool_calls", ())]
            trimmed.append({"role": message["role"], "content": message["content"].strip() + "".join(calls)})
        return super().render_chat(trimmed, tools=tools, add_generation_prompt=add_generation_prompt)


@pytest.fixture(params=["plain", "stream"])
def chat(request):
    """Ask for an answer, whole or as a stream: the assistant's message, usage and id."""

    async def ask(server, messages, max_tokens=40, **extra):
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, **extra}
        if request.param == "plain":
            answer = await server.post(CHAT, body)
            message, usage = answer["choices"][0]["message"], answer["usage"]
        else:
            events = await server.events(CHAT, {**body, "stream_options": {"include_usage": True}})
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])
            message, usage, answer = {"role": "assistant", "content": text}, events[-1]["usage"], events[-1]
        return message, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], answer["id"]

    return ask


async def drift_of(server, request_id):
    return (await server.get(f"/v1/requests/{request_id}/cache"))["drift"]


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // 16 * 16


async def test_generated_tokens_hit_in_every_next_turn(make_server, chat):
    """Answers that come back as text hit with the tokens that were generated, though their text has fewer tokens; turn
    after turn all whole blocks of the turn before are found, and nothing drifts."""
    server = await make_server(tokenizer=PairTokenizer(), vocab_size=PairTokenizer.vocab_size)
    messages, known = [ASK], 0
    for _ in range(4):
        message, num_prompt, num_cached, request_id = await chat(server, messages)
        assert num_cached == whole_blocks(known)
        assert await drift_of(server, request_id) is None
        known = num_prompt + 40 - 1  # the last token is given out, not computed
        messages += [message, MORE]
    as_text = server.tokenizer.render_chat(messages[:-2])
    assert num_prompt > len(as_text)


async def test_without_the_memory_the_text_counts(make_server, chat):
    """With `remembered_tokens` 0 and with `reuse: false` a prompt is what the template says."""
    for settings, extra in ((ServerSettings(remembered_tokens=0), {}), (None, {"reuse": False})):
        server = await make_server(tokenizer=PairTokenizer(), vocab_size=PairTokenizer.vocab_size, settings=settings)
        message, *_ = await chat(server, [ASK], **extra)
        _, num_prompt, _, request_id = await chat(server, [ASK, message, MORE], **extra)
        assert num_prompt == len(server.tokenizer.render_chat([ASK, message, MORE]))
        assert await drift_of(server, request_id) is None


async def test_a_template_that_drops_thoughts(make_server, chat):
    """[R43] The template opens a thought for the answer and drops it from history: what is common hits, floored to
    blocks, and the explanation names the first position and text that differ, the message and the cause."""
    server = await make_server(tokenizer=ThinkingTokenizer())
    message, num_prompt, _, first_id = await chat(server, [ASK])
    _, _, num_cached, second_id = await chat(server, [ASK, message, MORE])
    assert num_cached == whole_blocks(num_prompt - 1)
    drift = await drift_of(server, second_id)
    assert (drift["cause"], drift["token"], drift["message_index"]) == ("template_rewrote", num_prompt - 1, 1)
    assert drift["earlier_request_id"] == first_id
    assert drift["text_before"].endswith("<assistant>")
    assert drift["earlier_text"] == ("T" + message["content"])[:12]
    assert drift["text_now"] == (message["content"] + "</>")[:12]
    assert drift["num_lost_tokens"] == whole_blocks(num_prompt + 39) - num_cached
    for part in (f"token {num_prompt - 1}", "message 1", repr(first_id), "template"):
        assert part in drift["message"]


async def test_what_is_common_hits_in_later_turns_too(make_server, chat):
    """[R43] The turns before the last one hit again with all of their tokens, since they are rendered the same by
    now."""
    server = await make_server(tokenizer=ThinkingTokenizer())
    messages, ends = [ASK], []
    for _ in range(4):
        message, num_prompt, num_cached, _ = await chat(server, messages)
        assert num_cached == (whole_blocks(ends[-1] - 1) if ends else 0)
        ends.append(num_prompt)
        messages += [message, MORE]


@pytest.mark.parametrize(
    ("change", "cause", "message_index"),
    [
        (lambda m: [m[0], {**m[1], "content": m[1]["content"][:9] + "Z"}, m[2]], "message_edited", 1),
        (lambda m: [{**m[0], "content": "tell me no story about binders"}, *m[1:]], "message_edited", 0),
        (lambda m: [m[0], m[2]], "message_edited", 1),
        (lambda m: m[1:], "message_removed", 0),
        (lambda m: [{"role": "system", "content": "be brief"}, *m], "message_inserted", 0),
        (lambda m: [m[0], {"role": "user", "content": "wait"}, *m[1:]], "message_inserted", 1),
    ],
)
async def test_who_changed_what(server, change, cause, message_index):
    """A message that a client edited, removed or inserted is named, with its place; what is before it still hits, and
    the texts of both sides are shown."""
    first = await server.post(CHAT, {"messages": [ASK], "max_tokens": 40, "request_id": "first"})
    messages = change([ASK, first["choices"][0]["message"], MORE])
    second = await server.post(CHAT, {"messages": messages, "max_tokens": 4, "request_id": "second"})
    drift = await drift_of(server, "second")
    assert (drift["cause"], drift["message_index"], drift["earlier_request_id"]) == (cause, message_index, "first")
    now = server.tokenizer.decode(server.tokenizer.render_chat(messages), skip_special_tokens=False)
    assert drift["text_before"] + drift["text_now"] in now
    then = server.tokenizer.decode(server.tokenizer.render_chat([ASK]), skip_special_tokens=False)
    assert drift["text_before"] + drift["earlier_text"] in then + first["choices"][0]["message"]["content"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == whole_blocks(drift["token"])


async def test_tool_calls_in_another_shape(make_server):
    """Text that a client sends back as a tool call is an edited message; white space that the template cuts off is the
    template's doing. What is before it hits."""
    server = await make_server(tokenizer=TrimmingTokenizer(), vocab_size=PairTokenizer.vocab_size)
    await server.post(CHAT, {"messages": [ASK], "max_tokens": 40, "request_id": "first"})
    call = {"id": "c", "type": "function", "function": {"name": "go", "arguments": '{"b": 1, "a": 2}'}}
    turns = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "7"}]
    await server.post(CHAT, {"messages": turns, "max_tokens": 4, "request_id": "second"})
    drift = await drift_of(server, "second")
    assert (drift["cause"], drift["message_index"]) == ("message_edited", 1)
    assert drift["text_now"].startswith('{"arguments"')

    num_prompt = len(server.tokenizer.render_chat([ASK]))
    server.runner.script("third", num_prompt, b"  so be it  ")
    third = await server.post(CHAT, {"messages": [ASK], "max_tokens": 12, "request_id": "third"})
    assert third["choices"][0]["message"]["content"] == "  so be it  "
    turns = [ASK, third["choices"][0]["message"], MORE]
    await server.post(CHAT, {"messages": turns, "max_tokens": 4, "request_id": "fourth"})
    drift = await drift_of(server, "fourth")
    assert (drift["cause"], drift["token"], drift["message_index"]) == ("template_rewrote", num_prompt, 1)
    assert (drift["earlier_text"], drift["text_now"][:5]) == ("  so be it  ", "so be")


async def test_a_last_token_that_merges(make_server):
    """Where the last token of an answer makes one token with what the template writes behind it, that is told as
    retokenized; it costs nothing in whole blocks here."""

    class Glueing(PairTokenizer):
        def render_chat(self, messages, *, tools=(), add_generation_prompt=True):
            texts = [f"<{message['role']}>{message['content']}" for message in messages]
            return self.encode("end".join(texts) + ("end<assistant>" if add_generation_prompt else ""))

    server = await make_server(tokenizer=Glueing(), vocab_size=PairTokenizer.vocab_size)
    first = await server.post(CHAT, {"messages": [ASK], "max_tokens": 7, "request_id": "first"})
    turns = [ASK, first["choices"][0]["message"], MORE]
    await server.post(CHAT, {"messages": turns, "max_tokens": 4, "request_id": "second"})
    drift = await drift_of(server, "second")
    assert (drift["cause"], drift["message_index"]) == ("retokenized", 1)
    assert drift["token"] == len(server.tokenizer.render_chat([ASK])) + 6


async def test_tools_that_change(server):
    """Other tools than in the turn before are the cause of all that is lost."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    first = await server.post(CHAT, {"messages": [ASK], "tools": [tool], "max_tokens": 40})
    turns = [ASK, first["choices"][0]["message"], MORE]
    same = await server.post(CHAT, {"messages": turns, "tools": [tool], "max_tokens": 1})
    assert same["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    other = {**tool, "function": {"name": "listen", "parameters": {}}}
    await server.post(CHAT, {"messages": turns, "tools": [other], "max_tokens": 1, "request_id": "other"})
    assert (await drift_of(server, "other"))["cause"] == "tools_changed"


async def test_another_conversation_has_not_drifted(server):
    """A conversation that has only an opening in common with others, one that is asked again, and one that goes back to
    an earlier turn are no drift."""
    system = {"role": "system", "content": "be brief and kind, whatever they say to you"}
    first = await server.post(CHAT, {"messages": [system, ASK], "max_tokens": 40})
    turns = [system, ASK, first["choices"][0]["message"], MORE]
    await server.post(CHAT, {"messages": turns, "max_tokens": 40})
    for name, messages in (("new", [system, MORE]), ("again", turns), ("back", [system, ASK])):
        await server.post(CHAT, {"messages": messages, "max_tokens": 4, "request_id": name})
        assert await drift_of(server, name) is None


async def test_a_session_is_known_by_its_name(server):
    """A first message that changes with every request (the time of day) is found out through the session, also without
    an answer in common."""
    for minute in (1, 2):
        system = {"role": "system", "content": f"it is 12:0{minute} now. be brief."}
        body = {"messages": [system, ASK], "max_tokens": 4, "session_id": "s", "request_id": f"r{minute}"}
        await server.post(CHAT, body)
    assert await drift_of(server, "r1") is None
    drift = await drift_of(server, "r2")
    assert (drift["cause"], drift["message_index"]) == ("message_edited", 0)
    assert (drift["earlier_text"][:2], drift["text_now"][:2]) == ("1 ", "2 ")


async def test_every_choice_is_remembered(make_server):
    """Whichever of several choices comes back, its tokens are used."""
    server = await make_server(tokenizer=PairTokenizer(), vocab_size=PairTokenizer.vocab_size)
    body = {"messages": [ASK], "max_tokens": 40, "n": 3, "temperature": 1.0, "seed": 5, "request_id": "r"}
    first = await server.post(CHAT, body)
    for choice in first["choices"]:
        request_id = f"next-{choice['index']}"
        turns = [ASK, choice["message"], MORE]
        second = await server.post(CHAT, {"messages": turns, "max_tokens": 4, "request_id": request_id})
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == whole_blocks(len(server.tokenizer.render_chat([ASK])) + 39)
        assert await drift_of(server, request_id) is None


async def test_an_answer_cut_short_by_its_client_hits(make_server, wire, eventually):
    """What came of a stream before its client left goes on with its own tokens when it is sent back."""
    options = {"vocab_size": PairTokenizer.vocab_size, "delay_seconds": 0.01}
    server = await make_server(tokenizer=PairTokenizer(), **options)
    async with wire(server) as wired:
        body = {"messages": [ASK], "max_tokens": 500, "stream": True, "request_id": "left"}
        reader, writer = await wired.send(CHAT, body)
        text = ""
        while len(text) < 30:
            line = await reader.readline()
            if line.startswith(b"data: "):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        writer.close()
        assert await eventually(lambda: server.is_idle)
    turns = [ASK, {"role": "assistant", "content": text}, MORE]
    second = await server.post(CHAT, {"messages": turns, "max_tokens": 4})
    num_prompt = len(server.tokenizer.render_chat([ASK]))
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= whole_blocks(num_prompt + len(text) - 1)


async def test_marks_pins_and_match_use_the_same_tokens(make_server):
    """A mark behind an answer pins the tokens that were generated; `match` and `pins` by messages mean the same
    ones."""
    server = await make_server(tokenizer=PairTokenizer(), vocab_size=PairTokenizer.vocab_size, pin_quota=1.0)
    first = await server.post(CHAT, {"messages": [ASK], "max_tokens": 40})
    answer, num_prompt = first["choices"][0]["message"], first["usage"]["prompt_tokens"]
    end = num_prompt + 40
    matched = await server.post("/v1/cache/match", {"messages": [ASK, answer, MORE]})
    assert matched["num_cached_tokens"] == whole_blocks(end - 1)
    pin = await server.post("/v1/pins", {"messages": [ASK, answer]})
    assert pin["num_tokens"] >= end
    assert pin["num_pinned_tokens"] == whole_blocks(end - 1)
    marked = {"role": "assistant", "content": answer["content"], "cache_control": {"type": "ephemeral"}}
    await server.post(CHAT, {"messages": [ASK, marked, MORE], "max_tokens": 1})
    assert (await server.pins())[-1]["num_tokens"] == end


async def test_memory_is_bounded_and_forgets(make_server):
    """Past turns take at most what the setting says, the oldest go first; a clear forgets those of its namespace."""
    settings = ServerSettings(remembered_tokens=250)
    server = await make_server(tokenizer=PairTokenizer(), vocab_size=PairTokenizer.vocab_size, settings=settings)
    turns = []
    for name in ("ab", "cd", "ef", "gh"):
        messages = [{"role": "user", "content": name * 40}]
        first = await server.post(CHAT, {"messages": messages, "max_tokens": 40})
        turns.append([*messages, first["choices"][0]["message"], MORE])

    async def length(messages, **extra):
        return (await server.post("/v1/cache/match", {"messages": messages, **extra}))["num_prompt_tokens"]

    as_text = [len(server.tokenizer.render_chat(messages)) for messages in turns]
    assert await length(turns[0]) == as_text[0]
    assert await length(turns[3]) > as_text[3]
    await server.post("/v1/cache/clear", {"cache_salt": "other"})
    assert await length(turns[3]) > as_text[3]
    await server.post("/v1/cache/clear", {})
    assert await length(turns[3]) == as_text[3]


async def test_turns_of_others_are_not_known(make_server):
    """Conversations of another namespace are no source of tokens and never show in a drift."""
    server = await make_server(tokenizer=PairTokenizer(), vocab_size=PairTokenizer.vocab_size)
    first = await server.post(CHAT, {"messages": [ASK], "max_tokens": 40, "cache_salt": "a", "session_id": "s"})
    turns = [ASK, first["choices"][0]["message"], MORE]
    as_text = len(server.tokenizer.render_chat(turns))
    edited = [ASK, {**turns[1], "content": "x" + turns[1]["content"]}, MORE]
    for salt, messages in ((None, turns), ("b", turns), ("c", edited)):
        body = {"messages": messages, "max_tokens": 1, "cache_salt": salt, "session_id": "s", "request_id": "r"}
        second = await server.post(CHAT, {name: value for name, value in body.items() if value is not None})
        assert second["usage"]["prompt_tokens"] == as_text + (0 if messages is turns else 1)
        assert await drift_of(server, "r") is None
    own = await server.post(CHAT, {"messages": turns, "max_tokens": 1, "cache_salt": "a"})
    assert own["usage"]["prompt_tokens"] > as_text


@pytest.mark.parametrize("body_id", [None, "s1"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_one_session_id(server, path, body_id):
    """A session is named in the body or in the header; two different names are refused."""
    body = {"messages": [ASK]} if path == CHAT else {"prompt": "a"}
    body |= {"max_tokens": 1, "session_id": body_id}
    await server.post(path, body, **{"X-Session-Id": "s1"})
    error = (await server.post(path, {**body, "session_id": "s1"}, 400, **{"X-Session-Id": "s2"}))["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "session_id")
    for bad in ("", "a b", "x" * 201, 7):
        await server.post(path, {**body, "session_id": bad}, 400)
