"""Serving with continuous batching: requests come and go, their keys and values lie in pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.programs._report import Recorder, sized
from benchmarks.programs.recorded._blocks import Decoder

PAGE = 16  # tokens


@dataclass
class Request:
    tokens: list[int]
    wanted: int  # tokens, prompt included
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # tokens whose keys and values are in the pages


class Server:
    """Gives requests their pages, and a token to each of a batch: new ones bring their prompts."""

    def __init__(self, model: Decoder, pages: int, device: torch.device) -> None:
        self.blocks: list[Any] = list(model.blocks)
        attention = self.blocks[0].attention
        width = attention.out.in_features // attention.heads
        shape = (len(self.blocks), 2, pages, PAGE, attention.heads, width)
        self.pool = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.free = list(range(pages))
        self.model, self.device = model, device

    def admits(self, request: Request) -> bool:
        """Give a request the pages of its longest text, if there are as many."""
        needed = -(-request.wanted // PAGE)
        if needed > len(self.free):
            return False
        request.pages = [self.free.pop() for _ in range(needed)]
        return True

    def step(self, requests: list[Request]) -> Tensor:
        """Add a token to each request; return the new tokens."""
        new = [request.tokens[request.cached :] for request in requests]
        width = max(map(len, new))
        tokens = torch.tensor([each + [0] * (width - len(each)) for each in new])
        counts = torch.tensor([len(each) for each in new])
        start = torch.tensor([request.cached for request in requests])
        used = max(-(-len(request.tokens) // PAGE) for request in requests)
        table = torch.tensor([(request.pages + [0] * used)[:used] for request in requests])
        last = self._forward(*(each.to(self.device) for each in (tokens, start, counts, table)))
        chosen = last.argmax(-1)
        for request, token in zip(requests, chosen.tolist(), strict=True):
            request.cached = len(request.tokens)
            request.tokens.append(token)
        return chosen

    def _forward(self, tokens: Tensor, start: Tensor, counts: Tensor, table: Tensor) -> Tensor:
        offsets = torch.arange(tokens.shape[1], device=self.device)
        places = start[:, None] + offsets
        is_real = offsets < counts[:, None]
        page = table.gather(1, (places // PAGE).clamp(max=table.shape[1] - 1))
        keys_at = torch.arange(table.shape[1] * PAGE, device=self.device)
        mask = (keys_at <= places[..., None])[:, None]
        x = self.model.tokens(tokens) + self.model.positions(places)
        for layer, block in enumerate(self.blocks):
            inside = block.norms[0](x)
            query, key, value = (
                block.attention.qkv(inside).unflatten(-1, (3, block.attention.heads, -1)).unbind(2)
            )
            for kind, each in enumerate((key, value)):
                self.pool[layer, kind][page[is_real], places[is_real] % PAGE] = each[is_real]
            key, value = (self.pool[layer, kind][table].flatten(1, 2) for kind in (0, 1))
            query, key, value = (each.transpose(1, 2) for each in (query, key, value))
            y = scaled_dot_product_attention(query, key, value, attn_mask=mask)
            x = x + block.attention.out(y.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.norms[1](x))
        ends = x[torch.arange(len(x), device=self.device), counts - 1]
        logits: Tensor = self.model.head(self.model.norm(ends))
        return logits


def main() -> None:
    recorder = Recorder(warmup=0, timed=110, deterministic=False)
    vocabulary, width, layers, longest = sized((32_000, 2048, 8, 2048), (100, 32, 2, 64))
    model = Decoder(vocabulary, width, layers, longest)
    device = recorder.begin()
    model = model.to(device, torch.bfloat16).eval()
    server, active = Server(model, sized(8192, 64), device), list[Request]()
    for _ in range(recorder.steps):
        for _ in range(recorder.random.randint(0, 4)):
            prompt = recorder.random.randint(4, longest // 2)
            request = Request(
                torch.randint(0, vocabulary, (prompt,)).tolist(),
                prompt + recorder.random.randint(2, longest // 16),
            )
            if server.admits(request):
                active.append(request)
        if not active:
            active.append(Request([1, 2, 3], 8))
            assert server.admits(active[0])
        with recorder.step(), torch.inference_mode():
            # Prompts and single tokens are of too different lengths for one batch.
            prompts = [each for each in active if not each.cached]
            others = [each for each in active if each.cached]
            chosen = [server.step(each) for each in (prompts, others) if each]
        recorder.loss(torch.cat(chosen))
        for request in [each for each in active if len(each.tokens) >= each.wanted]:
            server.free += request.pages
            active.remove(request)
    recorder.finish()


if __name__ == "__main__":
    main()
