"""Other libraries that read or make diffbit's models: a file each, which needs that library.

    transformers.py     AutoModelForCausalLM reads quantized checkpoints
    exporter.py         transformers' AutoHfExporter writes artifacts

`optimum-cli export diffbit` is optimum_command/register/diffbit.py, a file that is installed among optimum's own.
"""
