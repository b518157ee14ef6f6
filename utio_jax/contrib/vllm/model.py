# SPDX-License-Identifier: Apache-2.0
"""The model class and the logits processor that vLLM loads; only public seams of vLLM 0.32.

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
    """Keeps which request stands in which row; leaves logits as they are."""

    current: ClassVar[Rows | None] = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows = PromptRows.current = Rows()

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        added = [
            # Without ids (prompts of embeddings) a request runs in full, and so does one that
            # asks for log-probabilities of prompt tokens, which only the last layer has.
            (row, Prompt(length=len(ids or ()), full=params.prompt_logprobs is not None or None))
            for row, params, ids, _ in batch_update.added
        ]
        moved = [
            (source, target, how is MoveDirectionality.SWAP)
            for source, target, how in batch_update.moved
        ]
        self._rows.update(batch_update.removed, added, moved)

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


@dataclasses.dataclass(frozen=True)
class _Split:
    """A batch of which some tokens stop.

    Attributes:
      deep: places of tokens that run all layers, in order.
      stopped: places of the others.
      rows: of the batch that have deep tokens.
      counts: deep tokens of each of these rows.
      seq_lens: tokens of each of these rows up to its last deep one.
    """

    deep: torch.Tensor
    stopped: torch.Tensor
    rows: torch.Tensor
    counts: list[int]
    seq_lens: torch.Tensor


class UtioLlamaForCausalLM(LlamaForCausalLM):
    """A Llama whose prompt tokens stop at a layer, but for the last one of each prompt.

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
        self.settings = read_settings(vllm_config.additional_config.get("utio"), num_layers=layers)
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
            model=Path(vllm_config.model_config.model),
            wanted=(config.hidden_size, *behind),
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
        """Returns which tokens stop; None: none does, or this is a run without requests."""
        if context is None or not isinstance(context.attn_metadata, dict):
            return None
        batch = context.attn_metadata.get(self.names[0])
        if batch is None:
            return None
        places, ends = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        starts = [end - (b - a) for end, a, b in zip(ends, places, places[1:], strict=False)]
        ends = ends[: len(starts)]
        deep_from = self.rows.deep_from(starts, ends, self.settings, self.work)
        if deep_from == starts:
            return None
        total, device = places[-1], batch.seq_lens.device
        goes = torch.zeros(total, dtype=torch.bool)
        rows = []
        for row, (first, start, end) in enumerate(zip(deep_from, starts, ends, strict=True)):
            goes[places[row] + first - start : places[row + 1]] = True
            if end > first:
                rows.append(row)
        return _Split(
            deep=goes.nonzero()[:, 0].to(device),
            stopped=(~goes).nonzero()[:, 0].to(device),
            rows=torch.tensor(rows, dtype=torch.long, device=device),
            counts=[ends[row] - deep_from[row] for row in rows],
            seq_lens=batch.seq_lens[torch.tensor(rows, dtype=torch.long, device=device)],
        )

    def _show(
        self,
        context: ForwardContext,
        stopped: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
    ) -> None:
        """Writes mapped keys and values of tokens that stop into the caches behind the stop."""
        x = states[stopped].float()
        x = (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)).to(states.dtype)
        shown = (x @ self.kernel).view(-1, *self.bias.shape) + self.bias
        keys, values = shown[:, :, 0], shown[:, :, 1]
        rotary = self.model.layers[-1].self_attn.rotary_emb
        flat = keys.reshape(len(stopped), -1)
        # All layers at once, as if they were heads of one.
        keys = rotary(positions[stopped], flat, flat[:, : self.bias.shape[-1]].clone())[0]
        keys = keys.view(values.shape)
        with override_forward_context(self._with(context, context.attn_metadata, stopped)):
            for index, name in enumerate(self.names):
                unified_kv_cache_update(
                    keys[:, index].contiguous(), values[:, index].contiguous(), name
                )

    def _behind(self, context: ForwardContext, split: _Split) -> ForwardContext:
        """Returns the forward context of the tokens that go on: as if no others were scheduled."""
        whole: Any = context.attn_metadata
        batch = whole[self.names[0]]
        attention = self.model.layers[-1].self_attn.attn
        if self._builder is None:
            self._builder = attention.get_attn_backend().get_builder_cls()(
                attention.get_kv_cache_spec(self.vllm_config),
                self.names,
                self.vllm_config,
                split.deep.device,
            )
        starts = torch.tensor([0, *split.counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(split.deep.device),
            query_start_loc_cpu=starts,
            seq_lens=split.seq_lens,
            num_reqs=len(split.counts),
            num_actual_tokens=len(split.deep),
            max_query_len=max(split.counts),
            max_seq_len=int(split.seq_lens.max()),
            block_table_tensor=batch.block_table[split.rows],
            slot_mapping=self._slots(context)[split.deep],
        )
        metadata = self._builder.build(0, common)
        return self._with(context, dict.fromkeys(self.names, metadata), split.deep)

    def _slots(self, context: ForwardContext) -> torch.Tensor:
        slots: Any = context.slot_mapping
        return slots[self.names[0]]

    def _with(self, context: ForwardContext, metadata: Any, places: torch.Tensor) -> ForwardContext:
        """Returns the context of a part of the tokens, in the layers behind the stop."""
        slots = self._slots(context)[places]
        return dataclasses.replace(
            context, attn_metadata=metadata, slot_mapping=dict.fromkeys(self.names, slots)
        )


def _like(array: Any) -> torch.Tensor:
    """Returns a tensor of vLLM's default dtype and device at this time: those of the weights."""
    found = torch.from_numpy(array)
    return found.to(dtype=torch.get_default_dtype(), device=torch.empty(0).device)
