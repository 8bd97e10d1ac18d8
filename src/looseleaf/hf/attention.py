"""The attention function that unmodified models call, and the registry entry that leads them to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface

from looseleaf.errors import UnsupportedModel
from looseleaf.hf.attention_backend import AttentionBackend, AttentionCall
from looseleaf.hf.step_plan import StepPlan
from looseleaf.tensors import KVMemory, LayerShape

UNKNOWN_TO_BLOCKS = (
    "alibi",
    "attention_bias",
    "block_indices",
    "indices",
    "position_bias",
    "relative_position_bias",
)
"""Arguments with which a model tells its attention to do something else than look back; refused when given.
"""


@dataclass(frozen=True)
class LayerTraits:
    """What a layer told at its first call: its shape and the kind of attention it wants."""

    shape: LayerShape
    window: int | None
    has_softcap: bool
    has_sinks: bool


@dataclass
class PagedAttention:
    """One model's attention over blocks: a callable in the form of transformers' attention functions.

    In a *survey* it notes each layer's shape and gives zeros. In a *step* it writes the layer's K and V
    into the memory, all rows of the step, and then attends. Outside both it refuses to be called. Layers
    are known by their module, numbered in the order of the survey.
    """

    architecture: str
    backend: AttentionBackend
    memory: KVMemory | None = None
    traits: list[LayerTraits] = field(default_factory=list)
    num_calls: int = 0
    _layers: dict[int, int] = field(default_factory=dict)
    _plan: StepPlan | None = None
    _surveying: bool = False

    @contextmanager
    def survey(self) -> Iterator[None]:
        """Within it, forward passes find out what layers there are; their output is meaningless."""
        self._surveying = True
        try:
            yield
        finally:
            self._surveying = False

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Within it, one forward pass computes `plan`.

        Raises:
            UnsupportedModel: the pass called some layer not at all or twice.
        """
        if self.memory is None:
            raise UnsupportedModel(self.architecture, "no KV memory was given before the first step")
        self._plan, self.num_calls = plan, 0
        try:
            yield
            if self.num_calls != len(self._layers):
                raise UnsupportedModel(
                    self.architecture,
                    f"{self.num_calls} attention calls in one pass over {len(self._layers)} layers",
                )
        finally:
            self._plan = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **arguments: object,
    ) -> tuple[torch.Tensor, None]:
        """Attend: `query` [1, heads, T, dim], `key`, `value` [1, kv_heads, T, dim]; output [1, T, heads,
        value_dim].

        Raises:
            UnsupportedModel: the layer wants something that is not known here (a mask, a position bias, …).
        """
        call = self._understand(module, query, key, value, attention_mask, arguments)
        if self._surveying:
            self._note(call)
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
        if self._plan is None or self.memory is None:
            raise UnsupportedModel(self.architecture, "its attention was called outside a step of the runner")
        if call.layer != self.num_calls:
            raise UnsupportedModel(
                self.architecture,
                f"call {self.num_calls} of a pass came from layer {call.layer}, not in order or twice",
            )
        self.num_calls += 1
        self.memory.write(call.layer, self._plan.slots, call.keys, call.values)
        return self.backend.attend(call, self._plan, self.memory)[None], None

    def _understand(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        arguments: Mapping[str, object],
    ) -> AttentionCall:
        strange = [name for name in UNKNOWN_TO_BLOCKS if arguments.get(name) is not None]
        if attention_mask is not None:
            strange.append("an attention mask of its own")
        if strange:
            raise UnsupportedModel(
                self.architecture, f"its attention wants {', '.join(strange)}, which blocks know nothing of"
            )
        if query.dim() != 4 or query.shape[0] != 1 or key.dim() != 4 or key.shape[2] != query.shape[2]:
            raise UnsupportedModel(
                self.architecture,
                f"its attention gets queries {tuple(query.shape)} and keys {tuple(key.shape)}; "
                "expected [1, heads, tokens, dim] with as many keys as queries",
            )
        sinks = arguments.get("s_aux", arguments.get("sinks"))
        return AttentionCall(
            layer=self._layer_of(module),
            query=query[0].transpose(0, 1),
            keys=key[0].transpose(0, 1),
            values=value[0].transpose(0, 1),
            scaling=_number(arguments.get("scaling")),
            window=None if (window := _number(arguments.get("sliding_window"))) is None else int(window),
            softcap=_number(arguments.get("softcap")),
            sinks=sinks if isinstance(sinks, torch.Tensor) else None,
        )

    def _layer_of(self, module: torch.nn.Module) -> int:
        layer = self._layers.get(id(module))
        if layer is not None and not self._surveying:
            return layer
        if not self._surveying:
            raise UnsupportedModel(
                self.architecture, f"{type(module).__name__} did not attend in the survey but does now"
            )
        if layer is not None:
            raise UnsupportedModel(
                self.architecture,
                f"layer {layer} ({type(module).__name__}) attends several times in one pass",
            )
        self._layers[id(module)] = len(self._layers)
        return self._layers[id(module)]

    def _note(self, call: AttentionCall) -> None:
        shape = LayerShape(call.keys.shape[1], call.keys.shape[2], call.values.shape[2])
        self.traits.append(LayerTraits(shape, call.window, call.softcap is not None, call.sinks is not None))


def _number(argument: object) -> float | None:
    """A plain number of an argument that may be a tensor of one entry, or None."""
    if argument is None:
        return None
    if isinstance(argument, torch.Tensor):
        return float(argument.item())
    if isinstance(argument, (int, float)):
        return float(argument)
    raise TypeError(f"expected a number, got {type(argument).__name__}")


def register_attention(name: str, attention: PagedAttention) -> None:
    """Let models whose attention implementation is `name` call `attention`. Process-wide, as transformers
    keeps it.
    """
    AttentionInterface.register(name, attention)


def unregister_attention(name: str) -> None:
    """Take the entry away again, so that the memory behind it can be freed. Unknown names are ignored.

    There is no public call for it: `register` writes into a class-wide mapping, and deleting through an
    instance reaches only that instance's own mapping.
    """
    AttentionInterface._global_mapping.pop(name, None)
