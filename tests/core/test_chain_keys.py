"""Laws of chain keys: they follow the tokens, block by block, and are the same everywhere."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from looseleaf.core.chain_keys import ChainKeys, join_keys, root_key
from looseleaf.core.tokens import pack_tokens


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_block_by_block_or_at_once(block_tokens: int) -> None:
    """The keys of a prompt are those of its blocks one after the other; an incomplete block has none."""
    chain = ChainKeys(4 * block_tokens)
    tokens = np.random.default_rng(1).integers(0, 2**31, 40 * block_tokens + block_tokens - 1, dtype=np.int32)
    data = pack_tokens(tokens)
    at_once = chain.behind(root_key("a"), data)
    key, one_by_one = root_key("a"), []
    for at in range(0, 40 * block_tokens, block_tokens):
        key = int(ChainKeys(4 * block_tokens).behind(key, data[4 * at : 4 * (at + block_tokens)])[0])
        one_by_one.append(key)
    assert at_once.tolist() == one_by_one
    assert len(chain.behind(5, b"")) == 0


def test_every_token_and_its_place_count() -> None:
    """Prompts that differ in one token, in their order or in their namespace share no key from there on."""
    chain = ChainKeys(16)
    tokens = [7] * 16
    keys = chain.behind(root_key(""), pack_tokens(tokens)).tolist()
    for at in range(16):
        for other in (6, 8, 0, 2**31 - 1):
            changed = [*tokens[:at], other, *tokens[at + 1 :]]
            found = chain.behind(root_key(""), pack_tokens(changed)).tolist()
            assert [a == b for a, b in zip(keys, found, strict=True)] == [number < at // 4 for number in range(4)]
    assert not set(keys) & set(chain.behind(root_key("a"), pack_tokens(tokens)).tolist())
    assert len(set(keys)) == 4
    assert len({root_key(""), root_key("a"), join_keys(root_key(""), "a"), join_keys(root_key("a"), "")}) == 4


def test_few_collisions() -> None:
    """200,000 different blocks of small numbers have as many keys, and spread over the low and the high bits."""
    tokens = np.stack(np.meshgrid(np.arange(500), np.arange(400)), axis=-1).reshape(-1, 2).astype(np.int32)
    chain = ChainKeys(8)
    keys = np.concatenate([chain.behind(3, row.tobytes()) for row in tokens[:2000]])
    assert len(np.unique(keys)) == 2000
    assert len(np.unique(chain.behind(3, tokens.tobytes()))) == len(tokens)
    for shift in (0, 48):
        assert len(np.unique((keys.view(np.uint64) >> np.uint64(shift)) & np.uint64(0xFFFF))) > 1900


def test_the_same_in_every_process() -> None:
    """[O81] Keys of three prompts, with and without a namespace, in three processes with other hash seeds."""
    code = (
        "from looseleaf.core.chain_keys import ChainKeys, root_key\n"
        "from looseleaf.core.tokens import pack_tokens\n"
        "for name in ('', 'salt', 'None'):\n"
        "    for n in (1, 2, 3):\n"
        "        print(ChainKeys(16).behind(root_key(name), pack_tokens([n] * 12)).tolist())\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(found) == 1
    lines = found.pop().split("\n")[:-1]
    assert len(lines) == len(set(lines)) == 9
