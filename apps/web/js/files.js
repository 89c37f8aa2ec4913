// Reads an artifact's files: from a folder (in node) or a server. Each file's SHA-256 is compared with the manifest's.
// In a browser's worker, downloads are kept in the origin private file system, also those that were interrupted: the
// next one asks the server for the rest (HTTP Range). Where the browser has no room for them, they are held in memory.

const VERSION = 4; // of the manifest (runtime/artifact.py)
const MANIFEST = "diffbit.json";
const TEXTS = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja"];
const GRAPH = /^(model\.onnx|onnx\/model\.onnx)$/;
const DATA = /^(model\.onnx\.data|onnx\/model\.onnx_data)(_\d+)?$/;
const STARTS = 3; // downloads of a file that may fail one after another without a byte

// Whether this file of a manifest is read; site.py copies no other (IS_READ)
export const isRead = (name) => TEXTS.includes(name) || GRAPH.test(name) || DATA.test(name);

export const inNode = typeof process !== "undefined" && Boolean(process.versions?.node);

// source: the artifact's folder or address; onProgress({file, loaded, total}): bytes of all files that are read;
// signal: an AbortSignal that stops the download
// -> {manifest, graph, data, has(name), read(name, room), json(name)}; graph: the name of the ONNX file, data: those of its
// weights; room(size) -> {bytes, sha256()}: memory for the file, which read fills and returns
export async function openFiles(source, { onProgress = () => {}, signal } = {}) {
  const remote = source instanceof URL ? source.protocol !== "file:" : !inNode || /^https?:/.test(source);
  const place = remote ? serverFiles(source, signal) : await folderFiles(source);
  let manifest;
  try {
    manifest = JSON.parse(new TextDecoder().decode(await place.manifest()));
  } catch (error) {
    if (error instanceof SyntaxError) throw new Error(`${place.path(MANIFEST)} is not JSON, so this is not an artifact of diffbit export.`);
    throw error;
  }
  if (manifest.artifact_version !== VERSION)
    throw new Error(`${place.path(MANIFEST)} has artifact_version ${manifest.artifact_version}, this release reads ${VERSION}. Export the model again.`);
  const names = Object.keys(manifest.files).filter(isRead);
  const total = names.reduce((sum, name) => sum + manifest.files[name].bytes, 0);
  const lengths = {};
  const has = (name) => names.includes(name);
  const read = (name, room = memory) =>
    place.read(name, manifest.files[name], room, (length) => {
      lengths[name] = length;
      onProgress({ file: name, loaded: Object.values(lengths).reduce((a, b) => a + b), total });
    });
  const json = async (name) => (has(name) ? JSON.parse(new TextDecoder().decode(await read(name))) : {});
  return { manifest, graph: names.find((name) => GRAPH.test(name)), data: names.filter((name) => DATA.test(name)), has, read, json };
}

async function folderFiles(source) {
  const load = (name) => import(/* webpackIgnore: true */ /* @vite-ignore */ `node:${name}`); // no bundler wants these
  const [{ open }, { join }, { fileURLToPath }] = await Promise.all(["fs/promises", "path", "url"].map(load));
  const path = (name) => join(source instanceof URL ? fileURLToPath(source) : source, name);
  const fill = async (name, room) => {
    let file;
    try {
      file = await open(path(name));
      const into = room((await file.stat()).size);
      for (let at = 0, got; at < into.bytes.length; at += got) {
        ({ bytesRead: got } = await file.read(into.bytes, at, into.bytes.length - at, at));
        if (!got) throw new Error("it became shorter");
      }
      return into;
    } catch (error) {
      throw new Error(`${path(name)} cannot be read (${error.code ?? error.message}). Wanted the folder of an artifact, as diffbit export writes it.`);
    } finally {
      await file?.close();
    }
  };
  const read = async (name, entry, room, report) => {
    const into = await fill(name, room);
    const sha256 = await into.sha256();
    if (sha256 !== entry.sha256) throw damaged(path(name), sha256, entry);
    report(into.bytes.length);
    return into.bytes;
  };
  return { path, read, manifest: async () => (await fill(MANIFEST, memory)).bytes };
}

function serverFiles(source, signal) {
  const base = new URL(String(source).replace(/\/?$/, "/"), globalThis.location?.href);
  const path = (name) => new URL(name, base).href;
  const read = async (name, entry, room, report) => {
    const into = room(entry.bytes);
    for (;;) {
      const file = await keep(base.href, entry, into.bytes);
      const fresh = file.length === 0;
      try {
        if (file.length > entry.bytes) file.clear();
        await download(path(name), entry.bytes, file, signal, report);
        report(entry.bytes);
        file.read(into.bytes);
        const sha256 = await into.sha256();
        if (sha256 === entry.sha256) return into.bytes;
        file.clear();
        if (fresh) throw damaged(name, sha256, entry); // else what was kept is wrong, and the whole file is fetched again
      } catch (error) {
        if (!(error instanceof NoRoom)) throw error;
        file.clear();
        full = true; // this visit holds it in memory
      } finally {
        file.close();
      }
    }
  };
  const manifest = async () => new Uint8Array(await (await answer(path(MANIFEST), { signal, cache: "no-cache" })).arrayBuffer());
  return { path, read, manifest };
}

// Fetches the bytes that the file lacks. A download that breaks goes on where it was
async function download(url, size, file, signal, report) {
  let failures = 0;
  while (file.length < size) {
    const begin = file.length;
    try {
      const reply = await answer(url, { signal, headers: begin ? { Range: `bytes=${begin}-` } : {} });
      const whole = reply.status !== 206;
      if (whole && begin) file.clear(); // the server sends no parts
      if (!whole && !reply.headers.get("Content-Range")?.startsWith(`bytes ${begin}-`))
        throw new Refused(`${url}: the server sent another part of the file than the one from byte ${begin}.`);
      for await (const value of partsOf(reply.body)) {
        if (file.length + value.length > size) throw new Refused(`${url} is longer than the ${size} bytes of the manifest.`);
        file.append(value);
        report(file.length);
      }
      if (file.length < size) throw new Error("the connection ended early");
    } catch (error) {
      if (signal?.aborted || error instanceof Refused || error instanceof NoRoom) throw error;
      failures = file.length > begin ? 0 : failures + 1;
      if (failures === STARTS) throw new Error(`${url}: the download stopped at ${file.length} of ${size} bytes (${error.message}). Try again: it goes on from there.`);
    }
  }
}

// The parts of a body as they come, one after the other in the same memory if the browser can do that
async function* partsOf(body) {
  let [reader, buffer] = [null, new ArrayBuffer(1 << 20)];
  try {
    reader = body.getReader({ mode: "byob" });
  } catch {
    [reader, buffer] = [body.getReader(), null];
  }
  for (;;) {
    const { done, value } = await reader.read(...(buffer ? [new Uint8Array(buffer)] : []));
    if (done) return;
    yield value;
    if (buffer) ({ buffer } = value);
  }
}

class Refused extends Error {} // trying again would not help
class NoRoom extends Error {} // the browser's file system does not take more

async function answer(url, options) {
  let reply;
  try {
    reply = await fetch(url, options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Error(`${url} cannot be reached (${error.cause?.message ?? error.message})`);
  }
  if (!reply.ok) throw new Refused(`${url}: the server answered ${reply.status}.`);
  return reply;
}

let full = false; // whether the file system had no room

// Where a download goes: to a file of the origin private file system named by its hash, else to `room`
async function keep(site, { sha256, bytes }, room) {
  try {
    if (full || bytes === 0) throw new Error("memory");
    const root = await navigator.storage.getDirectory();
    const folder = await root.getDirectoryHandle(`diffbit ${encodeURIComponent(site)}`.slice(-250), { create: true });
    const handle = await folder.getFileHandle(sha256, { create: true });
    return new Kept(await handle.createSyncAccessHandle());
  } catch {
    return new Held(room); // node, a private window, a page's own thread, or another tab that has the file open
  }
}

class Kept {
  constructor(handle) {
    this.handle = handle;
    this.length = handle.getSize();
  }

  append(part) {
    let written;
    try {
      written = this.handle.write(part, { at: this.length });
    } catch {
      written = 0;
    }
    // Where there is no room, some browsers throw, some write less, and Chromium returns an error's number, -8 as unsigned
    if (written !== part.length) throw new NoRoom();
    this.length += written;
  }

  read(into) {
    this.handle.read(into, { at: 0 });
  }

  clear() {
    this.handle.truncate(0);
    this.length = 0;
  }

  close() {
    try {
      this.handle.flush();
    } catch {
      // what is kept may be incomplete; the next visit compares its hash
    }
    this.handle.close();
  }
}

class Held {
  constructor(room) {
    this.bytes = room;
    this.length = 0;
  }

  append(part) {
    this.bytes.set(part, this.length);
    this.length += part.length;
  }

  read() {} // it is there

  clear() {
    this.length = 0;
  }

  close() {}
}

function memory(size) {
  const bytes = new Uint8Array(size);
  return { bytes, sha256: () => hash(bytes) };
}

async function hash(bytes) {
  if (!globalThis.crypto?.subtle) throw new Error("The files' hashes cannot be checked here: browsers allow that only on https and localhost.");
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function damaged(name, sha256, entry) {
  return new Error(`${name} is not the file that was exported: its SHA-256 is ${sha256.slice(0, 12)}…, the manifest says ${entry.sha256.slice(0, 12)}….`);
}
