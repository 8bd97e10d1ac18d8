"""`looseleaf serve`: a Hugging Face model behind the OpenAI API."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from looseleaf.cli.auto_pin import RULE, AutoPinOption, MinRateOption, MinTokensOption, auto_pin_config
from looseleaf.cli.extras import import_extra
from looseleaf.cli.failures import FAILED, friendly_errors, say_error
from looseleaf.cli.output import format_bytes, print_json, stderr_console, stdout_console
from looseleaf.cli.progress import model_progress
from looseleaf.cli.traffic import recording
from looseleaf.core.config import CacheConfig
from looseleaf.core.eviction import POLICIES
from looseleaf.core.namespaces import namespace_of
from looseleaf.engine.config import EngineConfig
from looseleaf.errors import ConfigError
from looseleaf.lab.capacity import parse_bytes

if TYPE_CHECKING:
    from looseleaf.cli.build import MemorySettings, ModelSettings, Stack
    from looseleaf.cli.declared_pins import DeclaredPin
    from looseleaf.server import ServerSettings

ModelArgument = Annotated[
    str | None, typer.Argument(help="Folder or hub id of a decoder-only model. Without it: the demo model.")
]
KvMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Memory for keys and values: 512MiB, 2GiB; what fits is said at the start. "
        "Default: a quarter of RAM, at most 2GiB."
    ),
]
KvDtypeOption = Annotated[
    str,
    typer.Option(
        help="How keys and values are stored: auto (as the model computes), float32, bfloat16, float16, or in 8 bits "
        "with a scale per token and head: int8, fp8."
    ),
]
ReservePagesOption = Annotated[
    int | None,
    typer.Option(help="Whole pages kept free ahead of need. Default: 2% of the pages, none of fewer than 16."),
]
MaxModelTokensOption = Annotated[
    int | None, typer.Option(help="Limit on prompt and output together. Default: the model's own.")
]
AdminKeyOption = Annotated[
    str | None,
    typer.Option(envvar="LOOSELEAF_ADMIN_KEY", help="Key that pinning, warming, clearing and resizing then need."),
]
PinsOption = Annotated[
    Path | None, typer.Option(help="TOML file of pins: computed and pinned once the server is up.", show_default=False)
]
PolicyOption = Annotated[str, typer.Option(help=f"Which cached blocks go first: {', '.join(POLICIES)}.")]
FairSharesOption = Annotated[
    bool,
    typer.Option("--fair-shares", help="Take memory from the namespace that uses most: floods then take their own."),
]
NamespaceQuotaOption = Annotated[
    list[str] | None,
    typer.Option(
        "--namespace-quota",
        help="Share of the memory that requests with a cache_salt may store: SALT=0.2; may come again.",
        show_default=False,
    ),
]
RecordOption = Annotated[
    Path | None,
    typer.Option(
        help="Append each request to this file, hashed and without text, for `looseleaf replay`.", show_default=False
    ),
]
_DEFAULTS = EngineConfig()
EXAMPLE_TOKENS = 8192


@dataclass(frozen=True)
class ServeSettings:
    """What the command line asks for."""

    model: ModelSettings
    memory: MemorySettings
    engine: EngineConfig
    server: ServerSettings
    vllm_metrics: bool
    host: str
    port: int
    as_json: bool
    pins: list[DeclaredPin]
    record: Path | None = None


def serve(
    model: ModelArgument = None,
    kv_memory: KvMemoryOption = None,
    page_tokens: Annotated[int, typer.Option(help="Tokens of a page, the unit of memory.")] = 256,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block, the unit of sharing.")] = 16,
    pin_quota: Annotated[float, typer.Option(help="Share of the memory that pins may hold, 0 to 1.")] = 0.30,
    pins: PinsOption = None,
    auto_pin: AutoPinOption = "on",
    auto_pin_min_tokens: MinTokensOption = str(RULE.min_tokens),
    auto_pin_min_rate: MinRateOption = f"{RULE.min_requests_per_second:g}",
    reserve_pages: ReservePagesOption = None,
    policy: PolicyOption = CacheConfig.policy,
    fair_shares: FairSharesOption = False,
    namespace_quota: NamespaceQuotaOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto (what suits model and device), float32, float16, bfloat16.")
    ] = "auto",
    kv_dtype: KvDtypeOption = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    max_running_requests: Annotated[
        int, typer.Option(help="Requests that hold memory at the same time.")
    ] = _DEFAULTS.max_running_requests,
    max_step_tokens: Annotated[
        int, typer.Option(help="Tokens computed in one forward pass; longer prompts are cut.")
    ] = _DEFAULTS.max_step_tokens,
    max_model_tokens: MaxModelTokensOption = None,
    no_reuse: Annotated[bool, typer.Option("--no-reuse", help="Compute every prompt in full; store nothing.")] = False,
    admin_key: AdminKeyOption = None,
    record: RecordOption = None,
    vllm_metrics: Annotated[bool, typer.Option("--vllm-metrics", help="Use vLLM's names for metrics too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the start-up facts as JSON.")] = False,
) -> None:
    """Serve a Hugging Face model on paged, pinned, reused memory, with the OpenAI API."""
    with friendly_errors():
        limits = EngineConfig(max_running_requests, max_step_tokens, max_model_tokens, reuse=not no_reuse)
        kv_bytes = None if kv_memory is None else parse_bytes(kv_memory)
        automatic = auto_pin_config(auto_pin, auto_pin_min_tokens, auto_pin_min_rate)
        build = import_extra("looseleaf.cli.build", "serve")
        declared = [] if pins is None else import_extra("looseleaf.cli.declared_pins", "serve").load_pins(pins)
        memory = build.MemorySettings(
            kv_bytes=kv_bytes or build.default_kv_bytes(),
            page_tokens=page_tokens,
            block_tokens=block_tokens,
            policy=policy,
            pin_quota=pin_quota,
            reserve_pages=reserve_pages,
            auto_pin=automatic,
            fair_shares=fair_shares,
            namespace_quotas=quotas_of(namespace_quota),
        )
        model_settings = build.ModelSettings(model, device, dtype, kv_dtype)
        server = build.ServerSettings(admin_key=admin_key)
        settings = (model_settings, memory, limits, server, vllm_metrics, host, port, as_json, declared, record)
        run(ServeSettings(*settings))


def quotas_of(given: list[str] | None) -> dict[str, float]:
    """Quotas by namespace, of options written as SALT=SHARE, or with a namespace as the server shows it.

    Raises:
        ConfigError: one is not written so.
    """
    quotas: dict[str, float] = {}
    for text in given or []:
        name, equals, share = text.rpartition("=")
        try:
            quotas[name if '="' in name else namespace_of(salt=name)] = float(share if equals else "")
        except ValueError:
            raise ConfigError(f"--namespace-quota is {text!r}; it is written as SALT=0.2") from None
    return quotas


def run(settings: ServeSettings) -> None:
    """Listen first (a port in use should not cost a model's loading), load, serve until stopped.

    Raises:
        ConfigError, ModelError: settings or model cannot be used.
        typer.Exit: with 1 if the server could not start.
    """
    build = import_extra("looseleaf.cli.build", "serve")
    serving = import_extra("looseleaf.cli.serving", "serve")
    listening: socket.socket = serving.open_socket(settings.host, settings.port)
    try:
        with model_progress(stderr_console(), settings.model.source, is_shown=not settings.as_json) as progress:
            loaded = build.load_model(settings.model, settings.memory, progress)
        try:
            with recording(settings.record, settings.memory.block_tokens) as recorder:
                stack = build.build_stack(
                    loaded,
                    settings.memory,
                    settings.engine,
                    settings.server,
                    vllm_metrics=settings.vllm_metrics,
                    recorder=recorder,
                )
                on_ready = _on_ready(settings, stack, startup_facts(stack, serving.url_of(listening)))
                if not serving.serve_until_stopped(stack.app, listening, on_ready):
                    say_error("the server did not start; the log above says why")
                    raise typer.Exit(FAILED)
        finally:
            loaded.close()
    finally:
        listening.close()
    if not settings.as_json:
        print("\nstopped")


def _on_ready(settings: ServeSettings, stack: Stack, facts: dict[str, Any]) -> Callable[[], None]:
    """What to do once requests are taken, on the event loop: say so, and begin with the declared pins."""
    tasks: list[asyncio.Task[None]] = []  # the loop itself does not keep a task alive

    def on_ready() -> None:
        (print_json if settings.as_json else print_welcome)(facts)
        if settings.pins:
            warm_pins = import_extra("looseleaf.cli.declared_pins", "serve").warm_pins
            say = partial(print, file=sys.stderr, flush=True)
            tasks.append(asyncio.create_task(warm_pins(stack.app.state.context, settings.pins, say)))

    return on_ready


def startup_facts(stack: Stack, url: str) -> dict[str, Any]:
    """What a person or program wants to know of a server that has just started.

    `sequence_…`: what one sequence of `sequence_tokens` holds while it is generated, against a memory in which every
    layer keeps every token (`sequence_all_bytes`).
    """
    plan, info, block_bytes = stack.cache.plan, stack.model.runner.info, stack.model.bytes_per_block
    sequence_tokens = min(EXAMPLE_TOKENS, stack.engine.engine.max_model_tokens)
    sequence_blocks = plan.blocks_for(sequence_tokens, 1)
    return {
        "url": url,
        "model": stack.model.name,
        "max_model_tokens": stack.engine.engine.max_model_tokens,
        "num_pages": plan.num_pages,
        "page_tokens": stack.cache.config.page_tokens,
        "block_tokens": plan.block_tokens,
        "num_tokens": plan.num_tokens,
        "num_blocks": plan.num_blocks,
        "num_lanes": plan.num_lanes,
        "kv_bytes": plan.num_blocks * block_bytes,
        "bytes_per_token": info.bytes_per_token,
        "sequence_tokens": sequence_tokens,
        "sequence_blocks": sequence_blocks,
        "sequence_bytes": sequence_blocks * block_bytes,
        "sequence_all_bytes": -(-sequence_tokens // plan.block_tokens) * plan.num_lanes * block_bytes,
        "reserve_pages": stack.cache.config.reserve_pages,
        "policy": stack.cache.config.policy,
        "pin_quota_tokens": plan.quota_blocks // plan.num_lanes * plan.block_tokens,
    }


def print_welcome(facts: dict[str, Any]) -> None:
    """The start-up facts for people, and how to call the server."""
    url, name = facts["url"], facts["model"]
    used, everything = format_bytes(facts["sequence_bytes"]), format_bytes(facts["sequence_all_bytes"])
    lanes = f" in {facts['num_lanes']} lanes" if facts["num_lanes"] > 1 else ""
    instead = "" if used == everything else f"; {everything} if every layer kept every token"
    stdout_console().print(
        f"looseleaf serves {name} at {url}\n"
        f"  memory   {format_bytes(facts['kv_bytes'])}: {facts['num_blocks']:,} blocks{lanes}, "
        f"{facts['num_pages']:,} pages of {facts['page_tokens']} tokens\n"
        f"           a sequence of {facts['sequence_tokens']:,} tokens takes {facts['sequence_blocks']:,} blocks "
        f"({used}{instead}), so {facts['num_blocks'] // facts['sequence_blocks']:,} fit\n"
        f"  limits   {facts['max_model_tokens']:,} tokens a request, "
        f"{facts['pin_quota_tokens']:,} tokens can be pinned\n"
        f"  policy   {facts['policy']}, blocks of {facts['block_tokens']} tokens, "
        f"{facts['reserve_pages']} pages kept free ahead of need\n\n"
        f"  curl {url}/v1/completions -H 'content-type: application/json' \\\n"
        f'    -d \'{{"model": "{name}", "prompt": "The harbour at dawn", "max_tokens": 32}}\'\n\n'
        f"  from openai import OpenAI\n"
        f'  client = OpenAI(base_url="{url}/v1", api_key="none")\n'
        f'  client.chat.completions.create(model="{name}", messages=[{{"role": "user", "content": "Hello"}}])\n\n'
        f"  dashboard {url}/dashboard   metrics {url}/metrics   API {url}/openapi.json   stop: Ctrl-C",
        markup=False,
        soft_wrap=True,
    )
