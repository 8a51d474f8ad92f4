"""Heads of models that hear, see or translate: no logits in training, and the same all around."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from language_model_tools import gradients, largest_error, sizes_made
from optimize_tools import ROUNDING, optimised_copy
from torch import Tensor

import vramx
from vramx import errors
from vramx.errors import VramxWarning
from vramx.nn import loss_chunks
from vramx.nn.logits import Logits

transformers = pytest.importorskip("transformers", minversion="4.57")

CLASSES, ROWS, TOKENS, WIDTH = 301, 3, 64, 16
# Of the gradient of all parameters, as the promise for int8 is.
INT8_COSINE = 0.9993
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
UNDROPPED = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
TWO_SIDES = {
    "vocab_size": CLASSES, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, **UNDROPPED, **IDS,
}  # fmt: skip
TEXTS = {**TWO_SIDES, "max_position_embeddings": 128}
T5 = {
    "vocab_size": CLASSES, "d_model": WIDTH, "d_kv": 8, "d_ff": 16, "num_layers": 1,
    "num_heads": 2, "dropout_rate": 0.0, **IDS,
}  # fmt: skip
LAYER = {
    "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16,
}  # fmt: skip
BERT = {
    **LAYER, "vocab_size": CLASSES, "max_position_embeddings": 128, "pad_token_id": 0,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
SIGHT = {**LAYER, "image_size": 32, "patch_size": 16, "projection_dim": 16}
SOUND = {
    **LAYER, **UNDROPPED, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "feat_proj_dropout": 0.0,
    "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "apply_spec_augment": False,
    "hidden_dropout": 0.0,
}  # fmt: skip


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def ids(tokens: int = TOKENS, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, CLASSES, (ROWS, tokens), generator=generator)


def labels() -> Tensor:
    found = ids(seed=2)
    found[0, :5] = -100
    return found


def of_text() -> dict[str, Any]:
    return {"input_ids": ids(20), "labels": labels()}


def causal() -> dict[str, Any]:
    return {"input_ids": ids(), "labels": labels()}


def image() -> Tensor:
    return numbers(ROWS, 3, 32, 32)


def model_of(name: str, **options: Any) -> Any:
    prefix = name.partition("For")[0].removesuffix("MTModel").removesuffix("WithLMHeadModel")
    config = getattr(transformers, f"{prefix}Config")(**copy.deepcopy(options))
    return getattr(transformers, name)(config)


def joined(name: str, encoder: Any, decoder: Any) -> Any:
    make = getattr(transformers, f"{name}Config").from_encoder_decoder_configs
    config = make(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return getattr(transformers, f"{name}Model")(config=config)


def whisper(**options: Any) -> Any:
    return model_of(
        "WhisperForConditionalGeneration", **TWO_SIDES, num_mel_bins=8, max_source_positions=10,
        max_target_positions=128, begin_suppress_tokens=None, suppress_tokens=None, **options
    )  # fmt: skip


def heard() -> dict[str, Any]:
    return {"input_features": numbers(ROWS, 8, 20), "labels": labels()}


def captioner() -> Any:
    text = transformers.GPT2Config(
        vocab_size=CLASSES, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=128, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2
    )  # fmt: skip
    sight = {k: v for k, v in SIGHT.items() if k != "projection_dim"}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return joined("VisionEncoderDecoder", transformers.ViTConfig(**sight, **none), text)


def blip2(text: dict[str, Any]) -> Any:
    queries = {**BERT, "vocab_size": 50, "encoder_hidden_size": WIDTH}
    return model_of(
        "Blip2ForConditionalGeneration", vision_config=SIGHT, qformer_config=queries,
        text_config=text, num_query_tokens=4, image_token_index=5
    )  # fmt: skip


def asked() -> dict[str, Any]:
    call = causal()
    call["input_ids"][:, :4] = 5
    return {**call, "pixel_values": image()}


OPT = {
    **LAYER, "model_type": "opt", "vocab_size": CLASSES, "word_embed_proj_dim": WIDTH,
    "ffn_dim": 16, "max_position_embeddings": 128, "dropout": 0.0, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 2,
}  # fmt: skip


def documents() -> dict[str, Any]:
    patches = numbers(ROWS, 16, 14)
    patches[..., :2] = torch.arange(32).view(16, 2) % 4
    return {"flattened_patches": patches, "labels": labels()}


def padded() -> dict[str, Any]:
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[1, -7:] = 0
    return {**causal(), "attention_mask": mask}


KINDS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
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
            "Speech2TextForConditionalGeneration",
            **TWO_SIDES,
            max_source_positions=128,
            max_target_positions=128,
            input_feat_per_channel=8,
            input_channels=1,
            conv_channels=16,
            num_conv_layers=2,
            conv_kernel_sizes=(5, 5),
        ),
        lambda: {"input_features": numbers(ROWS, 40, 8), "labels": labels()},
    ),
    "speecht5": (
        lambda: model_of(
            "SpeechT5ForSpeechToText",
            **{**SOUND, **TWO_SIDES},
            max_text_positions=128,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
            positional_dropout=0.0,
        ),
        lambda: {"input_values": numbers(ROWS, 800), "labels": labels()},
    ),
    "image captions": (captioner, lambda: {"pixel_values": image(), "labels": labels()}),
    "speech and text": (
        lambda: joined(
            "SpeechEncoderDecoder",
            transformers.Wav2Vec2Config(**SOUND),
            transformers.MBartConfig(**TEXTS),
        ),
        lambda: {"input_values": numbers(ROWS, 800), "labels": labels()},
    ),
    "pix2struct": (
        lambda: model_of(
            "Pix2StructForConditionalGeneration",
            text_config={**T5, "hidden_size": WIDTH},
            vision_config={
                **LAYER,
                "patch_embed_hidden_size": 12,
                "d_ff": 16,
                "d_kv": 8,
                "seq_len": 16,
                "dropout_rate": 0.0,
                "attention_dropout": 0.0,
            },
            pad_token_id=0,
            decoder_start_token_id=0,
        ),
        documents,
    ),
    "blip": (
        lambda: model_of(
            "BlipForConditionalGeneration",
            text_config={
                **BERT,
                "encoder_hidden_size": WIDTH,
                "projection_dim": 16,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "sep_token_id": 2,
            },
            vision_config=SIGHT,
        ),
        lambda: {**causal(), "pixel_values": image()},
    ),
    "blip2 and opt": (lambda: blip2(OPT), asked),
    "blip2 and t5": (lambda: blip2({"model_type": "t5", **T5}), asked),
    "git": (
        lambda: model_of("GitForCausalLM", vision_config=SIGHT, **BERT, eos_token_id=2),
        lambda: {**causal(), "pixel_values": image()},
    ),
    "qwen2 audio": (
        lambda: model_of(
            "Qwen2AudioForConditionalGeneration",
            text_config={
                **LAYER,
                "model_type": "qwen2",
                "vocab_size": CLASSES,
                "num_key_value_heads": 2,
                "pad_token_id": 0,
            },
            audio_config={
                "model_type": "qwen2_audio_encoder",
                "num_mel_bins": 8,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 16,
                "d_model": WIDTH,
                "max_source_positions": 10,
            },
            audio_token_index=5,
        ),
        padded,
    ),
}


@pytest.fixture(autouse=True)
def told_anew() -> None:
    errors._said.clear()
    vramx.manual_seed(0, rank=0)


def made(kind: str) -> tuple[Any, dict[str, Any]]:
    """Return a model that trains and a call, with a bias of the logits where it has such."""
    make, call = KINDS[kind]
    torch.manual_seed(0)
    model = make().train()
    for name, buffer in model.named_buffers():
        if name.endswith("final_logits_bias"):
            buffer.normal_()
    return model, call()


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_the_originals(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_chunks, "_TOKENS_OF_CHUNK", 128)
    original, call = made(kind)
    model = copy.deepcopy(original)
    report = vramx.optimize(model, "keep")
    assert not [row for row in report.left if row.module == type(original).__name__]
    with sizes_made() as sizes:
        found = model(**call)
        found.loss.backward()
    with sizes_made() as with_logits:
        original(**call).loss.backward()
    size = found.logits.numel()
    assert max(with_logits) == size  # what the mode sees without vramx
    assert max(sizes) < size
    assert isinstance(found.logits, Logits)
    assert largest_error(model, original, call) < ROUNDING
    given = {**call, "num_items_in_batch": torch.tensor(17)}
    if takes(original, given):
        assert largest_error(model, original, given) < ROUNDING


def takes(model: Any, call: dict[str, Any]) -> bool:
    """Tell whether a model of this release takes a call."""
    try:
        model(**call)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_at_int8_point_where_the_originals_do(kind: str) -> None:
    original, call = made(kind)
    (_, found), (_, exact) = (
        gradients(model, call) for model in (optimised_copy(original, "int8"), original)
    )
    assert found.keys() == exact.keys()
    both = (torch.cat([each[name].flatten() for name in exact]) for each in (found, exact))
    assert torch.nn.functional.cosine_similarity(*both, dim=0) > INT8_COSINE


@pytest.mark.filterwarnings("ignore::vramx.errors.VramxWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_and_the_restored_model_are_the_originals(kind: str) -> None:
    original, call = made(kind)
    model = optimised_copy(original, "keep")
    for each in (model, original):
        each.eval()
    found, expected = model(**call), original(**call)
    assert type(found.logits) is Tensor
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)
    vramx.restore(model)
    assert largest_error(model.train(), original.train(), call) == 0


@pytest.mark.filterwarnings("ignore::vramx.errors.VramxWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_generated_words_are_the_originals(kind: str) -> None:
    original, call = made(kind)
    model = optimised_copy(original.eval(), "keep")
    given = {name: value for name, value in call.items() if name != "labels"}
    asked = {**given, "max_new_tokens": 3, "do_sample": False}
    try:
        words = original.generate(**asked)
    except IndexError:
        pytest.skip("this release's model itself cannot")
    assert torch.equal(model.generate(**asked), words)


def test_nothing_is_said_of_a_loss_that_the_model_does_not_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = made("image captions")
    logging = transformers.utils.logging
    logging.warning_once.cache_clear()
    said = list[str]()
    handler = logging.logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    logging.get_logger("transformers").addHandler(handler)
    try:
        assert vramx.optimize(model, {"decoder.lm_head": "keep"}).swapped
    finally:
        logging.get_logger("transformers").removeHandler(handler)
    assert not said


def test_a_loss_that_needs_the_logits_is_named_with_the_reason() -> None:
    model = model_of(
        "ProphetNetForConditionalGeneration", vocab_size=CLASSES, hidden_size=WIDTH,
        encoder_ffn_dim=16, decoder_ffn_dim=16, num_encoder_layers=1, num_decoder_layers=1,
        num_encoder_attention_heads=2, num_decoder_attention_heads=2, **UNDROPPED, **IDS
    )  # fmt: skip
    with pytest.warns(VramxWarning, match="ProphetNet.* its loss needs the logits themselves"):
        report = vramx.optimize(model, "keep")
    (row,) = (row for row in report.rows if row.name == "lm_head")
    assert (row.done, row.reason) == ("left", "its loss needs the logits themselves")


def test_a_head_that_a_model_does_not_tell_is_named() -> None:
    sizes = {**LAYER, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50}
    crossed = {f"cross_{name}": size for name, size in sizes.items() if name != "vocab_size"}
    model = model_of(
        "DiaForConditionalGeneration", encoder_config=sizes, delay_pattern=[0, 1, 2],
        decoder_config={**sizes, **crossed, "num_channels": 3, "max_position_embeddings": 64}
    )  # fmt: skip
    with pytest.warns(VramxWarning, match="Dia.* get_output_embeddings.. gives no head"):
        report = vramx.optimize(model, "keep")
    (row,) = (row for row in report.rows if row.module == "DiaForConditionalGeneration")
    assert row.done == "left"


# -- What programs do with a Whisper ---------------------------------------------------------------


def test_metrics_in_training_have_logits_and_a_word_of_it() -> None:
    original = whisper().train()
    model = optimised_copy(original, "keep")
    found, expected = model(**heard()), original(**heard())
    with pytest.warns(VramxWarning, match="argmax of a language model's logits"):
        words = found.logits.argmax(-1)
    assert torch.equal(words, expected.logits.argmax(-1))


@pytest.mark.parametrize("with_labels", [True, False])
def test_ids_for_the_decoder_are_the_callers(with_labels: bool) -> None:
    original = whisper().train()
    model = optimised_copy(original, "keep")
    call = {**heard(), "decoder_input_ids": ids(seed=5)}
    if with_labels:
        assert largest_error(model, original, call) < ROUNDING
        assert not model(**call).logits.is_made
        return
    del call["labels"]  # for a loss of the loop's own, as with the Trainer's label smoothing
    found, expected = model(**call).logits, original(**call).logits
    assert type(found) is Tensor
    assert torch.equal(found, expected)


def test_a_subclass_with_its_own_forward_is_left_with_a_reason() -> None:
    class Weighted(transformers.WhisperForConditionalGeneration):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            result = super().forward(*args, **kwargs)
            result.loss = result.loss + result.logits.logsumexp(-1).square().mean()
            return result

    original = Weighted(whisper().config).train()
    model = copy.deepcopy(original)
    with pytest.warns(VramxWarning, match="is derived from WhisperForConditionalGeneration"):
        vramx.optimize(model, "keep")
    assert type(model(**heard()).logits) is Tensor
    assert largest_error(model, original, heard()) < ROUNDING


def test_another_weight_of_the_head_is_in_the_loss() -> None:
    original = whisper(tie_word_embeddings=False).train()
    model = optimised_copy(original, "keep")
    for each in (model, original):
        torch.manual_seed(4)
        each.proj_out.weight = torch.nn.Parameter(torch.randn(CLASSES, WIDTH))
    assert largest_error(model, original, heard()) < ROUNDING
    assert not model(**heard()).logits.is_made


@pytest.mark.filterwarnings("ignore:.*makes its logits:vramx.errors.VramxWarning")
@pytest.mark.filterwarnings("ignore:.*no plain Linear:vramx.errors.VramxWarning")
@pytest.mark.parametrize("adapted", [["q_proj", "v_proj"], ["q_proj", "proj_out"]])
def test_adapters_train_as_on_the_original(adapted: list[str]) -> None:
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=adapted, init_lora_weights=False)
    both = []
    for is_optimised in (True, False):
        torch.manual_seed(0)
        model = whisper().train()
        torch.manual_seed(1)
        both.append(peft.get_peft_model(model, config))
        if is_optimised:
            vramx.optimize(both[0], "keep")
    model, original = both
    assert largest_error(model, original, heard()) < ROUNDING
    assert isinstance(model(**heard()).logits, Logits) == ("proj_out" not in adapted)


class Recordings(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Recordings, and what is said in them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        call = {name: value[index % ROWS].clone() for name, value in heard().items()}
        call["labels"][: 2 * index] = -100
        return call


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_trainer_of_sequences_trains_and_generates_as_with_the_original(
    smoothing: float, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    original = whisper().train()
    model = optimised_copy(original, "keep")
    start = torch.cat([p.detach().flatten() for p in model.parameters()])

    def batch_of(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        if smoothing:  # of the Trainer: a loss of its own, without the model's labels
            batch["decoder_input_ids"] = batch["labels"].clamp(min=1)
        return batch

    found = []
    for each in (model, original):
        arguments = transformers.Seq2SeqTrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2,
            save_strategy="no",
            learning_rate=0.1, optim="sgd", logging_steps=1, report_to=[], disable_tqdm=True,
            use_cpu=True, seed=0, predict_with_generate=True, generation_max_length=6,
            label_smoothing_factor=smoothing,
        )  # fmt: skip
        trainer = transformers.Seq2SeqTrainer(
            model=each, args=arguments, train_dataset=Recordings(), eval_dataset=Recordings(),
            data_collator=batch_of,
            compute_metrics=lambda seen: {"words": float(seen.predictions.sum())},
        )  # fmt: skip
        trainer.train()
        words = trainer.evaluate()["eval_words"]
        weights = torch.cat([p.detach().flatten() for p in each.parameters()])
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append((weights, losses, words))
    (weights, losses, words), (expected, exact, spoken) = found
    assert losses == pytest.approx(exact, rel=ROUNDING)
    assert (weights - expected).norm() < ROUNDING * (expected - start).norm()
    assert words == spoken
