"""What goes into the engine and what comes out: requests, deltas, usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from looseleaf.core.namespaces import NamespaceLayer, Tenancy
from looseleaf.engine.sampling import SamplingParams, TokenLogprobs
from looseleaf.errors import InvalidTokens, LooseleafError, RequestError
from looseleaf.ids import Int32Array, Namespace, RequestId

_MAX_TOKEN_ID = 2**31 - 1


class FinishReason(str, Enum):
    """Why a request ended. The values are the words of the OpenAI surface, plus two of ours."""

    STOP = "stop"
    """The model ended it (an end-of-sequence token), or a stop string appeared."""
    LENGTH = "length"
    """`max_tokens`, the limit of model or pool, or no memory left to grow."""
    ABORT = "abort"
    """The client left, or the engine was stopped."""
    ERROR = "error"
    """The step that computed it failed, or it could not get memory; `OutputDelta.error` says which."""


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """One prompt to continue.

    `prompt_tokens`: int32 [n], n >= 1; any sequence of ints is taken and copied. `namespace`: root of the prefix tree
    that it may share. `reuse`: False neither matches nor stores. `params.max_tokens` 0 is a prefill: no token is
    generated, the full blocks of the prompt are cached. `session`: the conversation that it belongs to, by name.
    `layers`: beginnings of the prompt that lie in other namespaces, see `CacheManager.lease`.
    """

    request_id: RequestId
    prompt_tokens: Int32Array
    params: SamplingParams
    namespace: Namespace = ""
    reuse: bool = True
    session: str | None = None
    layers: tuple[NamespaceLayer, ...] = ()

    def __init__(
        self,
        request_id: RequestId,
        prompt_tokens: Int32Array | Sequence[int],
        params: SamplingParams,
        namespace: Namespace = "",
        reuse: bool = True,
        session: str | None = None,
        layers: Sequence[NamespaceLayer] = (),
    ) -> None:
        """Check and copy.

        Raises:
            InvalidTokens: the prompt is empty, or holds something that is no token id.
            RequestError: the request id is empty, or the layers do not fit together or to the prompt.
        """
        if not request_id:
            raise RequestError("the request id is empty", "give each request an id of its own")
        prompt = as_token_array(prompt_tokens)  # set through __dict__, since the class is frozen
        self.__dict__.update(
            request_id=request_id,
            prompt_tokens=prompt,
            params=params,
            namespace=namespace,
            reuse=reuse,
            session=session,
            layers=tuple(layers),
        )
        Tenancy.of(namespace, self.layers, len(prompt), block_tokens=1)  # refuses what cannot be


@dataclass(frozen=True)
class Usage:
    """Tokens of one request up to now.

    `num_cached_tokens`: prompt tokens found in the cache at the first admission (0 before it, at most
    `num_prompt_tokens - 1`). `num_output_tokens`: tokens generated, with those of a stop string and the end token.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class OutputDelta:
    """What one step adds to one request.

    `text` is the decoded text of `token_ids`, exactly: text that waits (a character not whole yet, a possible stop
    string) keeps its tokens back too. The one exception: the token in which a stop string begins is given with the text
    before it. End tokens and tokens of a stop string are not given. `logprobs`: one for each of `token_ids` if asked
    for, else empty. The last delta of a request has `finish_reason`; `error` comes with ERROR.
    """

    request_id: RequestId
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    usage: Usage
    error: LooseleafError | None = None


def as_token_array(tokens: Int32Array | Sequence[int]) -> Int32Array:
    """A read-only int32 copy [n] of `tokens`.

    Raises:
        InvalidTokens: empty, not one-dimensional, not integers, negative, or at or above 2**31.
    """
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidTokens(f"the prompt is not a flat sequence of token ids: {error}") from error
    if array.ndim != 1:
        raise InvalidTokens(f"the prompt has {array.ndim} dimensions; it must be one flat sequence of token ids")
    if array.size == 0:
        raise InvalidTokens("the prompt is empty", "give at least one token")
    if array.dtype.kind not in "iu":
        raise InvalidTokens(f"the prompt holds {array.dtype} values; token ids are integers")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > _MAX_TOKEN_ID:
        raise InvalidTokens(f"token ids go from {low} to {high}; they must lie from 0 to {_MAX_TOKEN_ID}")
    copied = array.astype(np.int32)
    copied.setflags(write=False)
    return copied
