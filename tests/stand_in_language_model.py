"""A causal language model as transformers writes one, for tests without that library.

Loaded as a module of transformers (language_model_tools.py), by whose name its classes are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it


@dataclass
class Config:
    hidden_size: int = 32
    num_attention_heads: int = 4
    num_hidden_layers: int = 2
    vocab_size: int = 50
    bias: bool = False
    tied: bool = False
    cap: float | None = None
    scale: float = 1.0
    # What no cross entropy alone is computed from.
    penalty: float = 0.0


class Output(dict):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        return self[name]


def causal_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_kwargs: Any,
) -> Tensor:
    logits = logits.float()
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    how = "mean" if num_items_in_batch is None else "sum"
    rows, targets = logits.view(-1, vocab_size), shift_labels.view(-1)
    loss = F.cross_entropy(rows, targets, ignore_index=ignore_index, reduction=how)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class StandInForCausalLM(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        sizes = [(config.hidden_size, config.hidden_size)] * config.num_hidden_layers
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.bias)
        if config.tied:
            self.lm_head.weight = self.embed.weight
        self.loss_function = causal_loss

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> Any:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logits = self.lm_head(hidden[:, slice(-logits_to_keep, None)]) * self.config.scale
        if self.config.cap is not None:
            logits = torch.tanh(logits / self.config.cap) * self.config.cap
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
            if self.config.penalty:
                loss = loss + self.config.penalty * logits.logsumexp(-1).square().mean()
        return Output(loss=loss, logits=logits) if return_dict else (loss, logits)


class StandInEncoderDecoder(nn.Module):
    """A model that has another one within: one of the two computes the loss."""

    main_input_name = "pixels"

    def __init__(self, decoder: Any, passes_labels: bool = False) -> None:
        super().__init__()
        self.config = decoder.config
        self.encoder = nn.Linear(12, decoder.config.vocab_size)
        self.decoder = decoder
        self.passes_labels = passes_labels
        self.loss_function = causal_loss

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder.get_output_embeddings()

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Any:
        ids = self.encoder(pixels).argmax(-1)
        if self.passes_labels:
            return self.decoder(input_ids=ids, labels=labels)
        logits = self.decoder(input_ids=ids)["logits"]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size)
        return Output(loss=loss, logits=logits)
