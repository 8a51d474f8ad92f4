"""The tables of README.md and docs/, by name."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.documents.layout import (
    COSINE,
    COUNT,
    FINE_GIBS,
    FINE_MS,
    FINE_RATIO,
    GIBS,
    MIBS,
    MS,
    PERCENT,
    RATIO,
    Column,
    Show,
    Table,
    number,
)
from benchmarks.documents.results import Run
from benchmarks.fused import BLOCK

ALLOCATORS = {"native": "native", "expandable_segments": "expandable", "vramx": "vramx"}
RECORDED = (
    *("fasterrcnn", "generate_kv", "gpt2_amp_accum", "llama_ckpt_varlen", "llama_fixed"),
    *("llama_varlen", "moe_train", "offload_streams", "resnet50_multires", "unet3d_patch"),
)
RECORDED_MORE = (
    *("diffusion_buckets", "graph_transformer", "growing_graph", "lora_checkpoint"),
    *("paged_serving", "pipeline_streams", "preference_pairs", "recommender", "speech_ctc"),
    "training_and_evaluation",
)
OF_SEVERAL_STREAMS = {"offload_streams": "7", "pipeline_streams": "4"}


def same(names: Iterable[str]) -> dict[str, str]:
    """Return rows that are labelled by their names."""
    return {name: name for name in names}


def by_allocator(heading: str, case: str, metric: str, show: Show) -> list[Column]:
    """Return a column for each allocator; `case` has {} for the row and {{}} for the allocator."""
    return [
        Column(f"{heading}{label}", case.replace("{{}}", name), metric, show)
        for label, name in ALLOCATORS.items()
    ]


TRACE_COLUMNS = (
    *by_allocator("", "{} {{}}", "peak_reserved_ratio", FINE_RATIO),
    *by_allocator("smallest: ", "{} {{}}", "min_capacity_ratio", FINE_RATIO),
    Column("driver time of vramx", "{} vramx", "driver_share", PERCENT),
)

STREAMS = {
    "batches arrive while the last is computed with": "prefetch",
    "activations go to the host and come back": "offload",
    "optimizer states come, are updated, and go back": "optimizer_states",
    "four streams that have nothing in common": "four_streams",
    "a job of 10 ms beside a stream that is busy for 100": "small_job",
}

PROGRAMS = {
    "Llama 0.5 B, lengths 256 to 2048": "llama_varlen",
    "the same, gradient checkpointing": "llama_checkpoint",
    "LoRA (peft), lengths varying": "lora_varlen",
    "GNN (PyG), sampled subgraphs": "gnn_sampled",
    "CNN, resolutions varying, `cudnn.benchmark`": "cnn_multires",
    "ViT (Lightning, DeviceStatsMonitor)": "lightning_vit",
    "Llama 0.5 B, fixed shapes": "llama_fixed",
    "generation, KV cache": "generate_kv",
    '`torch.compile(mode="reduce-overhead")`': "compile_reduce_overhead",
    "accelerate's `find_executable_batch_size`": "batch_size_search",
}

MODELS = {
    "Llama, hidden 4096, 2 x 4096 tokens": "llama",
    "GPT-2, hidden 2048, dropout": "gpt2",
    "BERT": "bert",
    "ViT": "vit",
    "ResNet": "cnn",
    "3-D U-Net": "unet3d",
    "GNN (PyG)": "gnn",
}

WAYS = {
    "eager": "eager",
    "`torch.compile`": "compile",
    "Liger": "liger",
    "`torch.compile`, memory budget 0.5": "compile_budget_0.5",
    "selective checkpointing, every second product": "selective_checkpoint",
    "`torch.utils.checkpoint`": "checkpoint",
    "Liger and checkpoints": "liger_checkpoint",
    "`keep`: fused, exact": "keep",
    "`int8`": "int8",
    "`int4`": "int4",
    "`recompute_mlp`": "recompute_mlp",
    "`recompute_all`": "recompute_all",
}
WAYS_OF_OTHERS = {
    label: way
    for label, way in WAYS.items()
    if way in {"eager", "compile", "checkpoint", "keep", "int8", "recompute_mlp", "recompute_all"}
}
STACKS = {"GPT-2": "gpt2", "ViT": "vit", "ConvNeXt": "convnext", "ResNet": "cnn"}

COPY = "share of copy_"
KERNELS = {
    "quantise, int8, nearest": f"quantize8_nearest {COPY}",
    "quantise, int8, stochastic": f"quantize8_stochastic {COPY}",
    "dequantise, int8": f"dequantize8 {COPY}",
    "quantise, int4, nearest": f"quantize4_nearest {COPY}",
    "quantise, int4, stochastic": f"quantize4_stochastic {COPY}",
    "dequantise, int4": f"dequantize4 {COPY}",
    "pack a mask": f"pack_mask {COPY}",
    "unpack a mask": f"unpack_mask {COPY}",
    "RMSNorm, forward": f"norm_forward8 {COPY}",
    "RMSNorm, backward": f"norm_backward8 {COPY}",
    "LayerNorm, backward": f"layer_norm_backward8 {COPY}",
    "SwiGLU, forward": f"swiglu_forward8 {COPY}",
    "SwiGLU, backward": f"swiglu_backward8 {COPY}",
    "GELU, forward": f"gelu_forward8 {COPY}",
    "GELU, backward": f"gelu_backward8 {COPY}",
    "dropout and residual": f"dropout_add {COPY}",
    "rotary embedding": f"rotary {COPY}",
}

WEIGHTS = {
    "as they are": "pretrained",
    "one channel a group, in the residual stream": "residual_one_in_a_group",
    "two channels a group, in the residual stream": "residual_two_in_a_group",
    "one channel a group, behind a norm": "behind_norm_one_in_a_group",
    "two channels a group, behind a norm": "behind_norm_two_in_a_group",
    "biases of keys": "key_biases",
}

TRAINED = {
    "3 B, 24 GiB: Liger, all layers checkpointed": "3b_24_all",
    "3 B, 24 GiB: the same, half of the layers, torchao's AdamW8bit": "3b_24_half_torchao",
    "3 B, 24 GiB: the same, half of the layers": "3b_24_half",
    "3 B, 24 GiB: `plan`": "3b_24_plan",
    "3 B, 12 GiB: `plan`, states on the host": "3b_12_plan",
    "8 B, 24 GiB: `plan`, states on the host": "8b_24_plan",
}


class Words(Column):
    """How many blocks a plan treats in which way."""

    def text(self, run: Run, name: str) -> str:
        found = run.metrics(self.case.format(name))
        return ", ".join(
            f"{count:.0f} `{metric.removeprefix('blocks_')}`"
            for metric, count in found.items()
            if metric.startswith("blocks_")
        )


def plan_table(rows: dict[str, str]) -> Table:
    """Return the table of the budgets of some models."""
    return Table(
        "plan",
        "budget",
        rows,
        (
            Column("bytes", "{}", "budget_bytes", FINE_GIBS),
            Words("blocks", "{}", "budget_bytes", COUNT),
            Column("peak predicted", "{}", "predicted_bytes", FINE_GIBS),
            Column("peak measured", "{}", "peak_bytes", FINE_GIBS),
            Column("step predicted", "{}", "predicted_ms", FINE_MS),
            Column("step measured", "{}", "step_ms", FINE_MS),
        ),
    )


def fused_table(model: str, ways: dict[str, str]) -> Table:
    """Return the table of the ways of one model whose blocks count their tokens."""
    return Table(
        "fused",
        "way",
        ways,
        (
            Column("kept", f"{model} {{}}", BLOCK, number(".3g")),
            Column("peak", f"{model} {{}}", "peak_bytes", GIBS),
            Column("step", f"{model} {{}}", "step_ms", MS),
            Column("cosine", f"{model} {{}}", "gradient_cosine", COSINE, is_needed=False),
        ),
    )


TABLES: dict[str, Table] = {
    "traces": Table("traces", "program", same(RECORDED), TRACE_COLUMNS),
    "traces-more": Table("traces", "program", same(RECORDED_MORE), TRACE_COLUMNS),
    "traces-gpu": Table(
        "traces",
        "program",
        same(("gpt2_amp_accum", "llama_varlen")),
        (
            Column("modelled", "{} vramx", "driver_us_modelled", number(".0f", " ms", 1e-3)),
            Column("measured", "{} vramx", "driver_us_measured", number(".0f", " ms", 1e-3)),
            Column(
                "measured, first replay",
                "{} vramx",
                "driver_us_first_run",
                number(".0f", " ms", 1e-3),
            ),
            Column("wrong bytes", "{} vramx", "pattern_mismatches", COUNT),
        ),
    ),
    "streams": Table(
        "streams",
        "program",
        STREAMS,
        (
            *by_allocator("", "{} {{}}", "seconds", number(".1f", " ms", 1e3)),
            *by_allocator("reserved: ", "{} {{}}", "peak_reserved_bytes", MIBS),
        ),
    ),
    "programs": Table(
        "torch_programs",
        "program",
        PROGRAMS,
        (
            Column("allocated", "{} vramx 1", "peak_allocated", GIBS),
            *by_allocator("", "{} {{}} 1", "peak_reserved", GIBS),
            *by_allocator("step: ", "{} {{}} 1", "step_ms", MS),
            Column("vramx / faster", "{} goals", "step_ratio", RATIO),
            Column("with limit / without", "{} goals", "capped_step_ratio", RATIO, is_needed=False),
        ),
        is_one_run=False,
    ),
    "calls": Table(
        "torch_calls",
        "program",
        {
            **same(
                name
                for name in sorted((*RECORDED, *RECORDED_MORE))
                if name not in OF_SEVERAL_STREAMS
            ),
        },
        (
            *by_allocator("", "{} raw {{}} 1", "ns", number(".0f")),
            Column("vramx / native", "{} raw vramx", "ratio_to_native", RATIO),
            Column("vramx, tensor", "{} tensor vramx 1", "ns", number(".0f")),
            Column("vramx / native, tensor", "{} tensor vramx", "ratio_to_native", RATIO),
        ),
    ),
    "calls-streams": Table(
        "torch_calls",
        "program",
        {
            f"{name}, {n} streams": f"{name} raw on {n} streams"
            for name, n in OF_SEVERAL_STREAMS.items()
        },
        (
            *by_allocator("", "{} {{}} 1", "ns", number(".0f")),
            Column("vramx / native", "{} vramx", "ratio_to_native", RATIO),
        ),
    ),
    "core": Table(
        "core",
        "blocks",
        {
            **{f"{n:,} live": f"live={n}" for n in (1000, 10_000, 100_000, 1_000_000)},
            "of 512 B to 64 KiB": "sizes=512B-64KiB",
            "of 1 to 64 MiB": "sizes=1MiB-64MiB",
            "by 2 threads": "threads=2",
        },
        (
            Column("time of one", "{}", "ns_per_operation", number(".0f", " ns")),
            Column("books, for a live block", "{}", "bytes_per_block", number(".0f", " B")),
        ),
    ),
    "soak": Table(
        "soak",
        "device",
        {"that only counts": "accounting", "of real pages": "memfd"},
        (
            Column("calls", "{}", "calls", COUNT),
            Column("failures recovered from", "{}", "recovered_ooms", COUNT),
            Column("resident at half", "{}", "rss_at_50%", MIBS),
            Column("resident at the end", "{}", "rss_at_100%", MIBS),
            Column("most aliases", "{}", "aliases_max", COUNT),
        ),
    ),
    "activations": Table(
        "activations",
        "model",
        MODELS,
        (
            Column("kept, exact", "{} exact", "kept_bytes", GIBS),
            Column("int8", "{} int8", "kept_ratio", number(".2f", " x less")),
            Column("int4", "{} int4", "kept_ratio", number(".2f", " x less")),
            Column("step, int8", "{} int8", "step_ratio", number(".2f", " x")),
            Column("cosine, int8", "{} int8", "gradient_cosine", COSINE),
            Column("cosine, int4", "{} int4", "gradient_cosine", FINE_RATIO),
        ),
    ),
    "activations-training": Table(
        "activations",
        "model",
        MODELS,
        (
            Column("exact", "{} exact", "loss_trained", COSINE),
            Column("int8", "{} int8", "loss_trained", COSINE),
            Column("deviation of seeds", "{} exact", "loss_seed_deviation", COSINE),
        ),
    ),
    "checkpoints": Table(
        "activations",
        "Llama of the table above",
        {
            "nothing checkpointed": "exact",
            "`torch.utils.checkpoint`": "torch",
            '`vramx.checkpoint(level="int8")`': "int8_inputs",
        },
        (
            Column("a block keeps", "llama_checkpoint {}", "kept_per_block", MIBS),
            Column("peak", "llama_checkpoint {}", "peak_bytes", GIBS),
            Column("step", "llama_checkpoint {}", "step_ms", FINE_MS),
            Column("cosine", "llama_checkpoint {}", "gradient_cosine", COSINE),
        ),
    ),
    "offload": Table(
        "activations",
        "what leaves",
        {
            "nothing": "int8",
            "what the link hides (`cpu`)": "int8_offload",
            "half": "int8_offload_half",
            "all": "int8_offload_all",
        },
        (
            Column("kept on the GPU", "llama_offload {}", "kept_bytes", GIBS),
            Column("step, of the exact one", "llama_offload {}", "step_ratio", RATIO),
        ),
    ),
    "offload-hidden": Table(
        "activations",
        "what leaves",
        {"what the link hides (`cpu`)": "share cpu", "half": "share 0.5", "all": "share 1.0"},
        (
            Column("hidden", "llama_offload {}", "hidden_measured", RATIO),
            Column("foretold", "llama_offload {}", "hidden_predicted", RATIO),
        ),
    ),
    "language": Table(
        "language_model",
        "way",
        {
            "exact, once more": "exact_again",
            "int8": "int8_stochastic",
            "int8, rounded to the nearest": "int8_nearest",
            "int4": "int4_stochastic",
            "int4, rounded to the nearest": "int4_nearest",
            "fused blocks, int8": "optimised_int8",
        },
        (
            Column("gap", "{} against exact", "gap", number("+.4f")),
            Column("from", "{} against exact", "gap_low", number("+.4f")),
            Column("to", "{} against exact", "gap_high", number("+.4f")),
            Column("allowed", "{} against exact", "margin", number(".4f")),
        ),
    ),
    "weights": Table(
        "real_weights",
        "channels of 1000 times the rest",
        WEIGHTS,
        (
            Column("bfloat16, exact", "{} bfloat16", "cosine_least", COSINE),
            Column("hooks, int8", "{} hooks", "cosine_least", COSINE),
            Column("`int8`", "{} int8", "cosine_least", COSINE),
            Column("`recompute_mlp`", "{} recompute_mlp", "cosine_least", COSINE),
            Column("`recompute_all`", "{} recompute_all", "cosine_least", COSINE),
        ),
    ),
    "kernels": Table(
        "kernels",
        "kernel",
        KERNELS,
        (
            Column("64 MiB", "64MiB", "{}", RATIO),
            Column("256 MiB", "256MiB", "{}", RATIO, is_needed=False),
            Column("1 GiB", "1GiB", "{}", RATIO, is_needed=False),
            Column("4 GiB", "4GiB", "{}", RATIO, is_needed=False),
        ),
    ),
    "fused-llama": fused_table("llama", WAYS),
    "fused-lora": fused_table(
        "lora_undropped",
        {label: way for label, way in WAYS_OF_OTHERS.items() if way != "recompute_mlp"},
    ),
    "fused-others": Table(
        "fused",
        "way",
        WAYS_OF_OTHERS,
        tuple(
            column
            for label, model in STACKS.items()
            for column in (
                Column(label, f"{model} {{}}", "kept_bytes", GIBS),
                Column("step", f"{model} {{}}", "step_ms", MS),
            )
        ),
    ),
    "fused-host": Table(
        "fused",
        "way",
        WAYS_OF_OTHERS,
        tuple(Column(label, f"{model} {{}}", "host_ms", MS) for label, model in STACKS.items()),
    ),
    "plan-llama": plan_table({str(n): f"llama budget {n}" for n in range(1, 6)}),
    "plan-others": plan_table(
        {
            f"{label} {n}": f"{model} budget {n}"
            for label, model in {
                "GPT-2": "gpt2",
                "BERT": "bert",
                "ViT": "vit",
                "ResNet": "cnn",
            }.items()
            for n in (1, 3, 5)
        }
    ),
    "train": Table(
        "train_3b",
        "model, limit, way",
        TRAINED,
        (
            Column("reserved", "{}", "peak_reserved_bytes", GIBS),
            Column("tokens/s", "{}", "tokens_per_s", COUNT),
        ),
        may_lack={"3 B, 8.5 GiB: `plan`, states on the host": "3b_8.5_plan"},
    ),
    "train-longest": Table(
        "train_3b",
        "model, limit, way",
        {},
        (Column("longest sequence", "{}", "longest_tokens", COUNT),),
        may_lack={
            "3 B, 24 GiB: `recompute_all`, inputs of blocks on the host": "3b_24_longest",
            "3 B, 24 GiB: Liger, checkpoints on the host": "3b_24_longest_liger",
            "8 B, 24 GiB: `recompute_all`, inputs of blocks on the host": "8b_24_longest",
            "8 B, 24 GiB: Liger, checkpoints on the host": "8b_24_longest_liger",
        },
    ),
}
