"""Methods: how float weights become low-bit ones. One file each, found by listing this folder (recipe.py).

A method's file has ONE of these functions:

    transform(layer) -> None                    before rounding: changes layer.tensors and not what the model computes
    quantize(weight, format, stats) -> QTensor  rounds a weight [N, K]; stats: CalibStats of its input, or None
    quantize_layer(layer) -> {module: QTensor}  rounds the weights of a layer together

and CALIBRATED, whether it needs calibration tokens. A transform may also have config(config) -> ModelConfig, that of
the model it makes; one that changes the embedding or the head must untie them there. layer.py says what a layer is.
"""
