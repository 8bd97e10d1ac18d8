"""Laws of configuration: every wrong value is refused with what it must be; every error keeps its contract."""

from __future__ import annotations

import inspect

import pytest

import looseleaf
from looseleaf import CacheConfig, CacheManager, ConfigError, LayerGroup, LooseleafError, errors


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"num_pages": 0}, "num_pages is 0"),
        ({"num_pages": True}, "num_pages is True"),
        ({"num_pages": 1.5}, "num_pages is 1.5"),
        ({"block_tokens": 24}, "power of two"),
        ({"block_tokens": 1024, "page_tokens": 1024}, "from 1 to 512"),
        ({"page_tokens": 100}, "not a multiple of block_tokens 16"),
        ({"page_tokens": 2048, "block_tokens": 16}, "at most 64 fit"),
        ({"policy": "lur"}, "did you mean 'lru'"),
        ({"pin_quota": 1.5}, "share from 0 to 1"),
        ({"pin_quota": -0.1}, "share from 0 to 1"),
        ({"reserve_pages": 9}, "above num_pages 8"),
        ({"groups": ()}, "groups is empty"),
        ({"groups": 5}, "must be a tuple of LayerGroup"),
        ({"policy": None}, "no setting 'None'"),
        ({"groups": (LayerGroup("full"), LayerGroup("full", name="other"))}, "there are several full groups"),
        ({"groups": (LayerGroup("full", name="a"), LayerGroup("window", 8, name="a"))}, "2 groups have this name"),
        ({"groups": (LayerGroup("full", name="kv"),)}, "means all groups"),
        ({"num_known_requests": -1}, "num_known_requests is -1"),
        ({"page_token": 256}, "did you mean 'page_tokens'"),
    ],
    ids=str,
)
def test_wrong_settings(settings: dict[str, object], facts: str) -> None:
    """A wrong or unknown setting is a ConfigError with the value and what it must be, or the nearest name."""
    with pytest.raises(ConfigError, match=facts):
        CacheConfig(**{"num_pages": 8, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [{"kind": "windw"}, {"kind": "window"}, {"kind": "full", "window_tokens": 3}])
def test_wrong_groups(arguments: dict[str, object]) -> None:
    """A layer group that makes no sense is refused."""
    with pytest.raises(ConfigError):
        LayerGroup(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_tokens", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
def test_all_block_sizes(block_tokens: int) -> None:
    """Every allowed block size works at its boundaries."""
    cache = CacheManager(CacheConfig(num_pages=8, page_tokens=block_tokens, block_tokens=block_tokens))
    for length in {1, max(1, block_tokens - 1), block_tokens, block_tokens + 1}:
        prompt = [length] * length
        with cache.lease(prompt) as lease:
            lease.reserve(length + 1)
            lease.commit(length)
        assert cache.match([*prompt, 0]).num_tokens == length // block_tokens * block_tokens
    cache.check_integrity()


def test_errors_form_one_tree() -> None:
    """Every error is a LooseleafError, has a code of its own, and can be imported from the package."""
    classes = [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, Exception)]
    assert all(issubclass(item, LooseleafError) for item in classes)
    assert len({item.code for item in classes}) == len(classes)
    for item in classes:
        assert getattr(looseleaf, item.__name__) is item
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.RequestError, ValueError)
    assert issubclass(errors.LifecycleError, RuntimeError)
