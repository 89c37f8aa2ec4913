"""diffbit train: a model from text, in float or in low bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..progress import set_quiet
from .options import Data, Field, Json, Quiet, Seed, TorchDevice
from .output import print_json, print_table

EXAMPLES = ("diffbit train --preset tiny --attention diff_v1 --steps 300 -o out/diff_v1",)


def _list_presets(wanted: bool) -> None:
    if wanted:
        from ..train import parameters

        print_table(parameters())
        raise typer.Exit


Output = Annotated[Path, typer.Option("--output", "-o", help="Folder of the run, and of the model it ends in.")]
Preset = Annotated[str, typer.Option(help="pico, tiny, nano, small or base; see --list-presets.")]
Attention = Annotated[
    str | None, typer.Option(help="A variant, such as softmax, diff_v1 or diff_v2; default: diff_v1, or --init's.")
]
Init = Annotated[Path | None, typer.Option(help="A checkpoint to start from: its weights, its sizes, its tokenizer.")]
Context = Annotated[
    int | None, typer.Option(help="Tokens of a row and of the model's context; default: the preset's, or --init's.")
]
TokenizerFile = Annotated[
    Path | None, typer.Option(help="A tokenizer.json or a folder that holds one; default: train one on the data.")
]
Qat = Annotated[
    str | None,
    typer.Option(
        help="Train for a format that the linear layers compute in, and end in a quantized model: ternary (BitNet "
        "b1.58), int4_g128, int2_g64, ...; its float weights lie in OUTPUT/master.",
    ),
]
Activations = Annotated[
    str, typer.Option(help="With --qat ternary: int8, or int4 behind a Hadamard transform (BitNet v2).")
]
Distill = Annotated[
    Path | None,
    typer.Option(
        help="A teacher: a checkpoint, float or quantized, of the same tokenizer, whose predictions are learned from "
        "beside the text (BitDistill)."
    ),
]
DistillWeight = Annotated[
    float | None, typer.Option(help="With --distill: weight of the teacher's predictions; the text's is 1.")
]
Mlp = Annotated[str | None, typer.Option(help="swiglu or relu2; default: swiglu, or --init's.")]
SubNorms = Annotated[
    bool | None,
    typer.Option(
        "--sub-norms/--no-sub-norms",
        help="Norms before o_proj and down_proj, put into --init's model if it has none; default: --init's, or "
        "with --qat ternary.",
    ),
]
Needles = Annotated[
    float, typer.Option(help="Share of the rows that have key-value needles laid into their text and asked for.")
]
Steps = Annotated[int | None, typer.Option(help="Steps; default: the preset's.")]
BatchSize = Annotated[int | None, typer.Option(help="Rows in a step; default: the preset's.")]
Accumulate = Annotated[int | None, typer.Option(help="Forward passes summed up before a step.")]
LearningRate = Annotated[
    float | None,
    typer.Option(help="At its highest; default: the preset's, with --qat another (doubled, or less from --init)."),
]
Schedule = Annotated[
    str | None,
    typer.Option(help="cosine or two_stage (BitNet's); default: two_stage for --qat ternary from fresh weights."),
]
EvalEvery = Annotated[int, typer.Option(help="Steps between evaluations; 0: at the end only.")]
CheckpointEvery = Annotated[int, typer.Option(help="Steps between checkpoints to resume from; 0: none.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in OUTPUT.")]
Compile = Annotated[bool, typer.Option("--compile", help="Run the model through torch.compile.")]
Precision = Annotated[
    str, typer.Option(help="fp32 or bf16 (autocast; weights stay fp32); auto: bf16 on a GPU, fp32 on a CPU.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start anew: the run that is in OUTPUT is lost.")]
ListPresets = Annotated[
    bool, typer.Option("--list-presets", is_eager=True, callback=_list_presets, help="Show the presets' sizes.")
]


def train(
    output: Output,
    preset: Preset = "tiny",
    attention: Attention = None,
    init: Init = None,
    context: Context = None,
    data: Data = "stdlib",
    field: Field = "text",
    tokenizer: TokenizerFile = None,
    qat: Qat = None,
    activations: Activations = "int8",
    distill: Distill = None,
    distill_weight: DistillWeight = None,
    mlp: Mlp = None,
    sub_norms: SubNorms = None,
    needles: Needles = 0.0,
    steps: Steps = None,
    batch_size: BatchSize = None,
    accumulate: Accumulate = None,
    learning_rate: LearningRate = None,
    schedule: Schedule = None,
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
    """Train a model: DIFF version 1 or 2, or the plain Transformer of equal size that sees the same batches.

    Under torchrun every process takes its share of each batch:
    torchrun --nproc-per-node 8 -m diffbit train --preset base --attention diff_v1 -o out/base

    A ternary model, from training to a device: diffbit train --qat ternary -o out/b158, diffbit export out/b158 -o
    out/artifact, diffbit run out/artifact

    The same from a trained model, which is its own teacher: diffbit train --init out/float --qat ternary --distill
    out/float -o out/b158
    """
    from ..train import train as run_training
    from ..train import train_config

    set_quiet(quiet)
    changes: dict[str, Any] = dict(context=context, init=init, mlp=mlp, sub_norms=sub_norms)
    changes |= dict(source=data, field=field, tokenizer=tokenizer, needles=needles)
    changes |= dict(qat=qat, activations=activations)
    changes |= dict(distill=distill, distill_weight=distill_weight)
    changes |= dict(steps=steps, batch_size=batch_size, accumulate=accumulate)
    changes |= dict(learning_rate=learning_rate, schedule=schedule, seed=seed)
    changes |= dict(eval_every=eval_every, checkpoint_every=checkpoint_every)
    changes |= dict(device=device, compile=compiled, precision=precision)
    given = {name: value for name, value in changes.items() if value is not None}
    given |= {name: str(value) for name, value in given.items() if isinstance(value, Path)}
    config = train_config(preset, attention, **given)
    result = run_training(config, output, resume=resume, overwrite=overwrite)
    if os.environ.get("RANK", "0") != "0":  # under torchrun one process speaks for all
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
    if as_json:
        print_json(row)
    else:
        print_table([row])
