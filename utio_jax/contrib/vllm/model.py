# SPDX-License-Identifier: Apache-2.0
"""The model class and the logits processor that vLLM loads; uses public APIs of vLLM 0.32.

Which rows of a batch read a prompt, and how long it is, a model class is not given; a logits
processor is, before each forward pass. So one that changes no logits keeps the account.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import torch
from utio_jax_vllm.rows import Prompt, Rows, Work, read_maps, read_settings
from vllm.config import VllmConfig
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
)
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality


class PromptRows(LogitsProcessor):
    """Logits processor that tracks the request of each row; logits stay unchanged."""

    current: ClassVar[Rows | None] = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows = PromptRows.current = Rows()

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        # Without ids (prompts of embeddings) a request runs in full, and so does one that asks for
        # log-probabilities of prompt tokens, which only the last layer has.
        self._rows.update(
            batch_update.removed,
            [
                (
                    row,
                    Prompt(length=len(ids or ()), full=params.prompt_logprobs is not None or None),
                )
                for row, params, ids, _ in batch_update.added
            ],
            [(a, b, how is MoveDirectionality.SWAP) for a, b, how in batch_update.moved],
        )

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


@dataclasses.dataclass(frozen=True)
class _Split:
    """A batch in which some tokens exit early.

    Attributes:
      deep: places of tokens that run all layers, in order.
      stopped: places of the others.
      rows: of the batch that have deep tokens.
      counts: deep tokens of each of these rows, the last that are scheduled of it.
    """

    deep: torch.Tensor
    stopped: torch.Tensor
    rows: torch.Tensor
    counts: list[int]


class UtioLlamaForCausalLM(LlamaForCausalLM):
    """A Llama whose prompt tokens exit at a layer, except the last one of each prompt.

    Batches without such tokens (decoding, short prompts, prompt log-probabilities) go through
    vLLM's own forward pass, compiled where vLLM compiles it. The others call the same layers,
    eagerly: all tokens up to the stop, then those that go on, in a forward context of their own.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        parallel, config = vllm_config.parallel_config, self.config
        if parallel.world_size > 1 or vllm_config.speculative_config or vllm_config.lora_config:
            raise ValueError(
                "Wanted one device, no speculative decoding and no LoRA with prompts that stop. "
                "Got another setting. Leave it, or the --hf-overrides of this plugin, out."
            )
        if PromptRows.current is None:
            raise ValueError(
                f"Wanted --logits-processors {PromptRows.__module__}:PromptRows and the model "
                "runner V1 (VLLM_USE_V2_MODEL_RUNNER=0), to know which rows read prompts. Got "
                "none. Add the flag."
            )
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        attention = self.model.layers[0].self_attn
        size, kv_heads = attention.head_dim, attention.num_kv_heads
        given = vllm_config.additional_config.get("utio")
        self.settings, stored = read_settings(given, num_layers=layers)
        self.work = Work(
            layers=layers,
            stop=self.settings.stop,
            dim=config.hidden_size,
            query=heads * size,
            kv=kv_heads * size,
            mlp=config.intermediate_size,
        )
        behind = (layers - self.settings.stop, 2, kv_heads, size)
        kernel, bias = read_maps(
            self.settings,
            stored,
            model=Path(vllm_config.model_config.model),
            shape=(config.hidden_size, *behind),
        )
        self.kernel = torch.nn.Buffer(_like(kernel.reshape(len(kernel), -1)), persistent=False)
        self.bias = torch.nn.Buffer(_like(bias), persistent=False)
        self.rows, self.vllm_config, self._builder = PromptRows.current, vllm_config, None
        self.names = [
            layer.self_attn.attn.layer_name for layer in self.model.layers[self.settings.stop :]
        ]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        context = get_forward_context() if is_forward_context_available() else None
        split = self._split(context)
        if split is None or context is None:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        hidden, residual = inputs_embeds, None
        if hidden is None:
            hidden = self.embed_input_ids(input_ids)
        for layer in self.model.layers[: self.settings.stop]:
            hidden, residual = layer(positions, hidden, residual)
        self._show(context, split.stopped, positions, hidden + residual)
        out = torch.zeros_like(hidden)  # Of tokens that stop nothing is sampled.
        if split.counts:
            places, hidden, residual = (x[split.deep] for x in (positions, hidden, residual))
            with override_forward_context(self._behind(context, split)):
                for layer in self.model.layers[self.settings.stop :]:
                    hidden, residual = layer(places, hidden, residual)
            out[split.deep] = self.model.norm(hidden, residual)[0]
        return out

    def _split(self, context: ForwardContext | None) -> _Split | None:
        """Returns which tokens exit, or None if none does or no request is scheduled."""
        if context is None or not isinstance(context.attn_metadata, dict):
            return None
        batch: Any = context.attn_metadata[self.names[0]]
        places, ends = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        spans = [(end - (b - a), end) for end, a, b in zip(ends, places, places[1:], strict=False)]
        deep_from = self.rows.deep_from(spans, self.settings, self.work)
        if deep_from == [start for start, _ in spans]:
            return None
        goes = torch.zeros(places[-1], dtype=torch.bool)
        for first, (start, _), place, behind in zip(
            deep_from, spans, places, places[1:], strict=False
        ):
            goes[place + first - start : behind] = True
        device = batch.seq_lens.device
        counts = [end - first for first, (_, end) in zip(deep_from, spans, strict=True)]
        return _Split(
            deep=goes.nonzero()[:, 0].to(device),
            stopped=(~goes).nonzero()[:, 0].to(device),
            rows=torch.tensor([row for row, count in enumerate(counts) if count], device=device),
            counts=[count for count in counts if count],
        )

    def _show(
        self,
        context: ForwardContext,
        stopped: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
    ) -> None:
        """Writes mapped K/V of tokens that exit into the caches of the layers after the stop."""
        x = states[stopped].float()
        x = (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)).to(states.dtype)
        shown = (x @ self.kernel).view(-1, *self.bias.shape) + self.bias
        keys, values = shown[:, :, 0], shown[:, :, 1]
        rotary = self.model.layers[-1].self_attn.rotary_emb
        flat = keys.reshape(len(stopped), -1)
        # All layers at once, as if they were heads of one.
        keys = rotary(positions[stopped], flat, flat[:, : self.bias.shape[-1]].clone())[0]
        keys = keys.view(values.shape)
        slots = self._part(context, stopped)
        with override_forward_context(dataclasses.replace(context, slot_mapping=slots)):
            for index, name in enumerate(self.names):
                unified_kv_cache_update(
                    keys[:, index].contiguous(), values[:, index].contiguous(), name
                )

    def _behind(self, context: ForwardContext, split: _Split) -> ForwardContext:
        """Returns the forward context of the deeper tokens, as if no others were scheduled."""
        whole: Any = context.attn_metadata
        batch, slots = whole[self.names[0]], self._part(context, split.deep)
        attention = self.model.layers[-1].self_attn.attn
        if self._builder is None:
            self._builder = attention.get_attn_backend().get_builder_cls()(
                attention.get_kv_cache_spec(self.vllm_config),
                self.names,
                self.vllm_config,
                split.deep.device,
            )
        starts = torch.tensor([0, *split.counts]).cumsum(0, dtype=torch.int32)
        lengths = batch.seq_lens[split.rows]
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(split.deep.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=len(split.counts),
            num_actual_tokens=len(split.deep),
            max_query_len=max(split.counts),
            max_seq_len=int(lengths.max()),
            block_table_tensor=batch.block_table[split.rows],
            slot_mapping=slots[self.names[0]],
        )
        metadata = dict.fromkeys(self.names, self._builder.build(0, common))
        return dataclasses.replace(context, attn_metadata=metadata, slot_mapping=slots)

    def _part(self, context: ForwardContext, places: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns slots of a part of the tokens, by layer after the stop."""
        slots: Any = context.slot_mapping
        return dict.fromkeys(self.names, slots[self.names[0]][places])


def _like(array: Any) -> torch.Tensor:
    """Returns a tensor of vLLM's default dtype and device at this time: those of the weights."""
    tensor = torch.from_numpy(array)
    return tensor.to(dtype=torch.get_default_dtype(), device=torch.empty(0).device)
