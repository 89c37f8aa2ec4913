"""Training: presets, options, the training loop, quantization-aware training, distillation, checkpoints."""

from .config import TrainConfig
from .folder import plot_losses, read_log
from .presets import PRESETS, model_config, parameters, train_config
from .trainer import TrainResult, evaluation_loss, lambdas, train

__all__ = [
    "PRESETS",
    "TrainConfig",
    "TrainResult",
    "evaluation_loss",
    "lambdas",
    "model_config",
    "parameters",
    "plot_losses",
    "read_log",
    "train",
    "train_config",
]
