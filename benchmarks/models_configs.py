"""Configurations of transformers' language models, for the models that benchmarks train.

A library is imported by the function that needs it. What is not said here is the library's default.
"""

from __future__ import annotations

from typing import Any

# Hidden, layers, feed-forward, heads, heads of keys and values.
Sizes = tuple[int, int, int, int, int]


def llama_config(vocabulary: int, sizes: Sizes, kind: str = "LlamaConfig", **options: Any) -> Any:
    """Return the configuration of a Llama, or of what has its layers' names."""
    import transformers

    hidden, layers, inner, heads, key_heads = sizes
    return getattr(transformers, kind)(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        use_cache=False,
        attn_implementation="sdpa",
        **options,
    )


def gpt2_config(vocabulary: int, hidden: int, layers: int, heads: int) -> Any:
    """Return the configuration of a GPT-2 for texts of up to 1024 tokens, with its dropouts."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=vocabulary,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        n_positions=1024,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
