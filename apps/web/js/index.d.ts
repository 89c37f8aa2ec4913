/** A message of a conversation. */
export interface Message {
  role: "system" | "user" | "assistant" | (string & {});
  content: string;
}

/** How the next token is chosen; the model's generation_config.json has the defaults. */
export interface Sampling {
  /** 0: always the most likely token. */
  temperature?: number;
  /** Sample from the k most likely tokens; 0: from all. */
  topK?: number;
  /** Sample from the most likely tokens whose probabilities add up to this. */
  topP?: number;
  /** Sample from the tokens that are at least this share as likely as the most likely one. */
  minP?: number;
  /** Above 1: tokens that have already occurred, in the prompt too, become less likely. */
  repetitionPenalty?: number;
  /** Subtracted from a token's logit for each time that it has been generated. */
  frequencyPenalty?: number;
  /** Subtracted from a token's logit if it has been generated. */
  presencePenalty?: number;
  /** Added to the logits of these token ids. */
  logitBias?: Record<number, number>;
  /** The same seed draws the same tokens; default: a new one each time. */
  seed?: number;
}

export interface GenerateOptions extends Sampling {
  /** At most this number of new tokens; default 512. */
  maxTokens?: number;
  /** Go on with a text that repeats the same words again and again; else it ends with the reason "loop". */
  allowLoops?: boolean;
  /** Ends the text. The iteration then ends without an error. */
  signal?: AbortSignal;
}

export interface ChatOptions extends GenerateOptions {
  /** Whether a model that can do both thinks before it answers; default: as its chat template has it. */
  think?: boolean;
}

/** The counts and times of a generation. */
export interface Generation {
  /** Every sampled token; an eos that ended the text is the last. */
  ids: number[];
  reason: "eos" | "length" | "loop" | "context" | "interrupted";
  promptTokens: number;
  /** Tokens of the prompt that were in the cache already. */
  cachedTokens: number;
  /** Until the first token. */
  promptSeconds: number;
  /** From the first token to the last. */
  seconds: number;
  /** Messages left out because the context was full. */
  dropped: number;
}

export interface LoadOptions {
  /** Default: the GPU if there is one that computes the model's golden logits, else the CPU. */
  device?: "cpu" | "webgpu";
  /** On the CPU; default: the processors, at most 4. In a browser more than one need cross-origin isolation. */
  threads?: number;
  /** Bytes of all files that are read, as they come. */
  onProgress?: (progress: { file: string; loaded: number; total: number }) => void;
  /** Stops the download; load then throws. The next load goes on where it stopped, if the browser keeps files. */
  signal?: AbortSignal;
}

/** A model that is ready. It generates one text at a time. */
export interface Model {
  /** What it runs on, such as "GPU" or "2 threads". */
  readonly runtime: string;
  /** diffbit.json. */
  readonly manifest: Record<string, any>;
  /** Bytes that the runtime has taken; undefined if it does not know. */
  readonly memory: number | undefined;
  /** Whether `think` chooses if the model thinks before it answers. */
  readonly canThink: boolean;
  /** Counts and times of the last generation, or of the one under way; null before the first. */
  readonly last: Generation | null;
  /** Answer a conversation. Throws for a model without a chat template. */
  chat(messages: Message[], options?: ChatOptions): AsyncGenerator<string, void, undefined>;
  /** Continue a text, or token ids as they are. */
  generate(prompt: string | ArrayLike<number>, options?: GenerateOptions): AsyncGenerator<string, void, undefined>;
  encode(text: string): number[];
  encodeChat(messages: Message[], think?: boolean): number[];
  decode(ids: number[]): string;
  /** Free the model's memory. */
  close(): Promise<void>;
}

/** Load an artifact of `diffbit export`: from its folder (in node) or its address. Throws if a file is not the one that was
 * exported. In a browser's worker, files are kept in the origin private file system. */
export function load(source: string | URL, options?: LoadOptions): Promise<Model>;
