"""The attention function that unmodified models call in place of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from transformers import PretrainedConfig, PreTrainedModel

from looseleaf.core.config import LayerGroup
from looseleaf.errors import UnsupportedModel
from looseleaf.hf.attention_backend import AttentionBackend, AttentionCall
from looseleaf.hf.sizing import history_of
from looseleaf.hf.step_plan import StepPlan
from looseleaf.tensors import KVMemory, LayerShape

POSITION_BIASES = ("alibi", "attention_bias", "position_bias", "relative_position_bias")
UNKNOWN_TO_BLOCKS = (*POSITION_BIASES, "attention_mask", "block_indices", "indices")
"""Arguments with which a model tells its attention to do something else than look back; refused when given."""

SURVEY_TOKENS = 4
"""Tokens of the pass that finds out what layers a model has."""


@dataclass(frozen=True)
class LayerTraits:
    """What a layer told in the survey: its shape, the history it looks back on, the window it asked for by argument."""

    shape: LayerShape
    history: LayerGroup
    window: int | None
    has_sinks: bool


@dataclass
class PagedAttention:
    """One model's attention over blocks: a callable in the form of transformers' attention functions.

    In the *survey* it notes each layer's traits and gives zeros. In a *step* it writes the layer's K and V into the
    memory, all rows of the step, and then attends. Outside both it refuses to be called. Layers are known by their
    module, numbered in the order of the survey.
    """

    architecture: str
    backend: AttentionBackend
    traits: list[LayerTraits] = field(default_factory=list)
    _layers: dict[int, int] = field(default_factory=dict)
    _surveying: bool = False
    _config: PretrainedConfig | None = None
    _step: tuple[StepPlan, KVMemory] | None = None
    _num_calls: int = 0

    @torch.inference_mode()
    def survey(self, model: PreTrainedModel) -> None:
        """Run a few tokens through `model` to see which layers call, with what.

        Raises:
            UnsupportedModel: no layer calls, one calls twice, or the pass fails.
        """
        tokens = torch.arange(SURVEY_TOKENS, device=model.device)[None]
        self._surveying, self._config = True, model.config.get_text_config(decoder=True)
        try:
            model(input_ids=tokens, position_ids=tokens, use_cache=False)
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
            raise self._refusal(f"a packed pass fails with {type(error).__name__}: {error}") from error
        finally:
            self._surveying = False
        if not self.traits:
            raise self._refusal("no layer calls the registered attention function")

    @contextmanager
    def step(self, plan: StepPlan, memory: KVMemory) -> Iterator[None]:
        """Within it, one forward pass computes `plan` on `memory`.

        Raises:
            UnsupportedModel: the pass called some layer not at all or twice.
        """
        self._step, self._num_calls = (plan, memory), 0
        try:
            yield
            if self._num_calls != len(self._layers):
                raise self._refusal(f"{self._num_calls} attention calls in one pass over {len(self._layers)} layers")
        finally:
            self._step = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **arguments: object,
    ) -> tuple[torch.Tensor, None]:
        """Attend: `query` [1, heads, T, dim], `key`, `value` [1, kv_heads, T, dim]; output [1, T, heads, value_dim].

        Raises:
            UnsupportedModel: the layer wants something that is not known here (a mask, a position bias, …).
        """
        self._refuse_the_unknown(query, key, {"attention_mask": attention_mask, **arguments})
        sinks = arguments.get("s_aux", arguments.get("sinks"))
        window = None if (asked := _number(arguments.get("sliding_window"))) is None else int(asked)
        call = AttentionCall(
            layer=self._layer_of(module),
            query=query[0].transpose(0, 1),
            keys=key[0].transpose(0, 1),
            values=value[0].transpose(0, 1),
            scaling=_number(arguments.get("scaling")),
            softcap=_number(arguments.get("softcap")),
            sinks=sinks if isinstance(sinks, torch.Tensor) else None,
        )
        if self._surveying:
            shape = LayerShape(call.keys.shape[1], call.keys.shape[2], call.values.shape[2])
            history = history_of(self._config, getattr(module, "layer_idx", None), window)
            self.traits.append(LayerTraits(shape, history, window, call.sinks is not None))
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
        if self._step is None:
            raise self._refusal("its attention was called outside a step of the runner")
        if call.layer != self._num_calls:
            raise self._refusal(f"call {self._num_calls} of a pass came from layer {call.layer}, not in order or twice")
        if window != (surveyed := self.traits[call.layer].window):
            raise self._refusal(f"layer {call.layer} asks for a window of {window} tokens; in the survey: {surveyed}")
        self._num_calls += 1
        plan, memory = self._step
        memory.write(call.layer, plan.for_layer(call.layer).slots, call.keys, call.values)
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            call = replace(call, query=_retuned(module, call.query, plan.positions))
        return self.backend.attend(call, plan, memory)[None], None

    def _refuse_the_unknown(self, query: torch.Tensor, key: torch.Tensor, arguments: Mapping[str, object]) -> None:
        strange = [name for name in UNKNOWN_TO_BLOCKS if arguments.get(name) is not None]
        if strange:
            raise self._refusal(f"its attention wants {', '.join(strange)}, which blocks know nothing of")
        if query.dim() != 4 or query.shape[0] != 1 or key.dim() != 4 or key.shape[2] != query.shape[2]:
            raise self._refusal(
                f"its attention gets queries {tuple(query.shape)} and keys {tuple(key.shape)}; "
                "expected [1, heads, tokens, dim] with as many keys as queries"
            )

    def _layer_of(self, module: torch.nn.Module) -> int:
        layer = self._layers.get(id(module))
        if self._surveying and layer is not None:
            raise self._refusal(f"layer {layer} ({type(module).__name__}) attends several times in one pass")
        if not self._surveying and layer is None:
            raise self._refusal(f"{type(module).__name__} did not attend in the survey but does now")
        return self._layers.setdefault(id(module), len(self._layers))

    def _refusal(self, why: str) -> UnsupportedModel:
        return UnsupportedModel(self.architecture, why)


def _retuned(module: torch.nn.Module, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`query` [T, heads, dim] scaled for its own `positions` [T].

    Llama 4 scales the queries of layers without rotary positions by how far along they are, and takes for that the row
    in the pass. Rows of a packed pass are no positions.
    """

    floor_scale, attn_scale = _number(module.floor_scale) or 1.0, _number(module.attn_scale) or 0.0

    def scales(at: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.floor((at.float() + 1.0) / floor_scale)) * attn_scale + 1.0

    ratio = scales(positions) / scales(torch.arange(len(positions), device=positions.device))
    return (query * ratio[:, None, None]).to(query.dtype)


def _number(argument: object) -> float | None:
    """A plain number of an argument that may be a tensor of one entry, or None."""
    if isinstance(argument, torch.Tensor):
        return float(argument.item())
    if argument is None or isinstance(argument, (int, float)):
        return argument
    raise TypeError(f"expected a number, got {type(argument).__name__}")
