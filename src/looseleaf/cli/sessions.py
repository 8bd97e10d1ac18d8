"""`looseleaf sessions`: conversations that a running server remembers, and the end of one."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote, urlencode

import typer
from rich.table import Table

from looseleaf.cli.client import DEFAULT_URL, JsonOption, KeyOption, ServerClient, UrlOption
from looseleaf.cli.failures import friendly_errors
from looseleaf.cli.output import format_span, print_json, stdout_console

sessions_app = typer.Typer(help="See and end sessions of a running server.", no_args_is_help=True)


@sessions_app.command("list")
def list_sessions(url: UrlOption = DEFAULT_URL, key: KeyOption = None, as_json: JsonOption = False) -> None:
    """List sessions, longest unused first: turns, gaps between them, what only they use, what turns have replaced."""
    with friendly_errors():
        answer = ServerClient(url, key).call("GET", "/v1/sessions")
        if as_json:
            print_json(answer)
            return
        if not answer["data"]:
            print("no sessions")
            return
        columns = ("id", "namespace", "turns", "used", "mean gap", "own tokens", "replaced tokens")
        table = Table(*columns, box=None, padding=(0, 2, 0, 0))
        for session in answer["data"]:
            gap = session["mean_gap_seconds"]
            table.add_row(
                session["id"],
                session.get("namespace", ""),
                str(session["num_turns"]),
                f"{format_span(session['last_used_seconds_ago'])} ago",
                "" if gap is None else format_span(gap),
                str(session["num_tokens"]),
                str(session["num_superseded_tokens"]),
            )
        stdout_console().print(table)


@sessions_app.command("rm")
def end_session(
    session_id: Annotated[str, typer.Argument(help="The id that its requests carry.")],
    salt: Annotated[str | None, typer.Option(help="The cache_salt of its requests.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Instead: the namespace that `sessions list` shows.")] = None,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a session: what only it used is evicted before anything else."""
    with friendly_errors():
        given = {"cache_salt": salt, "namespace": namespace}
        query = urlencode({name: value for name, value in given.items() if value is not None})
        path = f"/v1/sessions/{quote(session_id, safe='')}{'?' if query else ''}{query}"
        answer = ServerClient(url, key).call("DELETE", path)
        if as_json:
            print_json(answer)
            return
        print(f"{answer['id']} has ended: {answer['num_released_tokens']} tokens released, ", end="")
        print(f"{answer['num_kept_tokens']} kept by pins and running requests")
