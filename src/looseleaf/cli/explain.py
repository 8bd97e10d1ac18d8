"""`looseleaf explain`: why a request hit or missed."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from looseleaf.cli.client import DEFAULT_URL, JsonOption, KeyOption, ServerClient, UrlOption
from looseleaf.cli.failures import friendly_errors
from looseleaf.cli.output import print_json


def explain(
    request_id: Annotated[str, typer.Argument(help="The `id` of an answer, or the request_id sent with it.")],
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a running server why a request hit or missed the cache."""
    with friendly_errors():
        answer = ServerClient(url, key).call("GET", f"/v1/requests/{quote(request_id, safe='')}/cache")
        if as_json:
            print_json(answer)
            return
        print(f"{answer['num_cached_tokens']} of {answer['num_prompt_tokens']} prompt tokens came from the cache")
        if answer.get("first_missed_token") is not None:
            print(f"first token that had to be computed: {answer['first_missed_token']}")
        print(f"reason: {answer['reason']}")
        print(answer["message"])
        if texts := answer.get("diverged_text"):
            print(f"stored there: {texts['stored']!r}\nasked for:    {texts['asked']!r}")
        if drift := answer.get("drift"):
            print(f"drift: {drift['cause']}\nthis conversation {drift['message']}")
