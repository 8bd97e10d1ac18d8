"""Namespaces in the engine: adapters, a change of weights, layers that several share."""

from __future__ import annotations

import random

import pytest

from looseleaf.core.namespaces import NamespaceLayer, fingerprint, namespace_of
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.plan import StepPlan
from looseleaf.engine.request import FinishReason, GenerationRequest
from looseleaf.engine.sampling import SamplingParams
from looseleaf.errors import RequestError
from looseleaf.testing.engine_kit import EngineKit
from looseleaf.testing.engine_kit import sample_prompt as prompt_of
from looseleaf.testing.fake_model import FakeModel

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def adapters() -> list[str]:
    """The base model and two adapters, by content."""
    return ["", *(namespace_of(adapter=fingerprint([weights])) for weights in (b"one", b"two"))]


def test_adapters_do_not_share():
    """[T133] The same prompt under the base model and two adapters: none finds anything of another's, each its own."""
    kit = EngineKit(num_blocks=64)
    for turn in (0, 1):
        for number, namespace in enumerate(adapters()):
            request = kit.add(f"r{turn}-{number}", prompt_of(17), 4, namespace=namespace)
            kit.run()
            assert kit.last(request.request_id).usage.num_cached_tokens == (16 if turn else 0)
            assert kit.tokens(request.request_id) == kit.expected(request)
    assert kit.runner.mismatches == []


def test_adapters_in_rapid_alternation():
    """[T142] Two adapters alternate 200 times on one prefix, in a pool for one and a half of them, several at a time:
    the stamps of every block that is read are those of the request's own adapter."""
    rng = random.Random(5)
    kit = EngineKit(num_blocks=24, config=EngineConfig(max_step_tokens=16))
    requests = []
    for number in range(200):
        requests.append(
            kit.add(f"r{number}", prompt_of(60)[: rng.randint(50, 60)], 3, namespace=adapters()[1 + number % 2])
        )
        if number % 3 == 2:
            kit.run()
    kit.run()
    assert kit.runner.mismatches == []
    for request in requests:
        assert kit.tokens(request.request_id) == kit.expected(request)


def test_a_name_is_not_the_weights():
    """[T136] An adapter that is loaded anew under its old name is another namespace by its content, and finds nothing
    of the old one; the old content loaded again finds its own."""
    names = [namespace_of(adapter=fingerprint([weights])) for weights in (b"v1", b"v2", b"v1")]
    kit = EngineKit(num_blocks=64)
    found = []
    for number, namespace in enumerate(names):
        kit.add(f"r{number}", prompt_of(17), 4, namespace=namespace)
        kit.run()
        found.append(kit.last(f"r{number}").usage.num_cached_tokens)
    assert found == [0, 0, 16]


def test_new_weights_find_nothing_old():
    """[T137] After a change of weights and a clear, a warm prompt is computed anew and gives what the new weights give;
    a request that runs across it finishes, and none of its blocks is ever found."""
    kit = EngineKit(num_blocks=64)
    kit.add("warm", prompt_of(17), 4)
    kit.run()
    kit.add("across", prompt_of(30, seed=3), 12)
    kit.step(4)
    kit.cache.clear(include_pins=True)
    kit.runner.model = FakeModel(alphabet=tuple(range(60, 90)))
    kit.run()
    assert kit.reason("across") is FinishReason.LENGTH
    for name, prompt in (("again", prompt_of(17)), ("after", [*prompt_of(30, seed=3), *kit.tokens("across")])):
        request = kit.add(name, prompt, 4)
        kit.run()
        assert kit.last(name).usage.num_cached_tokens == 0
        assert kit.tokens(name) == kit.expected(request)


def layered(name: str, prompt: list[int], *layers: tuple[str, int], namespace: str = "") -> GenerationRequest:
    made = [NamespaceLayer(owner, num_tokens) for owner, num_tokens in layers]
    return GenerationRequest(name, prompt, GREEDY, namespace or name, layers=made)


@pytest.mark.parametrize("together", [True, False])
def test_a_layer_is_shared_as_far_as_it_goes(together):
    """Requests of several tenants share the layers that they have in common, in flight and cached, and nothing behind;
    each is answered as if it were alone."""
    kit = EngineKit(num_blocks=64, config=EngineConfig(max_step_tokens=8))
    prompt = prompt_of(41)
    asked = [
        layered("a", prompt, ("org", 16), ("ladders", 28)),
        layered("b", prompt, ("org", 16), ("ladders", 28)),
        layered("c", prompt, ("org", 16), ("books", 28)),
        layered("d", prompt, ("org", 14)),
        layered("e", prompt),
        layered("f", prompt, ("org", 16), ("ladders", 28), namespace="a"),
    ]
    for request in asked:
        kit.engine.add(request)
        if not together:
            kit.run()
    kit.run()
    found = {request.request_id: kit.last(request.request_id).usage.num_cached_tokens for request in asked}
    assert found == {"a": 0, "b": 28, "c": 16, "d": 12, "e": 0, "f": 40}
    expected = kit.runner.expected_tokens(prompt, 4, GREEDY)
    assert all(kit.tokens(name) == expected for name in found)
    assert kit.runner.num_computed_tokens == 6 * 41 - sum(found.values()) + 6 * 3
    kit.cache.check_integrity()


def test_a_layered_request_that_is_preempted():
    """A preempted request comes back with its layers: it finds its own blocks in them again, and others the layer."""
    kit = EngineKit(num_blocks=16)
    kit.add("first", prompt_of(9, seed=1), 30)
    kit.engine.add(layered("a", prompt_of(20), ("org", 16)))
    kit.step(2)
    plan = StepPlan()
    assert kit.engine._scheduler._preempt(plan, "decode").request_id == "a"
    kit.run()
    kit.engine.add(layered("b", prompt_of(20), ("org", 16)))
    kit.run()
    assert [kit.last(name).usage.num_cached_tokens for name in "ab"] == [0, 16]
    assert kit.tokens("a") == kit.tokens("b") == kit.runner.expected_tokens(prompt_of(20), 4, GREEDY)
    assert kit.runner.num_computed_tokens < 9 + 30 + 20 + 4 + 10 + 4 + 8


@pytest.mark.parametrize("layers", [(("a", 9), ("b", 9)), (("a", 30),), (("a", 8), ("b", 12), ("a", 16)), (("a", 0),)])
def test_layers_that_do_not_fit_are_refused_at_once(layers):
    """Layers that do not fit together or to the prompt are refused before the request is queued."""
    with pytest.raises(RequestError):
        layered("r", prompt_of(20), *layers)


def test_samples_have_the_same_layers():
    """Samples with other layers or sessions are no samples of one prompt."""
    kit = EngineKit()
    for other in (layered("s", prompt_of(9), ("org", 8), namespace="r"), layered("s", prompt_of(9), namespace="r")):
        with pytest.raises(RequestError, match="layers"):
            kit.engine.add_samples([layered("r", prompt_of(9), ("org", 4)), other])
    assert not kit.engine.has_work
