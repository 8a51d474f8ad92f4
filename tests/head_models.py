"""Small models of transformers with a head and a loss, of each kind that is known, and calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="4.57")

CLASSES, ROWS, TOKENS, WIDTH = 301, 3, 64, 16
Call = dict[str, Any]
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TWO_SIDES = {
    "vocab_size": CLASSES, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, "decoder_start_token_id": 1, **IDS,
}  # fmt: skip
TEXTS = {**TWO_SIDES, "max_position_embeddings": 128}
T5 = {
    "vocab_size": CLASSES, "d_model": WIDTH, "d_kv": 8, "d_ff": 16, "num_layers": 1,
    "num_heads": 2, "decoder_start_token_id": 1, **IDS,
}  # fmt: skip
LAYER = {
    "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16,
}  # fmt: skip
BERT = {**LAYER, "vocab_size": CLASSES, "max_position_embeddings": 128, "pad_token_id": 0}
SIGHT = {**LAYER, "image_size": 32, "patch_size": 16, "projection_dim": 16}
SOUND = {
    **LAYER, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
}  # fmt: skip
OPT = {
    **LAYER, **IDS, "model_type": "opt", "vocab_size": CLASSES, "word_embed_proj_dim": WIDTH,
    "ffn_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
QWEN2 = {**LAYER, "model_type": "qwen2", "vocab_size": CLASSES, "num_key_value_heads": 2}
DECODER = {
    **LAYER, **IDS, "vocab_size": CLASSES, "num_hidden_layers": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What transformers logs from now on; a file names it in `__all__`."""
    logging = transformers.utils.logging
    logging.warning_once.cache_clear()
    messages, handler = list[str](), logging.logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.get_logger("transformers").addHandler(handler)
    yield messages
    logging.get_logger("transformers").removeHandler(handler)


def without_dropout(config: Any) -> Any:
    for name, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            without_dropout(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return config


def model_of(name: str, **options: Any) -> Any:
    prefix = name.partition("For")[0].removesuffix("MTModel").removesuffix("WithLMHeadModel")
    config = getattr(transformers, f"{prefix}Config")(**copy.deepcopy(options))
    return getattr(transformers, name)(without_dropout(config))


def joined(name: str, encoder: Any, decoder: Any) -> Any:
    make = getattr(transformers, f"{name}Config").from_encoder_decoder_configs
    config = make(without_dropout(encoder), without_dropout(decoder))
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return getattr(transformers, f"{name}Model")(config=config)


def causal_model(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: model_of(f"{name}ForCausalLM", **DECODER, **options)


def whisper(**options: Any) -> Any:
    return model_of(
        "WhisperForConditionalGeneration", **TWO_SIDES, num_mel_bins=8, max_source_positions=10,
        max_target_positions=128, begin_suppress_tokens=None, suppress_tokens=None, **options
    )  # fmt: skip


def captioner() -> Any:
    sight = {name: size for name, size in SIGHT.items() if name != "projection_dim"}
    text = transformers.GPT2Config(
        vocab_size=CLASSES, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=128, bos_token_id=1,
        eos_token_id=2
    )  # fmt: skip
    return joined("VisionEncoderDecoder", transformers.ViTConfig(**sight), text)


def blip2(text: dict[str, Any]) -> Any:
    queries = {**BERT, "vocab_size": 50, "encoder_hidden_size": WIDTH}
    return model_of(
        "Blip2ForConditionalGeneration", vision_config=SIGHT, qformer_config=queries,
        text_config=text, num_query_tokens=4, image_token_index=5
    )  # fmt: skip


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def ids(tokens: int = TOKENS, seed: int = 1) -> Tensor:
    return torch.randint(6, CLASSES, (ROWS, tokens), generator=torch.Generator().manual_seed(seed))


def labels() -> Tensor:
    found = ids(seed=2)
    found[0, :5] = -100
    return found


def causal() -> Call:
    return {"input_ids": ids(), "labels": labels()}


def of_text() -> Call:
    return {"input_ids": ids(20), "labels": labels()}


def heard() -> Call:
    return {"input_features": numbers(ROWS, 8, 20), "labels": labels()}


def sound() -> Call:
    return {"input_values": numbers(ROWS, 800), "labels": labels()}


def seen() -> Call:
    return {**causal(), "pixel_values": numbers(ROWS, 3, 32, 32)}


def asked() -> Call:
    call = seen()
    call["input_ids"][:, :4] = 5
    return call


def documents() -> Call:
    patches = numbers(ROWS, 16, 14)
    patches[..., :2] = torch.arange(32).view(16, 2) % 4
    return {"flattened_patches": patches, "labels": labels()}


def padded() -> Call:
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[1, -7:] = 0
    return {**causal(), "attention_mask": mask}


Kinds = dict[str, tuple[Callable[[], Any], Callable[[], Call]]]
# Those of a language model alone have a bias, a cap, a factor or none of their own weights, and
# other losses; or layers whose sizes follow from one another, so that no small one can be tried.
DECODERS: Kinds = {
    "gemma2": (causal_model("Gemma2", head_dim=8, final_logit_softcapping=3.0), causal),
    "phi": (causal_model("Phi"), causal),
    "granite": (causal_model("Granite", logits_scaling=4.0), causal),
    "cohere": (causal_model("Cohere"), causal),
    "mixtral": (causal_model("Mixtral", num_local_experts=4, output_router_logits=True), causal),
    "tied": (causal_model("Llama", tie_word_embeddings=True), causal),
    "masked": (lambda: model_of("BertForMaskedLM", **BERT), causal),
    "bamba": (
        causal_model(
            "Bamba", mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=4,
            mamba_chunk_size=8,
            attn_layer_indices=[1],
        ),
        causal,
    ),
    "falcon mamba": (causal_model("FalconMamba", state_size=8), causal),
    "llava": (
        lambda: model_of(
            "LlavaForConditionalGeneration", text_config={"model_type": "llama", **DECODER},
            vision_config=SIGHT,
        ),
        causal,
    ),
    "gemma3": (
        lambda: model_of(
            "Gemma3ForConditionalGeneration", text_config={**DECODER, "head_dim": 8},
            vision_config=SIGHT,
        ),
        lambda: {**causal(), "token_type_ids": torch.zeros(ROWS, TOKENS, dtype=torch.int64)},
    ),
}  # fmt: skip
# Models that hear, see or translate.
OTHERS: Kinds = {
    "whisper": (whisper, heard),
    "whisper's decoder": (
        lambda: model_of(
            "WhisperForCausalLM", **TWO_SIDES, num_mel_bins=8, max_target_positions=128
        ),
        causal,
    ),
    "marian": (lambda: model_of("MarianMTModel", **TEXTS), of_text),
    "marian's decoder": (lambda: model_of("MarianForCausalLM", **TEXTS), causal),
    # As those of real vocabularies, these ids are beyond what a small model would have.
    "large ids": (
        lambda: model_of("MarianMTModel", **{**TEXTS, "decoder_start_token_id": CLASSES - 1}),
        of_text,
    ),
    "t5": (lambda: model_of("T5ForConditionalGeneration", **T5), of_text),
    "speech2text": (
        lambda: model_of(
            "Speech2TextForConditionalGeneration", **TWO_SIDES, max_source_positions=128,
            max_target_positions=128, input_feat_per_channel=8, input_channels=1, conv_channels=16,
            num_conv_layers=2, conv_kernel_sizes=(5, 5),
        ),
        lambda: {"input_features": numbers(ROWS, 40, 8), "labels": labels()},
    ),
    "speecht5": (
        lambda: model_of(
            "SpeechT5ForSpeechToText", **{**SOUND, **TWO_SIDES}, max_text_positions=128
        ),
        sound,
    ),
    "image captions": (
        captioner, lambda: {"pixel_values": numbers(ROWS, 3, 32, 32), "labels": labels()}
    ),
    "speech and text": (
        lambda: joined(
            "SpeechEncoderDecoder", transformers.Wav2Vec2Config(**SOUND),
            transformers.MBartConfig(**TEXTS),
        ),
        sound,
    ),
    "pix2struct": (
        lambda: model_of(
            "Pix2StructForConditionalGeneration", text_config={**T5, "hidden_size": WIDTH},
            vision_config={
                **LAYER, "patch_embed_hidden_size": 12, "d_ff": 16, "d_kv": 8, "seq_len": 16
            },
            pad_token_id=0, decoder_start_token_id=0,
        ),
        documents,
    ),
    "blip": (
        lambda: model_of(
            "BlipForConditionalGeneration",
            text_config={
                **BERT, **IDS, "encoder_hidden_size": WIDTH, "projection_dim": 16,
                "sep_token_id": 2,
            },
            vision_config=SIGHT,
        ),
        seen,
    ),
    "blip2 and opt": (lambda: blip2(OPT), asked),
    "blip2 and t5": (lambda: blip2({"model_type": "t5", **T5}), asked),
    "git": (lambda: model_of("GitForCausalLM", vision_config=SIGHT, **BERT, eos_token_id=2), seen),
    "qwen2 audio": (
        lambda: model_of(
            "Qwen2AudioForConditionalGeneration", text_config={**QWEN2, "pad_token_id": 0},
            audio_config={
                "model_type": "qwen2_audio_encoder", "num_mel_bins": 8, "encoder_layers": 1,
                "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": WIDTH,
                "max_source_positions": 10,
            },
            audio_token_index=5,
        ),
        padded,
    ),
}  # fmt: skip
KINDS = DECODERS | OTHERS


def made(kind: str) -> tuple[Any, Call]:
    """Return a model that trains and a call, with a bias of the logits where it has such."""
    make, call = KINDS[kind]
    torch.manual_seed(0)
    model = make().train()
    for name, buffer in model.named_buffers():
        if name.endswith("final_logits_bias"):
            buffer.normal_()
    return model, call()
