"""Other libraries that read or write diffbit's models. Each file needs its library:

    transformers.py     AutoModelForCausalLM reads quantized checkpoints
    exporter.py         transformers' AutoHfExporter writes artifacts

`optimum-cli export diffbit` is optimum_command/register/diffbit.py, which is installed into optimum's package.
"""
