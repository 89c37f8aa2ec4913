/* libdiffbit: runs an artifact of `diffbit export` from C, without other libraries (docs/c.md).
 *
 * All texts are UTF-8. A model is for one thread at a time; only diffbit_cancel may be called by another. A function that can
 * fail returns -1 (diffbit_open: NULL), and diffbit_error says why in one sentence; nothing ends the process. */
#ifndef DIFFBIT_H
#define DIFFBIT_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#ifdef DIFFBIT_BUILDS
#define DIFFBIT_API __declspec(dllexport)
#else
#define DIFFBIT_API
#endif
#else
#define DIFFBIT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct diffbit_model diffbit_model;

typedef struct diffbit_about {
  int64_t context;    /* tokens that the model holds at most */
  int64_t vocabulary; /* logits after each token */
  int64_t cached;     /* tokens in the cache */
  int32_t bos;        /* the token that begins a text; -1: none */
  int32_t threads;
} diffbit_about;

/* How a token is chosen: penalties, temperature, top-k, top-p, min-p, then the draw, as `diffbit run` does. */
typedef struct diffbit_sampling {
  double temperature;        /* 0: the most likely token */
  int32_t top_k;             /* 0: all */
  double top_p, min_p;       /* 1 and 0: all */
  double repetition_penalty; /* 1: none */
  double frequency_penalty, presence_penalty;
  int64_t seed; /* the same seed draws the same tokens; negative: a random one */
} diffbit_sampling;

/* Why diffbit_generate ended. */
enum { DIFFBIT_END = 0, DIFFBIT_LENGTH = 1, DIFFBIT_CONTEXT = 2, DIFFBIT_STOPPED = 3 };

/* Opens the folder of an artifact. threads: 0: one for each physical core. NULL: it failed, and `error` has the reason. */
DIFFBIT_API diffbit_model *diffbit_open(const char *folder, int threads, char *error, size_t error_bytes);
DIFFBIT_API void diffbit_close(diffbit_model *model); /* NULL is ignored */
/* The reason why the last call failed; valid until the next. */
DIFFBIT_API const char *diffbit_error(const diffbit_model *model);
DIFFBIT_API diffbit_about diffbit_describe(const diffbit_model *model);
/* The model's own settings, of its generation_config.json. */
DIFFBIT_API int diffbit_defaults(diffbit_model *model, diffbit_sampling *sampling);

/* Text to tokens and back; special: with the tokens that the tokenizer adds, such as the one that begins a text. Return how many
 * tokens or bytes there are, of which at most `room` are written; text is not ended by a zero. */
DIFFBIT_API int64_t diffbit_encode(diffbit_model *model, const char *text, size_t bytes, int special, int32_t *ids, size_t room);
DIFFBIT_API int64_t diffbit_decode(diffbit_model *model, const int32_t *ids, size_t count, char *text, size_t room);

typedef struct diffbit_message {
  const char *role; /* "system", "user" or "assistant" */
  const char *content;
  size_t bytes; /* of content */
} diffbit_message;

/* A conversation to tokens, as the model's chat template writes it, up to where the answer begins: maybe a system message, then user
 * and assistant by turns, the user's last. Returns as diffbit_encode does; fails for a model whose template is more than fixed texts
 * around messages (docs/c.md). From then on, the token that ends an answer ends a text, too. */
DIFFBIT_API int64_t diffbit_chat(diffbit_model *model, const diffbit_message *messages, size_t count, int32_t *ids, size_t room);

/* Begins a text: computes what the cache does not hold of it. */
DIFFBIT_API int diffbit_prompt(diffbit_model *model, const int32_t *ids, size_t count);
/* The logits after the last token, `vocabulary` of them; valid until the next call. NULL: there is no prompt. */
DIFFBIT_API const float *diffbit_logits(diffbit_model *model);
/* Chooses the next token and appends it. sampling: NULL: the model's own. */
DIFFBIT_API int32_t diffbit_next(diffbit_model *model, const diffbit_sampling *sampling);
/* Whether a token ends a text. */
DIFFBIT_API int diffbit_is_end(const diffbit_model *model, int32_t id);

/* Receives each token with the text that it completes: whole characters, maybe none; the last call may have text and the token -1.
 * Another result than 0 stops the text. */
typedef int (*diffbit_on_token)(void *data, int32_t id, const char *text, size_t bytes);
/* diffbit_prompt, and diffbit_next until the text ends; returns why it did. */
DIFFBIT_API int diffbit_generate(diffbit_model *model, const int32_t *ids, size_t count, int64_t most_tokens,
                                 const diffbit_sampling *sampling, diffbit_on_token on_token, void *data);
/* Stops the call under way, or else the next: diffbit_generate returns DIFFBIT_STOPPED, others fail. Any thread, and a signal's
 * handler, may call it. */
DIFFBIT_API void diffbit_cancel(diffbit_model *model);

#ifdef __cplusplus
}
#endif

#endif
