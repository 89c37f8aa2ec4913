// The model card: rows of (name, text) from the artifact's manifest.
const ATTENTION = { softmax: "plain (softmax)", diff_v1: "differential, version 1", diff_v2: "differential, version 2" };

export const megabytes = (bytes) => (bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(2)} GB`);

// manifest: diffbit.json; site: site.json; runtime: what the model runs on
export function facts(manifest, site, runtime) {
  const { layers } = manifest.model;
  const mixers = [...new Set(layers.map(({ mixer }) => ATTENTION[mixer.name] ?? mixer.name))];
  const weights = manifest.parts.reduce((sum, part) => sum + (part.weights ?? 0), 0);
  return [
    ["Attention", `${mixers.join(" and ")}, in ${layers.length} layers`],
    ["Weights", `${(weights / 1e6).toFixed(1)} million, ${formats(manifest)}${manifest.method ? ` by ${manifest.method}` : ""}`],
    ["KV cache", cache(manifest)],
    ["Size", `${megabytes(bytesOf(manifest))}: ${manifest.parts.slice(0, 3).map(({ name, bytes }) => `${name} ${megabytes(bytes)}`).join("; ")}`],
    ["Context", `${manifest.context_length.toLocaleString("en")} tokens`],
    ["Made from", manifest.source.name],
    ["License", site.license ?? "not stated"],
    ["Runs on", runtime],
    ["Checked", `every file’s SHA-256, and the golden logits (manifest ${manifest.sha256.slice(0, 12)}…)`],
  ];
}

export const bytesOf = ({ files }) => Object.values(files).reduce((sum, { bytes }) => sum + bytes, 0);

export const formats = ({ scheme, dtype }) => scheme?.weights ?? (dtype === "fp16" ? "float16" : "float32");

function cache({ scheme, cache: { layers } }) {
  const buffers = layers.flatMap((layer) => layer.buffers);
  const stored = (part) => scheme?.attention?.[`${part}s`] ?? buffers.find(({ name }) => name === part)?.dtype ?? "none";
  const [keys, values] = [stored("key"), stored("value")];
  return keys === values ? keys : `keys ${keys}, values ${values}`;
}
