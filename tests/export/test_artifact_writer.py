"""The artifact's folder: the graph's form, the manifest, the configs, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from diffbit import DiffbitError, runtime
from diffbit.export import export_artifact, reference_model
from diffbit.export.artifact_writer import NOISE, golden_prompt
from diffbit.formats import parse_format
from diffbit.models import Decoder, load, save
from diffbit.ops import diff_attention
from diffbit.ops.cache import Buffer
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint

from ..runtime.toy import seal
from .conftest import Maker
from .helpers import (
    CONFIG,
    VARIANTS,
    config_of,
    graph_of,
    write_artifact,
    write_model,
    write_quantized,
    write_tokenizer,
)


def test_diff_v1_holds_the_op_and_its_body(checkpoint_of: Maker) -> None:
    artifact = write_artifact(checkpoint_of("diff_v1", "int4_g32"))
    model = graph_of(artifact)
    assert (model.ir_version, {o.domain: o.version for o in model.opset_import}) == (
        10,
        {"": 21, "com.microsoft": 1, "diffbit": 1},
    )
    nodes = [node for node in model.graph.node if node.op_type == "DiffAttention"]
    assert len(nodes) == 2 and all(node.domain == "diffbit" for node in nodes)
    assert {a.name: a.i for a in nodes[0].attribute if a.type == a.INT} == {
        "num_heads": 2,
        "num_kv_heads": 2,
        "wide_value": 1,
        "branches": 2,
        "noise_ratio": 1,
        "key_bits": 16,
        "value_bits": 16,
        "query_bits": 0,
        "window": 0,
        "first": 0,
        "sliding_window": 0,
        "spec_version": diff_attention.OP.version,
    }
    functions = sorted((f.domain, f.name) for f in model.functions)
    assert functions == [("diffbit", "DiffAttention"), ("diffbit", "Int4MatMul"), ("diffbit", "SiluGate")]
    # what does not depend on the layer is there once: T - S, and that of each row
    assert sum(node.op_type == "Sub" for node in model.graph.node) == 2


@pytest.mark.parametrize("attention", ["softmax", "diff_v2"])
def test_plain_attention_has_group_query_attention_as_the_body(
    checkpoint_of: Maker, attention: str, tmp_path: Path
) -> None:
    artifact = write_artifact(checkpoint_of(attention))
    nodes = [node for node in graph_of(artifact).graph.node if node.op_type == "DiffAttention"]
    assert len(nodes) == 2 and all(
        attribute.i == 1 for node in nodes for attribute in node.attribute if attribute.name == "branches"
    )
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    ort.InferenceSession(str(artifact / "model.onnx"), options)
    op_types = [
        node.op_type for node in onnx.load(options.optimized_model_filepath, load_external_data=False).graph.node
    ]
    assert op_types.count("GroupQueryAttention") == 2 and op_types.count("RotaryEmbedding") == 4
    assert op_types.count("Where") == op_types.count("Squeeze") == 1  # one mask and one length for all layers


def test_more_kinds_of_attention_than_names_are_refused(tmp_path: Path) -> None:
    mixer = config_of("diff_v1").layers[0].mixer
    layers = tuple(replace(CONFIG.layers[0], mixer=replace(mixer, sliding_window=n)) for n in range(7))
    with pytest.raises(DiffbitError, match="DiffAttention with more than 6 different signatures"):
        write_artifact(write_model(tmp_path / "m", replace(CONFIG, layers=layers)))


@pytest.mark.parametrize("attention", VARIANTS)
def test_weights_are_external_and_named_after_their_layer(checkpoint_of: Maker, attention: str) -> None:
    artifact = write_artifact(checkpoint_of(attention, "int4_g32"))
    model = graph_of(artifact)
    for tensor in model.graph.initializer:
        small = tensor.name.startswith("constant_") or tensor.name in ("logits_from", "shorter_by")
        assert (tensor.data_location == onnx.TensorProto.EXTERNAL) != small, tensor.name
        if small:
            assert len(tensor.raw_data) <= 64
        else:
            fields = {entry.key: entry.value for entry in tensor.external_data}
            assert fields["location"] == "model.onnx.data" and int(fields["offset"]) % 64 == 0
    names = {tensor.name for tensor in model.graph.initializer}
    assert {"embed_tokens.weight", "norm.weight", "lm_head.weight", "cos", "sin"} <= names
    assert "layers.1.self_attn.q_proj+k_proj+v_proj.codes" in names and "layers.0.mlp.down_proj.scale" in names
    assert (artifact / "model.onnx").stat().st_size < 60_000
    graph_inputs = {value.name for value in model.graph.input}
    assert not graph_inputs & names  # else ONNX Runtime prints a warning for each
    assert json.loads((artifact / "diffbit.json").read_text())["optional_inputs"] == ["shorter_by", "logits_from"]


def test_the_checker_accepts_graph_and_functions(checkpoint_of: Maker, tmp_path: Path) -> None:
    """All but SimplifiedLayerNormalization, which ONNX Runtime adds to the default domain and onnx does not know."""
    artifact = write_artifact(checkpoint_of("diff_v1", "ternary"))
    model = graph_of(artifact)
    assert sorted(function.name for function in model.functions) == ["DiffAttention", "SiluGate", "TernaryMatMul"]
    for node in model.graph.node:
        if node.op_type == "SimplifiedLayerNormalization":
            node.domain = "com.microsoft"  # domains that the checker has no schemas for are passed over
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "model.onnx.data").write_bytes((artifact / "model.onnx.data").read_bytes())
    onnx.checker.check_model(tmp_path / "model.onnx")


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("attention", VARIANTS)
def test_manifest_and_golden_logits(checkpoint_of: Maker, attention: str, dtype: str) -> None:
    checkpoint = checkpoint_of(attention, "int4_g32")
    artifact = write_artifact(checkpoint, dtype)
    opened = runtime.Artifact.open(artifact)
    assert opened.dtype == dtype
    heads, kind = 2 if attention == "diff_v1" else 1, {"fp32": "float32", "fp16": "float16"}[dtype]
    in_place = "native" if attention == "diff_v1" else "always"
    layer = tuple(Buffer(part, kind, (heads, "tokens", 32), in_place) for part in ("key", "value"))
    assert opened.cache.layers == (layer,) * config_of(attention).num_layers
    assert opened.model == config_of(attention).to_dict() and opened.eos_token_ids == (3,)
    assert Scheme.from_dict(opened.scheme) == Scheme(weights=parse_format("int4_g32"))
    assert set(opened.files) == {path.name for path in artifact.iterdir()} - {"diffbit.json"}
    # the golden logits, streamed layer by layer, are those of the whole model
    golden = opened.golden
    with torch.inference_mode():
        logits = reference_model(checkpoint)(torch.tensor([golden.input_ids]))[0, -1]
    assert np.allclose(golden.logits, logits[list(golden.token_ids)], atol=1e-5)
    assert golden.spread == pytest.approx(float(logits.std()), rel=1e-5)
    assert int(logits.argmax()) in golden.token_ids
    result = runtime.verify(artifact)
    assert result.passed, result.failures
    assert golden.tolerance < 0.5


def test_tolerance_covers_other_codes_in_the_first_layer(tmp_path: Path) -> None:
    """Another machine may round some of its activations to other codes; binary weights make much of one code."""
    source = tmp_path / "model"
    torch.manual_seed(0)
    save(Decoder(config_of("softmax", num_layers=1, hidden_size=128)), source)
    write_tokenizer(source, CONFIG.vocab_size)
    golden = runtime.Artifact.open(write_artifact(write_quantized(source, "int2_g64"))).golden
    model = reference_model(source.with_name("model-int2_g64"))
    with torch.inference_mode():
        logits = model(ids := torch.tensor([golden.input_ids]))[0, -1]
        noise = NOISE["fp32", True]
        model.model.embed_tokens.register_forward_hook(lambda _, __, x: x * (1 + noise * torch.randn_like(x)))
        differences = [float((model(ids)[0, -1] - logits).abs().max()) / golden.spread for _ in range(8)]
    assert 1e-2 < max(differences) < golden.tolerance


def test_verify_notices_a_wrong_weight(checkpoint_of: Maker, tmp_path: Path) -> None:
    """Files whose hashes are right but whose numbers are not: the checkpoint's scale of one layer is doubled."""
    checkpoint = checkpoint_of("diff_v1")
    decoder = load(checkpoint)
    artifact = write_artifact(checkpoint)
    golden = json.loads((artifact / "diffbit.json").read_text())["golden"]
    with torch.no_grad():
        decoder.model.layers[1].mlp.down_proj.weight.mul_(1.05)
    save(decoder, tmp_path / "other", tokenizer_from=checkpoint)
    other = export_artifact(tmp_path / "other", tmp_path / "onnx")
    manifest = json.loads((other / "diffbit.json").read_text())
    manifest["golden"] = golden
    manifest["sha256"] = runtime.artifact.manifest_sha256(manifest)
    (other / "diffbit.json").write_text(json.dumps(manifest))
    result = runtime.verify(other)
    assert [check.name for check in result.failures] == ["logits"]


def test_configs_for_other_loaders(checkpoint_of: Maker) -> None:
    artifact = write_artifact(checkpoint_of("diff_v1"))
    config = json.loads((artifact / "config.json").read_text())
    assert config["model_type"] == "llama" and config["num_attention_heads"] == 4
    assert config["num_key_value_heads"] == 2 and config["head_dim"] == 32
    genai = json.loads((artifact / "genai_config.json").read_text())
    assert genai["model"]["type"] == "decoder" and genai["search"]["past_present_share_buffer"] is False
    assert json.loads((artifact / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 3}


def test_context_length_bounds_the_tables(checkpoint_of: Maker, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("softmax")
    artifact = export_artifact(checkpoint, tmp_path / "a", context_length=9)
    tables = {t.name: tuple(t.dims) for t in graph_of(artifact).graph.initializer if t.name in ("cos", "sin")}
    assert tables == {"cos": (9, 16), "sin": (9, 16)}
    assert len(golden_prompt(config_of("softmax"), 9, AttentionScheme())) == 9
    lengths = [
        len(golden_prompt(config_of("softmax"), 100_000, AttentionScheme(keys="int4", window=window)))
        for window in (0, 32, 5000)
    ]
    assert lengths == [80, 112, 512]  # groups settle in it, but a large window does not make it large
    genai = json.loads((artifact / "genai_config.json").read_text())
    assert json.loads((artifact / "config.json").read_text())["max_position_embeddings"] == 9
    assert genai["model"]["context_length"] == genai["search"]["max_length"] == 9
    session = runtime.Session(artifact)
    assert session.capacity == 9 and runtime.verify(artifact).passed
    for length in (0, 49):
        with pytest.raises(DiffbitError, match=f"context_length is {length}, wanted 1 to 48"):
            export_artifact(checkpoint, tmp_path / "b", context_length=length)


@pytest.mark.parametrize("vocab_size", [23, 300])
def test_hidden_states_of_another_width_than_the_vocabulary(
    checkpoint_of: Maker, tmp_path: Path, vocab_size: int
) -> None:
    """The golden prompt keeps some of them by their index, which is not a token's."""
    artifact = export_artifact(checkpoint_of("diff_v1", vocab_size=vocab_size), tmp_path / "a", embeddings=True)
    assert runtime.verify(artifact).passed and runtime.Artifact.open(artifact).width != vocab_size
    manifest = json.loads((artifact / "diffbit.json").read_text())
    manifest["golden"]["token_ids"][0] = width = runtime.Artifact.open(artifact).width
    seal(artifact, manifest)
    with pytest.raises(DiffbitError, match=rf"golden.token_ids\[0\] is {width}, wanted"):
        runtime.Artifact.open(artifact)
    with pytest.raises(DiffbitError, match="onnxruntime-genai cannot run this model"):
        export_artifact(checkpoint_of("diff_v1"), tmp_path / "b", embeddings=True, library=True)


def test_head_and_lambda_projection_may_be_quantized(checkpoint_of: Maker, tmp_path: Path) -> None:
    """Also where the float model ties its head to the embedding; and some layers in another format, or float."""
    source = checkpoint_of("diff_v2", tie_embeddings=True)
    overrides = (
        ("lm_head", parse_format("int8")),
        ("*.lambda_proj", parse_format("int4_g32")),
        ("model.layers.0.*", None),
        ("*.1.mlp.*", parse_format("int2_g32_asym")),
    )
    quantize_checkpoint(source, tmp_path / "q", Scheme(parse_format("nf4"), overrides=overrides))
    artifact = export_artifact(tmp_path / "q", tmp_path / "a")
    counts: dict[str, int] = {}
    for node in graph_of(artifact).graph.node:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    # q, k, v are one product, gate and up another. Float: layer 0 but its lambda_proj; nf4: q, k, v, o of layer 1;
    # integers: its MLP, two lambda_proj and the head
    products = {name: counts[name] for name in ("MatMul", "MatMulBnb4", "MatMulNBits", "Int4MatMul", "Int8MatMul")}
    assert products == {"MatMul": 4, "MatMulBnb4": 2, "MatMulNBits": 2, "Int4MatMul": 2, "Int8MatMul": 1}
    assert runtime.verify(artifact).passed


def test_an_existing_folder_is_replaced_only_when_asked(checkpoint_of: Maker, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("softmax")
    artifact = export_artifact(checkpoint, tmp_path / "a")
    before = (artifact / "diffbit.json").read_bytes()
    with pytest.raises(DiffbitError, match="overwrite"):
        export_artifact(checkpoint, artifact, dtype="fp16")
    assert (artifact / "diffbit.json").read_bytes() == before
    export_artifact(checkpoint, artifact, dtype="fp16", overwrite=True)
    assert runtime.Artifact.open(artifact).dtype == "fp16"


def test_a_failed_export_leaves_nothing(checkpoint_of: Maker, tmp_path: Path) -> None:
    decoder = load(checkpoint_of("softmax"))
    with torch.no_grad():
        decoder.model.layers[1].mlp.up_proj.weight[3, 5] = 1e6
    save(decoder, tmp_path / "huge", tokenizer_from=checkpoint_of("softmax"))
    with pytest.raises(DiffbitError, match=r"layers\.1\.mlp\.gate_proj\+up_proj\.weight: holds 1e\+06.*65504.*fp32"):
        export_artifact(tmp_path / "huge", tmp_path / "a", dtype="fp16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["huge"]


def test_bad_input_is_refused(checkpoint_of: Maker, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("diff_v1")
    with pytest.raises(DiffbitError, match="dtype is 'bf16', wanted one of fp32, fp16"):
        export_artifact(checkpoint, tmp_path / "a", dtype="bf16")
    quantize_checkpoint(checkpoint, tmp_path / "nf4", Scheme(parse_format("nf4"), activations="int8"))
    with pytest.raises(DiffbitError, match="nf4 weights and the scheme asks for int8 activations"):
        export_artifact(tmp_path / "nf4", tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_tokenizers(checkpoint_of: Maker, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("softmax")
    save(load(checkpoint), tmp_path / "bare")
    with pytest.raises(DiffbitError, match=r"holds no tokenizer\.json.*--tokenizer"):
        export_artifact(tmp_path / "bare", tmp_path / "a")
    with pytest.raises(DiffbitError, match=r"is not a tokenizer\.json"):
        export_artifact(tmp_path / "bare", tmp_path / "a", tokenizer=tmp_path)
    for tokenizer in (checkpoint, checkpoint / "tokenizer.json"):
        artifact = export_artifact(tmp_path / "bare", tmp_path / "a", tokenizer=tokenizer, overwrite=True)
        assert (artifact / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
        assert (artifact / "tokenizer_config.json").exists()


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "BFLOAT16"), (torch.float16, "FLOAT16")])
def test_a_16_bit_embedding_stays_16_bits(tmp_path: Path, dtype: torch.dtype, kind: str) -> None:
    checkpoint = write_model(tmp_path / "model", config_of("diff_v1"), dtype)
    artifact = export_artifact(checkpoint, tmp_path / "artifact")
    (table,) = (t for t in graph_of(artifact).graph.initializer if t.name == "embed_tokens.weight")
    assert onnx.TensorProto.DataType.Name(table.data_type) == kind
    prompt = [[5, 1, 7, 2]]
    with torch.inference_mode():
        want = load(checkpoint).float()(torch.tensor(prompt))[0, -1]
    for native in (True, False):
        got = runtime.Session(artifact, native=native).prefill(prompt)[0]
        np.testing.assert_allclose(got, want.numpy(), atol=1e-5 * float(want.std()) + 1e-6)


def test_a_tied_embedding_is_in_the_graphs_dtype(tmp_path: Path) -> None:
    checkpoint = write_model(tmp_path / "model", config_of("diff_v1", tie_embeddings=True), torch.bfloat16)
    artifact = export_artifact(checkpoint, tmp_path / "artifact")
    (table,) = (t for t in graph_of(artifact).graph.initializer if t.name == "embed_tokens.weight")
    assert table.data_type == onnx.TensorProto.FLOAT and runtime.verify(artifact).passed


def test_the_manifest_has_the_texts_of_a_chat_template(checkpoint_of: Maker, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint_of("softmax"), tmp_path / "source")
    assert "chat" not in manifest_of(export_artifact(source, tmp_path / "plain"))
    (source / "tokenizer_config.json").write_text('{"eos_token": "w3"}')
    (source / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]")
    slots = {name: {"text": f"[{name}]", "strip": ""} for name in ("user", "assistant", "system")}
    assert manifest_of(export_artifact(source, tmp_path / "talks"))["chat"] == slots | {
        "first": slots["user"], "after_system": slots["user"], "prompt": "[a]", "end": "w3",
    }  # fmt: skip
    (source / "chat_template.jinja").write_text("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}")
    assert "chat" not in manifest_of(export_artifact(source, tmp_path / "counts"))


def manifest_of(artifact: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((artifact / "diffbit.json").read_text())
    return manifest
