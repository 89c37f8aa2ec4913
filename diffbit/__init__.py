"""diffbit: from a Differential Transformer checkpoint to a low-bit model on a device."""

__version__ = "0.1.0"
