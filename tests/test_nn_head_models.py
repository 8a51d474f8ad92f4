"""The loss of language models of transformers in vramx.optimize: no logits, in any loop."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_history import CpuHistory
from language_model_tools import CLASSES, call_of, largest_error
from optimize_tools import DECODERS, ROUNDING, any_model, gradient_of, optimised_copy
from record_tools import recorder

import vramx
from vramx import errors
from vramx.errors import VramxWarning
from vramx.nn.logits import Logits

transformers = pytest.importorskip("transformers")

OPTIONS: dict[str, dict[str, Any]] = {
    "no option": {},
    "number of items": {"num_items_in_batch": 17},
    "tensor of items": {"num_items_in_batch": torch.tensor(17)},
    "shifted": {"shift_labels": call_of()["input_ids"]},
    "tokens": {"logits_to_keep": 4, "shift_labels": call_of()["input_ids"][:, :4].contiguous()},
    "tuple": {"return_dict": False},
}
# Others have heads with a bias, a cap, a factor or none of their own weights, and other losses.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 16, "final_logit_softcapping": 3.0}),
    "phi": ("PhiForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {"logits_scaling": 4.0}),
    "cohere": ("CohereForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "output_router_logits": True}),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "masked": ("BertForMaskedLM", {}),
}


@pytest.fixture(autouse=True)
def told_anew() -> None:
    errors._said.clear()
    vramx.manual_seed(0, rank=0)


def other(name: str) -> Any:
    cls, options = OTHERS[name]
    prefix = cls.removesuffix("ForCausalLM").removesuffix("ForMaskedLM")
    config = getattr(transformers, f"{prefix}Config")(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=CLASSES, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, **options
    )  # fmt: skip
    for rate in vars(config):
        if rate.endswith(("dropout", "dropout_prob", "pdrop")):
            setattr(config, rate, 0.0)
    torch.manual_seed(0)
    return getattr(transformers, cls)(config).train()


def language_model(name: str) -> Any:
    if name in OTHERS:
        return other(name)
    return any_model(transformers, name)[0]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", [*DECODERS, "gpt2"])
def test_loss_and_gradients_are_the_originals(name: str, option: str) -> None:
    original, call = language_model(name), {**call_of(), **OPTIONS[option]}
    model = optimised_copy(original, "keep")
    assert largest_error(model, original, call) < ROUNDING
    result = model(**call)
    logits = result[1] if isinstance(result, tuple) else result.logits
    assert isinstance(logits, Logits)
    assert not logits.is_made


@pytest.mark.parametrize("name", OTHERS)
def test_other_heads_and_losses_are_the_originals(name: str) -> None:
    original = language_model(name)
    model = optimised_copy(original, "keep")
    assert largest_error(model, original, call_of()) < ROUNDING
    assert not model(**call_of()).logits.is_made


# Of layers whose sizes follow from one another, and with a config of the text in the config.
_SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": CLASSES, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "projection_dim": 32, "image_size": 28, "patch_size": 14,
}  # fmt: skip
WITHOUT_SMALL_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bamba": (
        "BambaForCausalLM",
        {
            **_SMALL,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "attn_layer_indices": [1],
        },
    ),
    "FalconMamba": ("FalconMambaForCausalLM", {**_SMALL, "state_size": 8}),
    "Llava": (
        "LlavaForConditionalGeneration",
        {"text_config": {"model_type": "llama", **_SMALL}, "vision_config": _VISION},
    ),
    "Gemma3": (
        "Gemma3ForConditionalGeneration",
        {"text_config": dict(_SMALL), "vision_config": dict(_VISION)},
    ),
}


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What transformers logs."""
    messages = list[str]()
    handler, logger = logging.Handler(), logging.getLogger("transformers")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@pytest.mark.parametrize("name", WITHOUT_SMALL_LAYERS)
def test_heads_of_layers_that_cannot_be_made_small_are_the_originals(
    name: str, said: list[str]
) -> None:
    cls, options = WITHOUT_SMALL_LAYERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**copy.deepcopy(options))
    original = getattr(transformers, cls)(config).train()
    call = call_of()
    if name == "Gemma3":
        call["token_type_ids"] = torch.zeros_like(call["input_ids"])
    said.clear()
    model = optimised_copy(original, "keep")
    assert not said
    assert largest_error(model, original, call) < ROUNDING
    assert not model(**call).logits.is_made


def test_a_bias_in_a_buffer_beside_the_head_is_in_the_loss() -> None:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=CLASSES,
        max_position_embeddings=64, dropout=0.0, decoder_start_token_id=2
    )  # fmt: skip
    original = transformers.BartForConditionalGeneration(config).train()
    original.final_logits_bias.normal_()
    model = optimised_copy(original, "keep")
    assert largest_error(model, original, call_of()) < ROUNDING
    assert not model(**call_of()).logits.is_made


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_recorded_step_makes_no_logits(name: str, tmp_path: Path) -> None:
    model = language_model(name)
    vramx.optimize(model, "int8")
    with recorder(tmp_path / "run.pickle", CpuHistory(), model):
        assert not model(**call_of()).logits.is_made


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_predicted_step_makes_no_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = language_model(name), call_of()
    stands, makes = list[Any](), list[Any]()
    stand, make = Logits.of, Logits.made
    monkeypatch.setattr(Logits, "of", lambda *args: (stands.append(1), stand(*args))[1])
    monkeypatch.setattr(Logits, "made", lambda each: (makes.append(1), make(each))[1])

    def step() -> None:
        model(**call).loss.backward()

    vramx.predict(step, levels=["int8"], policies="live", device="cpu", steps=1)
    assert (len(stands), len(makes)) == (1, 0)


def test_resized_embeddings_make_a_head_that_is_named() -> None:
    model = language_model("llama")
    vramx.optimize(model, "keep")
    model.resize_token_embeddings(CLASSES + 6)
    with pytest.warns(VramxWarning, match="LlamaForCausalLM makes its logits"):
        assert type(model(**call_of()).logits) is torch.Tensor


@pytest.mark.parametrize("how", ["loss_function", "loss_type"])
def test_loss_of_the_callers_own_is_left(how: str, monkeypatch: Any) -> None:
    def own_loss(logits: Any, labels: Any, **_: Any) -> Any:
        return logits.float().square().mean() + labels.float().mean()

    model = language_model("llama")
    if how == "loss_function":
        model.loss_function = own_loss
    else:
        mapping = pytest.importorskip("transformers.loss.loss_utils").LOSS_MAPPING
        monkeypatch.setitem(mapping, "own", own_loss)
        model.loss_type = model.config.loss_type = "own"
    with pytest.warns(VramxWarning, match=r"own_loss.* is not known"):
        report = vramx.optimize(model, "keep")
    assert [row.done for row in report.rows if row.name == "lm_head"] == ["left"]
    assert type(model(**call_of()).logits) is torch.Tensor


@pytest.mark.parametrize("adapted", [["q_proj"], ["q_proj", "lm_head"]])
@pytest.mark.parametrize("order", ["adapt", "optimise"])
def test_adapters_train_as_on_the_original(adapted: list[str], order: str) -> None:
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=adapted, init_lora_weights=False)

    def adapt(model: Any) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(model, config)

    original = adapt(language_model("llama"))
    model = language_model("llama")
    if order == "optimise":
        vramx.optimize(model, "keep")
    model = adapt(model)
    if order == "adapt":
        report = vramx.optimize(model, "keep")
        (done,) = (r.done for r in report.rows if r.name.endswith("lm_head"))
        assert done == ("left" if "lm_head" in adapted else "keep")
    assert largest_error(model, original, call_of()) < ROUNDING
    is_made = type(model(**call_of()).logits) is torch.Tensor
    assert is_made == ("lm_head" in adapted)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of which as many tokens count as their number says: no mean of means."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        call = {name: value[1].clone() for name, value in call_of().items()}
        call["input_ids"] = call["input_ids"].roll(index)
        call["labels"][: 2 * index] = -100
        return call


def trained(model: Any, folder: Path, **options: Any) -> tuple[torch.Tensor, list[Any]]:
    """Return the weights after some steps of Trainer, and what its losses were."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, save_strategy="no",
        gradient_accumulation_steps=2, learning_rate=0.1, optim="sgd", logging_steps=1,
        report_to=[], disable_tqdm=True, use_cpu=True, seed=0, **options
    )  # fmt: skip
    seen: list[Any] = []

    def measure(found: Any) -> dict[str, float]:
        seen.append(found.predictions.shape)
        return {"mean": float(found.predictions.mean())}

    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows(),
        compute_metrics=measure,
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert seen == [(8, 24, CLASSES)]
    return weights, losses


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}, {"bf16": True}])
def test_trainer_accumulates_as_with_the_original(options: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    original = language_model("llama")
    model = optimised_copy(original, "keep")
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    stand_ins: list[Any] = []
    of = Logits.of

    def counted(*args: Any) -> Any:
        stand_ins.append(of(*args))
        return stand_ins[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Logits, "of", counted)
        weights, losses = trained(model, tmp_path, **options)
    # A step of two batches each; label smoothing wants the logits.
    assert len(stand_ins) == (0 if "label_smoothing_factor" in options else 4)
    assert not any(each.is_made for each in stand_ins)
    expected, exact = trained(original, tmp_path, **options)
    bound = 8 * torch.finfo(torch.bfloat16).eps if "bf16" in options else ROUNDING
    assert losses == pytest.approx(exact, rel=bound)
    assert (weights - expected).norm() < bound * (expected - start).norm()


def test_lightning_trains_as_with_the_original(tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _index: int) -> Any:
            return dict(self.model(**batch))  # with all that it has

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    original = language_model("llama")
    model = copy.deepcopy(original)
    module = Module(model)
    assert [row.name for row in vramx.optimize(module, "keep").swapped][-1] == "model.lm_head"
    for each in (module, Module(original)):
        trainer = lightning.Trainer(
            max_steps=2, accumulate_grad_batches=2, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(each, torch.utils.data.DataLoader(Rows(), batch_size=2))
        each.model.train()
    found, expected = (
        torch.cat([p.detach().flatten() for p in each.parameters()]) for each in (model, original)
    )
    assert (found - expected).norm() < ROUNDING * expected.norm()


def test_a_loss_of_the_loops_own_has_logits() -> None:
    model = language_model("llama")
    inputs = {"input_ids": call_of()["input_ids"]}
    expected = gradient_of(model, inputs)
    vramx.optimize(model, {"lm_head": "keep"})
    assert type(model(**inputs).logits) is torch.Tensor
    assert torch.equal(gradient_of(model, inputs), expected)
