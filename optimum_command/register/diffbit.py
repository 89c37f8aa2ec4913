"""`optimum-cli export diffbit` quantizes a model and exports it from optimum's command line.

A package of its own installs this file as optimum/commands/register/diffbit.py, where optimum looks for commands of
others (a namespace package, PEP 420: no __init__.py). optimum imports it at each start, so large packages are imported
only when the command runs.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand

QUANTIZE = ("weights", "method", "kv", "calibrate", "max_windows")  # options of `diffbit quantize`
EXPORT = ("target", "dtype")  # options of `diffbit export`


class DiffbitExportCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo("diffbit", help="Quantize a model and export it to a diffbit artifact (ONNX).")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.add_argument(
            "-m", "--model", required=True, help="Model: a folder, a GGUF file, or its name on the hub."
        )
        parser.add_argument("output", type=Path, help="Output folder.")
        parser.add_argument("--weights", help="Weight format, such as int4_g32, int8 or ternary; default: float.")
        parser.add_argument("--method", help="Quantization method, such as gptq or awq; default: rtn.")
        parser.add_argument("--kv", help="KV cache format, such as int8.")
        parser.add_argument("--calibrate", help="Calibration text; default: mix.")
        parser.add_argument("--max-windows", help="Number of windows of calibration text.")
        parser.add_argument("--target", choices=("cpu", "cuda", "webgpu"), help="Device that the operators are for.")
        parser.add_argument("--dtype", choices=("fp32", "fp16"), help="Precision of all that is not quantized.")
        parser.add_argument("--overwrite", action="store_true", help="Replace the output folder.")

    def run(self) -> None:
        from diffbit.cli.app import main
        from diffbit.cli.output import print_error
        from diffbit.io.errors import DiffbitError
        from diffbit.io.files import check_place

        try:  # before the work
            check_place(self.args.output, overwrite=self.args.overwrite)
        except DiffbitError as error:
            print_error(str(error))
            raise SystemExit(2) from None

        def options_of(names: tuple[str, ...]) -> list[str]:
            values = {name: getattr(self.args, name) for name in names}
            return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]

        model = self.args.model
        if not Path(model).exists() and not model.startswith("hf:"):
            model = f"hf:{model}"
        export = ["-o", str(self.args.output), *options_of(EXPORT), *(["--overwrite"] if self.args.overwrite else [])]
        with TemporaryDirectory(prefix="diffbit-") as folder:
            if quantize := options_of(QUANTIZE):
                low = str(Path(folder, self.args.output.name))
                try:
                    main(["quantize", model, "-o", low, *quantize, "--quiet"])
                except SystemExit as end:
                    if end.code:
                        raise
                model = low
            main(["export", model, *export])


REGISTER_COMMANDS = [(DiffbitExportCommand, ExportCommand)]
