"""Requests and configuration: what is refused, with which words."""

from __future__ import annotations

import numpy as np
import pytest

from looseleaf.engine.config import EngineConfig
from looseleaf.engine.request import FinishReason, GenerationRequest
from looseleaf.engine.sampling import SamplingParams
from looseleaf.errors import ConfigError, InvalidTokens, RequestError


@pytest.mark.parametrize("tokens", [[], [-1], [2**31], [1.5], ["a"], [[1, 2]], None, [1, [2]], [2**70], [True, False]])
def test_bad_prompts_are_refused(tokens):
    """What is no flat sequence of token ids is InvalidTokens at once."""
    with pytest.raises(InvalidTokens):
        GenerationRequest("r", tokens, SamplingParams())


def test_prompt_is_copied():
    """The caller may change its own array afterwards; the request's array is read-only int32."""
    mine = np.array([1, 2, 3], np.int64)
    request = GenerationRequest("r", mine, SamplingParams())
    mine[0] = 9
    assert request.prompt_tokens.tolist() == [1, 2, 3]
    assert request.prompt_tokens.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        request.prompt_tokens[0] = 1


def test_empty_id_is_refused():
    """A request needs a name."""
    with pytest.raises(RequestError):
        GenerationRequest("", [1], SamplingParams())


def test_finish_reasons_are_their_words():
    """The enum's values are the words of the HTTP surface."""
    assert [reason.value for reason in FinishReason] == ["stop", "length", "abort", "error"]
    assert FinishReason.STOP == "stop"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_running_requests", 0),
        ("max_step_tokens", -1),
        ("max_model_tokens", 0),
        ("max_step_tokens", 1.5),
        ("max_running_requests", True),
        ("reuse", 1),
        ("reserve_output", None),
    ],
)
def test_bad_settings_are_refused(name, value):
    """A setting outside its range is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: value})


def test_unknown_setting_names_the_nearest():
    """An unknown keyword is a ConfigError with the nearest name."""
    with pytest.raises(ConfigError, match="max_step_tokens"):
        EngineConfig(max_step_token=5)
