"""A model of full and window layers behind HTTP: look-ups inside and behind the window, and samples of one prompt."""

from __future__ import annotations

import pytest

from looseleaf.core.config import LayerGroup

pytestmark = pytest.mark.anyio

WINDOW = LayerGroup("window", window_tokens=32, num_lanes=2)
GROUPS = (LayerGroup("full"), WINDOW)
PROMPT = [7 * i % 251 for i in range(160)]
OTHER = [11 * i % 241 + 3 for i in range(160)]
COMPLETIONS = "/v1/completions"


async def test_a_hit_inside_and_behind_the_window(make_server):
    """`match` and the completion that follows agree: a prompt of 33 tokens hits 32, all of them in the window; one of
    81 hits 80, of which the window's lanes need the last two blocks only; nothing of it is read wrongly."""
    server = await make_server(groups=GROUPS, page_tokens=64, num_pages=24)
    await server.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4})
    for num_tokens, num_cached, num_blocks in ((17, 16, 3), (33, 32, 2 + 4), (81, 80, 5 + 4), (160, 144, 9 + 4)):
        prompt = PROMPT[:num_tokens]
        match = await server.post("/v1/cache/match", {"tokens": prompt})
        assert (match["num_cached_tokens"], match["num_blocks"]) == (num_cached, num_blocks)
        answer = await server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached


async def test_a_window_that_is_gone_cuts_the_hit_and_is_named(make_server):
    """Under pressure what slid out of the window goes first: where the first prompt ended a request still goes on from
    all 160 tokens; in its middle none can, though the full layers hold 80 tokens, and the explanation names the
    group."""
    server = await make_server(groups=GROUPS, page_tokens=64, num_pages=8)
    await server.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4})
    await server.post(COMPLETIONS, {"prompt": OTHER, "max_tokens": 4})
    assert (await server.get("/v1/cache/stats"))["slid_out_blocks"] > 0
    match = await server.post("/v1/cache/match", {"tokens": [*PROMPT, 1]})
    assert (match["num_cached_tokens"], match["num_blocks"]) == (160, 10 + 4)
    answer = await server.post(COMPLETIONS, {"prompt": [*PROMPT, 1], "max_tokens": 1})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 160
    assert (await server.post("/v1/cache/match", {"tokens": PROMPT[:81]}))["num_cached_tokens"] == 0
    answer = await server.post(COMPLETIONS, {"prompt": PROMPT[:81], "max_tokens": 1})
    why = await server.get(f"/v1/requests/{answer['id']}/cache")
    assert (why["reason"], why["num_cached_tokens"], why["num_shared_tokens"]) == ("window_cut", 0, 80)
    assert "'window'" in why["message"]


@pytest.mark.parametrize("groups", [(LayerGroup("full"),), GROUPS])
@pytest.mark.parametrize("num_prompt_tokens", [31, 32, 40, 100])
async def test_choices_compute_their_prompt_once(make_server, groups, num_prompt_tokens):
    """[P10] n = 4 computes each prompt once, whatever its last block holds, and each choice then its own tokens: the
    same as alone with its own seed. The prompt counts once in the usage; three forks are counted for each."""
    server = await make_server(groups=groups)
    body = {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    prompts = [PROMPT[:num_prompt_tokens], OTHER[:num_prompt_tokens]]
    answer = await server.post(COMPLETIONS, {**body, "prompt": prompts, "n": 4, "seed": 5})
    assert server.runner.num_computed_tokens == 2 * (num_prompt_tokens + 4 * 7)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2 * num_prompt_tokens, 64)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert server.metrics.registry.get_sample_value("looseleaf_forks_total") == 6
    assert len({choice["text"] for choice in answer["choices"]}) == 8
    for choice in answer["choices"]:
        prompt, number = divmod(choice["index"], 4)
        alone = {**body, "prompt": prompts[prompt], "seed": 5 + number, "reuse": False}
        assert (await server.post(COMPLETIONS, alone))["choices"][0]["text"] == choice["text"]


async def test_the_best_of_several_are_answered(server):
    """`best_of` generates all, answers the `n` of highest mean log-probability, best first, and counts every generated
    token; without `logprobs` none are shown."""
    body = {"prompt": [PROMPT[:40], OTHER[:40]], "max_tokens": 6, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    every = await server.post(COMPLETIONS, {**body, "n": 5, "logprobs": 0})
    best = await server.post(COMPLETIONS, {**body, "n": 2, "best_of": 5})
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"] == 60
    assert best["usage"]["prompt_tokens"] == 80
    for start in (0, 1):
        of_prompt = every["choices"][5 * start : 5 * start + 5]
        ranked = sorted(of_prompt, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]) / 6)
        expected = [choice["text"] for choice in ranked[:2]]
        assert [choice["text"] for choice in best["choices"][2 * start : 2 * start + 2]] == expected
    echoed = await server.post(COMPLETIONS, {**body, "best_of": 5, "echo": True})
    starts = [server.tokenizer.decode(prompt) for prompt in body["prompt"]]
    texts = [choice["text"] for choice in echoed["choices"]]
    assert texts == [start + best["choices"][2 * at]["text"] for at, start in enumerate(starts)]


async def test_an_answer_without_tokens_is_never_the_best(make_server):
    """A sample that ends at once has no log-probability and comes last; `best_of` as large as `n` may stream."""
    server = await make_server(eos_every=2)
    body = {"prompt": PROMPT[:20], "max_tokens": 3, "temperature": 1.0, "seed": 1}
    every = await server.post(COMPLETIONS, {**body, "n": 8})
    assert any(choice["text"] == "" for choice in every["choices"])
    assert (await server.post(COMPLETIONS, {**body, "best_of": 8}))["choices"][0]["text"] != ""
    events = await server.events(COMPLETIONS, {**body, "n": 2, "best_of": 2})
    assert {choice["index"] for event in events for choice in event["choices"]} == {0, 1}
