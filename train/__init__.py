"""Training: presets, the run's options, the loop, checkpoints that resume."""

from .config import TrainConfig
from .folder import read_log
from .plot import plot_losses
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
