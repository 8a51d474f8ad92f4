"""Adapters of low rank on a frozen Llama, trained on batches of varying length through peft."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model

from benchmarks.programs._models import llama, tokens, train_llama
from benchmarks.programs._report import Recorder, sized

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    recorder = Recorder()
    adapters = LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.05, target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    model = get_peft_model(llama(recorder), adapters)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for _ in range(recorder.steps):
        length = recorder.random.randint(*sized((256, 1792), (8, 32)))
        batch = tokens(sized(8, 2), length, model.device)
        with recorder.step():
            loss = train_llama(model, optimizer, batch)
        recorder.loss(loss)
    recorder.finish()


if __name__ == "__main__":
    main()
