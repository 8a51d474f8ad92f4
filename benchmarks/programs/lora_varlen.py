"""Adapters of low rank on a frozen Llama, trained on batches of varying length through peft."""

from __future__ import annotations

from peft import LoraConfig, get_peft_model

from benchmarks.programs._models import llama, train
from benchmarks.programs._report import Recorder, sized

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    recorder = Recorder()
    adapters = LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.05, target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    model = get_peft_model(llama(recorder), adapters)
    train(recorder, model, sized(8, 2), sized((256, 1792), (8, 32)))


if __name__ == "__main__":
    main()
