"""`looseleaf explain`: why a request hit or missed, and where misses came from in all."""

from __future__ import annotations

import re
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer
from rich.table import Table

from looseleaf.cli.client import DEFAULT_URL, JsonOption, KeyOption, ServerClient, UrlOption
from looseleaf.cli.failures import friendly_errors
from looseleaf.cli.output import format_span, print_facts, print_json, stdout_console
from looseleaf.errors import ConfigError

_SECONDS_OF_UNIT = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
SinceOption = Annotated[
    str | None, typer.Option(help="With --summary: of the last 90s, 10m, 2h, 1d. Default: since the start.")
]
SaltOption = Annotated[str | None, typer.Option(help="With --summary: of the requests with this cache_salt.")]
StoredOption = Annotated[
    bool, typer.Option("--stored", help="And what is stored of it now, and what the policy thinks of that.")
]


def explain(
    request_id: Annotated[str | None, typer.Argument(help="The `id` of an answer, or its request_id.")] = None,
    stored: StoredOption = False,
    summary: Annotated[bool, typer.Option("--summary", help="Where did my misses come from?")] = False,
    since: SinceOption = None,
    salt: SaltOption = None,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a running server why a request hit or missed the cache, or where misses came from in all."""
    with friendly_errors():
        if summary == (request_id is not None) or (not summary and (since, salt) != (None, None)):
            hint = "looseleaf explain REQUEST_ID [--stored], or looseleaf explain --summary [--since 10m] [--salt SALT]"
            raise ConfigError("say what to explain: one request, or --summary", hint)
        client = ServerClient(url, key)
        if request_id is not None:
            query = "?stored=true" if stored else ""
            answer = client.call("GET", f"/v1/requests/{quote(request_id, safe='')}/cache{query}")
            (print_json if as_json else _print_request)(answer)
            return
        given = {"since_seconds": None if since is None else seconds_of(since), "cache_salt": salt, "buckets": "true"}
        query = urlencode({name: value for name, value in given.items() if value is not None})
        answer = client.call("GET", f"/v1/cache/misses?{query}")
        (print_json if as_json else _print_summary)(answer)


def seconds_of(text: str) -> float:
    """Seconds of "90s", "10m", "2h", "1d", "90".

    Raises:
        ConfigError: it is no such time.
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd]?)", text.strip(), re.ASCII)
    seconds = float(found[1]) * _SECONDS_OF_UNIT[found[2]] if found else 0.0
    if not seconds:
        raise ConfigError(f"{text!r} is no time", "write it as 90s, 10m, 2h or 1d")
    return seconds


def _print_request(answer: dict[str, Any]) -> None:
    rungs = ", ".join(f"{tokens} {rung.replace('_', ' ')}" for rung, tokens in answer["by_rung"].items() if tokens)
    came = f"{answer['num_cached_tokens']} of {answer['num_prompt_tokens']} prompt tokens came from the cache"
    print(f"{came} ({rungs})" if rungs else came)
    if answer["first_missed_token"] is not None:
        print(f"first token that had to be computed: {answer['first_missed_token']}")
    print(f"reason: {answer['reason']}\n{answer['message']}")
    if answer["session"] is not None:
        print(f"session: {answer['session']}")
    if texts := answer["diverged_text"]:
        hidden = "not shown: this may be another client's"
        print(f"stored there: {hidden if texts['stored'] is None else repr(texts['stored'])}")
        print(f"asked for:    {texts['asked']!r}")
    if drift := answer["drift"]:
        print(f"drift: {drift['cause']}\nthis conversation {drift['message']}")
    if "stored" in answer:
        print_facts({"stored": answer["stored"]})


def _print_summary(answer: dict[str, Any]) -> None:
    """The sentence, tokens by what became of them, and the same over time."""
    print(f"{answer['sentence']}\n")
    total = answer["query_tokens"]
    if not total:
        return
    reasons = sorted(answer["missed_tokens"], key=lambda reason: -answer["missed_tokens"][reason])
    table = Table("", "tokens", "share", "requests", box=None, padding=(0, 2, 0, 0))
    rows = [("found", answer["hit_tokens"]), *((reason, answer["missed_tokens"][reason]) for reason in reasons)]
    for name, tokens in rows:
        requests = answer["requests"].get("full_hit" if name == "found" else name)
        table.add_row(name, f"{tokens:,}", f"{tokens / total:.1%}", "" if requests is None else f"{requests:,}")
    stdout_console().print(table)
    over_time = Table("since", "tokens", "found", *reasons, box=None, padding=(0, 2, 0, 0))
    for bucket in answer["buckets"]:
        asked, missed = bucket["query_tokens"], bucket["missed_tokens"]
        shares = [f"{missed.get(reason, 0) / asked:.1%}" if asked else "" for reason in reasons]
        ago = f"{format_span(bucket['seconds'])} ago"
        over_time.add_row(ago, f"{asked:,}", f"{bucket['hit_rate']:.1%}", *shares)
    print()
    stdout_console().print(over_time)
