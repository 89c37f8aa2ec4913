"""Lets transformers' exporters (transformers.exporters, from 5.23 on) write diffbit's artifacts:

    import diffbit.apps.hub.transformers
    from transformers.exporters import AutoHfExporter
    config = DiffbitExportConfig(weights="int4_g32")              # or {"export_format": "diffbit", ...}
    AutoHfExporter.from_config(config).export(model, {}, config).save_pretrained("out")     # out/model is the artifact

Nothing is traced: the model is saved, then read like any other checkpoint, quantized and exported.
"""

from __future__ import annotations

import shutil
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel
from transformers.exporters import register_backend
from transformers.exporters.base import HfExporter
from transformers.exporters.configs import ExportConfigMixin
from transformers.exporters.metadata import ExportMetadata

from ...export import export_artifact
from ...formats import choose_format
from ...io.errors import DiffbitError
from ...io.tokenizer_files import tokenizer_files
from ...quantize import Scheme, quantize_checkpoint, table_formats


@dataclass
class DiffbitExportConfig(ExportConfigMixin):
    """weights: a number format, or None for float. tokenizer: its folder; default: the folder of the model."""

    export_format: str = "diffbit"
    weights: str | None = None
    tokenizer: str | None = None
    quantizer: None = None  # a field of transformers' own configs


class DiffbitExporter(HfExporter):
    """The exported program is the TemporaryDirectory that contains the artifact; it is deleted with that object."""

    export_format = "diffbit"
    config_class = DiffbitExportConfig
    program_suffix = ""

    def export_program(
        self, model: PreTrainedModel, sample_inputs: MutableMapping[str, Any], config: ExportConfigMixin
    ) -> tuple[TemporaryDirectory[str], ExportMetadata]:
        assert isinstance(config, DiffbitExportConfig)
        folder = TemporaryDirectory(prefix="diffbit-")
        checkpoint, artifact = Path(folder.name, "checkpoint"), Path(folder.name, "model")
        if getattr(model, "hf_quantizer", None) is not None:
            raise DiffbitError(
                "the model is already quantized; run `diffbit export` on the folder that it was loaded from"
            )
        model.save_pretrained(checkpoint)
        tokenizer = config.tokenizer or model.config.name_or_path
        if tokenizer and (config.tokenizer or Path(tokenizer).is_dir()):
            for name, data in tokenizer_files(Path(tokenizer)).items():
                if name != "generation_config.json":
                    (checkpoint / name).write_bytes(data)
        source = checkpoint
        if config.weights is not None:
            embedding, head = table_formats(True, None, None)
            scheme = Scheme(weights=choose_format(config.weights), embedding=embedding, head=head)
            source = Path(folder.name, "low")
            quantize_checkpoint(checkpoint, source, scheme)
        export_artifact(source, artifact)
        return folder, ExportMetadata(architecture=type(model).__name__, export_dtype="float32", export_device="cpu")

    @classmethod
    def save_program(cls, program: TemporaryDirectory[str], path: str | Path) -> None:
        shutil.copytree(Path(program.name, "model"), path)

    @classmethod
    def load_program(cls, path: str | Path) -> Path:
        return Path(path)


register_backend(DiffbitExporter)
