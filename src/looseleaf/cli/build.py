"""The object graph: configuration -> runner -> cache -> engine -> app. `serve` and `demo` build on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from looseleaf.cli.traffic import TrafficRecorder
from looseleaf.core.auto_pin_config import AutoPinConfig
from looseleaf.core.config import CacheConfig
from looseleaf.core.manager import CacheManager
from looseleaf.engine.async_engine import AsyncEngine
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.engine import Engine
from looseleaf.engine.observer import EngineObserver, Observers
from looseleaf.engine.runner import ModelRunner
from looseleaf.engine.tokenizer import Tokenizer
from looseleaf.hf.demo_model import DEMO_MODEL_NAME, Progress, demo_model_dir, quiet_transformers
from looseleaf.hf.runner import HFRunner
from looseleaf.hf.tokenizer import HFTokenizer
from looseleaf.lab.recording import TraceRecorder
from looseleaf.server import ServerSettings, create_app
from looseleaf.server.auth import shown_name
from looseleaf.telemetry import Metrics

MAX_DEFAULT_KV_BYTES = 2 * 2**30
MIN_PAGES_FOR_RESERVE = 16
PREPARING_SHARE = 0.8
"""Share of the progress bar for getting the demo model; the rest is loading it."""


@dataclass(frozen=True)
class MemorySettings:
    """KV memory as asked for: `kv_bytes` in all, or `num_pages` whatever a token takes; and how it is cut and kept.
    `reserve_pages` None: 2% of the pages, none of a pool of fewer than 16. `auto_pin` None: only what is asked for is
    pinned. `fair_shares`, `namespace_quotas`: as in `CacheConfig`."""

    kv_bytes: int | None = None
    num_pages: int | None = None
    page_tokens: int = 256
    block_tokens: int = 16
    policy: str = CacheConfig.policy
    pin_quota: float = 0.30
    reserve_pages: int | None = 0
    auto_pin: AutoPinConfig | None = None
    fair_shares: bool = False
    namespace_quotas: Mapping[str, float] = field(default_factory=dict)

    @property
    def blocks_per_page(self) -> int:
        """Blocks of a page."""
        return self.page_tokens // self.block_tokens

    def cache_config(self, num_pages: int, **of_model: Any) -> CacheConfig:
        """The cache of `num_pages` pages. `of_model`: its `groups` and `layout`.

        Raises:
            ConfigError: values that do not go together.
        """
        default_reserve = max(1, num_pages // 50) if num_pages >= MIN_PAGES_FOR_RESERVE else 0
        return CacheConfig(
            num_pages=num_pages,
            page_tokens=self.page_tokens,
            block_tokens=self.block_tokens,
            policy=self.policy,
            pin_quota=self.pin_quota,
            auto_pin=self.auto_pin,
            fair_shares=self.fair_shares,
            namespace_quotas=self.namespace_quotas,
            reserve_pages=default_reserve if self.reserve_pages is None else self.reserve_pages,
            **of_model,
        )


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and how it runs. `source`: a folder or hub id; None for the demo model. `kv_dtype`: how keys and
    values are stored."""

    source: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to compute, with the blocks that it computes into. `close` frees them."""

    name: str
    runner: ModelRunner
    tokenizer: Tokenizer
    num_blocks: int
    bytes_per_block: int
    close: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True)
class Stack:
    """One server's objects. Starting `app` starts `engine`."""

    model: LoadedModel
    cache: CacheManager
    metrics: Metrics
    engine: AsyncEngine
    app: FastAPI


def default_kv_bytes() -> int:
    """A quarter of the machine's memory, at most 2 GiB."""
    try:
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on this platform
        return MAX_DEFAULT_KV_BYTES
    return min(total_bytes // 4, MAX_DEFAULT_KV_BYTES)


def load_model(model: ModelSettings, memory: MemorySettings, progress: Progress | None = None) -> LoadedModel:
    """Load the model and give it its KV memory. Checks the cache's settings first, since loading takes long.

    Raises:
        ConfigError: settings that cannot be, or memory for less than a page.
        ModelError: the model cannot be found, loaded or served.
    """
    memory.cache_config(num_pages=max(1, memory.reserve_pages or 0))
    report = progress or (lambda _stage, _fraction: None)
    source = model.source or demo_model_dir(lambda stage, fraction: report(stage, PREPARING_SHARE * fraction))
    report("loading the model and checking how it is served", PREPARING_SHARE)
    has_downloads = not Path(source).is_dir()
    with contextlib.nullcontext() if has_downloads else quiet_transformers():
        tokenizer = HFTokenizer.load(source)
        runner = HFRunner.load(
            source,
            kv_memory_bytes=memory.kv_bytes,
            num_blocks=None if memory.num_pages is None else memory.num_pages * memory.blocks_per_page,
            block_tokens=memory.block_tokens,
            page_tokens=memory.page_tokens,
            device=model.device,
            dtype=model.dtype,
            kv_dtype=model.kv_dtype,
            extra_eos_token_ids=tokenizer.eos_token_ids,
        )
    name, blocks = model_name(model.source), runner.memory
    return LoadedModel(name, runner, tokenizer, blocks.num_blocks, blocks.bytes_per_block, runner.close)


def model_name(source: str | None) -> str:
    """The name under which clients ask for the model: a folder's own name, or the hub id."""
    if source is None:
        return DEMO_MODEL_NAME
    path = Path(source)
    return path.resolve().name if path.is_dir() else source


def build_stack(
    model: LoadedModel,
    memory: MemorySettings,
    engine_config: EngineConfig,
    server_settings: ServerSettings | None = None,
    *,
    vllm_metrics: bool = False,
    observe: Callable[[CacheManager, Metrics], EngineObserver] | None = None,
    recorder: TraceRecorder | None = None,
) -> Stack:
    """Cache, engine and app over a loaded model. The model may be used by several stacks one after the other.

    Args:
        observe: makes the engine's observer from cache and metrics; the metrics alone if None.
        recorder: is given the traffic, hashed; its clock is `time.monotonic`.

    Raises:
        ConfigError: settings that do not go together.
    """
    num_pages, info = model.num_blocks // memory.blocks_per_page, model.runner.info
    cache = CacheManager(memory.cache_config(num_pages, groups=info.groups, layout=info.kv_layout))
    metrics = Metrics(cache, model_name=model.name, vllm_names=vllm_metrics, name_of=shown_name)
    observer = metrics if observe is None else observe(cache, metrics)
    if recorder is not None:
        observer = Observers(observer, TrafficRecorder(recorder))
    engine = AsyncEngine(Engine(cache, model.runner, model.tokenizer, engine_config, observer=observer))
    app = create_app(
        engine, cache, model.tokenizer, model.name, metrics, server_settings, bytes_per_block=model.bytes_per_block
    )
    return Stack(model, cache, metrics, engine, app)
