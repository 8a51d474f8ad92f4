"""What programs do with models whose loss makes no logits: metrics, adapters, trainers, losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_models import CLASSES, WIDTH, heard, ids, transformers, whisper
from language_model_tools import call_of, largest_error, told_anew
from optimize_tools import ROUNDING, any_model, gradient_of, optimised_copy
from torch import Tensor

import vramx
from vramx.errors import VramxWarning
from vramx.nn.logits import Logits

__all__ = ["told_anew"]  # a fixture
pytestmark = pytest.mark.usefixtures("seeded", "told_anew")


def llama() -> Any:
    return any_model(transformers, "llama")[0]


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


def test_resized_embeddings_make_a_head_that_is_named() -> None:
    model = llama()
    vramx.optimize(model, "keep")
    model.resize_token_embeddings(model.config.vocab_size + 6)
    with pytest.warns(VramxWarning, match="LlamaForCausalLM makes its logits"):
        assert type(model(**call_of()).logits) is torch.Tensor


@pytest.mark.parametrize("how", ["loss_function", "loss_type"])
def test_loss_of_the_callers_own_is_left(how: str, monkeypatch: Any) -> None:
    def own_loss(logits: Any, labels: Any, **_: Any) -> Any:
        return logits.float().square().mean() + labels.float().mean()

    model = llama()
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


PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]], str]] = {
    "llama": (llama, call_of, "lm_head"),
    "whisper": (whisper, heard, "proj_out"),
}


@pytest.mark.filterwarnings("ignore:.*makes its logits:vramx.errors.VramxWarning")
@pytest.mark.filterwarnings("ignore:.*no plain Linear:vramx.errors.VramxWarning")
@pytest.mark.parametrize("of_head", [False, True])
@pytest.mark.parametrize("order", ["adapt", "optimise"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_adapters_train_as_on_the_original(program: str, order: str, of_head: bool) -> None:
    peft: Any = pytest.importorskip("peft")
    make, call_of, head = PROGRAMS[program]
    adapted = ["q_proj", head] if of_head else ["q_proj"]
    config = peft.LoraConfig(target_modules=adapted, init_lora_weights=False)
    torch.manual_seed(0)
    original = make().train()
    model = copy.deepcopy(original)
    if order == "optimise":
        vramx.optimize(model, "keep")
    both = []
    for each in (model, original):
        torch.manual_seed(3)
        both.append(peft.get_peft_model(each, config))
    model, original = both
    if order == "adapt":
        report = vramx.optimize(model, "keep")
        (done,) = (row.done for row in report.rows if row.name.endswith(head))
        assert done == ("left" if of_head else "keep")
    assert largest_error(model, original, call_of()) < ROUNDING
    assert isinstance(model(**call_of()).logits, Logits) == (not of_head)


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of which as many tokens count as their number says: no mean of means."""

    call, count = staticmethod(call_of), 8

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        call = {name: value[index % len(value)].clone() for name, value in self.call().items()}
        call["labels"][: 2 * index] = -100
        return call


class Recordings(Texts):
    call, count = staticmethod(heard), 4


def weights_of(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def smoothed(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The Trainer's own loss of ids for the decoder, without the model's labels."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {**batch, "decoder_input_ids": batch["labels"].clamp(min=1)}


def trained(
    model: Any, folder: Path, sequences: bool, **options: Any
) -> tuple[Tensor, list[Any], float]:
    """Return the weights after some steps of Trainer, its losses, and what was predicted."""
    prefix = "Seq2Seq" if sequences else ""
    if sequences:
        options |= {"predict_with_generate": True, "generation_max_length": 6}
    arguments = getattr(transformers, f"{prefix}TrainingArguments")(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, save_strategy="no",
        gradient_accumulation_steps=2, learning_rate=0.1, optim="sgd", logging_steps=1,
        report_to=[], disable_tqdm=True, use_cpu=True, seed=0, **options
    )  # fmt: skip
    data = Recordings() if sequences else Texts()
    collator = smoothed if sequences and "label_smoothing_factor" in options else None
    trainer = getattr(transformers, f"{prefix}Trainer")(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, data_collator=collator,
        compute_metrics=lambda found: {
            "mean": float(found.predictions.mean()), "rows": len(found.predictions)
        },
    )  # fmt: skip
    trainer.train()
    measured = trainer.evaluate()
    assert measured["eval_rows"] == len(data)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return weights_of(model), losses, measured["eval_mean"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}, {"bf16": True}], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_trainer_accumulates_and_evaluates_as_with_the_original(
    program: str, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    original = PROGRAMS[program][0]().train()
    start = weights_of(original)
    model = optimised_copy(original, "keep")
    options = {"sequences": program == "whisper", **options}
    expected, exact, right = trained(original, tmp_path, **options)
    stand_ins, of = list[Any](), Logits.of
    monkeypatch.setattr(Logits, "of", lambda *args: stand_ins.append(of(*args)) or stand_ins[-1])
    weights, losses, found = trained(model, tmp_path, **options)
    # A step of two batches each; label smoothing wants the logits.
    assert len(stand_ins) == (0 if "label_smoothing_factor" in options else 4)
    assert not any(each.is_made for each in stand_ins)
    bound = 8 * torch.finfo(torch.bfloat16).eps if "bf16" in options else ROUNDING
    assert losses == pytest.approx(exact, rel=bound)
    assert (weights - expected).norm() < bound * (expected - start).norm()
    assert found == pytest.approx(right, rel=bound, abs=bound)


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

    original = llama()
    model = copy.deepcopy(original)
    module = Module(model)
    assert [row.name for row in vramx.optimize(module, "keep").swapped][-1] == "model.lm_head"
    for each in (module, Module(original)):
        trainer = lightning.Trainer(
            max_steps=2, accumulate_grad_batches=2, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(each, torch.utils.data.DataLoader(Texts(), batch_size=2))
        each.model.train()
    found, expected = weights_of(model), weights_of(original)
    assert (found - expected).norm() < ROUNDING * expected.norm()


def test_a_loss_of_the_loops_own_has_logits() -> None:
    model = llama()
    inputs = {"input_ids": call_of()["input_ids"]}
    expected = gradient_of(model, inputs)
    vramx.optimize(model, {"lm_head": "keep"})
    assert type(model(**inputs).logits) is torch.Tensor
    assert torch.equal(gradient_of(model, inputs), expected)
