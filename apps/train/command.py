"""diffbit train: train a model, in float or with quantization-aware training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ...cli import (
    Data,
    Field,
    Json,
    Quiet,
    Seed,
    TorchDevice,
    chat_template,
    completion,
    of_formats,
    print_json,
    print_table,
)
from ...io import plugins
from ...io.errors import DiffbitError

EXAMPLES = {
    "train": (
        "diffbit train --preset tiny --attention diff_v1 --steps 300 -o out/diff_v1",
        "diffbit train --preset tiny --qat ternary -o out/b158",
        "diffbit train --init examples/pico/softmax --lora 16 --data chats.jsonl --field messages -o out/tuned",
        "diffbit train --init out/demo/diff_v1 --qat ternary --distill out/demo/diff_v1 --steps 300 -o out/distilled",
        "torchrun --nproc-per-node 8 -m diffbit train --preset base --attention diff_v1 -o out/base",
    )
}


def _list_presets(is_given: bool) -> None:
    if is_given:
        from .presets import parameters

        print_table(parameters())
        raise typer.Exit


Output = Annotated[Path, typer.Option("--output", "-o", help="Output folder: the model, its log and checkpoints.")]
Preset = Annotated[
    Literal["pico", "tiny", "yoco", "nano", "small", "base"] | None,
    typer.Option(
        help="Model size and training recipe; see --list-presets. Default: tiny; with --init, a recipe that fine-tunes "
        "that model: three passes over the text, in 50 to 300 steps."
    ),
]
Attention = Annotated[
    str | None,
    typer.Option(
        metavar="VARIANT",
        autocompletion=completion(lambda: plugins.names("diffbit.models.attention")),
        help="Attention variant: diff_v1, diff_v2, softmax, mla, gdla, or an experimental one (--list-presets lists "
        "all); default: diff_v1, or that of --init.",
    ),
]
Init = Annotated[
    Path | None,
    typer.Option(
        help="Model to start from, a folder or a GGUF file: its weights, sizes, tokenizer, chat template and "
        "generation settings."
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a training row; default: the preset's or --init's context, at most 512 to fine-tune. A model's "
        "context grows with it, but --init's does not shrink."
    ),
]
TokenizerFile = Annotated[
    Path | None, typer.Option(help="A tokenizer.json or a folder with one; default: train a tokenizer on the data.")
]
Qat = Annotated[
    str | None,
    of_formats(
        "Quantization-aware training for a weight format: ternary (BitNet b1.58), int4_g128, int2_g64, ... The result "
        "is a quantized checkpoint; OUTPUT/master keeps the float weights."
    ),
]
Activations = Annotated[
    Literal["int8", "int4"],
    typer.Option(help="Activation format for --qat ternary; int4 applies a Hadamard transform first (BitNet v2)."),
]
Lora = Annotated[
    int | None,
    typer.Option(
        metavar="RANK",
        min=1,
        help="Train low-rank adapters of this rank (LoRA), such as 16, and not the weights of --init. They are merged "
        "into the result, and OUTPUT/adapter has them in PEFT's layout. With --qat: --trainable lora.",
    ),
]
Trainable = Annotated[
    Literal["all", "scales", "lora"],
    typer.Option(
        help="What is trained. all: every weight; lora: what --lora trains, of rank 32. With --qat, scales: scales and "
        "norms, the codes stay (E2E-QP of EfficientQAT); lora: scales, norms and low-rank adapters, which are added to "
        "the weights before they are rounded."
    ),
]
Only = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Train only these tensors (with --lora: their adapters), and leave the others as they are: names with *, "
        "separated by commas, such as '*.q_proj.*,*.o_proj.*,*lambda*'.",
    ),
]
Distill = Annotated[
    Path | None,
    typer.Option(
        help="Teacher: a checkpoint, float or quantized, with the same tokenizer. Its predictions are additional "
        "training targets (BitDistill)."
    ),
]
DistillWeight = Annotated[
    float | None,
    typer.Option(help="Weight of the teacher's loss; the loss on the text has weight 1. Default: 100."),
]
Mlp = Annotated[
    str | None, typer.Option(metavar="MLP", help="MLP: swiglu, relu2, kan, ...; default: swiglu, or that of --init.")
]
SubNorms = Annotated[
    bool | None,
    typer.Option(
        "--sub-norms/--no-sub-norms",
        help="Norms before o_proj and down_proj (BitNet), added to the model of --init if it has none; default: on "
        "for --qat ternary, else as in --init.",
    ),
]
HeadNorm = Annotated[
    Literal["learned", "fixed", "none"] | None,
    typer.Option(
        help="RMSNorm of each diff_v1 head. learned: with a weight, folded into o_proj on saving (the official code); "
        "fixed: without a weight (Hugging Face's diffllama); none: no norm. Default: learned, or fixed with --init or "
        "--qat."
    ),
]
LambdaBias = Annotated[
    float | None,
    typer.Option(
        help="Give the projection to diff_v2's lambda a bias that starts at this value: at -6 there is hardly any "
        "subtraction at first. Default: no bias, or that of --init."
    ),
]
NoiseRatio = Annotated[
    int | None,
    typer.Option(min=1, help="Signal heads that share a noise head, in diff_v1 and diff_v2; default: 1, or --init's."),
]
Needles = Annotated[
    float, typer.Option(help="Fraction of the training rows that contain key-value needles and queries for them.")
]
Steps = Annotated[
    int | None,
    typer.Option(
        help="Training steps; default: the preset's; to fine-tune, three passes over the text, but 50 to 300."
    ),
]
BatchSize = Annotated[
    int | None, typer.Option(help="Rows per forward pass of one process; default: the preset's, 4 to fine-tune.")
]
Accumulate = Annotated[
    int | None,
    typer.Option(help="Forward passes per step (gradient accumulation); default: the preset's, 1 to fine-tune."),
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        help="Peak learning rate; default: that of the preset, or of the one nearest in size to --init; higher for "
        "--qat ternary, lower for --qat --init, a third for --lora, a twentieth to fine-tune all weights."
    ),
]
Schedule = Annotated[
    Literal["cosine", "two_stage"] | None,
    typer.Option(help="Learning rate schedule; default: cosine, two_stage (BitNet) for --qat ternary without --init."),
]
Optimizer = Annotated[
    Literal["adamw", "adamw8bit"],
    typer.Option(help="adamw8bit keeps AdamW's moments in 8 bits (bitsandbytes): 2 bytes per parameter instead of 8."),
]
EvalEvery = Annotated[int, typer.Option(help="Steps between evaluations; 0: evaluate at the end only.")]
CheckpointEvery = Annotated[int, typer.Option(help="Steps between checkpoints for --resume; 0: no checkpoints.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in the output folder.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the model with torch.compile.")]
Precision = Annotated[
    Literal["auto", "fp32", "bf16"],
    typer.Option(
        help="Precision of the forward pass; bf16 keeps fp32 weights. auto: bf16 on a GPU, and to fine-tune on a "
        "processor with AVX512-BF16; else fp32."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete the run in the output folder and start again.")]
ListPresets = Annotated[
    bool,
    typer.Option("--list-presets", is_eager=True, callback=_list_presets, help="List the presets and exit."),
]


def train(
    output: Output,
    preset: Preset = None,
    attention: Attention = None,
    init: Init = None,
    context: Context = None,
    data: Data = "stdlib",
    field: Field = "text",
    tokenizer: TokenizerFile = None,
    qat: Qat = None,
    activations: Activations = "int8",
    lora: Lora = None,
    trainable: Trainable = "all",
    only: Only = None,
    distill: Distill = None,
    distill_weight: DistillWeight = None,
    mlp: Mlp = None,
    sub_norms: SubNorms = None,
    head_norm: HeadNorm = None,
    lambda_bias: LambdaBias = None,
    noise_ratio: NoiseRatio = None,
    needles: Needles = 0.0,
    steps: Steps = None,
    batch_size: BatchSize = None,
    accumulate: Accumulate = None,
    learning_rate: LearningRate = None,
    schedule: Schedule = None,
    optimizer: Optimizer = "adamw",
    eval_every: EvalEvery = 0,
    checkpoint_every: CheckpointEvery = 500,
    resume: Resume = False,
    compiled: Compile = False,
    precision: Precision = "auto",
    seed: Seed = 0,
    device: TorchDevice = "auto",
    overwrite: Overwrite = False,
    list_presets: ListPresets = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a Differential Transformer, or a plain Transformer of equal size; or fine-tune a model (--init).

    Runs with the same preset, data and seed see the same batches, whatever their attention. Under torchrun each
    process trains on its share of every batch.
    """
    from ...formats import choose_format
    from .presets import train_config
    from .trainer import train as run_training

    if lora is not None:
        if trainable == "scales":
            raise DiffbitError("--lora trains adapters, and --trainable scales does not; leave out one of them")
        trainable = "lora"
    if qat is not None and trainable != "scales":  # which keeps the codes of --init, in whatever format they are
        choose_format(qat)
    changes: dict[str, Any] = dict(
        context=context, init=init, mlp=mlp, sub_norms=sub_norms, head_norm=head_norm, lambda_bias=lambda_bias,
        noise_ratio=noise_ratio, source=data, field=field, tokenizer=tokenizer, needles=needles, qat=qat,
        activations=activations, trainable=trainable, rank=lora, only=only, distill=distill,
        distill_weight=distill_weight, steps=steps, batch_size=batch_size, accumulate=accumulate,
        learning_rate=learning_rate, schedule=schedule, optimizer=optimizer, seed=seed, eval_every=eval_every,
        checkpoint_every=checkpoint_every, device=device, compile=compiled, precision=precision,
    )  # fmt: skip
    settings = {name: value for name, value in changes.items() if value is not None}
    settings |= {name: str(value) for name, value in settings.items() if isinstance(value, Path)}
    config = train_config(preset, attention, **settings)
    render = None if init is None else chat_template(init)
    result = run_training(config, output, resume=resume, overwrite=overwrite, render=render)
    if os.environ.get("RANK", "0") != "0":  # under torchrun only one process reports
        return
    row = {
        "model": str(result.path),
        "attention": config.model.attention,
        "steps": len(result.losses),
        "tokens": result.tokens,
        "train_loss": result.losses[-1],
        "eval_loss": result.eval_loss,
        "seconds": round(result.seconds, 1),
    }
    print_json(row) if as_json else print_table([row])
