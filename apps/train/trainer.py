"""The training loop: AdamW (betas 0.9, 0.95), linear warm-up, cosine decay to a tenth, clipped gradients.

Files in `out`, the folder of a run:

    config.json, model.safetensors, tokenizer files    the trained model, after the last step
    log.jsonl        one line per step:
                         step, lr, tokens_per_second
                         loss              mean nats per token of the step's batch, before the update; of conversations,
                                           the tokens of answers count (answers.py)
                         grad_norm         norm of the gradient before clipping
                         eval_loss         the same on the held-out text after the step, if it was evaluated
                         lambda            with diff_v1: one number per layer
                         answer_loss       loss on the tokens of needles' answers, if the batch has any
                         distill_loss      with a teacher (distill.py): its loss, which `loss` does not include
                         auxiliary_loss    of mixers that have one (Mixer.auxiliary_loss); `loss` does not include it
                         flips, zeros      with qat: fraction of the quantized weights whose code the update changed,
                                           and whose code is 0
    loss.png         plot of these losses
    training.json    the options, the hashes of text and tokenizer, and the result
    master/          with qat: the float master weights, a model folder from which training can continue
    adapter/         with trainable "lora" and no qat: the adapters that are merged into the model, in PEFT's layout
    checkpoints/     during the run: see checkpoint.py

Under torchrun every process takes its share of each batch, and gradients are averaged (DistributedDataParallel).
Weights, gradients and moments are fp32 (adamw8bit: 8-bit moments). The forward pass runs under bf16 autocast on a GPU,
and on a CPU if `precision` is bf16: with AVX512-BF16 or AMX this takes 0.55 to 0.65 of the time (nano, 2 cores of a Zen
5 EPYC).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...calib_data import Conversation, Corpus, Needles, Windows, load_text, shares_of, stream, windows
from ...formats import QTensor
from ...io.drawing import require_matplotlib
from ...io.errors import DiffbitError, needs
from ...io.files import check_apart, locked, write_json
from ...io.processes import Processes, processes
from ...io.progress import track
from ...io.resources import require
from ...models import Checkpoint, Decoder, save_adapter
from ...models.attention import Attention
from ...models.checkpoint import shapes
from ...models.mixers import Mixer
from .answers import learned_of_each, learned_tokens
from .checkpoint import FOLDER, last_checkpoint, read_training, restore, save_checkpoint
from .config import TrainConfig
from .data import TokenizerFiles, TrainingRows, prepare_tokenizer
from .disk import disk_demand, present
from .distill import Teacher
from .folder import LOG, begin_run, check_folder, log_state, place_model, plot_losses, read_log, rewind_log
from .head_norm import add_gains
from .initialize import initialize, insert_sub_norms, load_start
from .lora import add_adapters, merge_adapters
from .loss import Objective
from .qat import QATLinear, prepare, refresh

BETAS = (0.9, 0.95)
FINAL_RATE = 0.1  # learning rate at the last step, relative to the highest
SECOND_PEAK = 2 / 3  # learning rate in the second of two stages, relative to the first
CALIBRATION_ROWS = 16  # rows of the training text to fit sub-norms on
ANSWER_WEIGHT = 10.0  # weight in the loss of a token that answers a query; there are few of them
AUXILIARY_WEIGHT = 0.01  # of mixers' losses, beside that of the text (MoH, arXiv 2410.11842, section 3)


@dataclass(frozen=True)
class TrainResult:
    """The result of a run."""

    losses: list[float]  # of each step, nats per token
    eval_loss: float  # nats per token of the held-out text, after the last step
    path: Path
    tokens: int  # number of tokens trained on, with repetitions
    seconds: float  # for steps, evaluation and checkpoints; since the resumption for a resumed run


def train(
    config: TrainConfig,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    render: Callable[[Any], str] | None = None,
) -> TrainResult:
    """Train a model into the folder `out` (see the module's docstring).

    `resume` continues from the last checkpoint of the same run in `out`; on the CPU the losses equal those of an
    uninterrupted run bit for bit. `overwrite` deletes an earlier run in `out`. `render` makes text of conversations
    (calib_data.load_text). Under torchrun, call this in every
    process. Raises DiffbitError for a folder, text, tokenizer or checkpoint that does not fit, for a disk without room
    for the run's files (disk.py), and for a run that diverges.
    """
    out = Path(out)
    check_folder(out, resume=resume, overwrite=overwrite)
    if overwrite and not resume:
        inputs = *shares_of(config.source), config.tokenizer, config.init, config.distill
        check_apart(out, *(path for path in inputs if path is not None))
    require_matplotlib()  # if matplotlib or bitsandbytes is missing, fail now: an earlier run in `out` is still there
    optimizer_class(config)
    workers = processes(config.device)
    workers.wait()  # every process checks the folder before the first process writes there
    try:
        run = _prepared(config, out, workers, render)  # reads all that goes into the run, and writes nothing
        if workers.first:
            disk = disk_demand(run.model, run.config, sum(map(len, run.tokenizer_files.values())))
            require(f"training into {out}", 0, disk - present(out), out)
        with locked(out) if workers.first else nullcontext():
            return _train(run, resume)
    except BaseException as error:
        if not isinstance(error, Exception) and any((out / FOLDER).glob("step-*")):  # interrupted, such as by Ctrl-C
            error.add_note(f"{last_checkpoint(out)} is complete: the same command with --resume continues from it")
        raise


def _prepared(config: TrainConfig, out: Path, workers: Processes, render: Callable[[Any], str] | None) -> _Run:
    text = load_text(config.source, "train", field=config.field, limit=config.limit, render=render)
    held_out = load_text(config.source, "eval", field=config.field, render=render)
    files = workers.on_first(lambda: prepare_tokenizer(config, text))
    return _Run(config, out, workers, text, held_out, files, render)


def _train(run: _Run, resume: bool) -> TrainResult:
    config, out, workers = run.config, run.out, run.workers
    if workers.first and not resume:
        begin_run(out)
    workers.wait()
    done = run.resume() if resume else 0
    start = time.perf_counter()
    run.steps(done)
    seconds = time.perf_counter() - start
    if workers.first:
        run.finish(seconds)
    workers.wait()
    log = read_log(out)
    losses, tokens = [row["loss"] for row in log], config.steps * run.batch * config.length
    return TrainResult(losses, log[-1]["eval_loss"], out, tokens, seconds)


class _Run:
    """A run's text, model and optimizer, in one process."""

    def __init__(
        self, config: TrainConfig, out: Path, workers: Processes, text: Corpus, held_out: Corpus, files: TokenizerFiles,
        render: Callable[[Any], str] | None,
    ) -> None:  # fmt: skip
        self.out, self.workers, self.tokenizer_files = out, workers, files.files
        tokenizer = files.open(Path(config.tokenizer or out))
        eos = tokenizer.eos_id
        self.batch = config.batch_size * config.accumulate * workers.count  # rows per step
        tokens, _ = stream(tokenizer.encode(text.documents), eos)
        needles = Needles.of(tokenizer) if config.needles else None
        learned = None if render is None else learned_tokens(text.documents, tokenizer, render)
        self.rows = TrainingRows(tokens, config.length, config.seed, needles, config.needles, learned)
        if config.init is None or config.tokenizer != config.init or not config.model.eos_token_ids:
            config = replace(config, model=replace(config.model, bos_token_id=eos, eos_token_ids=(eos,)))
        self.config = config = config.scheduled(self.rows.per_epoch, self.batch)
        ids = tokenizer.encode(held_out.documents)
        cut = partial(windows, length=config.length, max_windows=config.eval_windows, source=config.source)
        self.held_out = cut(ids, eos_id=eos)
        if render is not None and any(isinstance(text, Conversation) for text in held_out.documents):
            parts = learned_of_each(held_out.documents, tokenizer, render)  # in the same windows
            flags = cut((learned.astype(np.int64) for learned in parts), eos_id=0).ids > 0
            if (target := self.held_out.target & flags).any():
                self.held_out = replace(self.held_out, target=target)
        self.about: dict[str, Any] = {
            "config": self.config.to_dict(),
            "processes": workers.count,
            "text_sha256": text.sha256,
            "text_counts": {**text.counts, "tokens": len(tokens)},
            "learned_tokens": len(tokens) if learned is None else int(learned.sum()),
            "eval_sha256": self.held_out.sha256,
            "tokenizer_sha256": tokenizer.sha256,
        }
        if config.init is not None:
            self.about["init_sha256"] = Checkpoint(config.init).sha256()

        torch.manual_seed(config.seed)
        self.model = Decoder(self.config.model)
        quantized: dict[str, QTensor] = {}
        if config.init is None:
            initialize(self.model, config.seed, config.o_proj_init, config.lambda_bias or 0.0)
        else:
            source, quantized = load_start(config.init)
            if self.config.model.sub_norms == source.config.sub_norms:
                self.model.load_state_dict(source.state_dict())
            elif config.adapts_floats:
                raise DiffbitError(
                    "sub-norms have to be trained, and --lora trains nothing but adapters; leave them out"
                )
            else:
                insert_sub_norms(source, self.model, torch.from_numpy(self.rows.take(0, CALIBRATION_ROWS)[0][:, :-1]))
        self.model.to(workers.device)
        if config.head_gain is not None:
            add_gains(self.model, config.head_gain)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(config.trains(name))
        self.layers: list[QATLinear] = []
        if config.scheme is not None:
            self.layers = prepare(self.model, config.scheme, config.trainable, quantized, config.rank)
        self.adapters = add_adapters(self.model, config) if config.adapts_floats else {}
        self.teacher = Teacher(self.config, tokenizer, workers.device) if config.distill else None
        if self.teacher is not None:
            self.about["distill_sha256"] = self.teacher.sha256
        self.optimizer = adamw(self.model, config)
        self.objective = Objective(self.model, self.teacher, config.distill_weight, config.compile)
        self.parallel: DistributedDataParallel | None = None
        if workers.count > 1:
            devices = [workers.device] if workers.device.type == "cuda" else None
            self.parallel = DistributedDataParallel(self.objective, devices)

    def resume(self) -> int:
        """Load the last checkpoint and return its step."""
        folder = last_checkpoint(self.out)
        before = read_training(folder)
        if different := self.config.differences(before.get("config", {})):
            raise DiffbitError(
                f"{folder}: belongs to a run with other values of {' and '.join(different)}; "
                "resume with the options in its training.json, or start a new run"
            )
        for key in ("processes", "text_sha256", "tokenizer_sha256", "init_sha256", "distill_sha256"):
            if before.get(key) != self.about.get(key):
                raise DiffbitError(
                    f"{folder}: was trained with {key} {before.get(key)}, now it is {self.about.get(key)}; resume with "
                    "the same text, tokenizer, initial weights, teacher and number of processes, or start a new run"
                )
        step: int = before["step"]
        restore(folder, step, self.model, self.optimizer)
        if self.layers:
            refresh(self.layers)
        if self.workers.first:
            rewind_log(self.out, before["log"])
        return step

    def steps(self, done: int) -> None:
        """Train all steps after step `done`."""
        config, first = self.config, self.workers.first
        remaining: Iterable[int] = range(done + 1, config.steps + 1)
        if first:
            remaining = track(remaining, f"training {config.model.attention}", config.steps - done)
        with (self.out / LOG).open("a", encoding="utf-8") if first else nullcontext() as log:
            for step in remaining:
                row = self.step(step)
                if log is None:
                    continue
                if step == config.steps or (config.eval_every and step % config.eval_every == 0):
                    row["eval_loss"] = evaluation_loss(self.model, self.held_out, config.batch_size, config.precision)
                log.write(json.dumps(row) + "\n")
                log.flush()
                if config.checkpoint_every and step % config.checkpoint_every == 0 and step < config.steps:
                    state = {"step": step, **self.about, "log": log_state(self.out)}
                    save_checkpoint(self.out, self.model, self.optimizer, self.tokenizer_files, state)

    def step(self, step: int) -> dict[str, Any]:
        """Train on the batch of a step (1 ... steps): forward, backward, update. Returns the step's line of the log."""
        config, workers = self.config, self.workers
        begin = time.perf_counter()
        rate = learning_rate(config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.param_groups[0]["weight_decay"] = weight_decay(config, step)
        rows, answers = map(torch.from_numpy, self.rows.take((step - 1) * self.batch, self.batch))
        counted = torch.from_numpy(self.rows.counted((step - 1) * self.batch, self.batch)) | answers
        total = max(1, int(counted[:, 1:].sum()))  # tokens of the batch that the loss counts
        # the losses of mixers and of the teacher are of all tokens, so that of the text is made as large
        tokens = self.batch * config.length
        sums = torch.zeros(4, device=workers.device)  # losses of these tokens, answers, the teacher; auxiliary ones
        for index in range(config.accumulate):
            first = (index * workers.count + workers.rank) * config.batch_size
            ids = rows[first : first + config.batch_size].to(workers.device)  # [B, S + 1]
            answer, counts = (
                mask[first : first + config.batch_size, 1:].to(workers.device) for mask in (answers, counted)
            )  # [B, S]
            last = index == config.accumulate - 1
            for layer in self.layers:
                layer.gathers = not last
            with nullcontext() if self.parallel is None or last else self.parallel.no_sync():
                with _autocast(workers.device, config.precision):
                    weights = tokens / total * counts * (1 + (ANSWER_WEIGHT - 1) * answer)
                    loss, losses, distilled = (self.parallel or self.objective)(ids, weights)
                auxiliary = losses.numel() * auxiliary_loss(self.model)
                loss = loss + AUXILIARY_WEIGHT * auxiliary
                (loss * workers.count / tokens).backward()  # processes' gradients are averaged
            sums += torch.stack(((losses * counts).sum(), (losses * answer).sum(), distilled, auxiliary)).detach()
        if workers.count > 1:
            dist.all_reduce(sums)
        loss = sums[0] / total
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip))
        if not (math.isfinite(float(loss)) and math.isfinite(grad_norm)):
            raise DiffbitError(
                f"step {step}: the loss is {float(loss)} and the gradient's norm {grad_norm}: the run diverged; "
                "lower learning_rate or lengthen warmup"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        row: dict[str, Any] = {"step": step, "loss": float(loss), "lr": rate, "grad_norm": grad_norm}
        row["tokens_per_second"] = round(tokens / (time.perf_counter() - begin), 1)
        if count := int(answers.sum()):
            row["answer_loss"] = float(sums[1]) / count
        if self.teacher is not None:
            row["distill_loss"] = float(sums[2]) / tokens
        if sums[3]:
            row["auxiliary_loss"] = float(sums[3]) / tokens
        if self.layers:
            row |= refresh(self.layers)
        if values := lambdas(self.model):
            row["lambda"] = values
        return row

    def finish(self, seconds: float) -> None:
        """Write loss.png, training.json and the model."""
        log = read_log(self.out)
        plot_losses({self.config.model.attention: log}, self.out / "loss.png")
        result = {"loss": log[-1]["loss"], "eval_loss": log[-1]["eval_loss"], "seconds": round(seconds, 2)}
        write_json(self.out / "training.json", {**self.about, "result": result})
        for layer in self.layers:
            layer.fold()
        write_adapter = None
        if self.adapters:
            assert self.config.init is not None
            halves = {
                name: (layer.down.detach().cpu(), layer.up.detach().cpu()) for name, layer in self.adapters.items()
            }
            write_adapter = partial(save_adapter, base=Checkpoint(self.config.init), adapters=halves)
            merge_adapters(self.model)
        place_model(self.model, self.out, self.tokenizer_files, self.config.scheme, write_adapter)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of a step (1 ... steps): peak * step / warmup during the warm-up, then the schedule.

    cosine      peak * (0.1 + 0.9 (1 + cos(pi t)) / 2), t in (0, 1] over the steps after the warm-up
    two_stage   peak * (1 - t), t = (step - 1) / steps; 2/3 of that in the second half of the run. High rates help when
                small updates do not change any code (The Era of 1-bit LLMs: Training Tips, Code and FAQ, 2024)
    """
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    if config.schedule == "two_stage":
        left = 1 - (step - 1) / config.steps
        return config.learning_rate * (left if step <= config.steps // 2 else SECOND_PEAK * left)
    t = (step - config.warmup) / (config.steps - config.warmup)
    return config.learning_rate * (FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * t)) / 2)


def weight_decay(config: TrainConfig, step: int) -> float:
    """Weight decay of matrices at a step; 0 in the second stage, in which ternary weights should stop changing."""
    return config.weight_decay if config.schedule == "cosine" or step <= config.steps // 2 else 0.0


def optimizer_class(config: TrainConfig) -> Callable[..., torch.optim.Optimizer]:
    """torch's AdamW, or that of bitsandbytes, whose moments have 8 bits and an fp32 absmax per block of 256 (arXiv
    2110.02861); tensors of fewer than 4096 elements keep fp32. Raises MissingDependency without bitsandbytes."""
    if config.optimizer == "adamw":
        return partial(torch.optim.AdamW, fused=True)
    with needs("bitsandbytes", "lab", "the optimizer adamw8bit"):
        from bitsandbytes.optim import AdamW8bit
    return partial(AdamW8bit)


def adamw(model: Decoder, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay for matrices, but not for norms, lambda vectors and learned scales."""
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (config.weight_decay, 0.0)]
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim >= 2 and name in shapes(model.config)
        groups[0 if decays else 1]["params"].append(parameter)
    return optimizer_class(config)(groups, lr=config.learning_rate, betas=BETAS)


@torch.no_grad()
def evaluation_loss(model: Decoder, held_out: Windows, batch_size: int, precision: str = "auto") -> float:
    """Return the mean loss over the windows, in nats per scored token."""
    device, objective = next(model.parameters()).device, Objective(model)
    total = 0.0
    for begin in range(0, len(held_out.ids), batch_size):
        ids = torch.from_numpy(held_out.ids[begin : begin + batch_size]).to(device)
        target = torch.from_numpy(held_out.target[begin : begin + batch_size]).to(device)[:, 1:]
        with _autocast(device, precision):  # padding is at the end, where causal attention hides it
            losses = objective(ids, target)[1]  # [B, S - 1]
        total += float(losses[target].double().sum())
    return total / held_out.scored


def auxiliary_loss(model: Decoder) -> torch.Tensor:
    """Return the mean of the auxiliary losses that mixers had in the last forward pass, which clears them; 0 if there
    are none."""
    mixers = [part for part in model.modules() if isinstance(part, Mixer)]
    losses = [mixer.auxiliary_loss for mixer in mixers if mixer.auxiliary_loss is not None]
    for mixer in mixers:
        mixer.auxiliary_loss = None
    return torch.stack(losses).mean() if losses else torch.zeros((), device=next(model.parameters()).device)


def lambdas(model: Decoder) -> list[float]:
    """lambda of each layer if it is a scalar (diff_v1); empty for the other variants."""
    values = [part.lambda_value() for part in model.modules() if isinstance(part, Attention)]
    return [float(value.detach()) for value in values if value is not None]


def _autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    half = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16) if half else nullcontext()
